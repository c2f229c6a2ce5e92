"""What operations work in on a GPU, beside their operands and results."""

from __future__ import annotations

from math import prod

from shardplan.groups import RAGGED, axes_of_groups
from shardplan.memory.convolutions import POOLING_GRADIENT
from shardplan.problem import Problem
from shardplan.program import Operation
from shardplan.strategy import Strategy, bytes_of, operand_type

WORKSPACE_BYTES = 4 * 2**20
"""What XLA:GPU gives cuBLAS to work in while a matrix product runs, whatever its size."""


def masked_bytes(operation: Operation, problem: Problem, strategy: Strategy) -> float:
    """Bytes of the copies of its rows that one device makes for an operation on rows that belong to groups.

    XLA:GPU multiplies the rows by the matrices of all groups at once: it makes a copy of the rows for each group, zero
    where the row is not of that group, and transposes all of it. It merges equal copies, and keeps them from the
    forward pass for the gradient of the matrices; the transposed ones live as long as the operation runs.
    """
    if operation.primitive.name != RAGGED:
        return 0.0
    rows, _, sizes = (operand_type(problem.program, operand) for operand in operation.operands)
    axes = {axis for axes in strategy.operands[0] or () for axis in axes} | {*axes_of_groups(operation, strategy)}
    split = problem.space.mesh.degree(tuple(axes))
    return sizes.shape[-1] * bytes_of(rows) / split


def window_bytes(operation: Operation, problem: Problem, strategy: Strategy) -> float:
    """Bytes on one device of the places that a pooling gradient scatters to: XLA:GPU finds them first, for every window
    an int32 per dimension."""
    source = operation.operands[0]
    if operation.primitive.name != POOLING_GRADIENT or not isinstance(source, int):
        return 0.0
    value, domain = problem.program.values[source], problem.domain(source)
    layout = strategy.operands[0]
    degree = 1.0 if layout is None else float(domain.degrees[domain.position[layout]])
    return 4.0 * len(value.shape) * prod(value.shape) / degree
