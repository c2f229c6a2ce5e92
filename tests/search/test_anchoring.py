"""Anchors: the parts of a graph cover every assignment, and prove what messages leave open."""

import math

import numpy as np
import pytest

from shardplan.search import Network
from shardplan.search.bounds.lagrangian import Relaxation
from shardplan.search.budget import Budget, Callbacks
from shardplan.search.graph.graph import Graph
from shardplan.search.solver import anchoring
from shardplan.search.solver.anchoring import Anchor
from shardplan.search.solver.graph_solver import GraphSolver
from shardplan.search.structure.symmetry_refinement import SymmetryRefinement
from shardplan.search.testing import random_networks

CALLBACKS = Callbacks(lambda: None, lambda: 60.0)


def quarrelling(count: int) -> Network:
    """Neighbours round a ring with chords want different ones of two twins, which not all can have."""
    net = Network()
    for _ in range(count):
        net.twins[net.add_variable([0.0, 0.0])] = np.array([0, 0])
    for v in range(count):
        for w in ((v + 1) % count, (v + 2) % count):
            net.add_edge(v, w, [[1.0, 0.0], [0.0, 1.0]])
    return net


def test_every_choice_of_an_anchor_is_in_one_part() -> None:
    net = random_networks.random_graph(np.random.default_rng(0), [(0, 1), (1, 2), (0, 2)], 4)
    net.twins = {v: np.arange(len(costs)) // 3 for v, costs in enumerate(net.costs)}
    anchor = Anchor.of(Graph.of(net))
    assert anchor is not None
    assert (np.sum(anchor.parts, axis=0) == 1).all()
    labels = net.twins[anchor.variable]
    assert all(len(set(labels[part])) == part.sum() for part in anchor.parts)
    net.twins = {v: np.arange(len(costs)) for v, costs in enumerate(net.costs)}
    assert Anchor.of(Graph.of(net)) is None


def test_parts_prove_what_messages_leave_open() -> None:
    net = quarrelling(9)
    optimum = random_networks.brute_force(net)[1]
    solver = GraphSolver(Graph.of(net), math.inf, Budget(), 1e-6, CALLBACKS)
    alternating = {v: v % 2 for v in range(9)}
    solver.accept(alternating, net.cost(list(alternating.values())))
    relaxation = Relaxation(solver.graph)
    for _ in range(50):
        relaxation.improve(math.inf)
    assert relaxation.bound < 0.5 * optimum
    assert not solver.closed_by_parts() and solver.lower == -math.inf  # which is for starts that twins contradict
    solver.contradicted = True
    assert solver.closed_by_parts() and solver.upper == optimum


def test_parts_are_held_to_the_work_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """All parts together take at most as much work as the search before them."""
    allowed = []

    def searched(solver: GraphSolver, _masks: object, budget: Budget, upper: float, _least: float) -> float:
        allowed.append(budget.seconds)
        solver.estimate += 0.75
        return upper

    monkeypatch.setattr(anchoring, "solve_among", searched)
    solver = GraphSolver(Graph.of(quarrelling(9)), math.inf, Budget(), 1e-6, CALLBACKS)
    solver.estimate = 2.0
    anchoring.bound_of_parts(solver)
    assert allowed == [2.0, 1.25]


def test_another_anchor_is_tried_where_the_first_tells_nothing() -> None:
    net = quarrelling(9)
    decoys = net.add_variable([0.0, 0.0]), net.add_variable([0.0, 0.0])  # which matter more, apart
    net.add_edge(decoys[0], decoys[1], [[0.0, 50.0], [50.0, 0.0]])
    net.twins[decoys[0]] = np.array([0, 0])
    solver = GraphSolver(Graph.of(net), math.inf, Budget(), 1e-6, CALLBACKS)
    solver.accept({**{v: v % 2 for v in range(9)}, **dict.fromkeys(decoys, 0)}, 9.0)
    solver.raise_lower(0.0)
    solver.contradicted, solver.estimate = True, 10.0
    anchor = Anchor.of(solver.graph)
    assert anchor is not None and anchor.variable == decoys[0]
    assert solver.closed_by_parts() and solver.upper == random_networks.brute_force(net)[1]


@pytest.mark.parametrize("excluded", [0.0, 0.2])
def test_parts_are_right_whatever_the_twins(excluded: float) -> None:
    closed = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        net = random_networks.random_twins(rng, excluded)
        drawn = [[int(rng.integers(0, len(costs))) for costs in net.costs] for _ in range(200)]
        known = min(drawn, key=net.cost)
        if not math.isfinite(net.cost(known)):
            continue
        solver = GraphSolver(Graph.of(net), math.inf, Budget(), 1e-9, CALLBACKS)
        solver.accept(dict(enumerate(known)), net.cost(known))
        solver.contradicted = True
        closed += solver.closed_by_parts()
        optimum = random_networks.brute_force(net)[1]
        assert solver.lower <= optimum + 1e-9 and solver.upper >= optimum - 1e-9
    assert closed > 8


def test_a_part_gives_an_assignment_without_near_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SymmetryRefinement, "_among_near", lambda *_: pytest.fail("near choices were looked through"))
    net = quarrelling(9)
    graph = Graph.of(net)
    every = {v: np.ones(2, dtype=bool) for v in graph.live()}
    parts = SymmetryRefinement(Budget(), 1e-9, CALLBACKS, near=[every])
    same = dict.fromkeys(graph.live(), 0)
    found = list(parts._found_near(graph, {}, same, lambda _: every))
    assert found[0] == same and graph.cost(found[1]) == random_networks.brute_force(net)[1]
