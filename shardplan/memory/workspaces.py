"""What operations work in on a GPU, beside their operands and results."""

from __future__ import annotations

from math import prod

from shardplan.memory.convolutions import POOLING_GRADIENT
from shardplan.problem import Problem
from shardplan.program import Operation
from shardplan.strategy import Strategy

WORKSPACE_BYTES = 4 * 2**20
"""What XLA:GPU gives cuBLAS to work in while a matrix product runs, whatever its size."""


def window_bytes(operation: Operation, problem: Problem, strategy: Strategy) -> tuple[float, float]:
    """Bytes on one device of the places that a pooling gradient scatters to, which XLA:GPU finds first: for every
    window an int32 per dimension; and of the largest elements there, in float32, which that kernel makes too."""
    source = operation.operands[0]
    if operation.primitive.name != POOLING_GRADIENT or not isinstance(source, int):
        return 0.0, 0.0
    value, domain = problem.program.values[source], problem.domain(source)
    layout = strategy.operands[0]
    largest = 4.0 * prod(value.shape) / (1.0 if layout is None else domain.parts[layout])
    return len(value.shape) * largest, largest
