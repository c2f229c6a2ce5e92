"""Slices of what a device holds: XLA:GPU makes them part of the kernels that read them.

Where a device has a whole result and the plan goes on with a part of it, nothing is sent: each kernel that reads it
computes where its part begins. So it is the whole result that stays in memory up to the first of them, without the part
beside it; what kernels read that come later was seen stored as a part. A library needs the part in memory of its own.

>>> is_sliced(((), ("x",)), (("y",), ("x",))), is_sliced((("y",), ()), ((), ("y",)))
(True, False)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from shardplan.layout import Layout
from shardplan.memory.fusion import fuses_operands, readers_of
from shardplan.program import Operation
from shardplan.schedule import Schedule


def is_sliced(source: Sequence[Sequence[Any]], target: Sequence[Sequence[Any]]) -> bool:
    """Whether a device has all of what it needs in layout ``target`` within what it has in layout ``source``.

    Parts of a sum that waits, stacked in front, are no slices.
    """
    if len(source) != len(target) or source == target:
        return False
    return all(tuple(wanted[: len(axes)]) == tuple(axes) for axes, wanted in zip(source, target, strict=True))


def sliced_on_the_way(schedule: Schedule, order: Sequence[Operation], fused: Collection[int]) -> dict[int, Layout]:
    """The results of which kernels alone read a slice, with the layout in which they are
    in memory up to the first of these.

    ``fused`` are the operations, by index, that become part of the kernels which read them.
    """
    problem, values, readers = schedule.problem, schedule.assignment.values, readers_of(order)
    leaving = {o for region in problem.program.regions for o in region.outputs if isinstance(o, int)}
    found = {}
    for operation in order:
        strategy = schedule.assignment.strategies.get(operation.index)
        if strategy is None or operation.index in fused:
            continue
        for position, result in enumerate(operation.results):
            partial = problem.partial(operation, strategy, position)
            kept = result in leaving or schedule.copy(result) != values[result]
            if partial.pending or kept or not is_sliced(partial.layout, values[result]):
                continue
            if all(
                fuses_operands(problem, reader, place)
                for reader in readers.get(result, ())
                for place, operand in enumerate(reader.operands)
                if operand == result
            ):
                found[result] = partial.layout
    return found
