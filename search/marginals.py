"""The price of every other choice of a variable, where the best assignment of a network is known.

One dual solution serves all variables: messages of the reduced network, which the best assignment proves to be nearly
tight. Dynamic programming over groups of choices (`shardplan.search.solver.near_optimal_dp`) closes the rest, once. A
second pass along the path from the root to a variable gives a lower bound of each of its choices
(`shardplan.search.graph.elimination_tree`). An assignment is decoded for each of the cheapest ones, and the groups that
it takes are split, until bound and assignment agree.

>>> net = Network()
>>> a, b, c = (net.add_variable([0.0, 1.0, 5.0]) for _ in range(3))
>>> for u, v in ((a, b), (b, c), (a, c)):
...     net.add_edge(u, v, np.array([[0.0, 4.0, 1.0], [4.0, 0.0, 1.0], [1.0, 1.0, 1.0]]))
>>> prices = Marginals(net, [0, 0, 0]).prices(a, 2)
>>> prices.at_least.tolist(), prices.at_most.tolist()
([0.0, 3.0, 7.0], [inf, 3.0, 7.0])
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.search.bounds.lagrangian import Relaxation
from shardplan.search.budget import Budget, Callbacks
from shardplan.search.graph.choice_groups import Groups
from shardplan.search.graph.elimination_tree import EliminationTree
from shardplan.search.graph.graph import Graph
from shardplan.search.graph.reductions import shrink
from shardplan.search.graph.restored import Eliminated, Restored
from shardplan.search.network import Network
from shardplan.search.solver.near_optimal_dp import (
    MAX_GRAPH_ENTRIES,
    affordable_groups,
    order_of_groups,
    pair_bounds,
)
from shardplan.search.structure.fold_repeats import folded_messages

__all__ = ["Marginals", "Prices"]

Array = NDArray[np.float64]

_FOLDED = Budget(sweeps=40, promising_choices=1)
_SWEEPS, _TURNS, _LEAST_GAIN = 4, 20, 0.3
"""Sweeps of a turn, the most turns, and the share of the gap that each must close for another one to follow."""
_GAP = 1e-5
_LEAST_GAP = 1e-7
"""The share of the cost that groups are made for where messages leave no gap."""
_PRECISION, _ROUNDING = 1e-4, 1e-12
"""The share of a price, and of the whole cost, within which both ends of its interval are one."""
_BASE_TURNS = 8
_ENTRIES, _LARGEST = 2e8, 5e6
"""Table entries of one elimination, of all tables and of the largest, from which on groups are not split further."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Per choice, the interval of its extra cost. ``at_most`` is infinite where no assignment was looked for."""

    at_least: Array
    at_most: Array


class Marginals:
    """The dual solution of a network without a usage limit, and its best assignment (or nearly the best)."""

    def __init__(self, network: Network, choices: Sequence[int]) -> None:
        self._sizes, self._choices = [costs.size for costs in network.costs], [int(k) for k in choices]
        self._tree: EliminationTree | None = None
        graph = Graph.of(network, np.array(self._choices))
        shrink(graph, dominance=False)
        self._eliminated = Eliminated(graph)
        self._graph = graph
        hint = graph.hint
        assert hint is not None
        self._hint, self._cost = hint, graph.cost(hint)
        if not graph.live():
            self._groups, self._tree = Groups(graph, {}), EliminationTree(graph, [])
        elif graph.entries() <= MAX_GRAPH_ENTRIES:
            self._group()
        if self._tree is not None:
            self._best = self._groups.choices(self._tree.choices)
            self._excess = self._groups.graph.cost(self._best) - self._cost

    @property
    def bounded(self) -> bool:
        """Whether the network is small enough for bounds."""
        return self._tree is not None

    def _group(self) -> None:
        """Groups of choices whose elimination gives the cost of the best assignment as its bound, or nearly so."""
        graph = self._graph
        graph.hint = None
        messages = folded_messages(graph, self._hint, _FOLDED, _GAP, Callbacks(lambda: None, lambda: math.inf))
        graph.hint = self._hint
        relaxation = Relaxation(graph)
        relaxation.load(messages or {})
        gap = math.inf
        for _ in range(_TURNS):
            before = gap
            for _ in range(_SWEEPS):
                relaxation.improve(self._cost)
            gap = self._cost - relaxation.bound
            if gap > (1 - _LEAST_GAIN) * before or gap <= _LEAST_GAP * abs(self._cost):
                break
        relaxation.reduced_costs()
        rises = pair_bounds(relaxation)
        affordable = affordable_groups(graph, rises, max(gap, _LEAST_GAP * abs(self._cost)))
        if affordable is None:
            return
        places, order = affordable
        self._groups = Groups(relaxation.above_bound(), places)
        for _ in range(_BASE_TURNS):
            self._tree = EliminationTree(self._groups.small, order.steps)
            if self._closed(self._tree.cost - self._cost, 0.0) or not self._groups.split(self._tree.choices):
                break
            again = order_of_groups(graph, places, 1.0)
            if again is None:
                break
            order = again

    def prices(self, variable: int, exact: int, until: float = math.inf) -> Prices:
        """The prices of a variable's choices: of so many of the cheapest other ones both ends of the interval are one,
        as far as there is time until this one (``time.monotonic``) and tables stay small."""
        assert self._tree is not None
        size = self._sizes[variable]
        restored = self._eliminated.around(variable, size)
        least, most = np.zeros(size), np.full(size, np.inf)
        groups, tree, changed, split = self._groups.copy(), self._tree, set[int](), set[int]()
        if restored.variable in groups.places:
            groups.separate(restored.variable)
            changed.add(restored.variable)
            split.add(restored.variable)
        while True:
            tree = tree.with_changes(groups.small, changed, map(groups.least, restored.factors))
            beliefs = tree.beliefs(restored.variable)
            marginals = tree.marginals(beliefs) - self._cost
            rises = np.full(size, np.inf)
            np.minimum.at(rises, restored.labels, marginals)
            least = np.maximum(least, rises)
            others = [k for k in np.argsort(least, kind="stable").tolist() if k != self._choices[variable]]
            changed = set()
            for choice in [k for k in others if np.isfinite(least[k])][:exact]:
                if self._closed(least[choice], most[choice]):
                    continue
                there = np.flatnonzero(restored.labels == choice)
                found = tree.assignment(beliefs, int(there[marginals[there].argmin()]))
                differs = split.union(v for v, k in tree.choices.items() if found[v] != k)
                most[choice] = min(most[choice], self._extra(groups, restored, found, differs))
                if not self._closed(least[choice], most[choice]):
                    changed.update(groups.split(found, differs))
            split |= changed
            if not changed or time.monotonic() > until or _too_large(*tree.entries()):
                break
        return Prices(np.minimum(least, most), most)

    def _extra(self, groups: Groups, restored: Restored, found: dict[int, int], differs: set[int]) -> float:
        """The extra cost of an assignment of groups, with the choice of each that suits its neighbours best.

        differs: the variables whose choices may be others than in the best assignment."""
        graph, best = groups.graph, self._best
        around = differs.union(*(graph.neighbours[v] for v in differs))
        choices = best | groups.choices(found, around)
        cost = self._excess
        for v in around:
            costs = graph.costs[v]
            assert costs is not None
            cost += float(costs[choices[v]] - costs[best[v]])
            for w, table in graph.neighbours[v].items():
                if w not in around or v < w:
                    cost += float(table[choices[v], choices[w]] - table[best[v], best[w]])
        for names, table in restored.factors:
            cost += float(table[tuple([choices.get(name, found.get(name, 0)) for name in names])])
        return max(0.0, cost)

    def _closed(self, at_least: float, at_most: float) -> bool:
        """Whether both are one, within what counts."""
        return at_most < np.inf and at_most - at_least <= _PRECISION * at_most + _ROUNDING * abs(self._cost)


def _too_large(entries: float, largest: float) -> bool:
    return entries > _ENTRIES or largest > _LARGEST
