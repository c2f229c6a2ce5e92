"""What is brought to another layout once for each reader, and when each of these collectives can begin.

Within a memory limit a plan may gather a tensor once for each reader instead of keeping the copy (a layer's weights for
the forward pass, and again for the backward pass). XLA would merge these gathers, so that each further one reads the
tensor behind a barrier. A weight depends on nothing: behind a barrier of its own it could still be gathered at any
time, and XLA gathers those of several layers together, long before most of them are read. So where a product reads it,
the barrier waits for the product's other operand too: a gradient, or what is computed again. That is in memory then
anyhow, as a library reads it. Of an operand in another shape it waits for what that shows: XLA's simplifier takes a
value out of a barrier that nothing else reads, and another shape is read by the barrier alone once the product's own
reshape has been merged into it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from shardplan.layout.layout import Layout
from shardplan.memoize import memoize
from shardplan.problem.schedule import Schedule
from shardplan.program.operation_kinds import is_view
from shardplan.program.program import Operation

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})

BARRIERS = 2
"""What a collective waits for passes so many barriers. For XLA most values are views in the end (a library's result, or
what lies in another order), one for each reader, and it takes a view out of a barrier that alone reads it."""


class Awaited(NamedTuple):
    """A value that a collective waits for, in the layout in which the operation reads it that reads both."""

    value: int
    layout: Layout


def awaited(schedule: Schedule, reader: Operation, value: int) -> tuple[Awaited, ...]:
    """What the collectives that bring a value to a further reader wait for besides: nothing, or one other operand."""
    return _awaited(schedule).get((reader.index, value), ())


def is_behind_barrier(schedule: Schedule, reader: int, value: int) -> bool:
    """Whether an operation, by its index, is a further reader of a value, of which it has a copy of its own."""
    return (reader, value) in _awaited(schedule)


@memoize
def _awaited(schedule: Schedule) -> Mapping[tuple[int, int], tuple[Awaited, ...]]:
    found: dict[tuple[int, int], tuple[Awaited, ...]] = {}
    before: dict[tuple[int, Layout], int] = {}  # the last reader of a value in a layout
    for operation in schedule.program.operations:
        strategy = schedule.assignment.strategies.get(operation.index)
        for value, layout in zip(operation.operands, strategy.operands, strict=True) if strategy is not None else ():
            if isinstance(value, int) and layout is not None and _is_anew(schedule, value, layout):
                if (value, layout) in before:
                    found[operation.index, value] = _others(schedule, operation, value, before[value, layout])
                before[value, layout] = operation.index
    return found


def _is_anew(schedule: Schedule, value: int, layout: Layout) -> bool:
    values = schedule.assignment.values
    return value in values and layout != values[value] and schedule.is_regathered(value, layout)


def _others(schedule: Schedule, operation: Operation, value: int, last: int) -> tuple[Awaited, ...]:
    """The other operand of a product that reads a value, where that is made after another operation has read this."""
    if operation.primitive.name not in _PRODUCTS:
        return ()
    strategy, makers = schedule.assignment.strategies[operation.index], schedule.program.makers
    for other, layout in zip(operation.operands, strategy.operands, strict=True):
        if not isinstance(other, int) or layout is None or other == value or other not in makers:
            continue
        shown = _shown(schedule, Awaited(other, layout))
        maker = makers[shown.value]
        kept = shown.value in schedule.assignment.values and not _is_anew(schedule, *shown)
        if kept and maker.region == operation.region and maker.index > last:
            return (shown,)
    return ()


def wait_behind(array: Any, others: Sequence[Any], dtype: Any) -> Any:
    """An array behind barriers that take in the arrays that it waits for.

    What was converted from a narrower type passes them in this ``dtype``, without loss: XLA moves conversions behind
    collectives, but sees none through a barrier.
    """
    behind = array if dtype is None else array.astype(dtype)
    for _ in range(BARRIERS if others else 1):
        behind, *_ = jax.lax.optimization_barrier((behind, *others))
    return behind if dtype is None else behind.astype(array.dtype)


def _shown(schedule: Schedule, awaited: Awaited) -> Awaited:
    """What a value shows in another shape, where nothing moves in between; a value of its own is itself."""
    program, assignment = schedule.program, schedule.assignment
    while True:
        view = program.makers[awaited.value]
        strategy = assignment.strategies.get(view.index)
        if strategy is None or not is_view(program, view) or awaited.layout != strategy.results[0]:
            return awaited
        source, layout = view.operands[0], strategy.operands[0]
        if not isinstance(source, int) or layout is None or source not in program.makers:
            return awaited
        awaited = Awaited(source, layout)
