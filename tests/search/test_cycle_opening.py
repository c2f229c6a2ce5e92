"""Cycle tightening: contradictory cycles are found and opened."""

import math

import numpy as np
import pytest

from shardplan.search import Network, solve
from shardplan.search.bounds import cycle_opening
from shardplan.search.bounds.cycle_opening import open_cycles
from shardplan.search.bounds.lagrangian import Relaxation
from shardplan.search.budget import Budget, Callbacks
from shardplan.search.graph.graph import Graph
from shardplan.search.solver.graph_solver import GraphSolver
from shardplan.search.structure import symmetry_coarsening
from shardplan.search.structure.symmetry_refinement import SymmetryRefinement
from shardplan.search.testing import random_networks


def joined_cycles(count: int, length: int, size: int) -> Network:
    """Cycles of variables, each of which fits the next one of its cycle but for the last, and the same one of the next
    cycle whatever it takes."""
    choices = np.arange(size)
    net = Network()
    for _ in range(count * length):
        net.add_variable(np.zeros(size))
    for cycle in range(count):
        for place in range(length):
            v, w = cycle * length + place, cycle * length + (place + 1) % length
            fits = choices[:, None] == (choices[None, :] + (place == length - 1)) % size
            net.add_edge(v, w, np.where(fits, 0.0, 2.0 + cycle))
            if cycle + 1 < count:
                net.add_edge(v, v + length, 1e-3 * (choices[:, None] + choices[None, :]) % 2)
    return net


@pytest.mark.parametrize("seed", range(12))
def test_an_opened_cycle_has_the_optimum_and_messages_find_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    length = 3 + seed % 5
    ring = [(v, (v + 1) % length) for v in range(length)]
    net = random_networks.random_graph(rng, ring, 4)
    choices, optimum = random_networks.brute_force(net)
    graph = Graph.of(net, choices if seed % 2 else None)
    relaxation = Relaxation(graph)
    for _ in range(10):
        relaxation.improve(optimum)
    if not open_cycles(graph, relaxation, optimum, 10_000).cycles:
        assert relaxation.bound > optimum - 0.05 * abs(optimum)
        return
    opened = Relaxation(graph)
    for _ in range(40):
        opened.improve(optimum)
    assert opened.bound == pytest.approx(optimum)
    assert opened.choices is not None and net.cost(graph.expand(opened.by_variable(opened.choices))) == optimum
    if graph.hint is not None:
        assert graph.cost(graph.hint) == pytest.approx(optimum)
        assert net.cost(graph.expand(graph.hint)) == optimum


def test_contradictory_cycles_without_room_for_contraction() -> None:
    """Opened cycles close the gap that messages leave."""
    net = joined_cycles(3, 6, 8)
    budget = Budget(table_entries=1, cp_sat_entries=0, contraction_entries=60_000)
    solver = GraphSolver(Graph.of(net), math.inf, budget, 1e-6, Callbacks(lambda: None, lambda: 60.0))
    solver.solve()
    assert solver.closed
    assert solver.graph.hint is not None
    assert net.cost(solver.graph.expand(solver.graph.hint)) == pytest.approx(solver.upper)


def test_start_with_a_wide_gap_stalls_sooner() -> None:
    """Messages of a warm start that leave a wide gap count as stalled sooner."""
    graph = Graph.of(joined_cycles(2, 6, 4))
    swept = Relaxation(graph)
    for _ in range(40):
        swept.improve(10.0)
    solver = GraphSolver(graph, math.inf, Budget(dives=False), 1e-6, Callbacks(lambda: None, lambda: 60.0))
    solver.begin(swept.messages(), dict.fromkeys(graph.live(), 0))
    solver.sweep_until_prunable()
    assert solver.stalled and solver.sweeps < 60


def twice_joined_cycles(count: int, differ: float) -> Network:
    """Cycles each of whose choices has a twin. differ: what taking the other one of the first two twins costs round one
    cycle, where taking the same one costs as much at one place."""
    net = joined_cycles(count, 6, 4)
    twice = np.repeat(np.arange(4), 2)
    net.costs = [costs[twice] for costs in net.costs]
    net.tables = [table[twice][:, twice] for table in net.tables]
    net.twins = dict.fromkeys(range(len(net)), twice)
    second = np.arange(8) % 2
    for place in range(6):
        other = (second[:, None] != second[None, :]) == (place < 5)
        net.add_edge(place, (place + 1) % 6, np.where(other & (twice == 0)[:, None], differ, 0.0))
    return net


def test_near_choices_where_twins_leave_no_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each choice has a twin that fits as well: all that is open contradicts itself with twins taken together."""

    def looked(*arguments: object) -> None:
        raise AssertionError("what is near leaves as much open")

    monkeypatch.setattr(symmetry_coarsening, "_MIN_ENTRIES", 1)
    monkeypatch.setattr(SymmetryRefinement, "_among_near", looked)
    monkeypatch.setattr(GraphSolver, "open_cycles", lambda _: False)
    graph = Graph.of(twice_joined_cycles(2, 0.0))
    start = symmetry_coarsening.coarse_start(graph, Budget(), 1e-6, Callbacks(lambda: None, lambda: 60.0))
    assert start is not None and start.choices is not None
    assert graph.cost(start.choices) > start.lower_bound + 1.0


@pytest.mark.parametrize("differ", [0.0, 1.0])
def test_cycles_are_opened_with_twins_taken_together(monkeypatch: pytest.MonkeyPatch, differ: float) -> None:
    """Where twins of the best assignment then contradict each other, what is hardly dearer is searched for the best."""
    monkeypatch.setattr(symmetry_coarsening, "_MIN_ENTRIES", 1)
    graph = Graph.of(twice_joined_cycles(4, differ))
    entries, least = graph.entries(), solve(twice_joined_cycles(4, differ)).cost
    start = symmetry_coarsening.coarse_start(graph, Budget(), 1e-6, Callbacks(lambda: None, lambda: 60.0))
    assert start is not None and start.choices is not None
    assert graph.cost(start.choices) == pytest.approx(least, rel=1e-6)
    assert least * (1 - 1e-6) <= start.lower_bound <= least + 1e-9
    assert graph.entries() < 0.5 * entries


def test_opened_cycles_share_no_variable_and_keep_the_room() -> None:
    graph = Graph.of(joined_cycles(3, 6, 8))
    entries = sum(table.size for v in graph.live() for table in graph.neighbours[v].values()) // 2
    for room, count in ((0, 0), (25_000, 1), (10**6, 3)):
        part = graph.copy()
        assert open_cycles(part, Relaxation(part), 12.0, room).cycles == count
        after = sum(table.size for v in part.live() for table in part.neighbours[v].values()) // 2
        assert after <= entries + room
        assert len(part.live()) == len(graph.live()) - count


def test_a_cycle_that_fits_all_the_way_round_is_left_alone() -> None:
    net = Network()
    for _ in range(4):
        net.add_variable(np.zeros(3))
    for v in range(4):
        net.add_edge(v, (v + 1) % 4, 1.0 - np.eye(3))
    graph = Graph.of(net)
    assert open_cycles(graph, Relaxation(graph), 1.0, 10**6).cycles == 0
    assert len(graph.live()) == 4


def test_cycle_with_shorter_ones_on_its_variables() -> None:
    """Shorter cycles through the same variables do not hide a cycle."""
    net = joined_cycles(1, 6, 5)
    for v in range(6):  # shorter ways from each variable to the one after the next
        net.add_edge(net.add_variable(np.zeros(5)), v, np.zeros((5, 5)))
        net.add_edge(6 + v, (v + 2) % 6, np.zeros((5, 5)))
        net.add_edge(6 + v, (v + 3) % 6, np.zeros((5, 5)))
    graph = Graph.of(net)
    assert open_cycles(graph, Relaxation(graph), 2.0, 10**6).cycles == 1
    opened = Relaxation(graph)
    for _ in range(20):
        opened.improve(2.0)
    assert opened.bound == pytest.approx(2.0)


def test_looking_for_cycles_takes_counted_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was looked at is counted, and no more than so much is looked at."""

    known = cycle_opening.open_cycles(*_before_opening())
    assert known.cycles and known.seconds > 0.0
    monkeypatch.setattr(cycle_opening, "_MAX_ENTRIES", 1)
    least = cycle_opening.open_cycles(*_before_opening())
    assert least.cycles == 0 and least.seconds <= known.seconds


def test_cycles_that_fit_take_none_of_the_work_of_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many choices few fit: cycles of these are told apart from the one that contradicts itself without reading
    all pairs."""
    net, size, fitting = Network(), 20, 3
    for _ in range(24):
        net.add_variable(np.zeros(size))
    rows = np.arange(size)
    for cycle in range(6):
        for place in range(4):
            v, w = 4 * cycle + place, 4 * cycle + (place + 1) % 4
            turned = int(cycle == 5 and place == 3)
            fits = (rows[:, None] == (rows[None, :] + turned) % fitting) & (rows < fitting)
            net.add_edge(v, w, np.where(fits, 0.0, 1.0))
    graph = Graph.of(net)
    monkeypatch.setattr(cycle_opening, "_MAX_ENTRIES", 4 * size**3)  # of one
    assert cycle_opening.open_cycles(graph, Relaxation(graph), 2.0, 10**6).cycles == 1


def _before_opening() -> tuple[Graph, Relaxation, float, int]:
    net, rows = Network(), np.arange(3)
    for _ in range(4):
        net.add_variable(np.zeros(3))
    for v in range(4):
        net.add_edge(v, (v + 1) % 4, 1.0 - (rows[:, None] == (rows[None, :] + int(v == 3)) % 3))
    graph = Graph.of(net)
    return graph, Relaxation(graph), 2.0, 10**6
