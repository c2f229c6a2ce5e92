"""What operations work in on a GPU, beside their operands and results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from shardplan.groups import RAGGED, axes_of_groups, sums_rows
from shardplan.memory.convolutions import POOLING_GRADIENT
from shardplan.problem import Problem
from shardplan.program import Operation
from shardplan.schedule import Schedule
from shardplan.strategy import Strategy, bytes_of, operand_type

WORKSPACE_BYTES = 4 * 2**20
"""What XLA:GPU gives cuBLAS to work in while a matrix product runs, whatever its size."""


def masked_bytes(operation: Operation, problem: Problem, strategy: Strategy, position: int = 0) -> float:
    """Bytes of the copies that one device makes of an operand whose rows belong to groups.

    XLA:GPU multiplies the rows by the matrices of all groups at once: it makes a copy of the rows for each group, zero
    where the row is not of that group, and transposes all of it. It merges equal copies, and keeps them from the
    forward pass for the gradient of the matrices, for which it masks both operands (``position`` 0 and 1) and
    transposes none; the transposed ones live as long as the operation runs.
    """
    rows, sizes = (operand_type(problem.program, operation.operands[place]) for place in (position, 2))
    axes = {axis for axes in strategy.operands[position] or () for axis in axes}
    axes |= {*axes_of_groups(operation, strategy)}
    return sizes.shape[-1] * bytes_of(rows) / problem.space.mesh.degree(tuple(axes))


def working_bytes(operation: Operation, problem: Problem, strategy: Strategy) -> float:
    """Bytes of all copies that a device makes of rows that belong to groups while an operation runs."""
    positions = (0, 1) if sums_rows(operation) else (0, 0)
    return sum(masked_bytes(operation, problem, strategy, position) for position in positions)


def masked_rows(order: Sequence[Operation], schedule: Schedule) -> Iterator[tuple[float, int, int]]:
    """The bytes of the copies of rows that belong to groups, each with the places of the order from which to which they
    are in memory, see `masked_bytes`."""
    kept: dict[Any, tuple[float, int, int]] = {}
    for place, operation in enumerate(order):
        strategy = schedule.assignment.strategies.get(operation.index)
        if operation.primitive.name != RAGGED or strategy is None:
            continue
        size = masked_bytes(operation, schedule.problem, strategy)
        yield working_bytes(operation, schedule.problem, strategy) - size, place, place
        rows, _, sizes = (o if isinstance(o, int) else id(o) for o in operation.operands)
        key = rows, sizes, strategy.operands[0]
        kept[key] = size, kept.get(key, (size, place, place))[1], place
    yield from kept.values()


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
