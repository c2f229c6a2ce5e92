"""Elimination of a variable from a sum of tables."""

import itertools
import math

import numpy as np
import pytest

from shardplan.search.graph import table_elimination
from shardplan.search.graph.dynamic_programming import Elimination, plan
from shardplan.search.graph.graph import Graph
from shardplan.search.graph.table_elimination import EliminatedVariable, Factor, Scratch, eliminate_variable
from shardplan.search.network import Network
from shardplan.search.testing import random_networks

SIZES = {0: 3, 1: 4, 2: 2, 3: 5, 4: 3}


def _factors(rng: np.random.Generator) -> list[Factor]:
    """Factors of variable 4 and some others each, in any order, with excluded pairs and equal sums."""
    factors: list[Factor] = []
    for names in ((1, 4), (4, 3, 0), (0, 4, 2), (4,), (2, 1, 4, 3)):
        table = rng.integers(0, 4, [SIZES[v] for v in names]).astype(float)
        table[rng.random(table.shape) < 0.1] = np.inf
        factors.append((names, table))
    return factors


@pytest.mark.parametrize("large", [1, 10**9])
@pytest.mark.parametrize("keeps", [False, True])
def test_what_is_left_is_the_least_of_all_sums(large: int, keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_elimination, "_LARGE_RESULT", large)
    scratch = Scratch()
    for seed in range(5):
        rng = np.random.default_rng(seed)
        costs, factors = rng.integers(0, 3, SIZES[4]).astype(float), _factors(rng)
        taken = eliminate_variable(4, costs, factors, scratch, keeps)
        assert sorted(taken.scope) == [0, 1, 2, 3]
        assert taken.least.shape == tuple(SIZES[v] for v in taken.scope)
        for others in itertools.product(*[range(SIZES[v]) for v in taken.scope]):
            found = dict(zip(taken.scope, others, strict=True))
            sums = [
                costs[k] + sum(table[tuple(found[w] if w != 4 else k for w in names)] for names, table in factors)
                for k in range(SIZES[4])
            ]
            assert taken.least[others] == min(sums)
            assert taken.decide(found) == sums.index(min(sums))


def test_no_table_of_all_dimensions_is_made() -> None:
    rng, scratch = np.random.default_rng(0), Scratch()
    factors: list[Factor] = [((0, 1), rng.random((50, 60))), ((0, 2), rng.random((50, 70)))]
    taken = eliminate_variable(0, np.zeros(50), factors, scratch, True)
    assert len(scratch.entries) == taken.least.size == 60 * 70


def _grid() -> tuple[Network, Graph]:
    net = random_networks.random_grid(np.random.default_rng(5), 4, 4, 3, 0.0)
    return net, Graph.of(net)


def test_what_has_not_changed_is_not_taken_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    net, graph = _grid()
    live = graph.live()
    sizes = {v: graph.size(v) for v in live}
    keep = {v: np.arange(size) for v, size in sizes.items()}
    order = plan(sizes, {v: set(graph.neighbours[v]) for v in live}, 1e6)
    assert order is not None
    made: list[int] = []

    def counted(v: int, costs: np.ndarray, factors: list[Factor], scratch: Scratch, keeps: bool) -> EliminatedVariable:
        made.append(v)
        return eliminate_variable(v, costs, factors, scratch, keeps)

    monkeypatch.setattr("shardplan.search.graph.dynamic_programming.eliminate_variable", counted)
    known: dict[int, EliminatedVariable] = {}
    costs = {v: np.asarray(graph.costs[v]) for v in live}

    def solve() -> tuple[dict[int, int], float]:
        made.clear()
        return Elimination(graph, costs, keep, known).solve(order, {})

    first = solve()
    assert sorted(made) == live
    assert solve() == first and not made
    last = order.steps[-2]  # on which nothing but the last one depends
    costs[last] = costs[last] + np.arange(sizes[last]) * 100.0
    choices, cost = solve()
    assert made == order.steps[-2:]
    for v in live:
        graph.costs[v] = costs[v]
    assert cost == graph.cost(choices) == Elimination(graph, costs, keep).solve(order, {})[1]
    assert math.isfinite(net.cost(graph.expand(choices)))
