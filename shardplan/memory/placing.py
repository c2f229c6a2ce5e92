"""How XLA's last scheduler places kernels and collectives, from a program's end: see `shardplan.memory.hiding`.

A library's result comes with its workspace. It is taken from there at once, whatever else could be placed, and what
needs the result's kernel can so be placed a microsecond later, with nothing in between.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardplan.memory.hiding import Graph

_LATENCY = 1.0
"""Microseconds after which an operation can start that needs another one, as XLA's scheduler counts."""


class Placing:
    """Places the nodes of a graph one by one, from the program's end."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._now = graph, 0.0
        self._readers: dict[int, set[int]] = {node: set() for node in graph.needs}
        for node, needs in graph.needs.items():
            for need in needs:
                self._readers[need].add(node)
        self._depth = self._depths()
        self._ready_at: dict[int, float] = {}
        self._frees = {node: sum(self._readers[n] == {node} for n in needs) for node, needs in graph.needs.items()}
        self._fitting: list[tuple[float, float, int, float, int]] = []  # what can be placed, by time
        self._freeing: list[tuple[float, int, float, int]] = []  # the same, by how much it lets be placed
        self._waiting: list[tuple[float, float, int]] = []
        self._ending: list[tuple[float, float, int]] = []  # ends of collectives
        self._sending = False

    def _depths(self) -> dict[int, float]:
        """How long the collectives take that lead to a node, one after another."""
        depth: dict[int, float] = {}
        for first in self._graph.needs:
            stack = [first]
            while stack:
                node = stack[-1]
                missing = [need for need in self._graph.needs[node] if need not in depth]
                if node not in depth and missing:
                    stack += missing
                    continue
                stack.pop()
                sends = self._graph.takes[node] if node in self._graph.starts else 0.0
                depth[node] = sends + max((depth[need] for need in self._graph.needs[node]), default=0.0)
        return depth

    def run(self) -> list[int]:
        """All nodes, the last one first."""
        placed: list[int] = []
        for node, readers in self._readers.items():
            if not readers:
                self._wait(node, 0.0)
        while len(placed) < len(self._readers):
            placed.append(self._next())
            self._place(placed[-1])
        return placed

    def _wait(self, node: int, at: float) -> None:
        self._ready_at[node] = at
        if node in self._graph.starts:
            heapq.heappush(self._ending, (-self._depth[node], -self._graph.place[node], node))
        else:
            heapq.heappush(self._waiting, (at, -self._graph.place[node], node))

    def _keys(self, node: int) -> tuple[tuple[float, float, int, float, int], tuple[float, int, float, int]]:
        depth, place, frees = -self._depth[node], -self._graph.place[node], -self._frees[node]
        return (depth, self._graph.takes[node], frees, place, node), (depth, frees, place, node)

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
        while self._waiting and self._waiting[0][0] <= self._now:
            self._insert(heapq.heappop(self._waiting)[-1])
        if not self._fitting:
            return heapq.heappop(self._waiting)[-1]
        node = self._freeing[0][-1]
        if self._waiting:
            depth, wait = self._freeing[0][0], self._waiting[0][0] - self._now
            above = bisect_left(self._fitting, (depth, wait))
            below = above - 1
            near = [self._fitting[n] for n in (above, below) if 0 <= n < len(self._fitting)]
            time = min((abs(key[1] - wait), key[1]) for key in near if key[0] == depth)[1]
            node = self._fitting[bisect_left(self._fitting, (depth, time))][-1]
        self._remove(node)
        return node

    def _place(self, node: int) -> None:
        """Moves on past a node; what it needs can be placed once all that needs it is."""
        graph = self._graph
        ends = node in graph.starts
        self._now = max(self._now, self._ready_at[node]) + (0.0 if ends else graph.takes[node])
        self._sending = ends or (self._sending and node < len(graph.program.operations))
        later = self._now + (graph.takes[node] if ends else _LATENCY)
        for need in sorted(graph.needs[node]):
            readers = self._readers[need]
            readers.discard(node)
            self._ready_at[need] = max(self._ready_at.get(need, 0.0), later)
            if not readers:
                if need in graph.parts:  # its result is taken from there at once, whatever else could be placed
                    self._now = max(self._now, self._ready_at[need])
                    self._ready_at[need] += _LATENCY
                self._wait(need, self._ready_at[need])
            elif len(readers) == 1:
                self._frees_more(next(iter(readers)))

    def _frees_more(self, reader: int) -> None:
        keys = self._keys(reader)[0]
        found = bisect_left(self._fitting, keys)
        available = found < len(self._fitting) and self._fitting[found] == keys
        if available:
            self._remove(reader)
        self._frees[reader] += 1
        if available:
            self._insert(reader)
