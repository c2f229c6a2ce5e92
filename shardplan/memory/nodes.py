"""What XLA's last scheduler puts in order (`shardplan.memory.hiding`): nodes, what they need, and how long they take.

Several operations may become one node. It takes as long as they do, but that a kernel which is bound by memory reads
what several of them read once, and not what one of them makes for another.

>>> nodes = Nodes(lambda value: 3.35e6)
>>> for node, reads in enumerate([{7}, {7, 8}]):
...     nodes.needs[node], nodes.values[node], nodes.takes[node] = set(), reads, len(reads) + 1.0
...     nodes.moves[node] = {*reads}, {10 + node}
>>> nodes.take_in({1: 0})
>>> nodes.takes, nodes.values
({0: 4.0}, {0: {8, 7}})
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping

from shardplan.memory.cycles import BESIDE
from shardplan.memory.times import BYTES_MOVED

_FROM_CACHE = 0.4
"""How long a kernel takes to read something again, of the time in which it reads it from memory."""


class Nodes:
    """Kernels and ends of collectives, by number.

    ``size``: the bytes of a value on one device; ``size_apart``: those read where each element is read by itself.
    """

    def __init__(self, size: Callable[[int], float], size_apart: Callable[[int], float] | None = None) -> None:
        self.needs: dict[int, set[int]] = {}
        self.takes: dict[int, float] = {}
        """Microseconds."""
        self.place: dict[int, float] = {}
        """Where each stands in the order of the program."""
        self.values: dict[int, set[int]] = {}
        """Those that each reads as they are made, or lie outside."""
        self.moves: dict[int, tuple[set[int], set[int]]] = {}
        """Per kernel that is bound by memory, the values that it reads and makes."""
        self.scattered: set[int] = set()
        """Kernels that read each element by itself."""
        self.slower: dict[int, float] = {}
        """How much longer kernels read and compute that keep too little of a device busy (`shardplan.memory.sums`):
        above 1, from memory as well."""
        self._size, self._size_apart = size, size_apart or size

    def in_order(self) -> list[int]:
        """All nodes, each behind what it needs, else in the order of the program; fewer if there are cycles."""
        return self.in_order_of(self.needs)

    def in_order_of(self, nodes: Mapping[int, Collection[int]]) -> list[int]:
        """The same for other needs."""
        missing = {node: len(needs) for node, needs in nodes.items()}
        readers: dict[int, list[int]] = {node: [] for node in nodes}
        for node, needs in nodes.items():
            for need in needs:
                readers[need].append(node)
        ready = [(self.place[node], node) for node, count in missing.items() if not count]
        heapq.heapify(ready)
        done: list[int] = []
        while ready:
            done.append(heapq.heappop(ready)[1])
            for reader in readers[done[-1]]:
                missing[reader] -= 1
                if not missing[reader]:
                    heapq.heappush(ready, (self.place[reader], reader))
        return done

    def leads(self, node: int, other: int) -> bool:
        """Whether another node needs a node, or something that does."""
        stack, seen = [other], {other}
        while stack:
            more = self.needs[stack.pop()] - seen
            if node in more:
                return True
            seen |= more
            stack += more
        return False

    def joining(self, owner: Mapping[int, int]) -> dict[int, set[int]]:
        """What each node needs where some are part of others."""
        found = {node: {owner.get(need, need) for need in needs} for node, needs in self.needs.items()}
        for index, other in owner.items():
            found[other] |= found.pop(index)
        for node, needs in found.items():
            needs.discard(node)
        return found

    def take_in(self, owner: Mapping[int, int]) -> None:
        """Adds up the times of what is one node now, and what it reads."""
        for index, other in owner.items():
            self.takes[other] += self.takes.pop(index)
            self.values[other] |= self.values.pop(index)
            if index in self.moves and other in self.moves:
                self.takes[other] += self.moving(index, other) - self.moving(index) - self.moving(other)
                self.moves[other] = self._as_one(index, other)
                self.scattered |= {other} if index in self.scattered else set()
                self.slower[other] = max(self.slower.get(node, 0.0) for node in (index, other))
            else:
                self.moves.pop(other, None)
            self.moves.pop(index, None)

    def moving(self, *nodes: int) -> float:
        """Microseconds in which kernels that are bound by memory read and write, as one kernel."""
        reads, made = self._as_one(*nodes)
        size = self._size if self.scattered.isdisjoint(nodes) else self._size_apart
        slower = max(1.0, *[self.slower.get(node, 0.0) for node in nodes])
        return (slower * sum(map(size, reads)) + sum(map(self._size, made))) / BYTES_MOVED

    def busy(self, computing: float, *nodes: int, again: float = 0.0) -> float:
        """Microseconds that kernels which are bound by memory take as one kernel, which computes for so long, and reads
        some bytes ``again``."""
        slower = max([self.slower.get(node, 0.0) for node in nodes])
        moving = self.moving(*nodes) + max(slower, _FROM_CACHE) * again / BYTES_MOVED
        computing *= max(slower, 1.0)
        return moving + computing - BESIDE * min(computing, moving)

    def size_of(self, value: int) -> float:
        """The bytes of a value on one device."""
        return self._size(value)

    def read_by(self, node: int) -> float:
        """The bytes that a kernel reads."""
        return sum(map(self._size, self.moves[node][0]))

    def _as_one(self, *nodes: int) -> tuple[set[int], set[int]]:
        made = set[int]().union(*(self.moves[node][1] for node in nodes))
        return set[int]().union(*(self.moves[node][0] for node in nodes)) - made, made
