"""Contraction of edges: two neighbours become one variable, whose choices are the pairs that pruning has left.

Message passing bounds a graph edge by edge. On a cycle, choices may fit each other on every edge although no assignment
of the whole cycle does. Meshes with equal axes have many such cycles: every assignment has one symmetric image per
order of the axes, and a mixture of images costs less than any image. Contraction of an edge makes cycles shorter. A
cycle of three variables becomes one edge, whose bound is exact.

Messages exclude most pairs, since the layouts of neighbours belong together. A contraction leaves these pairs out.

>>> import numpy as np
>>> from shardplan.search.graph.graph import Graph
>>> from shardplan.search.network import Network
>>> net = Network()
>>> a, b = net.add_variable([0.0, 0.0]), net.add_variable([0.0, 0.0])
>>> net.add_edge(a, b, np.array([[0.0, 9.0], [9.0, 1.0]]))
>>> graph = Graph.of(net)
>>> contract(graph, a, b, np.array([0, 1]), np.array([0, 1]))
>>> graph.costs[a].tolist(), graph.live(), graph.expand({a: 1}).tolist()
([0.0, 1.0], [0], [1, 1])
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.search.bounds.lagrangian import Relaxation
from shardplan.search.graph.graph import Graph, Keep
from shardplan.search.graph.reductions import fold_follower

__all__ = ["contract", "contract_neighbours"]

Index = NDArray[np.intp]

_MAX_GROWTH = 30.0
_MAX_CONTRACTED_SHARE = 0.15
"""Of all edges, at most how many are merged at once where that makes the tables larger."""


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The remaining pairs of choices of an edge, and the entries of both ends' tables before and after a
    contraction."""

    v: int
    w: int
    first: Index
    second: Index
    before: int
    after: int

    @property
    def growth(self) -> float:
        return self.after / self.before


def contract(graph: Graph, v: int, w: int, first: Index, second: Index) -> None:
    """Lets `v` stand for both: its choice k is the pair of choices `first[k]` and `second[k]`."""
    hint = graph.hint
    graph.undo.append(Keep(v, first))
    if hint is not None:
        places = np.flatnonzero((first == hint[v]) & (second == hint[w]))
        graph.hint = {**hint, v: int(places[0])} if len(places) else None
    costs = graph.costs[v]
    assert costs is not None
    graph.costs[v] = costs[first]
    graph.touch((v,))
    for u, table in list(graph.neighbours[v].items()):
        graph.set_edge(v, u, table[first])
    graph.spans[v] = [(amounts[first], start, end) for amounts, start, end in graph.spans[v]]
    graph.twins.pop(v, None)
    fold_follower(graph, w, v, second)


def contract_neighbours(graph: Graph, relaxation: Relaxation, upper: float, room: int) -> int:
    """Contracts edges that are not near each other, cheapest first, and returns their number.

    relaxation: of the graph as it is, which gets its messages. upper: cost of the best known assignment. room: by how
    many table entries the graph may grow.
    """
    bound, _ = relaxation.reduced_costs()
    allowed = upper - bound + 1e-9 * max(abs(upper), abs(graph.constant), 1e-30)
    candidates = sorted(_candidates(graph, relaxation, allowed), key=lambda pairs: (pairs.growth, pairs.v, pairs.w))
    relaxation.reparametrise()
    near: set[int] = set()
    count, most = 0, max(1, int(_MAX_CONTRACTED_SHARE * len(candidates)))
    for pairs in candidates:
        v, w = pairs.v, pairs.w
        if pairs.growth > 1.0 and (count >= most or pairs.growth > _MAX_GROWTH):
            break
        # A neighbour of a merged variable has a larger table by now than was counted.
        if v in near or w in near or pairs.after - pairs.before > room:
            continue
        near |= {v, w, *graph.neighbours[v], *graph.neighbours[w]}
        contract(graph, v, w, pairs.first, pairs.second)
        room -= max(0, pairs.after - pairs.before)
        count += 1
    graph.forget()
    return count


def _candidates(graph: Graph, relaxation: Relaxation, allowed: float) -> list[_Pairs]:
    found = []
    hint, neighbours = graph.hint, graph.neighbours
    width = {v: sum(table.shape[1] for table in neighbours[v].values()) for v in graph.live()}
    for v, w, rise in relaxation.pair_costs():
        fits = rise <= allowed
        if hint is not None:
            fits[hint[v], hint[w]] = True
        first, second = np.nonzero(fits)
        n, m = fits.shape
        shared = sum(graph.size(u) for u in neighbours[v] if u in neighbours[w])
        before, after = n * width[v] + m * (width[w] - n), len(first) * (width[v] - m + width[w] - n - shared)
        if len(first):
            found.append(_Pairs(v, w, first, second, before, after))
    return found
