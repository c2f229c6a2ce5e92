"""Edge blocks: messages of many edges at once equal those of single edges; eliminations keep their minima."""

import numpy as np
import pytest

from shardplan.search.bounds.edge_blocks import Block, groups_by_size
from shardplan.search.bounds.lagrangian import Relaxation
from shardplan.search.graph import dynamic_programming
from shardplan.search.graph.dynamic_programming import Elimination, plan
from shardplan.search.graph.graph import Graph
from shardplan.search.testing import random_networks


def test_tables_of_a_block_keep_their_entries() -> None:
    rng = np.random.default_rng(0)
    tables = [rng.random((rows, columns)) for rows, columns in ((3, 2), (1, 4), (2, 1))]
    for near in (0, 1):
        block = Block.of(tables, near)
        assert block.entries == sum(table.size for table in tables)
        for edge, table in enumerate(tables):
            own = block.tables[:, block.edge_of == edge]
            turned = table if near == 0 else table.T
            assert (own[: len(turned)] == turned).all() and np.isinf(own[len(turned) :]).all()
            assert block.edge_starts[edge] == np.flatnonzero(block.edge_of == edge)[0]


def test_edges_are_gathered_by_their_choices() -> None:
    assert groups_by_size([2, 90, 3, 90], [100, 100, 100, 100]) == [[1, 3], [2, 0]]
    assert groups_by_size([2, 90, 3, 90], [10, 10, 10, 10]) == [[1, 3, 2, 0]]
    assert groups_by_size([], []) == []


def test_messages_are_those_of_edges_by_themselves() -> None:
    """Of a sweep from known messages, each sent message is the least over the near end's choices."""
    graph = Graph.of(random_networks.random_grid(np.random.default_rng(1), 4, 4, 5, 0.0))
    relaxation = Relaxation(graph)
    sweeper = relaxation.sweeper
    for _ in range(3):
        sweeper.up()
        sweeper.down()
    sweeper.up()
    place = {v: i for i, v in enumerate(relaxation.order)}
    into = relaxation.messages()
    for v in graph.live():
        costs = np.asarray(graph.costs[v])
        belief = costs + sum(into[v, w] for w in graph.neighbours[v])
        for w in graph.neighbours[v]:
            if place[v] < place[w]:
                table = graph.neighbours[v][w]
                expected = (table + (sweeper.shares[place[v]] * belief - into[v, w])[:, None]).min(axis=0)
                assert into[w, v] == pytest.approx(expected - expected.min(), abs=1e-9)


@pytest.mark.parametrize("most_kept", [0, 10**6])
def test_eliminations_remember_what_was_cheapest(most_kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_programming, "_MAX_KEPT", most_kept)
    for seed in range(10):
        net = random_networks.random_grid(np.random.default_rng(seed), 3, 3, 3, 0.0)
        graph = Graph.of(net)
        live = graph.live()
        sizes = {v: graph.size(v) for v in live}
        order = plan(sizes, {v: set(graph.neighbours[v]) for v in live}, 1e6)
        assert order is not None
        keep = {v: np.arange(size) for v, size in sizes.items()}
        costs = {v: np.asarray(graph.costs[v]) for v in live}
        found, cost = Elimination(graph, costs, keep).solve(order, {})
        assert cost == random_networks.brute_force(net)[1] == net.cost(graph.expand(found))
        for v in live:
            assert (np.asarray(graph.costs[v]) == costs[v]).all()
