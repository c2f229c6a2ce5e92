"""Which operations of a region end kernels, and what these read, from memory and on the way."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain

from shardplan.memory.coalescing import turning_reads
from shardplan.memory.combining import Gather, gather_for, read_otherwise
from shardplan.memory.cutting import moved_parts
from shardplan.memory.cycles import cycles_in_kernel
from shardplan.memory.fusion import REDUCTIONS, is_view, pointwise_operations
from shardplan.memory.recomputing import Kernels
from shardplan.memory.repeated import repeated_in
from shardplan.memory.rows import row_results
from shardplan.memory.times import computing_microseconds
from shardplan.program import Operation
from shardplan.schedule import Schedule

_MOST_SOURCES = 64
"""Values that one kernel reads, about: what is computed from more counts as stored."""


class Endings:
    """The operations of a region that end kernels, whatever collectives are merged: what each of them reads."""

    def __init__(self, schedule: Schedule, kernels: Kernels, region: int) -> None:
        self._schedule, self._program = schedule, schedule.program
        here = [self._program.operations[index] for index in self._program.regions[region].operations]
        self.makers = {result: operation for operation in here for result in operation.results}
        self.cut = frozenset(value for value in moved_parts(schedule, kernels.fused) if value in self.makers)
        """Parts that may be cut out by kernels of their own."""
        self.reads: dict[int, frozenset[int]] = {}
        """Per kernel, the values in memory that it reads."""
        self.sources: dict[int, frozenset[int]] = {}
        """Per value computed on the way, likewise; and what is brought to other layouts for it."""
        self.brought: dict[int, tuple[Gather, ...]] = {}
        self.moved_by: dict[int, tuple[Gather, ...]] = {}
        """Per kernel, what is brought to other layouts for it."""
        self.computing: dict[int, float] = {}
        """Per kernel, how long what takes long in it does."""
        self.tiled, self.scattered = set[int](), set[int]()
        """Kernels that turn what they read, in tiles, and those that read each element by itself."""
        self.by_rows, self.rows = set[int](), set[int]()
        """Kernels that go through rows which they have reduced, and what is computed of such rows on the way."""
        self._slow: dict[int, frozenset[int]] = {}  # per value computed on the way, the operations that take long
        self._turning = turning_reads(schedule)
        rows = {*row_results(self._program, pointwise_operations(schedule.problem))}  # and what is computed of them
        in_memory, same = kernels.stored | kernels.read, repeated_in(self._program, kernels.apart)
        for operation in here:
            if operation.results and same.keys() >= {*operation.results}:
                for result in operation.results:
                    self.sources[result] = self.sources.get(same[result], frozenset((same[result],)))
                    self.brought[result] = self.brought.get(same[result], ())
                continue
            reads, slow = self._read_by(operation), self._slow_in(operation)
            results = [result for result in operation.results if result not in self.cut]
            stored = not in_memory.isdisjoint(results) and not self._shows(operation, same)
            brought = tuple(pair for o in operation.operands if isinstance(o, int) for pair in self.brought.get(o, ()))
            brought += tuple(moved_for(schedule, operation))
            by_rows = not rows.isdisjoint(o for o in chain(operation.operands, operation.results) if isinstance(o, int))
            if operation.index in kernels.fused and not stored and len(reads) <= _MOST_SOURCES:
                self.sources |= dict.fromkeys(results, reads)
                if by_rows:
                    rows.update(operation.results)
                    self.rows.update(operation.results)
                if brought:
                    self.brought |= dict.fromkeys(operation.results, brought)
                if slow:
                    self._slow |= dict.fromkeys(operation.results, slow)
            else:
                if slow:
                    some = [self._program.operations[index] for index in slow]
                    self.computing[operation.index] = sum(computing_microseconds(schedule, one) for one in some)
                    self._turn(operation, slow)
                self.reads[operation.index], self.moved_by[operation.index] = reads, brought
                self.by_rows.update({operation.index} if by_rows else ())
                rows.difference_update(operation.results)

    def _turn(self, operation: Operation, slow: Collection[int]) -> None:
        """Takes in that what an operation's kernel reads may lie otherwise. What adds up gets that turned already."""
        turning = [self._turning[one] for one in slow if one in self._turning]
        if turning and operation.primitive.name not in REDUCTIONS:
            (self.scattered if any(turning) else self.tiled).add(operation.index)

    def _slow_in(self, operation: Operation) -> frozenset[int]:
        """The operations that take long, of those that are computed where an operation is: this, and on the way."""
        found = [self._slow[o] for o in operation.operands if isinstance(o, int) and o in self._slow]
        long = cycles_in_kernel(operation) or operation.index in self._turning
        slow = {operation.index} if long else set()
        return frozenset[int]().union(slow, *found) if found or slow else frozenset()

    def _read_by(self, operation: Operation) -> frozenset[int]:
        """What is in memory that an operation's operands are, or are computed from on the way."""
        found = set[int]()
        for operand in operation.operands:
            if isinstance(operand, int):
                sources = self.sources.get(operand)
                if sources is None:
                    found.add(operand)
                else:
                    found |= sources
        return frozenset(found)

    def _shows(self, operation: Operation, same: Mapping[int, int]) -> bool:
        """Whether an operation gives another shape of what is in memory: of what is computed on the way, it ends the
        kernel that stores that."""
        seen: Operation | None = operation
        while seen is not None and is_view(self._program, seen):
            [shown, *_] = seen.operands
            if not isinstance(shown, int) or same.get(shown, shown) not in self.sources:
                return True
            seen = self.makers.get(same.get(shown, shown))
        return False


def moved_for(schedule: Schedule, operation: Operation) -> Iterator[Gather]:
    """What an operation reads in layouts that it has to be brought to."""
    for operand, layout in read_otherwise(schedule).get(operation.index, ()):
        if any(step.kind != "slice" for step in schedule.route(operand, layout).steps):
            yield gather_for(schedule, operation, operand, layout)
