"""How XLA's last scheduler places kernels and collectives, from a program's end: see `shardplan.memory.hiding`.

It is XLA's own procedure: on XLA's graph with XLA's times it gives the order that XLA compiles. Of what can be placed,
what can start at once comes first. An operation can start when what needs it has run, or a microsecond after that one
began, if this is later; a collective takes its time, and begins at once where another one waits for it to be placed,
but behind all that can start where none does and it leads to no more of them. What leads to more collectives comes
next, then what is as long as the wait for what can start next, then what reads what a collective brings, then what lets
most be placed, and at last what stands last in the order before. One of several values of a merged collective is taken
from these first, so that what reads it does not count as reading what the collective brings.

What an all-to-all starts from is a view of what it reads, which can start a microsecond later than now for that: what
can be placed at once comes between, however long it takes.

A library's result comes with its workspace. It is taken from there at once, whatever else could be placed, and what
made it can start a microsecond later. Arguments are placed at once as well; they count as what can be placed. So are
views of another shape (`shardplan.memory.viewing`): what they show can start a microsecond later.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from shardplan.memory.viewing import viewed

if TYPE_CHECKING:
    from shardplan.memory.graph import Graph

LATENCY = 1.0
"""Microseconds after which an operation can start that needs another one, as XLA's scheduler counts."""

_FIRST_VIEW = -(1 << 40)
"""The number of the first view; those of arguments, and of one of several results, are the complements of values."""

_Key = tuple[float, float, bool, int, float, int]


class Placing:
    """Places the nodes of a graph one by one, from the program's end."""

    def __init__(self, graph: Graph, needs: dict[int, set[int]]) -> None:
        """``needs``: what each node needs, as `through_values` gives it."""
        self._graph, self._now = graph, 0.0
        self._needs = needs
        self._readers: dict[int, set[int]] = {node: set() for node in self._needs}
        for node, found in self._needs.items():
            for need in found:
                self._readers[need].add(node)
        self._depth = self._depths()
        self._ready_at: dict[int, float] = {}
        self._frees = {node: sum(self._readers[n] == {node} for n in needs) for node, needs in self._needs.items()}
        self._starts = {*graph.starts.values()}
        alone = graph.starts.keys() - graph.merged
        self._brought = {node: not alone.isdisjoint(needs) for node, needs in self._needs.items()}
        self._fitting: list[_Key] = []  # what can start, by time
        self._freeing: list[_Key] = []  # the same, whatever time it takes
        self._waiting: list[tuple[float, int]] = []
        self._ending: list[tuple[float, float, int]] = []  # ends of collectives
        self._sending = False
        self._start: int | None = None  # of the collective that runs, once it can be placed

    def _depths(self) -> dict[int, float]:
        """How long the collectives take that lead to a node, one after another, with those of a loop's iteration that
        runs apart."""
        depth: dict[int, float] = {}
        for first in self._needs:
            stack = [first]
            while stack:
                node = stack[-1]
                needs = self._needs[node]
                missing = [need for need in needs if need not in depth]
                if node not in depth and missing:
                    stack += missing
                    continue
                stack.pop()
                sends = self._graph.takes[node] if node in self._graph.starts else self._graph.sends.get(node, 0.0)
                depth[node] = sends + max((depth[need] for need in needs), default=0.0)
        return depth

    def run(self) -> list[int]:
        """All nodes, the last one first."""
        placed: list[int] = []
        for node in self._graph.needs:
            if not self._readers[node]:
                self._wait(node, 0.0)
        while len(placed) < len(self._graph.needs):
            placed.append(self._next())
            self._place(placed[-1])
        return placed

    @property
    def deepest(self) -> float:
        """How long the collectives take one after another, at most."""
        return max(self._depth.values(), default=0.0)

    def _wait(self, node: int, at: float) -> None:
        self._ready_at[node] = at
        if node in self._graph.starts:
            heapq.heappush(self._ending, (-self._depth[node], -self._graph.place[node], node))
        else:
            heapq.heappush(self._waiting, (at, node))

    def _keys(self, node: int) -> tuple[_Key, _Key]:
        last = node in self._starts and not self._depth[node]
        depth, rest = (
            1.0 if last else -self._depth[node],
            (not self._brought[node], -self._frees[node], -self._graph.place[node], node),
        )
        return (depth, self._cost(node), *rest), (depth, 0.0, *rest)

    def _cost(self, node: int) -> float:
        """How long a node takes: starts and ends of collectives as long as anything small."""
        return self._graph.takes[node] if self._graph.runs(node) else LATENCY

    def _remove(self, node: int) -> None:
        fitting, freeing = self._keys(node)
        del self._fitting[bisect_left(self._fitting, fitting)]
        del self._freeing[bisect_left(self._freeing, freeing)]

    def _insert(self, node: int) -> None:
        fitting, freeing = self._keys(node)
        insort(self._fitting, fitting)
        insort(self._freeing, freeing)

    def _next(self) -> int:
        """What is placed next: one collective at a time as soon as it can, then what waits least and fits best."""
        if self._ending and not self._sending:
            return heapq.heappop(self._ending)[-1]
        until = self._now
        if not self._fitting and self._waiting:
            until = max(until, self._waiting[0][0])
        next_at = self._waiting[0][0] if until > self._now else None
        while self._waiting and self._waiting[0][0] <= until:
            ready = heapq.heappop(self._waiting)[-1]
            self._insert(ready)
            self._start = ready if ready in self._starts else self._start
        if next_at is None and self._waiting:
            next_at = self._waiting[0][0]
        node = self._freeing[0][-1]
        if self._start is not None and self._ending:
            node = self._start
        elif next_at is not None:
            depth, wait = self._freeing[0][0], next_at - self._now
            above = bisect_left(self._fitting, (depth, wait))
            near = [self._fitting[n] for n in (above, above - 1) if 0 <= n < len(self._fitting)]
            time = min((abs(key[1] - wait), key[1]) for key in near if key[0] == depth)[1]
            node = self._fitting[bisect_left(self._fitting, (depth, time))][-1]
        self._remove(node)
        self._start = None if node == self._start else self._start
        return node

    def _place(self, node: int) -> None:
        """Moves on past a node; what it needs can be placed once all that needs it is."""
        graph = self._graph
        began = max(self._now, self._ready_at[node])
        ends = node in graph.starts
        self._now = began + self._cost(node)
        self._sending = ends or (self._sending and graph.runs(node))
        after = graph.takes[node] if ends else LATENCY
        stack = [(node, began + after + (0.0 if ends or graph.runs(node) else graph.takes[node]))]
        while stack:
            reader, later = stack.pop()
            for need in sorted(self._needs[reader]):
                readers = self._readers[need]
                readers.discard(reader)
                self._ready_at[need] = max(self._ready_at.get(need, 0.0), later)
                if len(readers) == 1:
                    self._frees_more(next(iter(readers)))
                elif not readers:
                    at = max(self._now, self._ready_at[need])
                    if need >= 0:
                        self._wait(need, at)
                    else:  # an argument, or one of several results, which is placed at once
                        self._now = at
                        stack.append((need, at + LATENCY))

    def _frees_more(self, reader: int) -> None:
        if reader < 0:
            return
        keys = self._keys(reader)[0]
        found = bisect_left(self._fitting, keys)
        available = found < len(self._fitting) and self._fitting[found] == keys
        if available:
            self._remove(reader)
        self._frees[reader] += 1
        if available:
            self._insert(reader)


def through_values(graph: Graph) -> dict[int, set[int]]:
    """What each node needs, arguments, views, and what is taken from several results included, by negative numbers:
    each of these needs what makes it."""
    owner = {part: node for node, parts in graph.joined.items() for part in parts}
    found = {node: {*needs} for node, needs in graph.needs.items()}
    makers = {value: graph.maker(value) for values in graph.values.values() for value in values}
    made_by = {value: owner.get(maker, maker) for value, maker in makers.items() if maker is not None}
    for node, values in graph.values.items():
        for value in values:
            made = made_by.get(value)
            if made is None or (made in graph.parts and made != node):
                found[node].add(~value)
                found.setdefault(~value, set()).update(() if made is None else (made,))
    views: dict[tuple[int, bool], int] = {}
    for node, shown in viewed(graph).items():
        for one, turned in sorted(shown):
            need = one if one in found[node] else made_by.get(~one, node)
            if need in found[node]:
                view = views.setdefault((one, turned), _FIRST_VIEW - len(views))
                found[view] = {need}
                found[node] = (found[node] - {need}) | {view}
    for needs in [*found.values()]:
        for barrier in needs & graph.barriers.keys():
            needs.remove(barrier)
            needs.add(~graph.barriers[barrier])
            found[~graph.barriers[barrier]] = {barrier}
    for node, needs in found.items():
        if node >= 0:  # what it needs behind a view, or a result, it does not need itself
            taken = [made for need in needs if need < 0 for made in found[need]]
            taken += [made for need in taken if need < 0 for made in found[need]]
            needs.difference_update(taken)
    return found
