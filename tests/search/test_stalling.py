"""Stalled messages: the order of the tactics that follow."""

import math
import weakref

import numpy as np
import pytest

from shardplan.search import Network
from shardplan.search.bounds.cycle_opening import OpenedCycles
from shardplan.search.bounds.lagrangian import Relaxation
from shardplan.search.budget import Budget, Callbacks
from shardplan.search.graph.graph import Graph
from shardplan.search.run import Run
from shardplan.search.solver import bounded_graph, graph_solver
from shardplan.search.solver.graph_solver import GraphSolver
from shardplan.search.testing import random_networks


def _contradicting() -> Network:
    """Eight variables round which choices fit pair by pair only."""
    rows, net = np.arange(3), Network()
    for _ in range(8):
        net.add_variable(np.zeros(3))
    for v in range(8):
        for w, turn in (((v + 1) % 8, int(v == 7)), ((v + 3) % 8, 0)):
            net.add_edge(v, w, 1.0 - (rows[:, None] == (rows[None, :] + turn) % 3))
    return net


def test_better_assignments_are_asked_for_before_merging(monkeypatch: pytest.MonkeyPatch) -> None:
    net = _contradicting()
    steps: list[str] = []
    monkeypatch.setattr(graph_solver, "open_cycles", lambda *_: OpenedCycles(0, 0.0))
    monkeypatch.setattr(graph_solver, "contract_neighbours", lambda *_: steps.append("merge"))
    callbacks = Callbacks(lambda: None, lambda: 60.0, on_stall=lambda: steps.append("stuck"))
    one = GraphSolver(Graph.of(net), math.inf, Budget(table_entries=1, cp_sat_entries=0), 1e-9, callbacks)
    one.solve()
    assert steps[0] == "stuck" and "merge" in steps


def test_messages_go_on_from_a_much_better_assignment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known then is far better than what was decoded, so pruning comes before merging."""
    net = _contradicting()
    steps: list[str] = []
    best, optimum = random_networks.brute_force(net)
    assert best is not None
    known = dict(enumerate(best.tolist()))
    monkeypatch.setattr(bounded_graph, "_CYCLE_ENTRIES", 0)
    monkeypatch.setattr(graph_solver, "open_cycles", lambda *_: OpenedCycles(0, 0.0))
    monkeypatch.setattr(graph_solver, "contract_neighbours", lambda *_: steps.append("merge"))

    class Blind(GraphSolver):
        def accept(self, choices: dict[int, int], cost: float) -> None:
            if choices is known:  # as if nothing that is decoded were any good
                super().accept(choices, cost)

        def prune(self, relaxation: Relaxation) -> None:
            steps.append("prune")
            super().prune(relaxation)

    callbacks = Callbacks(lambda: None, lambda: 60.0, on_stall=lambda: one.accept(known, optimum))
    one = Blind(
        Graph.of(net), optimum + 100.0, Budget(table_entries=1, cp_sat_entries=0, promising_choices=1), 1e-9, callbacks
    )
    one.solve()
    assert one.upper == optimum and steps[:3] == ["prune", "prune", "merge"]


def test_merging_ends_where_there_is_hardly_room(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool] = []
    monkeypatch.setattr(graph_solver, "open_cycles", lambda *_: OpenedCycles(0, 0.0))
    monkeypatch.setattr(graph_solver, "contract_neighbours", lambda *_: called.append(True))
    for merging, expected in ((10_000, False), (10_000_000, True)):
        called.clear()
        budget = Budget(table_entries=1, cp_sat_entries=0, contraction_entries=merging)
        GraphSolver(Graph.of(_contradicting()), math.inf, budget, 1e-9, Callbacks(lambda: None, lambda: 60.0)).solve()
        assert bool(called) == expected


def test_cycles_open_while_messages_creep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow messages lead to opened cycles before they stall."""
    opened: list[bool] = []

    def none_opened(*_: object) -> OpenedCycles:
        opened.append(one.stalled)
        return OpenedCycles(0, 0.0)

    monkeypatch.setattr(graph_solver, "open_cycles", none_opened)
    monkeypatch.setattr(graph_solver, "contract_neighbours", lambda *_: 0)
    callbacks = Callbacks(lambda: None, lambda: 60.0)
    budget = Budget(table_entries=1, cp_sat_entries=0, dives=False)
    one: GraphSolver = GraphSolver(Graph.of(_contradicting()), math.inf, budget, 1e-9, callbacks)
    one.solve()
    assert opened == [False, True]  # and once more where they have stalled


def test_cycles_are_opened_before_parts_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    def opened(*_: object) -> OpenedCycles:
        steps.append("open")
        return OpenedCycles(1 if one.stalled and steps.count("open") < 4 else 0, 0.0)

    monkeypatch.setattr(graph_solver, "open_cycles", opened)
    monkeypatch.setattr(graph_solver, "contract_neighbours", lambda *_: 0)
    monkeypatch.setattr(GraphSolver, "closed_by_parts", lambda _: steps.append("parts"))
    budget = Budget(table_entries=1, cp_sat_entries=0, dives=False)
    one: GraphSolver = GraphSolver(
        Graph.of(_contradicting()), math.inf, budget, 1e-9, Callbacks(_nothing, lambda: 60.0)
    )
    one.solve()
    assert steps == ["open", "open", "open", "open", "parts"]


def test_merging_that_raises_nothing_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_solver, "open_cycles", lambda *_: OpenedCycles(0, 0.0))
    monkeypatch.setattr(graph_solver, "contract_neighbours", lambda *_: 0)
    swept: list[int] = []
    sweep = GraphSolver.sweep_until_prunable

    def counted(one: GraphSolver) -> Relaxation:
        swept.append(one.sweeps)
        return sweep(one)

    monkeypatch.setattr(GraphSolver, "sweep_until_prunable", counted)
    callbacks = Callbacks(lambda: None, lambda: 60.0)
    one = GraphSolver(
        Graph.of(_contradicting()), math.inf, Budget(table_entries=1, cp_sat_entries=0, dives=False), 1e-9, callbacks
    )
    one.solve()
    assert not one._merges and not one.closed
    assert len(swept) == 2  # after messages crept, and until they stalled


@pytest.mark.parametrize("merging", [200, 10_000])
def test_contraction_of_a_full_graph(merging: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full graph is contracted on only while that closes some of the gap."""
    merged: list[int] = []

    def merge(graph: Graph, relaxation: Relaxation, *_: object) -> int:
        merged.append(relaxation.sweeper.entries)
        return len(merged) < 5

    monkeypatch.setattr(graph_solver, "open_cycles", lambda *_: OpenedCycles(0, 0.0))
    monkeypatch.setattr(graph_solver, "contract_neighbours", merge)
    monkeypatch.setattr(graph_solver, "_LEAST_ROOM", 1)
    budget = Budget(table_entries=1, cp_sat_entries=0, dives=False, contraction_entries=merging)
    one = GraphSolver(Graph.of(_contradicting()), math.inf, budget, 1e-9, Callbacks(_nothing, lambda: 60.0))
    one.solve()
    assert not one._merges and merged[0] > graph_solver._FULL_RATIO * 200
    assert len(merged) == (1 if merging == 200 else 5)


def test_the_time_of_a_stage_within_another_counts_once() -> None:
    run = Run(Network(), 60.0)
    with run.stage("outer"), run.stage("inner"):
        pass
    assert run.seconds["outer"] + run.seconds["inner"] >= 0.0 and list(run.seconds) == ["inner", "outer"]
    with run.stage("outer"):
        before = dict(run.seconds)
        with run.stage("inner"):
            pass
        spent = run.seconds["inner"] - before["inner"]
        assert run.seconds["outer"] == before["outer"] - spent


@pytest.mark.parametrize("far", [0.0, 1.0])
@pytest.mark.parametrize("stalled", [False, True])
def test_messages_of_a_start_that_have_stalled_are_hardly_swept(
    stalled: bool, far: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far from closed they are."""
    monkeypatch.setattr(bounded_graph, "_FAR_GAP", far)
    monkeypatch.setattr(graph_solver, "open_cycles", lambda *_: OpenedCycles(0, 0.0))
    monkeypatch.setattr(graph_solver, "contract_neighbours", lambda *_: 0)
    graph = Graph.of(_contradicting())
    known = Relaxation(graph)
    for _ in range(40):
        known.improve(math.inf)
    one = GraphSolver(
        graph, math.inf, Budget(table_entries=1, cp_sat_entries=0, dives=False), 1e-9, Callbacks(_nothing, lambda: 60.0)
    )
    choices = known.by_variable(known.sweeper.decode())
    one.begin(known.messages(), choices)
    one.stalled = stalled
    one.sweep_until_prunable()
    assert one.stalled and (one.sweeps <= 4) == stalled


def _nothing() -> None:
    pass


def test_start_with_a_far_assignment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm start whose assignment is far from its bound is tried at once."""
    graph = Graph.of(random_networks.random_grid(np.random.default_rng(0), 4, 5, 4))
    known = GraphSolver(graph.copy(), math.inf, Budget(), 1e-9, Callbacks(lambda: None, lambda: 60.0))
    known.prunes = False
    messages = known.sweep_until_prunable().messages()
    monkeypatch.setattr(Relaxation, "offer", lambda *_: None)  # nothing is found by the way
    solver = GraphSolver(graph, math.inf, Budget(), 0.05, Callbacks(lambda: None, lambda: 60.0))
    solver.begin(messages, {v: int(np.argmax(np.asarray(graph.costs[v]))) for v in graph.live()})
    solver.sweep_until_prunable()
    assert solver.closed and solver.sweeps < 10


def test_trials_of_promising_choices_get_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of promising choices get rarer from round to round."""
    graph = Graph.of(random_networks.random_grid(np.random.default_rng(0), 4, 5, 4))
    graph.constant += 1e5  # so that the gap is small
    solver = GraphSolver(graph, math.inf, Budget(), -1.0, Callbacks(lambda: None, lambda: 60.0))
    tried: list[int] = []
    monkeypatch.setattr(solver, "_try_promising", lambda _: tried.append(solver.sweeps))
    monkeypatch.setattr(Relaxation, "prunable_share", lambda *_: 1.0)  # every turn of sweeps ends a round
    for _ in range(8):
        solver.sweep_until_prunable()
    assert [sweeps // tried[0] for sweeps in tried] == [1, 3, 7]


def test_messages_that_stay_where_they_are_stall_soon() -> None:
    """Momentum reaches the fixed point: three variables in a ring, each of which differs from the next."""
    net = Network()
    ring = [net.add_variable(np.zeros(2)) for _ in range(3)]
    for u, v in zip(ring, ring[1:] + ring[:1], strict=True):
        net.add_edge(u, v, np.eye(2))
    solver = GraphSolver(Graph.of(net), math.inf, Budget(), 1e-6, Callbacks(lambda: None, lambda: 60.0))
    solver.prunes = False
    solver.sweep_until_prunable()
    assert solver.stalled and not solver.closed and solver.sweeps == 80


@pytest.mark.parametrize(("slow", "first"), [(0.1, 20), (0.0, 100)])
def test_near_optimal_choices_after_slow_sweeps(slow: float, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near-optimal choices follow sweeps that hardly raise the bound."""
    asked: list[int] = []

    def none_fit(one: GraphSolver) -> bool:
        asked.append(one.sweeps)
        return False

    monkeypatch.setattr(graph_solver, "solve_near_optimal", none_fit)
    monkeypatch.setattr(bounded_graph, "_SLOW_SHARE", slow)
    monkeypatch.setattr(bounded_graph, "_CYCLE_ENTRIES", 0)
    monkeypatch.setattr(Relaxation, "prunable_share", lambda *_: 1.0)
    budget = Budget(
        sweeps=100, table_entries=1, cp_sat_entries=0, dives=False, contraction_entries=0, near_optimal_dp=True
    )
    GraphSolver(Graph.of(_contradicting()), math.inf, budget, 1e-9, Callbacks(_nothing, lambda: 60.0)).solve()
    assert asked[0] == first


@pytest.mark.parametrize(("most", "prunes"), [(10, False), (10**9, True)])
def test_what_is_too_large_for_anything_is_not_pruned_in_the_end(
    most: int, prunes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruned: list[int] = []
    prune = GraphSolver.prune

    def counted(one: GraphSolver, relaxation: Relaxation) -> None:
        pruned.append(relaxation.entries_left(one.upper))
        prune(one, relaxation)
        assert one.graph.entries() <= pruned[-1]

    monkeypatch.setattr(GraphSolver, "prune", counted)
    monkeypatch.setattr(graph_solver, "MAX_GRAPH_ENTRIES", most)
    budget = Budget(sweeps=20, table_entries=1, cp_sat_entries=0, dives=False)
    one = GraphSolver(Graph.of(_contradicting()), math.inf, budget, 1e-9, Callbacks(_nothing, lambda: 60.0))
    one.solve()
    assert bool(pruned) == prunes and one.lower < one.upper < math.inf


def test_tables_are_freed_once_messages_have_moved_into_new_ones() -> None:
    one = GraphSolver(Graph.of(_contradicting()), math.inf, Budget(), 1e-9, Callbacks(_nothing, lambda: 60.0))
    before = [weakref.ref(table) for around in one.graph.neighbours for table in around.values()]
    assert all(table() is not None for table in before)
    one.prune(one.relax_again())
    assert one.graph.live() and not any(table() is not None for table in before)


@pytest.mark.parametrize(("turns", "risen", "creeps"), [(1, 0.0, False), (2, 0.0, True), (2, 0.2, False)])
def test_creeping_by_the_last_sweeps(turns: int, risen: float, creeps: bool) -> None:
    """The first turn's last sweeps say nothing: they raise the bound before anything good is known."""
    one = GraphSolver(Graph.of(_contradicting()), 1.0, Budget(), 1e-9, Callbacks(lambda: None, lambda: 60.0))
    one.lower = 0.5
    relaxation = Relaxation(one.graph)
    relaxation.sweeps = 20 * turns
    relaxation._bounds = [0.0] * 20 * turns + [risen * 0.5]
    assert one._creeps(relaxation, left=1.0) == creeps
