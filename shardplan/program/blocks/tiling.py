"""Tiling: the rows of every value that one block of a loop has.

What leaves the loop, and what is summed over the index, is divided into blocks without overlap. From there on rows
follow backwards through the index expressions: a value has the rows that all of its readers need of it. What sums are
made of by linear operations alone goes the other way: see `shardplan.program.blocks.contributions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, gcd, lcm

from shardplan.program.blocks.contributions import Contributions, contributions
from shardplan.program.blocks.places import Growth, is_barrier
from shardplan.program.blocks.regions import Region, partial
from shardplan.program.blocks.scans import with_bodies
from shardplan.program.blocks.tiles import Part
from shardplan.program.operation_kinds import readers_in
from shardplan.program.program import Operation, Program
from shardplan.rules import Along, Refusal, Span


@dataclass(frozen=True, slots=True)
class Tiling:
    """The blocks of a loop: per index their number ``counts`` on one of so many ``devices``, and the spans of each
    value; the parts of operations."""

    counts: tuple[int, ...]
    devices: tuple[int, ...]
    spans: tuple[dict[int, Span], ...]
    parts: dict[int, tuple[Part, ...]]
    reduced: dict[int, str]
    leaving: tuple[int, ...]
    """The values that the loop gives: in blocks, or as sums over them."""

    def total(self, axis: int) -> int:
        """The number of blocks of an index on all devices."""
        return self.counts[axis] * self.devices[axis]

    @property
    def overlaps(self) -> bool:
        """Whether blocks of a value have rows in common, as those of windows have."""
        return any(span.low or span.high != span.step for spans in self.spans for span in spans.values())

    def even(self, axis: int, extents: dict[int, int]) -> bool:
        """Whether blocks of an index divide every value without overlap or remainder."""
        number = self.counts[axis]
        spans = self.spans[axis].items()
        return all(span.low == 0 and span.high == span.step and number * span.step == extents[v] for v, span in spans)

    def group(self, axis: int) -> int:
        """How many blocks of rows that stay together all values have: the greatest common divisor of their steps."""
        return gcd(*(span.step for span in self.spans[axis].values()))


def tiling(
    program: Program, growth: Growth, region: Region, counts: Sequence[int], devices: Sequence[int] = ()
) -> Tiling:
    """The tiling of a region into so many blocks per index, or fewer where blocks of that size are enough. Each of
    several ``devices`` per index has so many.

    Raises Refusal where readers of a value need rows that advance by different steps.
    """
    reduced = partial(program, growth, region.operations)
    leaving = tuple(_leaving(program, growth, region, reduced))
    shares = tuple(devices) or (1,) * len(counts)
    totals = [count * share for count, share in zip(counts, shares, strict=True)]
    units = [_unit(program, growth, region, axis, total) for axis, total in enumerate(totals)]
    split = any(share > 1 for share in shares)  # else halos are sent nowhere, and padding takes memory
    held = contributions(program, growth, region, reduced) if split else Contributions(frozenset(), {})
    axes = [_Axis(program, growth, region, axis, unit, held) for axis, (unit, _) in enumerate(units)]
    for one in axes:
        one.run([value for value in leaving if value not in reduced])
    parts = {index: tuple(one.parts[index] for one in axes) for index in axes[0].parts}
    numbers = tuple(ceil(number / share) for (_, number), share in zip(units, shares, strict=True))
    return Tiling(numbers, shares, tuple(one.spans for one in axes), parts, reduced, leaving)


def _leaving(program: Program, growth: Growth, region: Region, reduced: dict[int, str]) -> Iterator[int]:
    """The results of a region that are read outside, or that the program gives; not those made from nothing."""
    inside, given = {*region.operations}, {o for o in program.outputs if isinstance(o, int)}
    readers = readers_in(program)
    for index in region.operations:
        for result in program.operations[index].results if index not in region.own else ():
            outside = any(reader.index not in inside for reader in readers.get(result, ()))
            if (outside or result in given) and (growth.blocked(result) or result in reduced):
                yield result


def _unit(program: Program, growth: Growth, region: Region, axis: int, count: int) -> tuple[int, int]:
    """The positions of the seed per block, and the number of blocks: all scales divide blocks into whole rows."""
    places, longest = growth.places[axis], dict[Fraction, int]()
    operations = (one for index in region.operations for one in with_bodies(program, program.operations[index]))
    for value in {value for one in operations for value in (*one.read, *one.results)}:
        if value in places and growth.blocked(value):
            place = places[value]
            longest[place.scale] = max(longest.get(place.scale, 0), program.values[value].shape[place.dim])
    most = max((rows / scale for scale, rows in longest.items()), default=Fraction(0))
    whole = lcm(*(scale.denominator for scale in longest))
    unit = ceil(most / count / whole) * whole
    return unit, ceil(most / unit)


class _Axis:
    """The spans of one index of a region: forward for contributions, then backward for everything else."""

    def __init__(
        self, program: Program, growth: Growth, region: Region, axis: int, unit: int, held: Contributions
    ) -> None:
        self._program, self._region, self._held = program, region, held
        self._places, self._unit, self._axis, self._growth = growth.places[axis], unit, axis, growth
        self._reached = dict[int, Span]()  # by operation that reads contributions
        self._given = dict[int, Span]()  # by value that is one
        self.spans = dict[int, Span]()
        self.parts = dict[int, Part]()

    def run(self, leaving: Sequence[int]) -> None:
        """``leaving`` has the values that leave the region in blocks."""
        for index in self._region.operations:
            self._contribute(self._program.operations[index])
        self.spans |= self._given | {value: self._own(value) for value in leaving}
        for index in reversed(self._region.operations):
            operation = self._program.operations[index]
            if is_barrier(operation):
                self._pass_on(operation)
                continue
            part = self._part(operation)
            if part is not None:
                self.parts[index] = part

    def _own(self, value: int) -> Span:
        """The rows of a value that are of one block alone."""
        step = int(self._places[value].scale * self._unit)
        return Span(step, 0, step)

    def _rows(self, value: int) -> Span:
        """What a block contributes to a value."""
        return self._given.get(value) or self._own(value)

    def _contribute(self, operation: Operation) -> None:
        """The spans of contributions that an operation gives."""
        if is_barrier(operation):
            for operand, result in zip(operation.operands, operation.results, strict=True):
                if result in self._held.values and isinstance(operand, int):
                    self._given[result] = self._rows(operand)
            return
        found = None
        for place in self._held.read.get(operation.index, ()):
            operand, along = operation.operands[place], self._growth.along[operation.index][self._axis]
            if isinstance(operand, int) and operand in self._places:
                found = along.reached(place, self._rows(operand)).union(found)
        if found is not None:
            self._reached[operation.index] = found
        for result in operation.results:
            if result in self._held.values:
                self._given[result] = found or self._own(result)

    def _part(self, operation: Operation) -> Part | None:
        if operation.bodies:
            return self._as_own(operation, self._growth.along[operation.index][self._axis])
        along = self._growth.along[operation.index][self._axis]
        needed = self._reached.get(operation.index)
        if needed is None:
            for result, dim in zip(operation.results, along.results, strict=True):
                if dim is not None and result in self.spans:
                    needed = self.spans[result].union(needed)
            if any(along.reducers):
                step = int(self._scale(operation, along) * self._unit)
                needed = Span(step, 0, step).union(needed)
        if needed is None:
            return None
        read, given = list[Span | None](), list[Span | None]()
        for number, operand in enumerate(operation.operands):
            moved = along.operands[number] is not None
            span = along.needed(number, needed) if moved else None
            taken = number in self._held.read.get(operation.index, ()) and isinstance(operand, int) and moved
            read.append(span)
            given.append(self._rows(operand) if taken and isinstance(operand, int) else None)
            if span is not None and isinstance(operand, int):
                self.spans[operand] = (given[-1] or span).union(self.spans.get(operand))
        for result, dim in zip(operation.results, along.results, strict=True):
            if dim is not None:
                self.spans[result] = needed
        return Part(along, needed, tuple(read), tuple(given))

    def _as_own(self, operation: Operation, along: Along) -> Part:
        """The part of a scan, or of an operation in the body of one: all values have the rows of one block alone."""
        for body in operation.bodies:
            for inner in (self._program.operations[index] for index in self._program.regions[body].operations):
                if inner.index in self._growth.inside:
                    self.parts[inner.index] = self._as_own(inner, self._growth.inside[inner.index][self._axis])
        given = [self._own(r) for r, dim in zip(operation.results, along.results, strict=True) if dim is not None]
        pairs = zip((*operation.operands, *operation.results), (*along.operands, *along.results), strict=True)
        own = {end: self._own(end) for end, dim in pairs if dim is not None and isinstance(end, int)}
        needed = given[0] if given else next(iter(own.values()))
        if not given and not operation.bodies:
            step = int(self._scale(operation, along) * self._unit)
            needed = Span(step, 0, step)
        read = []
        for number, operand in enumerate(operation.operands):
            span = own[operand] if isinstance(operand, int) and along.operands[number] is not None else None
            read.append(span)
            if span is not None and not operation.bodies and along.needed(number, needed) != span:
                raise Refusal("a turn of a loop needs rows of other blocks")
        for value, span in own.items():
            if self.spans.setdefault(value, span) != span:
                raise Refusal("what a loop gives is needed with rows of other blocks")
        return Part(along, needed, tuple(read), (None,) * len(read))

    def _scale(self, operation: Operation, along: Along) -> Fraction:
        """The scale of the index of an operation: that of an operand by the step in which the operation reads it."""
        for number, operand in enumerate(operation.operands):
            if along.operands[number] is not None and isinstance(operand, int):
                return self._places[operand].scale / along.scale(number)
        raise Refusal("no operand is split along it")

    def _pass_on(self, operation: Operation) -> None:
        for operand, result in zip(operation.operands, operation.results, strict=True):
            if result in self.spans and isinstance(operand, int):
                self.spans[operand] = self.spans[result].union(self.spans.get(operand))
