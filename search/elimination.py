"""Dynamic programming over a graph whose variables have few choices each.

Variables are taken out one after another; what each leaves is a table over its neighbours, of as many dimensions as it
has (bucket elimination: Dechter, "Bucket elimination", 1999). The networks of models are nearly chains, with about
seven neighbours at the widest place, so this is exact once pruning has left a few choices per variable, and, on the
most promising choices alone, finds very good assignments long before. Where a table would grow too large, a variable
is fixed to a given choice instead, and the result is no longer exact, only the best for these choices.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.search.graph import Graph

__all__ = ["Elimination", "adjacency", "plan", "settled"]

Array = NDArray[np.float64]
Index = NDArray[np.intp]
Factor = tuple[tuple[int, ...], Array]
Decision = Callable[[dict[int, int]], int]
_MOST_DIMENSIONS = 32
_EVERY = slice(None)
_MOST_KEPT = 5e7
"""Table entries in all up to which tables are kept, rather than which choice is the cheapest for each of the others':
that is asked for once in the end."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The order in which variables go, and those that are to be fixed when their turn comes.

    entries: of all tables together, the work to do.
    """

    steps: list[int]
    fixed: frozenset[int]
    entries: float


def plan(sizes: dict[int, int], neighbours: dict[int, set[int]], largest: float, most: float = math.inf) -> Plan | None:
    """Greedy order by the least table; `None` once more than `most` entries are needed.

    neighbours: changed on the way. largest: entries of a table; a variable is fixed where the least exceeds it.
    """
    widths = {v: math.log(size) for v, size in sizes.items()}
    limit = math.log(largest)

    def width(v: int) -> float:
        if len(neighbours[v]) >= _MOST_DIMENSIONS:  # of one choice each, mostly
            return math.inf
        return widths[v] + sum([widths[w] for w in neighbours[v]])

    current = {v: width(v) for v in sizes}
    heap = [(value, v) for v, value in current.items()]
    heapq.heapify(heap)
    steps: list[int] = []
    fixed: set[int] = set()
    entries = 0.0
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
        if entries > most:
            return None
        steps.append(v)
        del current[v]
        around = neighbours.pop(v)
        for w in around:
            neighbours[w].discard(v)
            if v not in fixed:
                neighbours[w] |= around
                neighbours[w].discard(w)
        for w in around:
            current[w] = width(w)
            heapq.heappush(heap, (current[w], w))
    return Plan(steps, frozenset(fixed), entries)


class Elimination:
    """The best assignment of a graph's variables within some of their choices.

    costs: per variable, of all its choices (with prices, where there are any).
    keep: per variable, the choices to consider, ascending. hint: the choices that fixed variables take.
    """

    def __init__(self, graph: Graph, costs: dict[int, Array], keep: dict[int, Index]) -> None:
        self.keep = keep
        self.tick = graph.tick
        self.constant = graph.constant
        self.costs = {v: costs[v][picked] for v, picked in keep.items()}
        self.factors: dict[int, list[Factor]] = {v: [] for v in keep}
        self.neighbours: dict[int, set[int]] = {v: set() for v in keep}
        for v, picked in keep.items():
            for w, table in graph.neighbours[v].items():
                self.neighbours[v].add(w)
                if v < w:
                    smaller = table[picked[:, None], keep[w]] if table.size else table
                    self.factors[v].append(((v, w), smaller))
                    self.factors[w].append(((v, w), smaller))

    def sizes(self) -> dict[int, int]:
        """Number of choices considered, per variable."""
        return {v: len(picked) for v, picked in self.keep.items()}

    def solve(self, order: Plan, hint: dict[int, int]) -> tuple[dict[int, int], float]:
        """Eliminates in this order; returns the assignment and its cost."""
        undo: list[tuple[int, Decision]] = []
        found: dict[int, int] = {}
        for number, v in enumerate(order.steps):
            if number % 16 == 0:
                self.tick()
            if v in order.fixed:
                found[v] = int(np.searchsorted(self.keep[v], hint[v]))
                self._fix(v, found[v])
            else:
                undo.append((v, self._eliminate(v, order.entries <= _MOST_KEPT)))
        for v, decide in reversed(undo):
            found[v] = decide(found)
        return {v: int(self.keep[v][place]) for v, place in found.items()}, self.constant

    def _fix(self, v: int, place: int) -> None:
        self.constant += float(self.costs[v][place])
        for scope, table in self._take(v)[0]:
            axis = scope.index(v)
            self._put(scope[:axis] + scope[axis + 1 :], np.asarray(table.take(place, axis=axis)))

    def _eliminate(self, v: int, keeps: bool) -> Decision:
        """Takes `v` out; returns what says which of its choices is the cheapest, given the others'."""
        costs = self.costs[v]
        factors, scope = self._take(v)
        factors.sort(key=_size)  # sums grow to the full size only at the end
        full = (len(costs), *[len(self.keep[w]) for w in scope])
        first = total = costs.reshape(-1, *[1] * len(scope))
        for names, table in factors:  # whose axes are in ascending order, like those of the scope
            axis = names.index(v)
            if axis:
                table = table.transpose(axis, *range(axis), *range(axis + 1, len(names)))
            if len(names) < len(full):
                table = table[tuple([_EVERY, *[_EVERY if w in names else None for w in scope]])]
            if total.shape == full and total is not first:
                total += table
            else:
                total = total + table
        self._put(scope, np.minimum.reduce(total))
        return _of_sums(v, costs, factors) if keeps else _of_all(scope, total)

    def _take(self, v: int) -> tuple[list[Factor], tuple[int, ...]]:
        """Removes the factors that have `v`; returns them, and their other variables."""
        factors = self.factors.pop(v)
        around = {w for names, _ in factors for w in names}
        around.discard(v)
        for w in around:
            self.factors[w] = [factor for factor in self.factors[w] if v not in factor[0]]
        return factors, tuple(sorted(around))

    def _put(self, scope: tuple[int, ...], table: Array) -> None:
        if not scope:
            self.constant += float(table)
        elif len(scope) == 1:
            self.costs[scope[0]] = self.costs[scope[0]] + table
        else:
            for w in scope:
                self.factors[w].append((scope, table))


def _of_sums(v: int, costs: Array, factors: list[Factor]) -> Decision:
    """The choice of `v` of the least cost and entries of its tables, given the choices of all others."""

    def decide(found: dict[int, int]) -> int:
        total = costs
        for names, table in factors:
            total = total + table[tuple([_EVERY if w == v else found[w] for w in names])]
        return int(total.argmin())

    return decide


def _of_all(scope: tuple[int, ...], total: Array) -> Decision:
    """The same of their sum, of which only the choices are kept."""
    best = total.argmin(axis=0).astype(np.uint16)
    return lambda found: int(best[tuple([found[w] for w in scope])])


def _size(factor: Factor) -> int:
    return factor[1].size


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
