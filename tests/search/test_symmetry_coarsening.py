"""Warm starts from the quotient by axis symmetry."""

import math
from typing import Any

import numpy as np
import pytest

from shardplan.search import Network, solve
from shardplan.search.bounds.lagrangian import Relaxation
from shardplan.search.budget import Budget, Callbacks
from shardplan.search.graph.choice_groups import quotient
from shardplan.search.graph.graph import Graph
from shardplan.search.solver.graph_solver import GraphSolver
from shardplan.search.structure import symmetry_coarsening
from shardplan.search.structure.symmetry_coarsening import coarse_start, places_of
from shardplan.search.structure.symmetry_refinement import SymmetryRefinement
from shardplan.search.testing import random_networks


def renamed_axes(count: int) -> Network:
    """A ring of variables of six choices, whose tables stay the same when 0 to 2 and 3 to 5 are turned together."""
    rng = np.random.default_rng(0)
    turn = np.array([1, 2, 0, 4, 5, 3])
    net = Network()
    for _ in range(count):
        net.add_variable(np.repeat(rng.integers(0, 5, 2), 3).astype(float))
        net.twins[len(net) - 1] = np.repeat([0, 1], 3)
    for v in range(count):
        table = rng.integers(0, 20, (6, 6)).astype(float)
        net.add_edge(v, (v + 1) % count, table + table[turn][:, turn] + table[turn[turn]][:, turn[turn]])
    return net


def test_true_twins_lose_nothing_of_the_bound() -> None:
    graph = Graph.of(renamed_axes(7))
    small = quotient(graph, places_of(graph))
    bounds = []
    for each in (graph, small):
        relaxation = Relaxation(each)
        for _ in range(60):
            relaxation.improve(math.inf)
        bounds.append(relaxation.bound)
    assert {len(costs) for costs in small.costs if costs is not None} == {2}
    assert bounds[1] == pytest.approx(bounds[0])


@pytest.mark.slow
@pytest.mark.parametrize("excluded", [0.0, 0.2])
def test_any_twins_give_the_optimum(excluded: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetry_coarsening, "_MIN_ENTRIES", 1)
    monkeypatch.setattr(symmetry_coarsening, "_MAX_SHARE", 1.0)
    found = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        net = random_networks.random_twins(rng, excluded)
        _, optimum = random_networks.brute_force(net)
        solution = solve(net)
        assert solution.cost == optimum
        if np.isfinite(optimum):
            assert net.cost(solution.choices) == optimum and solution.lower_bound <= optimum
            graph = Graph.of(net)
            start = coarse_start(graph, Budget(), 1e-9, Callbacks(lambda: None, lambda: 60.0))
            assert start is not None
            if start.choices is not None:
                found += 1
                assert graph.cost(start.choices) >= optimum - 1e-9
                assert all(len(into) == graph.size(v) for (v, _), into in start.messages.items())
    assert found > 10


def test_near_choices_while_they_are_few() -> None:
    """Near choices are tried only where they are fewer than the choices left."""
    net = random_networks.random_graph(np.random.default_rng(3), [(0, 1), (1, 2), (0, 2)], 4)
    graph = Graph.of(net)
    every = {v: np.ones(graph.size(v), dtype=bool) for v in graph.live()}
    parts = SymmetryRefinement(Budget(), 1e-9, Callbacks(lambda: None, lambda: 60.0), near=[every])
    dear = max(({0: a, 1: b, 2: c} for a, b, c in np.ndindex(4, 4, 4)), key=graph.cost)
    found = list(parts._found_near(graph, {}, dear))
    assert found[0] == dear and graph.cost(found[1]) < graph.cost(dear)
    left = {v: np.arange(graph.size(v)) == dear[v] for v in graph.live()}
    assert list(parts._found_near(graph, {}, dear, lambda _: left)) == [dear]


def test_twins_that_contradict_each_other_are_chosen_anew() -> None:
    """Neighbours agree on one of two twins, whichever it is; the first choice is dearer than any number of quarrels."""
    net = Network()
    for v in range(12):
        net.add_variable([100.0, 0.0, 0.0])
        net.twins[v] = np.array([0, 1, 1])
    for v in range(12):
        for w in {(v + 1) % 12, (v + 5) % 12}:
            net.add_edge(v, w, [[0.0, 0.0, 0.0], [0.0, 0.0, 7.0], [0.0, 7.0, 0.0]])
    graph = Graph.of(net)
    quarrelling = {v: 1 + v % 2 for v in range(12)}
    solver = GraphSolver(graph, math.inf, Budget(), 1e-6, Callbacks(lambda: None, lambda: 60.0))
    solver.accept(quarrelling, graph.cost(quarrelling))
    solver.choose_among_twins()
    assert solver.upper == 0.0 and len(set((graph.hint or {}).values())) == 1


def test_repeated_layers_choose_their_twins_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of forty that must agree on one of two twins: a few of its ends say which, and the bound closes it."""
    monkeypatch.setattr(symmetry_coarsening, "_MIN_ENTRIES", 1)
    searched: list[int] = []
    among = SymmetryRefinement.among_twins

    def counted(parts: Any, graph: Graph, *rest: Any) -> dict[int, int] | None:
        searched.append(len(graph.live()))
        return among(parts, graph, *rest)

    monkeypatch.setattr(SymmetryRefinement, "among_twins", counted)
    net = Network()
    for v in range(40):
        net.add_variable([5.0, 1.0, 1.0])
        net.twins[v] = np.array([0, 1, 1])
    for v in range(39):
        net.add_edge(v, v + 1, [[0.0, 1.0, 1.0], [1.0, 0.0, 9.0], [1.0, 9.0, 0.0]])
    graph = Graph.of(net)
    start = coarse_start(graph, Budget(), 1e-6, Callbacks(lambda: None, lambda: 60.0))
    assert start is not None and start.choices is not None
    assert graph.cost(start.choices) == start.lower_bound == 40.0
    assert len(searched) == 1 and searched[0] < 20


@pytest.mark.parametrize("same", [50.0, np.inf], ids=["dear", "excluded"])
def test_next_best_choices_where_twins_contradict(monkeypatch: pytest.MonkeyPatch, same: float) -> None:
    """Round a triangle of which each pair must take different ones of two twins, one has to take something else."""
    monkeypatch.setattr(symmetry_coarsening, "_MIN_ENTRIES", 1)
    net = Network()
    for v in range(3):
        net.add_variable([0.0, 0.0, 3.0])
        net.twins[v] = np.array([0, 0, 1])
    differ = np.where(np.eye(3) > 0, same, 0.0)
    differ[2, 2] = 0.0
    for v in range(3):
        net.add_edge(v, (v + 1) % 3, differ)
    start = coarse_start(Graph.of(net), Budget(), 1e-9, Callbacks(lambda: None, lambda: 60.0))
    assert start is not None and start.choices is not None
    assert net.cost([start.choices[v] for v in range(3)]) == 3.0


@pytest.mark.parametrize("gap", [1e-9, 0.02])
def test_dropped_choices_are_in_nothing_better(monkeypatch: pytest.MonkeyPatch, gap: float) -> None:
    """After a few sweeps, choices are dropped from a graph and its small one; the optimum stays, and so does the
    bound's truth, whether twins are true ones or not."""
    monkeypatch.setattr(symmetry_coarsening, "_FIRST_SWEEPS", 2)
    monkeypatch.setattr(symmetry_coarsening, "_MIN_ENTRIES", 1)
    monkeypatch.setattr(symmetry_coarsening, "_MAX_SHARE", 1.0)
    dropped = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        pairs = [(u, v) for u in range(7) for v in range(u + 1, 7) if rng.random() < 0.7]
        net = random_networks.random_graph(rng, [*pairs, (0, 1), (5, 6)], 4, 0.1)
        net.twins = {v: np.arange(len(costs)) // 2 for v, costs in enumerate(net.costs)}
        optimum = random_networks.brute_force(net)[1]
        if not np.isfinite(optimum):
            continue
        graph = Graph.of(net)
        choices = sum(graph.size(v) for v in graph.live())
        start = coarse_start(graph, Budget(), gap, Callbacks(lambda: None, lambda: 60.0))
        if start is None:
            continue
        assert start.lower_bound <= optimum + 1e-9
        assert start.choices is None or graph.cost(start.choices) >= optimum - 1e-9
        assert all(len(into) == graph.size(v) for (v, _), into in start.messages.items())
        solver = GraphSolver(graph, math.inf, Budget(), 1e-9, Callbacks(lambda: None, lambda: 60.0))
        solver.begin(start.messages, start.choices)
        dropped += choices - sum(graph.size(v) for v in graph.live())
        solver.solve()
        assert solver.upper == pytest.approx(optimum)
    assert dropped > 0


def test_a_start_whose_gap_would_do_is_not_searched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetry_coarsening, "_MIN_ENTRIES", 1)
    monkeypatch.setattr(symmetry_coarsening, "_MAX_SHARE", 1.0)
    gaps = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        net = random_networks.random_graph(rng, [(u, v) for u in range(7) for v in range(u + 1, 7)], 4, 0.0)
        net.twins = {v: np.arange(len(costs)) // 2 for v, costs in enumerate(net.costs)}
        net.add_variable([100.0])
        optimum, solution = solve(net).cost, solve(net, gap=1e-9, acceptable_gap=0.5)
        assert solution.lower_bound <= optimum <= solution.cost
        gaps.append(solution.gap)
    assert 0.0 < max(gaps) <= 0.5
