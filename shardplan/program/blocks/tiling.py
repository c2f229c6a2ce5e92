"""Tiling: the rows of every value that one block of a loop has.

What leaves the loop, and what is summed over the index, is divided into blocks without overlap. From there on rows
follow backwards through the index expressions: a value has the rows that all of its readers need of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, gcd, lcm

from shardplan.program.blocks.growth import Growth, is_barrier
from shardplan.program.blocks.regions import Region, partial
from shardplan.program.blocks.tiles import Part
from shardplan.program.operation_kinds import readers_in
from shardplan.program.program import Operation, Program
from shardplan.rules import Refusal, Span


@dataclass(frozen=True, slots=True)
class Tiling:
    """The blocks of a loop: per index their number ``counts``, and the spans of each value; the parts of operations."""

    counts: tuple[int, ...]
    spans: tuple[dict[int, Span], ...]
    parts: dict[int, tuple[Part, ...]]
    reduced: dict[int, str]
    leaving: tuple[int, ...]
    """The values that the loop gives: in blocks, or as sums over them."""

    def even(self, axis: int, extents: dict[int, int]) -> bool:
        """Whether blocks of an index divide every value without overlap or remainder."""
        number = self.counts[axis]
        spans = self.spans[axis].items()
        return all(span.low == 0 and span.high == span.step and number * span.step == extents[v] for v, span in spans)

    def group(self, axis: int) -> int:
        """How many blocks of rows that stay together all values have: the greatest common divisor of their steps."""
        return gcd(*(span.step for span in self.spans[axis].values()))


def tiling(program: Program, growth: Growth, region: Region, counts: Sequence[int]) -> Tiling:
    """The tiling of a region into so many blocks per index, or fewer where blocks of that size are enough.

    Raises Refusal where readers of a value need rows that advance by different steps.
    """
    reduced = partial(program, growth, region.operations)
    leaving = tuple(_leaving(program, growth, region, reduced))
    units = [_unit(program, growth, region, axis, count) for axis, count in enumerate(counts)]
    spans: tuple[dict[int, Span], ...] = tuple({} for _ in counts)
    for axis, (unit, _) in enumerate(units):
        for value in leaving:
            if value not in reduced:
                step = int(growth.places[axis][value].scale * unit)
                spans[axis][value] = Span(step, 0, step)
    parts = dict[int, tuple[Part, ...]]()
    for index in reversed(region.operations):
        operation = program.operations[index]
        if is_barrier(operation):
            _pass_on(operation, spans)
            continue
        found = [
            part
            for axis, (unit, _) in enumerate(units)
            if (part := _part(growth, operation, axis, unit, spans[axis])) is not None
        ]
        if found:
            parts[index] = tuple(found)
    return Tiling(tuple(number for _, number in units), spans, parts, reduced, leaving)


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
    places, scales, most = growth.places[axis], set[Fraction](), Fraction(0)
    for index in region.operations:
        operation = program.operations[index]
        for value in (*operation.read, *operation.results):
            if value in places and growth.blocked(value):
                place = places[value]
                scales.add(place.scale)
                most = max(most, program.values[value].shape[place.dim] / place.scale)
    whole = lcm(*(scale.denominator for scale in scales))
    unit = ceil(most / count / whole) * whole
    return unit, ceil(most / unit)


def _part(growth: Growth, operation: Operation, axis: int, unit: int, spans: dict[int, Span]) -> Part | None:
    along, needed = growth.along[operation.index][axis], None
    for result, dim in zip(operation.results, along.results, strict=True):
        if dim is not None and result in spans:
            needed = spans[result].union(needed)
    if any(along.reducers):
        step = int(_scale(growth, operation, axis) * unit)
        needed = Span(step, 0, step).union(needed)
    if needed is None:
        return None
    read = list[Span | None]()
    for number, operand in enumerate(operation.operands):
        moved = along.operands[number] is not None
        read.append(along.needed(number, needed) if moved else None)
        if moved and isinstance(operand, int):
            spans[operand] = along.needed(number, needed).union(spans.get(operand))
    for result, dim in zip(operation.results, along.results, strict=True):
        if dim is not None:
            spans[result] = needed
    return Part(along, needed, tuple(read))


def _scale(growth: Growth, operation: Operation, axis: int) -> Fraction:
    """The scale of the index of an operation: that of an operand by the step in which the operation reads it."""
    along, places = growth.along[operation.index][axis], growth.places[axis]
    for number, operand in enumerate(operation.operands):
        if along.operands[number] is not None and isinstance(operand, int):
            return places[operand].scale / along.scale(number)
    raise Refusal("no operand is split along it")


def _pass_on(operation: Operation, spans: Sequence[dict[int, Span]]) -> None:
    for operand, result in zip(operation.operands, operation.results, strict=True):
        for axis in spans:
            if result in axis and isinstance(operand, int):
                axis[operand] = axis[result].union(axis.get(operand))
