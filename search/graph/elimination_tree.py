"""Min-marginals by a second pass over eliminated variables: the least cost of an assignment with a given choice.

Elimination leaves one table per variable, over the variables that go later (its scope). The earliest of these is its
parent, whose own tables take that one in. A pass back from the root to a variable adds what all other variables cost
at least. The passes to all variables would be the calibration of a junction tree (Shenoy and Shafer, 1990); here only
the path to one variable is walked. A change of some tables takes their variables out again, and those on their paths
to the root.

>>> from shardplan.search.graph.dynamic_programming import adjacency, plan
>>> from shardplan.search.network import Network
>>> net = Network()
>>> a, b, c = (net.add_variable([0.0, 1.0]) for _ in range(3))
>>> for u, v in ((a, b), (b, c), (a, c)):
...     net.add_edge(u, v, np.array([[0.0, 4.0], [4.0, 0.0]]))
>>> graph = Graph.of(net)
>>> tree = EliminationTree(graph, plan({a: 2, b: 2, c: 2}, adjacency(graph), 8).steps)
>>> path = tree.beliefs(a)
>>> tree.marginals(path).tolist(), tree.assignment(path, 1)
([0.0, 3.0], {0: 1, 1: 1, 2: 1})
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from math import prod

import numpy as np
from numpy.typing import NDArray

from shardplan.search.graph.graph import Graph
from shardplan.search.graph.table_elimination import (
    EliminatedVariable,
    Factor,
    Scratch,
    axes_in_order,
    eliminate_variable,
)

__all__ = ["EliminationTree"]

Array = NDArray[np.float64]


class EliminationTree:
    """The variables of a graph, eliminated in an order. `cost` and `choices` are those of the best assignment."""

    def __init__(self, graph: Graph, order: list[int]) -> None:
        self.graph, self.order = graph, order
        self._place = {v: place for place, v in enumerate(order)}
        self._taken: dict[int, EliminatedVariable] = {}
        self._children: dict[int, list[int]] = {v: [] for v in order}
        self._scratch = Scratch()
        self._restored: dict[int, Factor] = {}
        self._early: dict[int, int] = {}
        for v in order:
            self._eliminate(v)
            if scope := self._taken[v].scope:
                self._children[min(scope, key=self._place.__getitem__)].append(v)
        self._changed = set(order)
        self.choices: dict[int, int] = {}
        self.choices = self._completed({})
        self._changed = set()

    def with_changes(self, graph: Graph, changed: Collection[int], restored: Iterable[Factor] = ()) -> EliminationTree:
        """The tree of a graph of the same edges with other tables.

        changed: the variables whose costs or tables are other ones. restored: factors of variables that reductions took
        out before, each with its own one first, least 0 over that (`Restored.factors`).
        """
        other = object.__new__(EliminationTree)
        other.graph, other.order, other.choices = graph, self.order, self.choices
        other._place, other._children, other._scratch = self._place, self._children, self._scratch
        other._taken = dict(self._taken)
        other._restored = {names[0]: (names, table) for names, table in restored}
        other._early = {v: number - len(other._restored) for number, v in enumerate(other._restored)}
        places = {self._place[v] for v in changed}
        places.update(self._place[w] for v in changed for w in graph.neighbours[v] if self._place[w] < self._place[v])
        waiting = sorted(places)
        while waiting:
            v = self.order[heapq.heappop(waiting)]
            other._eliminate(v)
            if scope := other._taken[v].scope:
                place = min(map(self._place.__getitem__, scope))
                if place not in places:
                    places.add(place)
                    heapq.heappush(waiting, place)
        other._changed = self._changed.union(self.order[place] for place in places)
        return other

    @property
    def cost(self) -> float:
        """The least cost of all assignments."""
        return self.graph.constant + sum(float(one.least) for one in self._taken.values() if not one.scope)

    def entries(self) -> tuple[float, float]:
        """The table entries of an elimination of the graph as it is: of all tables, and of the largest."""
        each = [self.graph.size(v) * float(prod(map(self.graph.size, self._taken[v].scope))) for v in self.order]
        return sum(each), max(each, default=0.0)

    def beliefs(self, variable: int) -> list[Factor]:
        """From the root to a variable, the factor over each one and its scope: the least cost of all that there is."""
        path = [variable]
        while scope := self._scope(path[-1]):
            path.append(min(scope, key=lambda v: self._early.get(v, self._place.get(v, 0))))
        found: list[Factor] = []
        for v in reversed(path):
            names, table = self._own(v)
            if found:
                table = table + self._above(v, names, *found[-1])
            found.append((names, table))
        return found

    def marginals(self, beliefs: list[Factor]) -> Array:
        """Per choice of the last variable of a path, the least cost of an assignment with it."""
        _, table = beliefs[-1]
        least: Array = table.reshape(len(table), -1).min(axis=1)
        root = beliefs[0][0][0]
        others = sum(float(one.least) for v, one in self._taken.items() if not one.scope and v != root)
        return least + self.graph.constant + others

    def assignment(self, beliefs: list[Factor], choice: int) -> dict[int, int]:
        """The assignment of that cost."""
        found = {beliefs[-1][0][0]: choice}
        for names, table in reversed(beliefs):
            left = [name for name in names if name not in found]
            part = table[tuple([found.get(name, slice(None)) for name in names])]
            found.update(zip(left, map(int, np.unravel_index(int(part.argmin()), part.shape)), strict=True))
        return self._completed(found)

    def _completed(self, found: dict[int, int]) -> dict[int, int]:
        """The best choices of all other variables; those of the tree's first assignment where nothing differs."""
        other = {v for v, choice in found.items() if self.choices.get(v) != choice}
        for v in reversed(self.order):
            if v in found:
                continue
            taken = self._taken[v]
            if v in self._changed or not other.isdisjoint(taken.scope):
                found[v] = taken.decide(found)
                if found[v] != self.choices.get(v):
                    other.add(v)
            else:
                found[v] = self.choices[v]
        return found

    def _eliminate(self, v: int) -> None:
        graph, place = self.graph, self._place
        factors: list[Factor] = [((v, w), table) for w, table in graph.neighbours[v].items() if place[w] > place[v]]
        factors += [(self._taken[child].scope, self._taken[child].least) for child in self._children[v]]
        costs = graph.costs[v]
        assert costs is not None
        self._taken[v] = eliminate_variable(v, costs, factors, self._scratch, True)

    def _scope(self, v: int) -> tuple[int, ...]:
        return self._restored[v][0][1:] if v in self._restored else self._taken[v].scope

    def _own(self, v: int) -> Factor:
        """A variable's costs and all factors that went with it, as one."""
        if v in self._restored:
            return self._restored[v]
        taken = self._taken[v]
        names = (v, *taken.scope)
        total = taken.costs.reshape(-1, *[1] * len(taken.scope))
        for factor in taken.factors:
            total = total + axes_in_order(factor, names, False)
        return names, total

    def _above(self, v: int, names: tuple[int, ...], parent: tuple[int, ...], table: Array) -> Array:
        """What all other variables cost at least, per choices of a variable's scope."""
        scope = names[1:]
        table = table.min(axis=tuple([axis for axis, name in enumerate(parent) if name not in scope]))
        kept = [name for name in parent if name in scope]
        table = table.transpose([kept.index(name) for name in scope])
        if v not in self._restored:
            least = self._taken[v].least
            table = np.where(np.isfinite(table), table - np.where(np.isfinite(least), least, 0.0), np.inf)
        return table[None]
