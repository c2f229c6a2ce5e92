"""The schedule of XLA's latency-hiding scheduler, which overlaps collectives with kernels.

The scheduler places nodes from the end of the program backwards. A node can be placed after all of its dependants. It
is *ready* a microsecond after these. The start of a collective is ready after the duration of the collective. The end
of a collective is placed as soon as no other collective runs. Of the ready nodes, these criteria decide in turn:

1. the longest chain of collectives before the node;
2. a duration like the wait for the next ready node;
3. the most nodes that become ready;
4. the last one in XLA's written order.

So gradients of weights, whose merged reductions come last, are placed one by one behind kernels of the backward pass.
The scheduler ignores the memory of that.

>>> needs, takes = {0: set(), 1: {0}, 2: {0}, 3: {1, 2}}, dict.fromkeys(range(4), 5.0)
>>> backward_schedule(Nodes(needs, takes, {n: n for n in needs}, {}))
[3, 2, 1, 0]
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

_LATENCY_MICROSECONDS = 1.0
"""Microseconds between a node and its dependant, by XLA's latency model."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes to schedule, by number: dependencies, microseconds, places in the program, and per end of a collective
    its start."""

    needs: Mapping[int, set[int]]
    takes: Mapping[int, float]
    place: Mapping[int, int]
    starts: Mapping[int, int]


def backward_schedule(nodes: Nodes) -> list[int]:
    """All nodes, the last one first."""
    return _BackwardScheduler(nodes).run()


class _BackwardScheduler:
    def __init__(self, nodes: Nodes) -> None:
        self._nodes, self._now = nodes, 0.0
        self._readers: dict[int, set[int]] = {node: set() for node in nodes.needs}
        for node, needs in nodes.needs.items():
            for need in needs:
                self._readers[need].add(node)
        self._starts = {*nodes.starts.values()}
        self._depth = self._depths()
        self._ready_at: dict[int, float] = {}
        self._ready: dict[float, dict[int, None]] = {}
        """The ready nodes, by the first part of their keys."""
        self._waiting: list[tuple[float, int]] = []
        self._ends: list[tuple[float, int, int]] = []
        self._under_way = -1

    def _depths(self) -> dict[int, float]:
        """Per node, the duration of the longest chain of collectives before it."""
        depth: dict[int, float] = {}
        for first in self._nodes.needs:
            stack = [first]
            while stack:
                node = stack[-1]
                missing = [need for need in self._nodes.needs[node] if need not in depth]
                if node not in depth and missing:
                    stack += missing
                    continue
                stack.pop()
                sends = self._nodes.takes[node] if node in self._nodes.starts else 0.0
                depth[node] = sends + max((depth[need] for need in self._nodes.needs[node]), default=0.0)
        return depth

    def run(self) -> list[int]:
        for node, readers in self._readers.items():
            if not readers:
                self._wait(node, 0.0)
        placed = list[int]()
        while len(placed) < len(self._readers):
            placed.append(self._next())
            self._place(placed[-1])
        return placed

    def _wait(self, node: int, at: float) -> None:
        self._ready_at[node] = at
        if node in self._nodes.starts:
            heapq.heappush(self._ends, (-self._depth[node], -self._nodes.place[node], node))
        else:
            heapq.heappush(self._waiting, (at, node))

    def _next(self) -> int:
        if self._ends and self._under_way < 0:
            return heapq.heappop(self._ends)[-1]
        until = self._now
        if not self._ready and self._waiting:
            until = max(until, self._waiting[0][0])
        while self._waiting and self._waiting[0][0] <= until:
            node = heapq.heappop(self._waiting)[-1]
            self._ready.setdefault(self._first_key(node), {})[node] = None
        start = self._nodes.starts.get(self._under_way, -1)
        if self._ends and start in self._ready.get(self._first_key(start), ()):
            return self._taken(start)
        wait = self._waiting[0][0] - self._now if self._waiting else 0.0
        return self._taken(min(self._ready[min(self._ready)], key=lambda one: self._key(one, wait)))

    def _taken(self, node: int) -> int:
        key = self._first_key(node)
        del self._ready[key][node]
        if not self._ready[key]:
            del self._ready[key]
        return node

    def _first_key(self, node: int) -> float:
        """Less for a longer chain of collectives before a node. Most for the start of a collective without any."""
        depth = self._depth.get(node, 0.0)
        return 1.0 if node in self._starts and not depth else -depth

    def _key(self, node: int, wait: float) -> tuple[float, int, int]:
        frees = sum(len(self._readers[need]) == 1 for need in self._nodes.needs[node])
        return abs(self._cost(node) - wait) if wait else 0.0, -frees, -self._nodes.place[node]

    def _cost(self, node: int) -> float:
        """The duration of a node in the schedule. Starts and ends of collectives take the latency of a small node."""
        return _LATENCY_MICROSECONDS if node in self._starts or node in self._nodes.starts else self._nodes.takes[node]

    def _place(self, node: int) -> None:
        began = max(self._now, self._ready_at[node])
        self._now = began + self._cost(node)
        if node in self._nodes.starts:
            self._under_way = node
        elif node == self._nodes.starts.get(self._under_way, -1):
            self._under_way = -1
        after = self._nodes.takes[node] if node in self._nodes.starts else _LATENCY_MICROSECONDS
        for need in sorted(self._nodes.needs[node]):
            self._readers[need].discard(node)
            self._ready_at[need] = max(self._ready_at.get(need, 0.0), began + after)
            if not self._readers[need]:
                self._wait(need, max(self._now, self._ready_at[need]))
