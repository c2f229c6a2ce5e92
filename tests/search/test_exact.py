"""The exact search against brute force, on small random networks of every kind."""

import math

import numpy as np
import pytest

from shardplan.search import Network, Solution, solve
from shardplan.search.budget import Budget, Callbacks
from shardplan.search.graph.graph import Graph
from shardplan.search.solver.graph_solver import GraphSolver
from shardplan.search.testing import random_networks

KINDS = ("chain", "tree", "grid", "dense", "memory")


def random_network(seed: int) -> Network:
    """A network of at most 9 variables; every kind, with and without exclusions and ties."""
    rng = np.random.default_rng(seed)
    kind = KINDS[seed % len(KINDS)]
    excluded = float(rng.choice([0.0, 0.0, 0.15, 0.3]))
    if kind == "chain":
        net = random_networks.random_chain(rng, 7, 4, excluded)
    elif kind == "tree":
        net = random_networks.random_tree(rng, 7, 4, excluded)
    elif kind == "grid":
        net = random_networks.random_grid(rng, 3, 3, 3, excluded)
    elif kind == "dense":
        pairs = [(u, v) for u in range(7) for v in range(u + 1, 7) if rng.random() < 0.7]
        net = random_networks.random_graph(rng, [*pairs, (0, 1), (5, 6)], 4, excluded)
    else:
        net = random_networks.random_memory_bound(rng, 7, float(rng.random()), excluded)
    if rng.random() < 0.3:
        for _ in range(3):
            u, v = rng.choice(len(net), 2, replace=False).tolist()
            if net.costs[u].size == net.costs[v].size:
                net.add_tie(u, v)
    return net


def assert_optimal(net: Network, solution: Solution, optimum: float) -> None:
    assert solution.cost == optimum
    assert solution.lower_bound <= optimum
    if np.isinf(optimum):
        assert solution.status == "infeasible"
        return
    assert solution.status == "optimal"
    assert net.cost(solution.choices) == optimum
    assert net.usage_limit is None or net.peak(solution.choices)[0] <= net.usage_limit


@pytest.mark.parametrize("block", range(20))
def test_equals_brute_force(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        net = random_network(seed)
        _, optimum = random_networks.brute_force(net)
        assert_optimal(net, solve(net), optimum)


def test_dynamic_programming_comes_before_merging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages leave this graph open, and before the first of them it is too large for dynamic programming."""

    def merged(solver: GraphSolver) -> None:
        raise AssertionError("what is left is few enough for dynamic programming")

    monkeypatch.setattr(GraphSolver, "_merge", merged)
    monkeypatch.setattr(GraphSolver, "open_cycles", merged)
    monkeypatch.setattr("shardplan.search.solver.graph_solver._IMMEDIATE_ENTRIES", 1e4)
    rng = np.random.default_rng(2)
    net = Network()
    for _ in range(9):
        net.add_variable(rng.random(4))
    for u in range(9):
        for v in range(u + 1, 9):
            net.add_edge(u, v, rng.random((4, 4)))
    solver = GraphSolver(
        Graph.of(net), math.inf, Budget(promising_choices=2), 0.0, Callbacks(lambda: None, lambda: 60.0)
    )
    solver.solve()
    assert solver.sweeps and solver.closed
    assert solver.upper == pytest.approx(random_networks.brute_force(net)[1])


def test_what_merging_leaves_open_is_closed_on_the_graph_before() -> None:
    """Merged tables are too large for CP-SAT where those before were not."""
    for seed in range(8):
        rng = np.random.default_rng(seed)
        net = random_networks.random_graph(rng, [(u, v) for u in range(7) for v in range(u + 1, 7)], 4)
        _, optimum = random_networks.brute_force(net)
        graph = Graph.of(net)
        first = {v: 0 for v in graph.live()}
        budget = Budget(cp_sat_entries=250, contraction_entries=2000, table_entries=1)
        solver = GraphSolver(graph, math.inf, budget, 0.0, Callbacks(lambda: None, lambda: 60.0))
        solver.accept(first, graph.cost(first))
        solver._merge()
        solver.finish()
        assert solver.closed and solver.upper == pytest.approx(optimum)
        assert graph.hint is not None and net.cost(graph.expand(graph.hint)) == optimum
