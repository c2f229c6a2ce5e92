"""Kernels that read their operands from places far apart in memory: they lie with another dimension innermost.

XLA:GPU moves a dimension to the innermost place in tiles, through a processor's shared memory, where both the dimension
that lies there before and the one that does afterwards are long enough. Else each element is read by itself, and 64
bytes of memory for it, as its performance model counts: scores of four heads that share their keys, gates of a cell.

>>> [is_scattered((16, 2048, heads), (0, 1, 2), (0, 2, 1), 2) for heads in (16, 8, 4)]
[False, False, True]
>>> [is_scattered((16, 512, 512, 4), (0, 1, 2, 3), (0, 3, 2, 1), item) for item in (4, 2)]
[True, False]
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shardplan import _jax
from shardplan.layout import Layout
from shardplan.memory.fusion import pointwise_operations
from shardplan.memory.lying import lying_of
from shardplan.memory.sizes import bytes_in
from shardplan.once import once
from shardplan.program import Program
from shardplan.schedule import Schedule

READ_AT_ONCE = 64
"""Bytes of memory that are read for one element where its neighbours are not read with it."""

_TILED = 16
_TILED_TOGETHER = 8, 8192

_BANK, _BANKS, _LEAST_BANKS = 4, 32, 10
"""The bytes of a bank of shared memory, how many there are, and how many a tile of packed elements fills at least."""


def is_tiled(before: int, after: int) -> bool:
    """Whether a kernel moves in tiles what has a dimension of one size innermost before, and of another afterwards."""
    least, together = _TILED_TOGETHER
    return min(before, after) >= _TILED or (min(before, after) >= least and before * after >= together)


def bytes_apart(schedule: Schedule, value: int, layout: Layout) -> float:
    """Bytes of memory that are read for a value on one device where each of its elements is read by itself."""
    return bytes_in(schedule, value, layout) / _jax.item_bytes(schedule.program.values[value].dtype) * READ_AT_ONCE


def is_scattered(shape: Sequence[int], lying: Sequence[int], order: Sequence[int], item: int) -> bool:
    """Whether a kernel reads each element by itself which moves dimensions that lie in one order to another one.

    Elements of less than 4 bytes (``item``) may be packed, together with those of the dimension around the innermost
    one, where that stays.
    """
    before, after = ([dimension for dimension in own if shape[dimension] > 1] for own in (lying, order))
    runs = _runs(before, after)
    sizes = [prod(shape[dimension] for dimension in run) for run in runs]
    places = sorted(range(len(runs)), key=lambda run: after.index(runs[run][0]))
    if places[-1:] == [len(runs) - 1] or not runs:
        return False
    between = sizes[-2] if places[-2] == len(runs) - 2 else 1
    return not (is_tiled(sizes[-1], sizes[places[-1]]) or _is_packed(sizes[-1], between, sizes[places[-1]], item))


def _is_packed(before: int, between: int, after: int, item: int) -> bool:
    """Whether several elements of a few bytes fill each bank of a tile: of the dimension that lies innermost before,
    and of what is between, in one direction, and of the one that does afterwards in the other one.

    >>> [heads for heads in range(2, 11) if _is_packed(heads, 512, 512, 2)]
    [2, 4, 5, 6, 8, 10]
    """
    if item >= _BANK:
        return False
    packed = _BANK // item
    inner, outer = min(before, _BANKS * packed), min(after, _BANKS * packed)
    inner *= min(between, _BANKS * packed // inner)
    even = all(size % packed == 0 for size in (inner, outer, after % outer))
    return even and min(inner, outer) >= _LEAST_BANKS * packed


@once
def turning_reads(schedule: Schedule) -> dict[int, bool]:
    """The operations, by index, that read a product's result which lies otherwise; whether each element by itself."""
    pointwise = pointwise_operations(schedule.problem)
    lying = lying_of(schedule.program, pointwise)
    moved = {value: order for value, order in lying.turned.items() if value in schedule.assignment.values}
    apart = {value: moves_apart(schedule, value, lying.orders.get(value), order) for value, order in moved.items()}
    found = dict[int, bool]()
    for operation in schedule.program.operations:
        read = [apart[o] for o in operation.operands if isinstance(o, int) and o in apart]
        if read and operation.index in pointwise:
            found[operation.index] = any(read)
    return found


def moves_apart(schedule: Schedule, value: int, lying: Sequence[int] | None, order: Sequence[int]) -> bool:
    """Whether a kernel that moves a value from one order of its dimensions, by default that in which they are written,
    to another one reads each element by itself."""
    tensor = schedule.program.values[value]
    own = range(len(tensor.shape)) if lying is None else lying
    return is_scattered(_shape_left(schedule, value), own, order, _jax.item_bytes(tensor.dtype))


def is_read_apart(program: Program, value: int, order: Sequence[int], lying: Sequence[int] | None = None) -> bool:
    """Whether a kernel that moves a value to another order of its dimensions from that in which it lies, by default
    that in which they are written, reads each element by itself, where devices split none of those that are moved."""
    tensor = program.values[value]
    own = range(len(tensor.shape)) if lying is None else lying
    return is_scattered(tensor.shape, own, order, _jax.item_bytes(tensor.dtype))


def _shape_left(schedule: Schedule, value: int) -> list[int]:
    """The sizes of a value's dimensions on one device."""
    layout, shape = schedule.assignment.values[value], schedule.program.values[value].shape
    split = layout[len(layout) - len(shape) :]  # without what a sum that waits is yet to be added up over
    return [-(-size // schedule.space.mesh.degree(axes)) for size, axes in zip(shape, split, strict=True)]


def _runs(order: Sequence[int], other: Sequence[int]) -> list[list[int]]:
    """The dimensions that lie side by side in one order and stay so in another one, from the outermost inwards."""
    runs: list[list[int]] = []
    for dimension in order:
        place = other.index(dimension)
        if runs and place and other[place - 1] == runs[-1][-1]:
            runs[-1].append(dimension)
        else:
            runs.append([dimension])
    return runs
