"""Dynamic programming on near-optimal choices."""

import math

import numpy as np
import pytest

from shardplan.search import Network
from shardplan.search.budget import Budget, Callbacks
from shardplan.search.graph.dynamic_programming import Elimination, Plan
from shardplan.search.graph.graph import Graph
from shardplan.search.solver import near_optimal_dp
from shardplan.search.solver.graph_solver import GraphSolver
from shardplan.search.solver.near_optimal_dp import solve_near_optimal
from shardplan.search.testing import random_networks

CALLBACKS = Callbacks(lambda: None, lambda: 60.0)


def _ring(count: int = 15, size: int = 6) -> Network:
    """Neighbours that want to be equal round a ring with chords, but for one that wants its next but one."""
    rng = np.random.default_rng(3)
    net = Network()
    for _ in range(count):
        net.add_variable(0.6 * np.maximum(0, np.arange(size) - 2))
    for v in range(count):
        shifted = np.roll(np.arange(size), 2 if v == 0 else 0)
        for w in ((v + 1) % count, (v + 2) % count):
            table = rng.uniform(1.0, 2.0, (size, size))
            table[np.arange(size), shifted] = 0.0
            net.add_edge(v, w, table)
    return net


def _stalled(net: Network, choices: list[int]) -> GraphSolver:
    solver = GraphSolver(Graph.of(net), math.inf, Budget(), 1e-9, CALLBACKS)
    solver.accept(dict(enumerate(choices)), net.cost(choices))
    solver.prune(solver.relax_again(40))
    return solver


def test_all_that_is_better_fits() -> None:
    net = _ring()
    solver = _stalled(net, [0] * 15)
    assert not solver.closed
    assert solve_near_optimal(solver)
    known = GraphSolver(Graph.of(net), math.inf, Budget(), 1e-9, CALLBACKS)
    known.solve()
    assert solver.lower == solver.upper == pytest.approx(known.upper)


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The table entries of each time that dynamic programming is asked."""
    asked: list[int] = []
    solve = Elimination.solve

    def counted(self: Elimination, order: Plan, hint: dict[int, int]) -> tuple[dict[int, int], float]:
        asked.append(int(order.entries))
        return solve(self, order, hint)

    monkeypatch.setattr(Elimination, "solve", counted)
    return asked


def test_groups_are_split_until_single_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, part = _stalled(_ring(), [v % 6 for v in range(15)]), _stalled(_ring(), [v % 6 for v in range(15)])
    asked = _counted(monkeypatch)
    assert solve_near_optimal(whole) and len(asked) == 1
    monkeypatch.setattr(near_optimal_dp, "_GAP_SHARES", (0.0,))
    assert solve_near_optimal(part)
    assert len(asked) > 2 and asked[1] < asked[-1]
    assert part.lower == part.upper == pytest.approx(whole.upper)


def test_what_is_not_affordable_leaves_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    part = _stalled(_ring(), [v % 6 for v in range(15)])
    monkeypatch.setattr(near_optimal_dp, "_GAP_SHARES", (0.0,))
    monkeypatch.setattr(near_optimal_dp, "_ENTRIES", 2_000.0)
    before = part.lower
    assert not solve_near_optimal(part)
    assert before < part.lower < part.upper
    part.near_optimal_gap = part.upper - part.lower
    monkeypatch.setattr(near_optimal_dp, "Relaxation", lambda _: pytest.fail("nothing has closed the gap since"))
    assert not solve_near_optimal(part)


@pytest.mark.parametrize("entries", [30.0, 300.0, 1e8])
def test_bounds_are_right_whatever_fits(entries: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_optimal_dp, "_ENTRIES", entries)
    closed = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        net = random_networks.random_graph(rng, [(0, 1), (1, 2), (2, 3), (0, 3), (0, 2), (1, 3)], 4)
        optimum = random_networks.brute_force(net)[1]
        known = [int(rng.integers(0, len(costs))) for costs in net.costs]
        if not math.isfinite(net.cost(known)):
            continue
        solver = _stalled(net, known)
        closed += solve_near_optimal(solver)
        assert solver.lower <= optimum + 1e-9 and solver.upper >= optimum - 1e-9
    assert closed > (20 if entries == 1e8 else 0)


def test_near_optimal_choices_come_before_contraction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stalled search tries near-optimal choices before it contracts."""
    monkeypatch.setattr(GraphSolver, "_merge", lambda _: pytest.fail("neighbours were merged"))
    budget = Budget(table_entries=1, cp_sat_entries=0, promising_choices=1, dives=False, near_optimal_dp=True)
    solver = GraphSolver(Graph.of(_ring()), math.inf, budget, 1e-9, CALLBACKS)
    monkeypatch.setattr(solver, "open_cycles", lambda: False)
    solver.solve()
    assert solver.closed


def test_a_search_that_may_not_sweep_on_looks_through_what_fits() -> None:
    budget = Budget(
        sweeps=1,
        table_entries=1,
        cp_sat_entries=0,
        promising_choices=1,
        dives=False,
        contraction_entries=0,
        near_optimal_dp=True,
    )
    solver = GraphSolver(Graph.of(_ring()), math.inf, budget, 1e-9, CALLBACKS)
    solver.solve()
    assert solver.closed and not solver.stalled
