"""The classes of operations in XLA:GPU: library calls, kernels of their own, and operations fused into readers.

>>> import jax, jax.numpy as jnp, shardplan
>>> square = jax.ShapeDtypeStruct((64, 64), "float32")
>>> problem = shardplan.plan(lambda x, w: jnp.sum(jnp.tanh(x @ w)), 1, square, square).schedule.problem
>>> [o.primitive.name for o in problem.program.operations if is_fusible(problem, o)]
['tanh']
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import gcd, prod

from shardplan import _jax
from shardplan.memoize import memoize
from shardplan.memory.gpu import H100
from shardplan.problem.cost_network import Problem
from shardplan.program.operation_kinds import (
    CUMULATIVE,
    POOLING_GRADIENT,
    PRODUCT,
    REDUCTIONS,
    SCATTERS,
    VIEWS,
    is_outer_product,
    is_scatter,
    is_view,
    moves_between_memories,
    readers_in,
)
from shardplan.program.program import Constant, Operation, Program, operand_type

SHARDING_OPERATIONS = frozenset({"sharding_constraint", "device_put", "layout_constraint", "reshard"})

_SCATTER_ADDS, _ADDITIONS = frozenset({"scatter-add", "scatter_add"}), frozenset({"add", "add_any"})

_MOVES = frozenset(
    {"broadcast_in_dim", "transpose", "slice", "rev", "pad", "select_n", "iota", "gather", "dynamic_slice", "split"}
    | {"concatenate", "copy", "random_bits", "dynamic_update_slice"}
    | VIEWS
)
"""Data movement that readers can fuse. Random bits are computed from keys and counters."""

_WINDOWS = frozenset({"reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"})

_MAX_STEPS = 12
"""The most operations between a reduction and the readers of its result that are searched."""


def is_library_product(program: Program, operation: Operation) -> bool:
    """Whether a product is a library call."""
    return operation.index in library_products(program)


@memoize
def library_products(program: Program) -> frozenset[int]:
    """The products that are library calls, by index."""
    products = (o for o in program.operations if o.primitive.name == PRODUCT)
    return frozenset(
        o.index for o in products if not is_outer_product(program, o) and not is_summation_kernel(program, o)
    )


@memoize
def summation_kernels(program: Program) -> frozenset[int]:
    """The products of vectors and small matrices, by index, which are reduction kernels instead of library calls."""
    return frozenset(
        o.index for o in program.operations if o.primitive.name == PRODUCT and _is_summation_kernel(program, o)
    )


def is_summation_kernel(program: Program, operation: Operation) -> bool:
    """Whether a product is one of `summation_kernels`."""
    return operation.index in summation_kernels(program)


def _is_summation_kernel(program: Program, operation: Operation) -> bool:
    free, contracted, batches = [], 1, 1
    for operand, contraction, batch in zip(operation.operands, *operation.params["dimension_numbers"], strict=True):
        shape = operand_type(program, operand).shape
        free.append(prod(size for dim, size in enumerate(shape) if dim not in (*contraction, *batch)))
        contracted, batches = prod(shape[dim] for dim in contraction), prod(shape[dim] for dim in batch)
    split = program.devices / gcd(program.devices, batches)  # the devices left for the rows
    return max(free) == 1 or (min(free) == 1 and contracted * sum(free) < H100.products.summed_elements * split)


@memoize
def reduced_by_threads(program: Program) -> frozenset[int]:
    """The reductions, by index, with one thread per result. They fuse like elementwise operations."""
    return frozenset(
        o.index for o in program.operations if o.primitive.name in REDUCTIONS and _is_reduced_by_threads(program, o)
    )


def _is_reduced_by_threads(program: Program, operation: Operation) -> bool:
    """Whether one thread computes each result: for short rows that do not divide a warp, or few columns."""
    shape, dims = operand_type(program, operation.operands[0]).shape, operation.params["axes"]
    size = prod(shape[dim] for dim in dims)
    if _is_row_reduction(shape, dims):
        return size < H100.reading.warp and bool(H100.reading.warp % max(size, 1))
    return size < H100.reading.warp


def _is_row_reduction(shape: Sequence[int], dims: Collection[int]) -> bool:
    """Whether a reduction includes the innermost dimension."""
    inner = [dim for dim, size in enumerate(shape) if size > 1]
    return not inner or inner[-1] in dims


def is_fusible(problem: Problem, operation: Operation) -> bool:
    """Whether an operation can be fused into its readers."""
    return operation.index in fusible_operations(problem)


@memoize
def fusible_operations(problem: Problem) -> frozenset[int]:
    """The operations, by index, that can be fused into their readers."""
    return frozenset(o.index for o in problem.program.operations if _is_fusible(problem, o))


@memoize
def merged_scatters(problem: Problem) -> dict[int, int]:
    """Scatters into zeros whose only reader is an addition, with the addition, both by index.

    XLA scatters into the other addend instead, in a kernel of its own. Of two such scatters in one addition, it is
    the second one."""
    program = problem.program
    readers, found = readers_in(program), dict[int, int]()
    leaving = {o for region in program.regions for o in region.outputs if isinstance(o, int)}
    zeros = {o.results[0] for o in program.operations if o.primitive.name == "broadcast_in_dim" and _is_zero(o)}
    for operation in program.operations:
        if operation.primitive.name not in _SCATTER_ADDS or operation.operands[0] not in zeros:
            continue
        reading = readers.get(operation.results[0], [])
        if len(reading) != 1 or operation.results[0] in leaving or reading[0].region != operation.region:
            continue
        adds = reading[0].primitive.name in _ADDITIONS and reading[0].index not in found.values()
        if adds and is_scatter(program, operation):
            found[operation.index] = reading[0].index
    return found


def _is_zero(operation: Operation) -> bool:
    [operand] = operation.operands[:1]
    return isinstance(operand, Constant) and operand.value == 0


def _is_fusible(problem: Problem, operation: Operation) -> bool:
    name, program = operation.primitive.name, problem.program
    merged = merged_scatters(problem)
    if operation.index in merged or operation.index in merged.values():
        return operation.index in merged
    if operation.bodies or not operation.results or moves_between_memories(program, operation):
        return False
    if operation.primitive is _jax.optimization_barrier or is_scatter(program, operation):
        return False
    if name == PRODUCT:
        return is_outer_product(program, operation)
    if name in REDUCTIONS:
        return operation.index in reduced_by_threads(program) or is_view(program, operation)
    choices = problem.choices.get(operation.index)
    pointwise = choices is not None and choices.pointwise
    return pointwise or name in _MOVES | CUMULATIVE | SCATTERS | SHARDING_OPERATIONS


def computes_operand(problem: Problem, operation: Operation, position: int) -> bool:
    """Whether the producer of an operand can be fused into an operation.

    A scatter computes its indices and updates, and writes into its first operand.
    """
    if operation.primitive is _jax.optimization_barrier or operation.bodies:
        return False
    name = operation.primitive.name
    if operation.index in merged_scatters(problem).values():
        return True
    if is_scatter(problem.program, operation):
        return position > 0
    if is_fusible(problem, operation) or name in REDUCTIONS or name in _WINDOWS or name == POOLING_GRADIENT:
        return True
    return is_summation_kernel(problem.program, operation)


@memoize
def row_fusion_values(problem: Problem) -> frozenset[int]:
    """The values that a row reduction reads, and its result's readers read again. In a softmax, the exponentials.

    XLA:GPU makes one fusion over whole rows of it, and materialises none of them."""
    program, pointwise, found = problem.program, pointwise_operations(problem), set[int]()
    readers = readers_in(program)
    for operation in program.operations:
        name, read = operation.primitive.name, operation.operands[:1]
        if name not in REDUCTIONS or not isinstance(value := read[0], int):
            continue
        if not _is_row_reduction(program.values[value].shape, operation.params["axes"]):
            continue
        above, chain = value, [value]
        while (maker := program.makers.get(above)) is not None and maker.primitive.name == "convert_element_type":
            above = maker.operands[0]  # type: ignore[assignment]
            chain.append(above)
        stack, steps = [*operation.results], 0
        while stack and steps < _MAX_STEPS:
            steps += 1
            for reader in readers.get(stack.pop(), ()):
                spreads = reader.index in pointwise or reader.primitive.name in _MOVES
                if spreads and reader.region == operation.region:
                    if any(one in reader.operands for one in chain):
                        found.update(chain)
                        stack.clear()
                        break
                    stack += reader.results
    return frozenset(found)


@memoize
def pointwise_operations(problem: Problem) -> frozenset[int]:
    """The elementwise operations, by index."""
    return frozenset(index for index, choices in problem.choices.items() if choices.pointwise)
