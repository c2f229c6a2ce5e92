"""Dynamic programming among the choices that fit: those of pairs that raise the bound by little.

Where messages stall, many choices of a variable look as good as each other, twins above all, and a few promising ones
of each variable leave out those that go together. But no assignment that is better than the best known takes a pair of
choices that raises the bound by the gap. A choice whose pairs with some neighbour all raise it by more than a share of
the gap is left out here: with all of the gap, nothing better is lost, and with a small share of it hardly ever. So the
largest share is taken of which dynamic programming can look at everything.

>>> from shardplan.search.effort import Effort, Watch
>>> from shardplan.search.network import Network
>>> from shardplan.search.graph import Graph
>>> from shardplan.search.solver import GraphSolver
>>> net = Network()
>>> a, b, c = (net.add_variable([0.0, 0.0, 9.0]) for _ in range(3))
>>> for u, v in ((a, b), (b, c), (a, c)):
...     net.add_edge(u, v, np.array([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 0.0]]))
>>> solver = GraphSolver(Graph.of(net), 5.0, Effort(), 1e-6, Watch(lambda: None, lambda: 60.0))
>>> solver.prune(solver.relax_again())
>>> settle_fitting(solver), solver.upper, solver.lower
(True, 3.0, 3.0)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardplan.search.elimination import Elimination, Plan, adjacency, plan
from shardplan.search.graph import Graph
from shardplan.search.relaxation import Relaxation

if TYPE_CHECKING:
    from shardplan.search.solver import GraphSolver

__all__ = ["settle_fitting"]

Array = NDArray[np.float64]
Index = NDArray[np.intp]

_SHARES = 1.0, 0.5, 0.25, 0.1, 0.05
"""Of the gap, of which the first one is taken that is affordable; fewer choices hardly have anything better."""
_ENTRIES, _LARGEST = 1e8, 1e7
"""Table entries, in all and of one table: less than a second's."""
_WORTH = 0.5
"""The share of the gap that was open when choices were looked through before, up to which they are again."""
_SECONDS_PER_ENTRY = 7e-9


def settle_fitting(solver: GraphSolver) -> bool:
    """Takes the best assignment among the choices that fit into account, of as large a share of the gap as is
    affordable; True where the gap is closed by it."""
    graph, left = solver.graph, solver.upper - solver.lower
    live = graph.live()
    if not live or left == math.inf or left > _WORTH * solver.fitted or any(graph.spans[v] for v in live):
        return False
    solver.fitted = left
    relaxation = Relaxation(graph)
    bound, _ = relaxation.reduced_costs()
    upper = max(solver.upper, solver.ceiling)
    gap = upper - bound + 1e-9 * max(abs(upper), abs(graph.constant), 1e-30)
    rises = _rises(relaxation)
    least, most = 0, len(_SHARES)  # the shares between which the first affordable one is
    chosen: tuple[dict[int, Index], Plan] | None = None
    while least < most:
        middle = (least + most) // 2
        keep = _fitting(graph, rises, _SHARES[middle] * gap)
        order = plan({v: len(kept) for v, kept in keep.items()}, adjacency(graph), _LARGEST, _ENTRIES)
        if order is None or order.fixed:
            least = middle + 1
        else:
            chosen, most = (keep, order), middle
    if chosen is None:
        return False
    keep, order = chosen
    costs: dict[int, Array] = {v: graph.costs[v] for v in live}  # type: ignore[misc]
    found, cost = Elimination(graph, costs, keep).solve(order, {})
    solver.estimate += order.entries * _SECONDS_PER_ENTRY
    solver.accept(found, cost)
    if most == 0:
        solver.raise_lower(min(solver.upper, upper))
    return solver.closed


def _fitting(graph: Graph, rises: dict[int, Array], room: float) -> dict[int, Index]:
    """Per variable, the choices that raise the bound by no more than `room`, the least one, and that of the best known
    assignment."""
    hint = graph.hint or {}
    keep = {}
    for v, rise in rises.items():
        fits = rise <= room
        fits[rise.argmin()] = True
        if v in hint:
            fits[hint[v]] = True
        keep[v] = np.flatnonzero(fits)
    return keep


def _rises(relaxation: Relaxation) -> dict[int, Array]:
    """Per variable and choice, by how much the bound rises at least with the best pairs that it has with each of the
    variable's neighbours: by the most of these."""
    offsets, above = relaxation.sweeper.offsets, relaxation.sweeper.beliefs
    rises = {v: above[offsets[place] : offsets[place + 1]].copy() for place, v in enumerate(relaxation.order)}
    for v, w, rise in relaxation.pair_costs():
        np.maximum(rises[v], rise.min(axis=1), out=rises[v])
        np.maximum(rises[w], rise.min(axis=0), out=rises[w])
    return rises
