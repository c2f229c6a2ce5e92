"""The copies of operands that a device holds for products and convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardplan.memory.convolutions import POOLING_GRADIENT, neighbour_bytes
from shardplan.memory.held import Held, Lifetime
from shardplan.memory.sizes import bytes_in
from shardplan.memory.workspaces import window_bytes
from shardplan.schedule import Schedule

if TYPE_CHECKING:
    from shardplan.memory.liveness import Lifetimes


def convolution_copies(lifetimes: Lifetimes, schedule: Schedule) -> Iterator[Held]:
    """The copies of operands that convolutions read, see `shardplan.memory.convolutions`, and what gradients of
    poolings work in."""
    for index, strategy in schedule.assignment.strategies.items():
        operation, place = schedule.program.operations[index], lifetimes.place[index]
        if operation.primitive.name == POOLING_GRADIENT:
            yield Held(None, (), window_bytes(operation, schedule.problem, strategy), Lifetime(place, place))
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
    for gradient, first, last in lifetimes.zeros():
        image, layout = gradient.operands[1], schedule.assignment.strategies[gradient.index].operands[1]
        if isinstance(image, int) and layout is not None:
            yield Held(None, layout, bytes_in(schedule, image, layout), Lifetime(first, last))


def operand_copies(lifetimes: Lifetimes, schedule: Schedule) -> Iterator[Held]:
    """The transposed and padded copies that products read, see `shardplan.memory.products`."""
    for operand, copy in lifetimes.copies.items():
        strategy = schedule.assignment.strategies.get(copy.reader.index)
        read, layout = copy.reader.operands[copy.position], strategy.operands[copy.position] if strategy else None
        if isinstance(read, int) and layout is not None:
            size = operand.padding * bytes_in(schedule, read, layout)
            yield Held(operand.value, layout, size, Lifetime(copy.first, copy.last))
