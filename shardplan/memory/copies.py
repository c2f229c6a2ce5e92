"""The copies of operands that a device holds for products and convolutions, and what else lies beside a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardplan.layout import Layout
from shardplan.memory.besides import stored_beside
from shardplan.memory.combining import reducing
from shardplan.memory.convolutions import POOLING_GRADIENT, convolutions_of, neighbour_bytes
from shardplan.memory.cycles import is_complex
from shardplan.memory.fusion import pointwise_operations
from shardplan.memory.gathering import last_gathered
from shardplan.memory.held import Held, Lifetime
from shardplan.memory.moving import moved_for_transforms
from shardplan.memory.poolings import IMAGE, times_padded, zeros_of_poolings
from shardplan.memory.rows import weighted_rows
from shardplan.memory.sharing import read_by_element, read_by_several
from shardplan.memory.sizes import bytes_in, layout_left
from shardplan.memory.sums import reads_slowly, summed_products
from shardplan.memory.workspaces import window_bytes
from shardplan.problem import Problem
from shardplan.program import Operation
from shardplan.schedule import Schedule

if TYPE_CHECKING:
    from shardplan.memory.liveness import Lifetimes


def beside_kernels(lifetimes: Lifetimes, schedule: Schedule) -> Iterator[Held]:
    """All that a device holds besides values."""
    yield from operand_copies(lifetimes, schedule)
    yield from multiplied_copies(lifetimes, schedule)
    yield from convolution_copies(lifetimes, schedule)
    yield from exponential_parts(lifetimes, schedule)
    yield from _turned_products(lifetimes, schedule)
    yield from _stored(lifetimes, schedule)


def convolution_copies(lifetimes: Lifetimes, schedule: Schedule) -> Iterator[Held]:
    """The copies of operands that convolutions read, see `shardplan.memory.convolutions`, and what gradients of
    poolings work in."""
    for index, strategy in schedule.assignment.strategies.items():
        operation, place = schedule.program.operations[index], lifetimes.place[index]
        if operation.primitive.name == POOLING_GRADIENT:
            first = lifetimes.put_beside.get((index, IMAGE), place)
            places, largest = window_bytes(operation, schedule.problem, strategy)
            yield Held(None, (), places, Lifetime(first, place))
            yield Held(None, (), largest, Lifetime(first, first))
        if strategy.halos:
            size = neighbour_bytes(schedule.problem, operation, strategy)
            yield Held(None, (), size, Lifetime(place, place))
    for reader, position, times, first, last in lifetimes.spread:
        operand, strategy = reader.operands[position], schedule.assignment.strategies[reader.index]
        layout = strategy.operands[position]
        if isinstance(operand, int) and layout is not None:
            yield Held(operand, layout, times * bytes_in(schedule, operand, layout), Lifetime(first, last))
    for value, (reader, position) in lifetimes.reordered.items():
        layout = schedule.assignment.values[value]
        read = schedule.assignment.strategies.get(reader.index)
        if read is not None and read.operands[position] == layout:
            size = bytes_in(schedule, value, layout)
            yield Held(value, layout, size, Lifetime(lifetimes.place[reader.index], lifetimes.reads[value][1]))
    yield from _turned_gathers(lifetimes, schedule)
    for gradient, first, last in zeros_of_poolings(lifetimes, schedule.program):
        image, layout = gradient.operands[1], schedule.assignment.strategies[gradient.index].operands[1]
        if isinstance(image, int) and layout is not None:
            size = times_padded(gradient, schedule.program) * bytes_in(schedule, image, layout)
            yield Held(None, layout, size, Lifetime(first, last))


def _turned_gathers(lifetimes: Lifetimes, schedule: Schedule) -> Iterator[Held]:
    """What was gathered along another dimension than a convolution reads outermost: a gather leaves that one outermost,
    so that a kernel turns it for the first convolution, beside which it lies while this runs."""
    done = set[tuple[int, Layout]]()
    for operation in convolutions_of(schedule.program):
        strategy, numbers = schedule.assignment.strategies[operation.index], operation.params["dimension_numbers"]
        for position, (outer, *_) in enumerate((numbers.lhs_spec, numbers.rhs_spec)):
            value, layout = operation.operands[position], strategy.operands[position]
            if not isinstance(value, int) or layout is None or (value, layout) in done:
                continue
            done.add((value, layout))
            shape = schedule.program.values[value].shape
            gathered = last_gathered(schedule, value, layout) if value in schedule.assignment.values else None
            if gathered is not None and shape[outer] > 1 and gathered[1] != sum(size > 1 for size in shape[:outer]):
                place = lifetimes.place[operation.index]
                yield Held(None, layout, bytes_in(schedule, value, layout), Lifetime(place, place))


def _turned_products(lifetimes: Lifetimes, schedule: Schedule) -> Iterator[Held]:
    """What products write and kernels store as what is computed of it lies, see `moved_for_transforms`."""
    for value in sorted(moved_for_transforms(schedule.program, pointwise_operations(schedule.problem))):
        layout, span = schedule.assignment.values.get(value), lifetimes.reads.get(value)
        if layout is not None and span is not None:
            yield Held(value, layout, bytes_in(schedule, value, layout), Lifetime(*span))


def _stored(lifetimes: Lifetimes, schedule: Schedule) -> Iterator[Held]:
    """What is stored beside operands, see `shardplan.memory.besides`."""
    for operation, position, times, span in stored_beside(lifetimes, schedule.program):
        operand, strategy = operation.operands[position], schedule.assignment.strategies.get(operation.index)
        layout = strategy.operands[position] if strategy is not None else None
        if isinstance(operand, int) and layout is not None:
            yield Held(None, layout, times * bytes_in(schedule, operand, layout), Lifetime(*span))


def multiplied_copies(lifetimes: Lifetimes, schedule: Schedule) -> Iterator[Held]:
    """What kernels store of products of a matrix and a vector that XLA multiplies and adds up: the products, where it
    takes longer to read them while they are added up, or where the rows are weighted by what they have been reduced to
    (`shardplan.memory.rows`): not where devices have parts of the rows, whose sums are reduced in between."""
    strategies, sent = schedule.assignment.strategies, reducing(schedule)
    weighted = weighted_rows(schedule.program, pointwise_operations(schedule.problem))
    for operation in summed_products(schedule.program):
        if operation.index not in strategies:
            continue
        position, other = weighted.get(operation.index, (0, None))
        size, place = _largest_read(schedule, operation), lifetimes.place[operation.index]
        apart = multiplies_apart(schedule, operation)
        if other is not None and other not in sent and other in strategies:
            weights, first = operation.operands[1 - position], schedule.program.operations[other]
            read = strategies[operation.index].operands[1 - position]
            as_made = isinstance(weights, int) and schedule.assignment.values.get(weights) == read
            apart |= as_made and _largest_read(schedule, first) == size
        if apart:
            yield Held(None, (), size, Lifetime(place, place))


def exponential_parts(lifetimes: Lifetimes, schedule: Schedule) -> Iterator[Held]:
    """What lies beside exponentials of complex numbers while they are made, see `exponentials_in_parts`."""
    for operation, times in exponentials_in_parts(lifetimes, schedule.problem):
        result, place = operation.results[0], lifetimes.place[operation.index]
        layout = schedule.assignment.values[result]
        yield Held(result, layout, times * bytes_in(schedule, result, layout), Lifetime(place, place))


def exponentials_in_parts(lifetimes: Lifetimes, problem: Problem) -> Iterator[tuple[Operation, float]]:
    """The exponentials of complex numbers that XLA stores for several kernels, not for a library, with the bytes of
    what lies beside them, as a share of their own.

    XLA computes the real and the imaginary part each by itself, both from an exponential of the real part, one of half
    of that, and the imaginary part: three real arrays that another kernel stores for both. What takes no longer to read
    than these it computes them from in either kernel: both exponentials of a number in memory, the imaginary part of
    what is computed from one.
    """
    for operation in problem.program.operations:
        result = next(iter(operation.results), -1)
        stored = operation.primitive.name == "exp" and result in lifetimes.stored
        if not stored or not is_complex(problem.program, result) or operation.operands[0] in lifetimes.held:
            continue
        if read_by_several(problem, lifetimes.fused, lifetimes.held.keys(), result):
            read = read_by_element(problem, lifetimes.fused, lifetimes.held.keys(), operation)
            yield operation, 1.5 if lifetimes.held.keys().isdisjoint(read) else 1.0


def multiplies_apart(schedule: Schedule, product: Operation) -> bool:
    """Whether a kernel of its own multiplies what a product adds up, see `shardplan.memory.sums.reads_slowly`."""
    if product.index not in schedule.assignment.strategies:
        return False
    read, made = _largest_read(schedule, product), _made(schedule, product)
    return reads_slowly(schedule.program, product, read, made)


def _largest_read(schedule: Schedule, operation: Operation) -> float:
    """The bytes on one device of the larger operand of a product."""
    read = zip(operation.operands, schedule.assignment.strategies[operation.index].operands, strict=True)
    sizes = [bytes_in(schedule, o, layout) for o, layout in read if isinstance(o, int) and layout is not None]
    return max(sizes, default=0.0)


def _made(schedule: Schedule, operation: Operation) -> float:
    """The bytes on one device of what an operation makes, before any reduction."""
    left = layout_left(schedule.problem, operation, schedule.assignment.strategies[operation.index], 0)
    return bytes_in(schedule, operation.results[0], left)


def operand_copies(lifetimes: Lifetimes, schedule: Schedule) -> Iterator[Held]:
    """The transposed and padded copies that products read, see `shardplan.memory.products`."""
    for operand, copy in lifetimes.copies.items():
        strategy = schedule.assignment.strategies.get(copy.reader.index)
        read, layout = copy.reader.operands[copy.position], strategy.operands[copy.position] if strategy else None
        if isinstance(read, int) and layout is not None:
            size = operand.padding * bytes_in(schedule, read, layout)
            yield Held(operand.value, layout, size, Lifetime(copy.first, copy.last))
