"""Quotient graphs over groups of choices, and their splits."""

import numpy as np
import pytest

from shardplan.search.bounds.lagrangian import Relaxation
from shardplan.search.graph.choice_groups import Groups
from shardplan.search.graph.dynamic_programming import settled
from shardplan.search.graph.graph import Graph
from shardplan.search.testing import random_networks

EDGES = [(0, 1), (1, 2), (2, 3), (0, 3), (0, 2), (1, 3)]


@pytest.mark.parametrize("seed", range(20))
def test_groups_are_a_bound_and_their_splits_find_the_optimum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    net = random_networks.random_graph(rng, EDGES, 5)
    graph, optimum = Graph.of(net), random_networks.brute_force(net)[1]
    groups = Groups(graph, {v: rng.integers(0, 2, graph.size(v)) for v in graph.live()})
    groups.places = {v: np.unique(place, return_inverse=True)[1] for v, place in groups.places.items()}
    groups = Groups(graph, groups.places)
    bounds, further = [], True
    while further:
        found, bound = settled(groups.small, 1e6, 1e6) or ({}, 0.0)
        bounds.append(bound)
        further = bool(groups.split(found))
    assert bounds == sorted(bounds) and bounds[0] <= optimum
    assert bounds[-1] == pytest.approx(optimum) == graph.cost(groups.choices(found))


@pytest.mark.parametrize("seed", range(20))
def test_graph_above_the_bound(seed: int) -> None:
    """Every assignment costs the same above the bound, and no entry is negative."""
    rng = np.random.default_rng(seed)
    net = random_networks.random_graph(rng, EDGES, 5)
    graph = Graph.of(net)
    graph.make_consistent()
    relaxation = Relaxation(graph)
    for _ in range(10):
        relaxation.improve(np.inf)
    above = relaxation.above_bound()
    assert above.constant >= relaxation.bound - 1e-6
    assert all(costs.min() > -1e-9 for costs in above.costs if costs is not None)
    assert all(table.min() > -1e-9 for v in above.live() for table in above.neighbours[v].values())
    for _ in range(20):
        choices = {v: int(rng.integers(graph.size(v))) for v in graph.live()}
        assert above.cost(choices) == pytest.approx(graph.cost(choices))
