"""Memory: which tensors a device holds, when, and how many bytes that is.

Operations run in the order of `shardplan.order`. What XLA fuses never exists in memory: a value is *held* where the
operation that makes it cannot be fused into its readers (contractions, convolutions, gathers, sorts), where a reader
needs it in memory (an operand of a contraction), and where it enters or leaves the step. The readers of a fused value
read what it is computed from instead, so these live longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from shardplan import _jax
from shardplan.control import Link
from shardplan.convolutions import neighbour_bytes, spread_copies
from shardplan.fusion import readers_of
from shardplan.groups import RAGGED, axes_of_groups
from shardplan.layout import Layout
from shardplan.problem import Problem
from shardplan.products import PRODUCT, ProductOperand, is_sum, merged_products, product_operands
from shardplan.program import Constant, Operation
from shardplan.recomputing import Kernels, kernels_of
from shardplan.repeated import repeated_results
from shardplan.schedule import Schedule
from shardplan.strategy import Strategy, bytes_of, operand_type

_UPDATES = frozenset({"scatter", "scatter-add", "scatter_add", "dynamic_update_slice"})
POOLING_GRADIENT = "select_and_scatter_add"

WORKSPACE_BYTES = 4 * 2**20
"""What XLA:GPU gives cuBLAS to work in while a matrix product runs, whatever its size."""


def masked_bytes(operation: Operation, problem: Problem, strategy: Strategy) -> float:
    """Bytes of the copies of its rows that one device makes for an operation on rows that belong to groups.

    XLA:GPU multiplies the rows by the matrices of all groups at once: it makes a copy of the rows for each group, zero
    where the row is not of that group, and transposes all of it. It merges equal copies, and keeps them from the
    forward pass for the gradient of the matrices; the transposed ones live as long as the operation runs.
    """
    if operation.primitive.name != RAGGED:
        return 0.0
    rows, _, sizes = (operand_type(problem.program, operand) for operand in operation.operands)
    axes = {axis for axes in strategy.operands[0] or () for axis in axes} | {*axes_of_groups(operation, strategy)}
    split = problem.space.mesh.degree(tuple(axes))
    return sizes.shape[-1] * bytes_of(rows) / split


@dataclass(frozen=True, slots=True)
class Lifetime:
    """When a value is in memory: from the operation that makes it up to its last reader, as places in the order."""

    start: int
    end: int


class Lifetimes:
    """The lifetimes of a program's held values, whatever the layouts are, where operations run in ``order``."""

    def __init__(self, problem: Problem, order: Sequence[int], kernels: Kernels | None = None) -> None:
        program, kernels = problem.program, kernels or kernels_of(problem)
        self._problem = problem
        self.order = [program.operations[index] for index in order]
        self.place = {operation.index: place for place, operation in enumerate(self.order)}
        self.end = len(program.operations)
        outputs = {o for o in program.outputs if isinstance(o, int)}
        readers = readers_of(self.order)
        self._fused = kernels.fused
        self.in_libraries = {
            self.place[o.index] for o in self.order if o.primitive.name == PRODUCT and not is_sum(program, o)
        }
        self.spread = list(spread_copies(program, self.order, kernels.copied))
        self.copies: dict[ProductOperand, tuple[int, int, int]] = {}
        self._copied = {key: operand for key, operand in product_operands(program).items() if operand.copied}
        for operation in self.order:
            for position in range(len(operation.operands)):
                copy, place = self._copied.get((operation.index, position)), self.place[operation.index]
                if copy is not None:
                    self.copies[copy] = (*self.copies.get(copy, (position, place))[:2], place)
        self.held: dict[int, Lifetime] = {}
        last_read = dict.fromkeys(outputs, self.end)
        for operation in self.order:
            place = self.place[operation.index]
            for body in operation.bodies:
                leaving = {o for o in program.regions[body].outputs if isinstance(o, int)}
                outputs |= leaving
                last_read |= dict.fromkeys(leaving, place)
        same = repeated_results(program, self.order)
        for operation in reversed(self.order):
            if any(result in same for result in operation.results):
                for result in operation.results:
                    until = max(last_read.get(same[result], 0), last_read.get(result, 0))
                    last_read[same[result]] = until
                continue
            start, place = self.start(operation), self.place[operation.index]
            for result in operation.results:
                passed = operation.primitive is _jax.optimization_barrier
                needed = result in outputs or result in kernels.stored or (result in kernels.read and not passed)
                if (needed or operation.index not in self._fused) and result not in problem.generated:
                    self.held[result] = Lifetime(start, last_read.get(result, place))
            for operand, until in self._needed_until(operation, last_read):
                last_read[operand] = max(last_read.get(operand, 0), until)
        for link in (link for links in problem.links.values() for link in links.enter if link.stacked):
            if link.target in readers:  # one slice of a stack; other operands are the outer ones, or a carry's result
                first = self.place[readers[link.target][0].index]
                self.held[link.target] = Lifetime(first, last_read[link.target])
        for index in (*program.inputs, *program.captured):
            self.held[index] = Lifetime(0, self.end)
        self._share_in_place(last_read)
        self._share_with_results(last_read)
        # what links alone read (a body's result that is carry and stack) is read where the loop ends
        self.reads: dict[int, tuple[int, int]] = {value: (place, place) for value, place in last_read.items()}
        for value, found in readers.items():
            first = self.start(found[0])
            self.reads[value] = (first, max(last_read.get(value, first), first))  # what is repeated is not read

    def _needed_until(self, operation: Operation, last_read: dict[int, int]) -> Iterator[tuple[int, int]]:
        """The operands of an operation, with the last place that reads them, or what is computed from them on the way.

        What passes a barrier is each operand's own memory. A copy of an operand is made for its first reader.
        """
        place = self.place[operation.index]
        ends = [last_read.get(r, place) if r not in self.held else 0 for r in operation.results]
        passed = operation.primitive is _jax.optimization_barrier
        initial = self._becoming_carries(operation)
        for position, operand in enumerate(operation.operands):
            if isinstance(operand, int):
                copy = self._copied.get((operation.index, position))
                first = place if copy is None else self.copies[copy][1]
                if operand in initial:  # from the loop's start on, its memory is the carry's
                    yield operand, self.start(operation) - 1
                else:
                    yield operand, max(first, ends[position] if passed else max(ends, default=0))

    def _becoming_carries(self, operation: Operation) -> frozenset[int]:
        """The values that enter a loop as carries alone."""
        links = self._problem.links.get(operation.index)
        if links is None:
            return frozenset()
        carried = {link.target for link in links.inside}
        entering = [(link.source, link.target in carried) for link in links.enter]
        others = {source for source, becomes in entering if isinstance(source, int) and not becomes}
        return frozenset(source for source, becomes in entering if isinstance(source, int) and becomes) - others

    def _share_in_place(self, last_read: dict[int, int]) -> None:
        """Lets a result take the memory of an operand of its size that is read for the last time."""
        for operation in self.order:
            updates = operation.primitive.name in _UPDATES
            if (
                not operation.results
                or operation.results[0] not in self.held
                or not (updates or operation.index in self._fused)
            ):
                continue
            size = self._problem.program.values[operation.results[0]].total_bytes
            place = self.place[operation.index]
            for operand in operation.operands[:1] if updates else operation.operands:
                if not isinstance(operand, int) or operand not in self.held:
                    continue
                lifetime = self.held[operand]
                if lifetime.end != place or lifetime.start == place:
                    continue
                if self._problem.program.values[operand].total_bytes == size:
                    self.held[operand] = Lifetime(lifetime.start, place - 1)
                    break

    def _share_with_results(self, last_read: dict[int, int]) -> None:
        """Lets what leaves a branch lie in the memory of the branch's result, and what goes round a loop in that of
        the carry, which is the loop's result: there once nothing reads the carry of the iteration before."""
        makers = {result: operation for operation in self.order for result in operation.results}
        for operation in self.order:
            for link in self._problem.links[operation.index].inside if operation.bodies else ():
                source = link.source if isinstance(link.source, int) else -1
                maker = makers.get(source)
                if maker is None or maker.region not in operation.bodies or link.stacked:
                    continue
                in_place = maker.index in self._fused or maker.primitive.name in _UPDATES
                read = last_read.get(link.target, -1) if link.target not in operation.results else -1
                if read < self.place[maker.index] + in_place:
                    self.held.pop(source, None)

    def kept_around(self, operation: Operation) -> Iterator[tuple[Link, int]]:
        """The links through which a loop or a branch reads values, without carries (which are its results), each with
        the value that it reads."""
        links = self._problem.links.get(operation.index)
        if links is not None:
            carried = {link.target for link in links.inside}
            for link in links.enter:
                source = link.source
                if isinstance(source, int) and not (source in self._problem.generated or link.target in carried):
                    yield link, source

    def start(self, operation: Operation) -> int:
        """When the results of an operation take memory: a loop's carries and stacks before its first iteration."""
        regions = self._problem.program.regions
        inside = [self.place[index] for body in operation.bodies for index in regions[body].operations]
        return min(inside, default=self.place[operation.index])


@dataclass(frozen=True, slots=True)
class Held:
    """Memory that one device gives to a value, or to a copy of it, in bytes; None stands for a library's workspace."""

    value: int | None
    layout: Layout
    size: float
    lifetime: Lifetime


def memory_profile(lifetimes: Lifetimes, schedule: Schedule, donated: frozenset[int]) -> np.ndarray:
    """float [operations + 1]: bytes that one device holds while each operation runs, in their order, and at the end.

    ``donated`` are the positions of the inputs whose memory the outputs tied to them take.
    """
    ends = np.zeros(lifetimes.end + 2)
    for held in memory_held(lifetimes, schedule, donated):
        ends[held.lifetime.start] += held.size
        ends[held.lifetime.end + 1] -= held.size
    return np.cumsum(ends)[:-1]


def memory_held(lifetimes: Lifetimes, schedule: Schedule, donated: frozenset[int]) -> Iterator[Held]:
    """Everything that a device holds at some time, as `memory_profile` adds it up."""
    program = schedule.program

    def hold(value: int, layout: Layout, start: int, end: int) -> Held:
        return Held(value, layout, bytes_in(schedule, value, layout), Lifetime(start, end))

    merged = merged_lifetimes(lifetimes, schedule)
    inputs = {*program.inputs, *program.captured}
    leaving = {output for output in program.outputs if isinstance(output, int)} - inputs
    for value, lifetime in (lifetimes.held | merged).items():
        layout, copy = schedule.assignment.values[value], schedule.copy(value)
        end = lifetime.end
        if value in leaving:
            continue
        if copy != layout and value not in inputs:
            end = max(lifetime.start, min(end, lifetimes.reads[value][0]))
        yield hold(value, layout, lifetime.start, end)
    for number, output in enumerate(program.outputs):
        # the caller's memory for results is there from the start; a donated argument's is the result's
        if isinstance(output, int) and program.ties.get(number) not in donated:
            yield hold(output, schedule.layout_of_output(number), 0, lifetimes.end)
    for value in schedule.assignment.copies:
        if schedule.copy(value) != schedule.assignment.values[value]:
            yield hold(value, schedule.copy(value), *lifetimes.reads[value])
    shared: dict[tuple[int, Layout], tuple[int, int]] = {}  # reshards that XLA merges and keeps for the last reader
    for place, operation in enumerate(lifetimes.order):
        if place in lifetimes.in_libraries:
            yield Held(None, (), WORKSPACE_BYTES, Lifetime(place, place))
        for value, layout, first, last in _brought_for(lifetimes, schedule, operation):
            if schedule.gathered_anew(value, layout) and not operation.bodies:
                yield hold(value, layout, place, place)
            else:
                known = shared.get((value, layout), (first, last))
                shared[value, layout] = (min(known[0], first), max(known[1], last))
        strategy = schedule.assignment.strategies.get(operation.index)
        if strategy is not None and operation.primitive.name == POOLING_GRADIENT:
            yield Held(None, (), window_bytes(operation, schedule.problem, strategy), Lifetime(place, place))
        for result, own in zip(operation.results, strategy.results if strategy else (), strict=strategy is not None):
            if own != schedule.assignment.values[result]:
                yield hold(result, own, place, place)
    for (operand, wanted), (first, last) in shared.items():
        yield hold(operand, wanted, first, last)
    yield from _masked_rows(lifetimes, schedule)
    yield from _operand_copies(lifetimes, schedule)
    yield from _convolution_copies(lifetimes, schedule)


def _convolution_copies(lifetimes: Lifetimes, schedule: Schedule) -> Iterator[Held]:
    """The copies of operands that convolutions read, see `shardplan.convolutions`."""
    for place, operation in enumerate(lifetimes.order):
        strategy = schedule.assignment.strategies.get(operation.index)
        if strategy is not None and strategy.halos:
            size = neighbour_bytes(schedule.problem, operation, strategy)
            yield Held(None, (), size, Lifetime(place, place))
    for reader, times, first, last in lifetimes.spread:
        image, strategy = reader.operands[0], schedule.assignment.strategies[reader.index]
        layout = strategy.operands[0]
        if isinstance(image, int) and layout is not None:
            yield Held(image, layout, times * bytes_in(schedule, image, layout), Lifetime(first, last))


def _operand_copies(lifetimes: Lifetimes, schedule: Schedule) -> Iterator[Held]:
    """The transposed and padded copies that products read, see `shardplan.products`."""
    for copy, (position, first, last) in lifetimes.copies.items():
        reader = lifetimes.order[first]
        strategy = schedule.assignment.strategies.get(reader.index)
        operand, layout = reader.operands[position], strategy.operands[position] if strategy else None
        if isinstance(operand, int) and layout is not None:
            size = copy.padding * bytes_in(schedule, operand, layout)
            yield Held(copy.value, layout, size, Lifetime(first, last))


def merged_lifetimes(lifetimes: Lifetimes, schedule: Schedule) -> dict[int, Lifetime]:
    """The results of products that XLA merges: one buffer, which lives until nothing reads any of them."""
    sizes = {}
    for operation in lifetimes.order:
        strategy = schedule.assignment.strategies.get(operation.index)
        place = lifetimes.place[operation.index]
        if place in lifetimes.in_libraries and strategy is not None and operation.results[0] in lifetimes.held:
            pairs = zip((*operation.operands, *operation.results), (*strategy.operands, *strategy.results), strict=True)
            sizes[operation.index] = sum(
                bytes_in(schedule, value, layout)
                for value, layout in pairs
                if isinstance(value, int) and layout is not None
            )
    found: dict[int, Lifetime] = {}
    for group in merged_products(schedule.program, lifetimes.order, sizes):
        results = [schedule.program.operations[index].results[0] for index in group]
        spans = [lifetimes.held[result] for result in results]
        whole = Lifetime(min(span.start for span in spans), max(span.end for span in spans))
        found |= dict.fromkeys(results, whole)
    return found


def bytes_in(schedule: Schedule, value: int, layout: Layout) -> float:
    """Bytes of a value on one device, in a layout."""
    domain = schedule.problem.domain(value)
    return schedule.program.values[value].total_bytes / float(domain.degrees[domain.position[layout]])


def _masked_rows(lifetimes: Lifetimes, schedule: Schedule) -> Iterator[Held]:
    """The copies of rows that belong to groups, see `masked_bytes`."""
    kept: dict[Any, tuple[float, int, int]] = {}
    for place, operation in enumerate(lifetimes.order):
        strategy = schedule.assignment.strategies.get(operation.index)
        if operation.primitive.name != RAGGED or strategy is None:
            continue
        size = masked_bytes(operation, schedule.problem, strategy)
        yield Held(None, (), size, Lifetime(place, place))
        rows, _, sizes = (o if isinstance(o, int) else id(o) for o in operation.operands)
        key = rows, sizes, strategy.operands[0]
        kept[key] = size, kept.get(key, (size, place, place))[1], place
    for size, first, last in kept.values():
        yield Held(None, (), size, Lifetime(first, last))


def window_bytes(operation: Operation, problem: Problem, strategy: Strategy) -> float:
    """Bytes on one device of the places that a pooling gradient scatters to: XLA:GPU finds them first, for every window
    an int32 per dimension."""
    source = operation.operands[0]
    if operation.primitive.name != POOLING_GRADIENT or not isinstance(source, int):
        return 0.0
    value, domain = problem.program.values[source], problem.domain(source)
    layout = strategy.operands[0]
    degree = 1.0 if layout is None else float(domain.degrees[domain.position[layout]])
    return 4.0 * len(value.shape) * prod(value.shape) / degree


def _brought_for(
    lifetimes: Lifetimes, schedule: Schedule, operation: Operation
) -> Iterator[tuple[int, Layout, int, int]]:
    """Operands in layouts that an operation needs and nobody keeps, and from when to when it needs them."""
    place, values = lifetimes.place[operation.index], schedule.assignment.values
    wanted: list[tuple[int | Constant, Layout | None, int]] = [
        (source, schedule.link_layout(link), lifetimes.start(operation))
        for link, source in lifetimes.kept_around(operation)
    ]
    strategy = schedule.assignment.strategies.get(operation.index)
    if strategy is not None:
        wanted += [(o, layout, place) for o, layout in zip(operation.operands, strategy.operands, strict=True)]
    ends: dict[int | Constant, int] = {}
    if operation.primitive is _jax.optimization_barrier:  # what passes it lives on in the same memory
        pairs = zip(operation.operands, operation.results, strict=True)
        ends = {operand: lifetimes.reads[result][1] for operand, result in pairs if result in lifetimes.reads}
    for operand, layout, first in wanted:
        if not isinstance(operand, int) or layout is None or operand not in values:
            continue
        if layout not in (values[operand], schedule.copy(operand)):
            yield operand, layout, first, ends.get(operand, place)
