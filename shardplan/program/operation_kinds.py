"""Kinds of operations, and the readers of values."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from shardplan.memoize import memoize
from shardplan.program.program import Operation, Program, operand_type

CONVOLUTION, PRODUCT, POOLING_GRADIENT = "conv_general_dilated", "dot_general", "select_and_scatter_add"
PRODUCTS = frozenset({PRODUCT, CONVOLUTION, "ragged_dot_general"})
REDUCTIONS = frozenset(
    {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod", "argmax", "argmin"}
)
CUMULATIVE = frozenset({"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"})
SCATTERS = frozenset({"scatter-add", "scatter_add", "scatter", "scatter-sub", "scatter-mul", "scatter-min"})
SCATTERS |= {"scatter-max"}
UPDATES = SCATTERS | {"dynamic_update_slice"}
"""Primitives that write into their first operand."""

VIEWS = frozenset({"reshape", "squeeze", "expand_dims", "stop_gradient", "copy_p"})


@memoize
def readers_in(program: Program) -> dict[int, list[Operation]]:
    """Per value, the operations that read it, in the order of the program."""
    return readers_of(program.operations)


def readers_of(operations: Iterable[Operation]) -> dict[int, list[Operation]]:
    """Per value, those of some operations that read it."""
    readers: dict[int, list[Operation]] = {}
    for operation in operations:
        for operand in operation.operands:
            if isinstance(operand, int):
                readers.setdefault(operand, []).append(operation)
    return readers


def is_product(program: Program, operation: Operation) -> bool:
    """Whether an operation is a product or a convolution, and no outer product."""
    return operation.primitive.name in PRODUCTS and not is_outer_product(program, operation)


def is_outer_product(program: Program, operation: Operation) -> bool:
    """Whether a product has no contraction: it is an elementwise multiplication."""
    if operation.primitive.name != PRODUCT:
        return False
    (contracted, _), _ = operation.params["dimension_numbers"]
    shape = operand_type(program, operation.operands[0]).shape
    return prod(shape[dim] for dim in contracted) == 1


def is_scatter(program: Program, operation: Operation) -> bool:
    """Whether an operation writes to many places that are data. A write to one place is an update of a slice, which
    fuses.
    """
    return operation.primitive.name in SCATTERS and _places(program, operation) != 1


def is_view(program: Program, operation: Operation) -> bool:
    """Whether a result has its operand's elements, maybe in another shape. The only element of a dimension is such a
    result.
    """
    name = operation.primitive.name
    if name in VIEWS:
        return True
    if name != "gather" and name not in REDUCTIONS:
        return False
    own, made = operand_type(program, operation.operands[0]), program.values[operation.results[0]]
    same = own.dtype == made.dtype and prod(own.shape) == prod(made.shape)
    return same and (name != "gather" or _places(program, operation) == 1)


def _places(program: Program, operation: Operation) -> int:
    """The number of index vectors of a gather or a scatter."""
    return prod(operand_type(program, operation.operands[1]).shape[:-1])


def moves_between_memories(program: Program, operation: Operation) -> bool:
    """Whether an operation copies a tensor between host and device memory."""
    if operation.primitive.name != "device_put" or not isinstance(operation.operands[0], int):
        return False
    kinds = {program.values[value].memory_kind for value in (operation.operands[0], operation.results[0])}
    return len(kinds) > 1
