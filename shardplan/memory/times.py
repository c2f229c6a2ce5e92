"""How long XLA takes kernels to run on one H100, as its last scheduler (`shardplan.memory.hiding`) fills waits."""

from __future__ import annotations

from collections.abc import Collection
from math import prod

import jax

from shardplan import _jax
from shardplan.groups import RAGGED, axes_of_groups, sums_rows
from shardplan.memory.convolutions import CONVOLUTION
from shardplan.memory.measured import SIZES, product_microseconds
from shardplan.memory.products import PRODUCT, is_sum
from shardplan.memory.sizes import bytes_in
from shardplan.program import Operation
from shardplan.schedule import Schedule
from shardplan.strategy import operand_type

_CONVOLUTION = 10.0
"""Microseconds of any convolution, as it counts."""

BYTES_MOVED = 3.35e6
"""Bytes that an H100 reads or writes per microsecond."""

_WIDE = 40.0, 22e-6, 72e-9
"""Microseconds of a product of 16-bit numbers into float32, of which XLA has measured none: at least, and for each
element and each operation. That is some 25 times as long as a product into 16-bit numbers."""

_COLLECTIVES = {"all-gather": (20.0, 3.2e-6), "reduce-scatter": (12.0, 5e-6), "all-reduce": (30.0, 13e-6)}
"""Microseconds that XLA counts for a collective of eight H100s, about, and for each byte of the larger of operand and
result, fitted to what it says of compiled steps; others are as gathers."""

_FEW = 0.12
"""Microseconds for each byte at most, of those least ones: a single number costs next to nothing."""


def collective_microseconds(kind: str, size: float) -> float:
    """Microseconds that a collective takes, of so many bytes."""
    least, each = _COLLECTIVES.get(kind, _COLLECTIVES["all-gather"])
    return min(least, _FEW * size) + each * size


def kernel_microseconds(
    schedule: Schedule, operation: Operation, reads: Collection[int], made: int | None = None
) -> float:
    """Microseconds that the kernel of an operation takes on one device, which reads these values, and of a product that
    is part of an addition: which ``made`` that value."""
    if operation.primitive.name == CONVOLUTION:
        return _CONVOLUTION
    alone = operation.primitive.name == PRODUCT and not is_sum(schedule.program, operation)
    if alone or operation.primitive.name == RAGGED:
        return _product_microseconds(schedule, operation, operation.results[0] if made is None else made)
    values = schedule.assignment.values
    moved = (bytes_in(schedule, value, values[value]) for value in (*reads, *operation.results) if value in values)
    return sum(moved) / BYTES_MOVED


def _product_microseconds(schedule: Schedule, operation: Operation, made: int) -> float:
    width = _jax.item_bytes(schedule.program.values[made].dtype)
    batches, added, rows, columns = _product_sizes(schedule, operation)
    if width != 4 or not _reads_narrow(schedule, operation):
        return product_microseconds((batches, rows, added, columns), width)
    sizes = max(batches, 1), added, rows, columns
    measured = min(sizes[0], 4), *(min(max(size, SIZES[0]), SIZES[-1]) for size in sizes[1:])
    least, element, each = _WIDE
    flops = 2 * prod(measured)
    return prod(sizes) / prod(measured) * (least + element * flops / (2 * measured[1]) + each * flops)


def _reads_narrow(schedule: Schedule, product: Operation) -> bool:
    """Whether a product multiplies 16-bit numbers, or rounds to these."""
    widths = [_jax.item_bytes(operand_type(schedule.program, operand).dtype) for operand in product.operands]
    return max(widths) == 2 or product.params["precision"] is jax.lax.DotAlgorithmPreset.BF16_BF16_F32


def _product_sizes(schedule: Schedule, operation: Operation) -> tuple[float, ...]:
    """Of a product on one device: its batches, what it adds up, and what else each side has. Of rows in groups, all
    rows of a device are multiplied by all groups that it has, as `shardplan.memory.masking` says."""
    strategy, sizes = schedule.assignment.strategies[operation.index], list[tuple[float, ...]]()
    grouped, degrees = operation.primitive.name == RAGGED, schedule.space.mesh.sizes
    dimensions = operation.params["ragged_dot_dimension_numbers" if grouped else "dimension_numbers"]
    numbers = zip(*(dimensions.dot_dimension_numbers if grouped else dimensions), strict=True)
    for operand, layout, dims in zip(operation.operands, strategy.operands, numbers, strict=False):
        shape = operand_type(schedule.program, operand).shape
        axes = layout[-len(shape) :] if layout is not None else ((),) * len(shape)
        left = [size / prod(degrees[axis] for axis in split) for size, split in zip(shape, axes, strict=True)]
        contracted, batch = (prod(left[dim] for dim in some) for some in dims)
        sizes.append((batch, contracted, prod(left) / max(1e-9, batch * contracted)))
    (batch, contracted, rows), (*_, columns) = sizes
    if not grouped:
        return batch, contracted, rows, columns
    split = prod(degrees[axis] for axis in axes_of_groups(operation, strategy))
    groups = operand_type(schedule.program, operation.operands[2]).shape[-1] / split
    if sums_rows(operation):
        return batch * groups, contracted, rows, columns
    return batch, contracted * groups, rows, columns / groups
