"""How long XLA takes kernels to run on one H100, as its last scheduler (`shardplan.memory.hiding`) fills waits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod

import jax

from shardplan import _jax
from shardplan.groups import RAGGED, axes_of_groups, sums_rows
from shardplan.memory.convolutions import CONVOLUTION
from shardplan.memory.cycles import CYCLES_PER_BYTE, cycles_in_kernel
from shardplan.memory.measured import SIZES, product_microseconds
from shardplan.memory.products import PRODUCT, is_sum
from shardplan.memory.sizes import bytes_in, layout_left
from shardplan.memory.sums import WHOLE, WHOLE_ROW, columns_of, parts_of, waiting_for_blocks, waiting_for_rows
from shardplan.program import Operation, Program
from shardplan.schedule import Schedule
from shardplan.strategy import operand_type

_CONVOLUTION = 10.0
"""Microseconds of any convolution, as it counts."""

BYTES_MOVED = 3.35e6
"""Bytes that an H100 reads or writes per microsecond."""

_WIDE = 40.0, 22e-6, 72e-9
"""Microseconds of a product of 16-bit numbers into float32, of which XLA has measured none: at least, and for each
element and each operation. That is some 25 times as long as a product into 16-bit numbers."""


UNKNOWN = 0.01
"""Microseconds of what Triton makes, as XLA counts. Kernels that go through rows which they have reduced are taken for
such, though some norms are not."""


def kernel_microseconds(
    schedule: Schedule, operation: Operation, reads: Collection[int], made: int | None = None
) -> float:
    """Microseconds that the kernel of an operation takes on one device, which reads these values, and of a product that
    is part of an addition: which ``made`` that value."""
    if operation.primitive.name == CONVOLUTION:
        return _CONVOLUTION
    if is_timed(schedule.program, operation):
        made = operation.results[0] if made is None else made
        return _product_microseconds(schedule, operation, made, _product_sizes(schedule, operation))
    values = schedule.assignment.values
    moved = (bytes_in(schedule, value, values[value]) for value in (*reads, *operation.results) if value in values)
    return sum(moved) / BYTES_MOVED


def computing_microseconds(schedule: Schedule, operation: Operation) -> float:
    """Microseconds that one device computes what an operation makes element by element, where nothing is read."""
    result, values = operation.results[0], schedule.assignment.values
    if result not in values:
        return 0.0
    elements = bytes_in(schedule, result, values[result]) / _jax.item_bytes(schedule.program.values[result].dtype)
    return elements * cycles_in_kernel(operation) / CYCLES_PER_BYTE / BYTES_MOVED


def waiting_in_columns(schedule: Schedule, operation: Operation, reads: Collection[int]) -> float:
    """How long a sum down columns, whose kernel reads these values, reads where it keeps too little of a device busy,
    of the time in which an H100 reads from memory: above 1, from memory as well; below, what it has read before; 0 of
    what is none."""
    strategy = schedule.assignment.strategies.get(operation.index)
    columns, then = columns_of(schedule.program, operation)
    if strategy is None or not columns or (layout := strategy.operands[0]) is None:
        return 0.0
    left = layout_left(schedule.problem, operation, strategy, 0)
    read, made = (
        bytes_in(schedule, value, split) / _jax.item_bytes(schedule.program.values[value].dtype)
        if isinstance(value, int)
        else 0.0
        for value, split in ((operation.operands[0], layout), (operation.results[0], left))
    )
    width = min((_jax.item_bytes(schedule.program.values[value].dtype) for value in reads), default=4)
    return waiting_for_blocks(columns, read, then * made, width)


def finishing_microseconds(schedule: Schedule, operation: Operation) -> float:
    """Microseconds in which sums of parts are added up on one device, where a reduction reduces so much to each number
    that parts of that are reduced first, else 0."""
    strategy, read = schedule.assignment.strategies.get(operation.index), operation.operands[0]
    layout = strategy.operands[0] if strategy is not None else None
    if strategy is None or layout is None or not isinstance(read, int):
        return 0.0
    result, left = operation.results[0], layout_left(schedule.problem, operation, strategy, 0)
    width = _jax.item_bytes(schedule.program.values[result].dtype)
    made = bytes_in(schedule, result, left) / width
    elements = bytes_in(schedule, read, layout) / _jax.item_bytes(schedule.program.values[read].dtype)
    columns, then = columns_of(schedule.program, operation)
    if not made or elements <= (WHOLE if columns else WHOLE_ROW) * made:
        return 0.0
    parts = parts_of(round(elements / (then * made))) * then * made
    slower = waiting_for_blocks(columns, parts, made, width) if columns else waiting_for_rows(parts, made)
    return max(slower, 1.0) * parts * width / BYTES_MOVED


def is_timed(program: Program, operation: Operation) -> bool:
    """Whether a library runs an operation, which is not bound by memory."""
    product = operation.primitive.name == PRODUCT and not is_sum(program, operation)
    return product or operation.primitive.name in {RAGGED, CONVOLUTION}


def merged_microseconds(schedule: Schedule, products: Sequence[Operation]) -> tuple[float, float]:
    """Microseconds that products which share an operand take one by one, and as one."""
    (batches, added, rows, columns), *_ = sizes = [_product_sizes(schedule, product) for product in products]
    first = len({product.operands[0] for product in products}) == 1
    rows = rows if first else sum(own[2] for own in sizes)
    merged = batches, added, rows, sum(own[3] for own in sizes) if first else columns
    apart = [
        _product_microseconds(schedule, product, product.results[0], own)
        for product, own in zip(products, sizes, strict=True)
    ]
    return sum(apart), _product_microseconds(schedule, products[0], products[0].results[0], merged)


def _product_microseconds(schedule: Schedule, operation: Operation, made: int, measures: tuple[float, ...]) -> float:
    width = _jax.item_bytes(schedule.program.values[made].dtype)
    batches, added, rows, columns = measures
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
