"""Dynamic programming over a tree decomposition (bucket elimination).

Elimination of a variable leaves a table over its neighbours (Dechter, "Bucket elimination", 1999). The networks of
models are nearly chains, with about seven neighbours at the widest place. Once pruning has left a few choices per
variable, the elimination is exact. Before that, on the most promising choices alone, it finds very good assignments. A
variable whose table would be too large is fixed to a given choice. The result is then the best for these choices.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.search.graph.graph import Graph
from shardplan.search.graph.table_elimination import Decision, EliminatedVariable, Factor, Scratch, eliminate_variable

__all__ = ["Elimination", "adjacency", "plan", "settled"]

Array = NDArray[np.float64]
Index = NDArray[np.intp]
_MAX_DIMENSIONS = 32
_MAX_KEPT = 2.5e7
"""Entries of the tables that variables leave, up to which they are kept, rather than which choice is the cheapest for
each of the others': that is asked for once in the end."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The order in which variables go, and those that are to be fixed when their turn comes.

    entries: of all tables together, the work to do. kept: of those that variables leave.
    """

    steps: list[int]
    fixed: frozenset[int]
    entries: float
    kept: float


def plan(sizes: dict[int, int], neighbours: dict[int, set[int]], largest: float, most: float = math.inf) -> Plan | None:
    """Greedy order by the least table; `None` once more than `most` entries are needed.

    neighbours: changed on the way. largest: entries of a table; a variable is fixed where the least exceeds it.
    """
    widths = {v: math.log(size) for v, size in sizes.items()}
    limit = math.log(largest)

    weight = widths.__getitem__

    def width(v: int, around: set[int]) -> float:
        if len(around) >= _MAX_DIMENSIONS:  # of one choice each, mostly
            return math.inf
        return widths[v] + sum(map(weight, around))

    current = {v: width(v, neighbours[v]) for v in sizes}
    heap = [(value, v) for v, value in current.items()]
    heapq.heapify(heap)
    steps: list[int] = []
    fixed: set[int] = set()
    entries = kept = 0.0
    while current:
        value, v = heapq.heappop(heap)
        if current.get(v) != value:
            continue
        if value > limit + 1e-9:
            heapq.heappush(heap, (value, v))
            v = max((v, *neighbours[v]), key=lambda u: (len(neighbours[u]) * widths[u], u))
            fixed.add(v)
        else:
            entries += math.exp(value)
            kept += math.exp(value - widths[v])
        if entries > most:
            return None
        steps.append(v)
        del current[v]
        around = neighbours.pop(v)
        stays = v in fixed
        for w in around:
            others = neighbours[w]
            others.discard(v)
            if not stays:
                others |= around
                others.discard(w)
            if (value := width(w, others)) != current[w]:
                current[w] = value
                heapq.heappush(heap, (value, w))
    return Plan(steps, frozenset(fixed), entries, kept)


class Elimination:
    """The best assignment of a graph's variables within some of their choices.

    costs: per variable, of all its choices (with prices, where there are any).
    keep: per variable, the choices to consider, ascending. known: per variable, what taking it out gave before, which
    is used again where all that it was made of is the same, or else replaced. Tables that have changed are to be other
    arrays.
    """

    def __init__(
        self,
        graph: Graph,
        costs: dict[int, Array],
        keep: dict[int, Index],
        known: dict[int, EliminatedVariable] | None = None,
    ) -> None:
        self.keep = keep
        self.tick = graph.tick
        self.constant = graph.constant
        self.known, self._scratch = known, Scratch()
        self.entries = 0
        """Of the tables that variables were taken out of: the work that it took."""
        every = {v for v, picked in keep.items() if len(picked) == len(costs[v])}
        self.costs = {v: costs[v] if v in every else costs[v][picked] for v, picked in keep.items()}
        self.factors: dict[int, list[Factor]] = {v: [] for v in keep}
        self.neighbours: dict[int, set[int]] = {v: set() for v in keep}
        for v, picked in keep.items():
            for w, table in graph.neighbours[v].items():
                self.neighbours[v].add(w)
                if v < w:
                    smaller = table if v in every and w in every else table[picked[:, None], keep[w]]
                    self.factors[v].append(((v, w), smaller))
                    self.factors[w].append(((v, w), smaller))

    def sizes(self) -> dict[int, int]:
        """Number of choices considered, per variable."""
        return {v: len(picked) for v, picked in self.keep.items()}

    def solve(self, order: Plan, hint: dict[int, int]) -> tuple[dict[int, int], float]:
        """Eliminates in this order, where fixed variables take the choices of `hint`; returns the assignment and its
        cost."""
        undo: list[tuple[int, Decision]] = []
        found: dict[int, int] = {}
        for number, v in enumerate(order.steps):
            if number % 16 == 0:
                self.tick()
            if v in order.fixed:
                found[v] = int(np.searchsorted(self.keep[v], hint[v]))
                self._fix(v, found[v])
            else:
                undo.append((v, self._eliminate(v, order.kept <= _MAX_KEPT)))
        for v, decide in reversed(undo):
            found[v] = decide(found)
        return {v: int(self.keep[v][place]) for v, place in found.items()}, self.constant

    def _fix(self, v: int, place: int) -> None:
        self.constant += float(self.costs[v][place])
        for scope, table in self._take(v):
            axis = scope.index(v)
            self._put(scope[:axis] + scope[axis + 1 :], np.asarray(table.take(place, axis=axis)))

    def _put(self, scope: tuple[int, ...], table: Array) -> None:
        if not scope:
            self.constant += float(table)
        for w in scope:
            self.factors[w].append((scope, table))

    def _eliminate(self, v: int, keeps: bool) -> Decision:
        """Takes `v` out; returns what says which of its choices is the cheapest, given the others'."""
        costs, factors = self.costs[v], self._take(v)
        taken = None if self.known is None else self.known.get(v)
        if taken is None or not taken.of(costs, factors):
            taken = eliminate_variable(v, costs, factors, self._scratch, keeps)
            self.entries += costs.size * taken.least.size
        if self.known is not None and keeps:
            self.known[v] = taken
        self._put(taken.scope, taken.least)
        return taken.decide

    def _take(self, v: int) -> list[Factor]:
        """Removes the factors that have `v`; returns them."""
        factors = self.factors.pop(v)
        for w in {w for names, _ in factors for w in names if w != v}:
            self.factors[w] = [factor for factor in self.factors[w] if v not in factor[0]]
        return factors


def adjacency(graph: Graph) -> dict[int, set[int]]:
    """Per variable, its neighbours."""
    return {v: set(graph.neighbours[v]) for v in graph.live()}


def settled(graph: Graph, entries: float, largest: float) -> tuple[dict[int, int], float] | None:
    """The best assignment of a graph, and its cost, where that takes so many table entries in all and in one table;
    None where it takes more, or usage may bind."""
    live = graph.live()
    if any(graph.spans[v] for v in live):
        return None
    sizes = {v: graph.size(v) for v in live}
    order = plan(sizes, adjacency(graph), largest, entries)
    if order is None or order.fixed:
        return None
    keep = {v: np.arange(size) for v, size in sizes.items()}
    costs = {v: graph.costs[v] for v in live}
    return Elimination(graph, costs, keep).solve(order, {})  # type: ignore[arg-type]
