"""Slices of what a device holds: XLA:GPU makes them part of the kernels that read them.

Where a device has a whole result and the plan goes on with a part of it, nothing is sent: each kernel that reads it
computes where its part begins. So it is the whole result that stays in memory up to the first of them, without the part
beside it; what kernels read that come later was seen stored as a part. A library needs the part in memory of its own.

>>> is_sliced(((), ("x",)), (("y",), ("x",))), is_sliced((("y",), ()), ((), ("y",)))
(True, False)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardplan.layout import Layout
from shardplan.memory.fusion import fuses_operands, readers_in
from shardplan.once import once
from shardplan.schedule import Schedule


def is_sliced(source: Sequence[Sequence[Any]], target: Sequence[Sequence[Any]]) -> bool:
    """Whether a device has all of what it needs in layout ``target`` within what it has in layout ``source``.

    Parts of a sum that waits, stacked in front, are no slices.
    """
    if len(source) != len(target) or source == target:
        return False
    return all(tuple(wanted[: len(axes)]) == tuple(axes) for axes, wanted in zip(source, target, strict=True))


@lru_cache(maxsize=1024)
def sliced_among(layouts: tuple[Layout, ...]) -> NDArray[np.bool_]:
    """bool [layouts, layouts]: the same from each of some layouts to each."""
    found = np.zeros((len(layouts), len(layouts)), dtype=bool)
    ranks = np.array([len(layout) for layout in layouts])
    for rank in set(ranks.tolist()):
        here = np.flatnonzero(ranks == rank)
        inside = ~np.eye(len(here), dtype=bool)
        for dim in range(rank):
            splits = {axes: number for number, axes in enumerate(dict.fromkeys(layouts[n][dim] for n in here))}
            begins = np.array([[wanted[: len(axes)] == axes for wanted in splits] for axes in splits])
            which = [splits[layouts[n][dim]] for n in here]
            inside &= begins[np.ix_(which, which)]
        found[np.ix_(here, here)] = inside
    return found


def sliced_on_the_way(schedule: Schedule, fused: Collection[int]) -> dict[int, Layout]:
    """The results of which kernels alone read a slice, with the layout in which they are
    in memory up to the first of these.

    ``fused`` are the operations, by index, that become part of the kernels which read them.
    """
    return {result: layout for result, (maker, layout) in _sliced(schedule).items() if maker not in fused}


@once
def _sliced(schedule: Schedule) -> dict[int, tuple[int, Layout]]:
    """Likewise, whatever is fused, each with the operation that makes it, by index."""
    problem, values, readers = schedule.problem, schedule.assignment.values, readers_in(schedule.program)
    leaving = {o for region in problem.program.regions for o in region.outputs if isinstance(o, int)}
    found = {}
    for index, strategy in schedule.assignment.strategies.items():
        operation = schedule.program.operations[index]
        for position, result in enumerate(operation.results):
            left, pending = strategy.results[position], strategy.pending[position]
            if pending or result in leaving or left == values[result] or not is_sliced(left, values[result]):
                continue
            if schedule.copy(result) != values[result]:
                continue
            if all(
                fuses_operands(problem, reader, place)
                for reader in readers.get(result, ())
                for place, operand in enumerate(reader.operands)
                if operand == result
            ):
                found[result] = index, left
    return found


@once
def scattered_behind(schedule: Schedule) -> frozenset[int]:
    """The operations, by index, whose results are scattered along a dimension that lies behind another one of more than
    one element: it lies outermost then."""
    operations, mesh = schedule.program.operations, schedule.space.mesh
    found = set[int]()
    for index in schedule.assignment.strategies:
        if not operations[index].results:
            continue
        shape = schedule.program.values[operations[index].results[0]].shape
        for step in schedule.result_steps(operations[index], 0):
            if step.kind == "reduce-scatter":
                split = max(dim for dim, axes in enumerate(step.layout) if {*step.axes} <= {*axes})
                before = zip(shape[:split], step.layout[:split], strict=True)
                found.update({index} if any(size > mesh.degree(axes) for size, axes in before) else ())
    return frozenset(found)
