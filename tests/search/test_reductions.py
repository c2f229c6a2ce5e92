"""Exact reductions keep the optimum, and their inverses give assignments of equal cost."""

from collections.abc import Callable
from unittest.mock import Mock

import numpy as np
import pytest

from shardplan.search import Network
from shardplan.search.graph import tables
from shardplan.search.graph.graph import Graph, Infeasible
from shardplan.search.graph.pairwise_usage import with_pairs
from shardplan.search.graph.reductions import drop_dominated, eliminate, follow, reduce_graph, shrink
from shardplan.search.testing import random_networks


def best_of(graph: Graph) -> tuple[dict[int, int], float]:
    """The best assignment of what is left of a graph, by brute force."""
    live = graph.live()
    net = Network()
    index = {v: net.add_variable(np.asarray(graph.costs[v])) for v in live}
    for v in live:
        for w, table in graph.neighbours[v].items():
            if v < w:
                net.add_edge(index[v], index[w], table)
    if not live:
        return {}, graph.constant
    choices, cost = random_networks.brute_force(net)
    assert choices is not None
    return {v: int(choices[index[v]]) for v in live}, graph.constant + cost


def networks(count: int, excluded: float, sharp: bool) -> list[Network]:
    """Random networks; sharp ones have tables with one finite entry per row here and there."""
    found = []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        pairs = [(int(rng.integers(0, v)), v) for v in range(1, 7)]
        pairs += [(int(rng.integers(0, 7)), int(rng.integers(0, 7))) for _ in range(3)]
        net = random_networks.random_graph(rng, [pair for pair in pairs if pair[0] != pair[1]], 4, excluded)
        if sharp:
            for u, v in [(0, 1), (2, 3), (1, 4)]:
                table = np.full((net.costs[u].size, net.costs[v].size), np.inf)
                table[np.arange(len(table)), rng.integers(0, table.shape[1], len(table))] = rng.integers(0, 9)
                net.add_edge(u, v, table)
        found.append(net)
    return found


@pytest.mark.parametrize("reduction", [eliminate, follow, drop_dominated, reduce_graph])
@pytest.mark.parametrize(("excluded", "sharp"), [(0.0, False), (0.2, False), (0.0, True)])
def test_optimum_and_inverse(reduction: Callable[[Graph], object], excluded: float, sharp: bool) -> None:
    did_something = 0
    for net in networks(60, excluded, sharp):
        _, optimum = random_networks.brute_force(net)
        try:
            graph = Graph.of(net)
            before = len(graph.undo)
            reduction(graph)
            graph.make_consistent()
        except Infeasible:
            assert optimum == np.inf
            continue
        did_something += len(graph.undo) > before
        choices, cost = best_of(graph)
        assert cost == optimum
        assert net.cost(graph.expand(choices)) == optimum
    assert did_something > 10


def test_hint_through_all_reductions() -> None:
    """Reductions carry a hint along, and its cost never rises."""
    for seed in range(80):
        net = random_networks.random_memory_bound(np.random.default_rng(seed), 7, 0.5)
        hint, optimum = random_networks.brute_force(net)
        assert hint is not None
        graph = Graph.of(net, hint)
        shrink(graph)
        assert graph.hint is not None
        full = graph.expand(graph.hint)
        assert net.cost(full) == optimum == graph.cost(graph.hint)
        assert net.usage_limit is not None and net.peak(full)[0] <= net.usage_limit


def test_follow_takes_usage_along() -> None:
    net = Network(usage_limit=100)
    a, b = net.add_variable([0.0, 0.0]), net.add_variable([0.0, 0.0])
    net.add_edge(a, b, np.array([[np.inf, 0.0], [0.0, np.inf]]))
    net.add_usage(a, [1, 2], 0, 2)
    net.add_usage(b, [10, 20], 1, 3)
    graph = Graph.of(net)
    assert follow(graph) == 1
    (left,) = graph.live()
    total = np.sum([amounts for amounts, _, _ in graph.spans[left]], axis=0)
    assert sorted(total.tolist()) == [12.0, 21.0]


@pytest.mark.parametrize("value", [np.inf, 1e17, 3e18])
def test_exclusions_and_copies_of_large_tables(value: float) -> None:
    """Exclusions become infinite, and large tables without exclusions are not copied."""
    rng = np.random.default_rng(4)
    table = rng.uniform(0.0, 5.0, (40, 40))
    table[3, 5] = value
    net = Network()
    a, b = net.add_variable(np.zeros(40)), net.add_variable(np.zeros(40))
    net.add_edge(a, b, table)
    taken = Graph.of(net).neighbours[a][b]
    assert np.isinf(taken[3, 5]) and np.isfinite(taken).sum() == table.size - 1
    assert (taken is table) == np.isinf(value)


def test_equal_reductions_of_several_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Searches within several limits share the results of equal reductions."""
    rng, net = np.random.default_rng(5), Network()
    a, b, c = (net.add_variable(rng.uniform(0.0, 5.0, 30)) for _ in range(3))
    net.add_edge(a, b, rng.uniform(0.0, 5.0, (30, 30)))
    net.add_edge(b, c, rng.uniform(0.0, 5.0, (30, 30)))
    join = Mock(side_effect=tables._join)
    monkeypatch.setattr(tables, "_join", join)
    for limit in (5.0, 7.0):
        limited = with_pairs(net, [])
        limited.usage_limit = limit
        for variable in (a, c):
            limited.add_usage(variable, np.arange(30.0), 0, 1)
        graph = Graph.of(limited)
        assert eliminate(graph) == 1
        assert graph.live() == [a, c]
    assert join.call_count == 1
