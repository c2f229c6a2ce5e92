"""Quotient graphs over groups of choices, whose groups are split on demand.

The cost of a group is the least cost of its choices, and the cost of a pair of groups that of their cheapest pair. The
best assignment of groups is therefore a lower bound. The bound is too low where a group has several choices and each
neighbour assumes another one. Such a group is split in two, and the neighbours have to agree. An assignment of
groups with one choice each is the optimum.

>>> from shardplan.search.network import Network
>>> net = Network()
>>> a, b, c = net.add_variable([0.0, 0.0]), net.add_variable([0.0, 0.0]), net.add_variable([0.0])
>>> net.add_edge(a, b, np.array([[0.0, 9.0], [9.0, 4.0]]))
>>> net.add_edge(a, c, np.array([[5.0], [0.0]]))
>>> groups = Groups(Graph.of(net), {a: np.array([0, 0]), b: np.array([0, 1]), c: np.array([0])})
>>> groups.small.neighbours[a][b].tolist(), groups.small.neighbours[a][c].tolist()
([[0.0, 4.0]], [[0.0]])
>>> groups.split({a: 0, b: 0, c: 0})
[0]
>>> groups.small.neighbours[a][b].tolist(), groups.small.neighbours[a][c].tolist()
([[0.0, 9.0], [9.0, 4.0]], [[5.0], [0.0]])
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardplan.search.graph.graph import Graph
from shardplan.search.graph.table_elimination import Factor

__all__ = ["Groups", "quotient"]

Array = NDArray[np.float64]
Index = NDArray[np.intp]
_SPLITS_AT_ONCE = 3
"""Times that a group is split at once: its neighbours' groups mostly stay what they are."""


@dataclass(slots=True)
class Groups:
    """places: per variable of a graph, the group of each of its choices. small: the graph over groups."""

    graph: Graph
    places: dict[int, Index]
    small: Graph = field(init=False)

    def __post_init__(self) -> None:
        self.small = quotient(self.graph, self.places)

    def choices(self, found: dict[int, int], only: Iterable[int] | None = None) -> dict[int, int]:
        """An assignment of groups, as one of choices: of each group the one that its neighbours' groups suit best.

        only: the variables to find it for, where not for all."""
        every = {v: self._members(v, found) for v in (found if only is None else only)}
        return {
            v: int(members[self._costs(v, found).sum(axis=0).argmin() if len(members) > 1 else 0])
            for v, members in every.items()
        }

    def split(self, found: dict[int, int], only: Iterable[int] | None = None) -> list[int]:
        """Splits the groups of several choices that an assignment takes; returns their variables.

        only: the variables to look at, where not at all."""
        several = [v for v in (found if only is None else only) if np.count_nonzero(self.places[v] == found[v]) > 1]
        parts = [[self._members(v, found)[part] for part in _parts(self._costs(v, found))] for v in several]
        for v, new in zip(several, parts, strict=True):
            self.places[v] = self.places[v].copy()
            for part in new:
                self.places[v][part] = self.places[v].max() + 1
        self._renew(several)
        return several

    def separate(self, v: int) -> None:
        """Makes each choice of a variable a group of its own."""
        self.places[v] = np.arange(len(self.places[v]))
        self._renew([v])

    def copy(self) -> Groups:
        """Groups that can be split without a change of these."""
        other = copy.copy(self)
        other.places, other.small = dict(self.places), self.small.copy()
        return other

    def least(self, factor: Factor) -> Factor:
        """A factor over groups in the place of choices, of those variables that have groups."""
        names, table = factor
        for axis, name in enumerate(names):
            if name in self.places:
                table = np.moveaxis(_Runs.of(self.places[name]).least(np.moveaxis(table, axis, 0)), 0, axis)
        return names, table

    def _renew(self, variables: list[int]) -> None:
        """Makes the costs and tables of variables whose groups have changed."""
        changed = set(variables)
        runs = {v: _Runs.of(self.places[v]) for v in changed.union(*(self.graph.neighbours[v] for v in variables))}
        for v in variables:
            costs = self.graph.costs[v]
            assert costs is not None
            self.small.costs[v] = runs[v].least(costs)
            for w, table in self.graph.neighbours[v].items():
                if w > v or w not in changed:
                    self.small.set_edge(v, w, runs[v].least_pairs(table, runs[w]))

    def _members(self, v: int, found: dict[int, int]) -> Index:
        return np.flatnonzero(self.places[v] == found[v])

    def _costs(self, v: int, found: dict[int, int]) -> Array:
        """Per member of a variable's group, what it costs by itself, and least with each neighbour's group."""
        members, costs = self._members(v, found), self.graph.costs[v]
        assert costs is not None
        rows = [costs[members]]
        for w, table in self.graph.neighbours[v].items():
            rows.append(table[members[:, None], self._members(w, found)].min(axis=1))
        return np.array(rows)


def _parts(costs: Array) -> list[Index]:
    """The groups to part from one, whose members cost this much: it is split, then the cheaper part, and so on."""
    cheapest, parts = np.arange(costs.shape[1]), []
    for _ in range(_SPLITS_AT_ONCE):
        if len(cheapest) == 1:
            break
        part = np.zeros(len(cheapest), dtype=bool)
        part[_separated(costs[:, cheapest])] = True
        halves = sorted((cheapest[part], cheapest[~part]), key=lambda half: float(costs[:, half].min(axis=1).sum()))
        cheapest, other = halves
        parts.append(other)
    return parts


def _separated(costs: Array) -> Index:
    """Which members of a group to part from the others, so that the cheaper of the two groups costs the most: those up
    to some place in the order of one of their costs. costs: [terms, members]."""
    best: tuple[tuple[float, float], Index] | None = None
    for term in costs:
        order = np.argsort(term, kind="stable")
        first = np.minimum.accumulate(costs[:, order], axis=1).sum(axis=0)[:-1]
        others = np.minimum.accumulate(costs[:, order[::-1]], axis=1).sum(axis=0)[-2::-1]
        cheaper = np.minimum(first, others)
        place = int(cheaper.argmax())
        key = (float(cheaper[place]), float(first[place] + others[place]))
        if best is None or key > best[0]:
            best = key, order[: place + 1]
    assert best is not None
    return best[1]


def quotient(graph: Graph, places: dict[int, Index]) -> Graph:
    """The graph where each choice of each variable becomes the one that ``places`` says, which costs the least that any
    of them does."""
    small = graph.copy()
    small.twins, small.hint = {}, None
    keys = {v: place.tobytes() for v, place in places.items()}
    known = {key: _Runs.of(places[v]) for v, key in keys.items()}
    runs = {v: known[key] for v, key in keys.items()}
    made: dict[tuple[object, ...], Array] = {}

    for v, own in runs.items():
        costs = graph.costs[v]
        assert costs is not None
        key: tuple[object, ...] = (id(costs), keys[v])
        if key not in made:
            made[key] = own.least(costs)
        small.costs[v] = made[key]
        for w, table in graph.neighbours[v].items():
            if v < w:
                key = (id(table), keys[v], keys[w])
                if key not in made:
                    made[key] = own.least_pairs(table, runs[w])
                small.set_edge(v, w, made[key])
    return small


@dataclass(frozen=True, slots=True)
class _Runs:
    """Choices by their groups: `order` puts those of a group side by side, which begin at `starts`."""

    order: Index
    starts: Index

    @staticmethod
    def of(places: Index) -> _Runs:
        order = np.argsort(places, kind="stable")
        ordered = places[order]
        return _Runs(order, np.concatenate([[0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1]))

    def least(self, array: Array) -> Array:
        """The least of the rows that become one, per group."""
        if len(self.starts) == len(self.order):
            return array[self.order]
        return np.minimum.reduceat(array[self.order], self.starts, axis=0)

    def least_pairs(self, table: Array, others: _Runs) -> Array:
        """The least of the entries that become one. table: `[choice, choice of the other variable]`."""
        return np.ascontiguousarray(others.least(self.least(table).T).T)
