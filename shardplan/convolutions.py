"""Convolutions: the copies of their operands that XLA:GPU makes.

cuDNN reads one block of memory per operand. Where an image is split along its windows, each device puts the rows of its
neighbours around its own in a copy, which lives while the convolution runs. The kernel that makes it computes the image
on the way: what is cheap to compute (a rectifier) is then stored nowhere. Where a transposed convolution spreads its
image, zeros are written between the elements, in a copy that the gradient of its filters reads as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from shardplan.problem import Problem
from shardplan.program import Operation
from shardplan.strategy import Strategy

CONVOLUTION = "conv_general_dilated"


def copied_with_neighbours(problem: Problem, strategies: Mapping[int, Strategy]) -> dict[tuple[int, int], float]:
    """The operands of convolutions that are copied with rows of neighbours, by the operation's index and the operand's
    position, and how many times as large as the operand's block the copy is."""
    found = {}
    for index, strategy in strategies.items():
        operation = problem.program.operations[index]
        for position in {halo.operand for halo in strategy.halos}:
            if operation.primitive.name == CONVOLUTION:
                found[index, position] = _times_larger(problem, operation, strategy, position)
    return found


def _times_larger(problem: Problem, operation: Operation, strategy: Strategy, position: int) -> float:
    operand = operation.operands[position]
    if not isinstance(operand, int):
        return 1.0
    shape, mesh = problem.program.values[operand].shape, problem.space.mesh
    rows: dict[int, float] = {}
    for halo in strategy.halos:
        if halo.operand == position:
            block = -(-shape[halo.dim] // mesh.degree(halo.axes))
            rows[halo.dim] = rows.get(halo.dim, 0.0) + halo.rows / block
    return prod(1 + more for more in rows.values())


def neighbour_bytes(problem: Problem, operation: Operation, strategy: Strategy) -> float:
    """Bytes of the copies with rows of neighbours that one device makes for a convolution."""
    found = 0.0
    if operation.primitive.name == CONVOLUTION:
        for position in {halo.operand for halo in strategy.halos}:
            operand, layout = operation.operands[position], strategy.operands[position]
            if isinstance(operand, int) and layout is not None:
                domain = problem.domain(operand)
                block = problem.program.values[operand].total_bytes / float(domain.degrees[domain.position[layout]])
                found += block * _times_larger(problem, operation, strategy, position)
    return found


def spread_images(operations: Iterable[Operation]) -> dict[int, float]:
    """The convolutions that read a copy of their image with zeros between its elements, by index, and how many times
    larger it is.

    Where filters are reversed, cuDNN computes the gradient of an image, without a copy.
    """
    reversed_filters, found = set[int](), {}
    for operation in operations:
        if operation.primitive.name == "rev":
            reversed_filters.update(operation.results)
        elif operation.primitive.name == CONVOLUTION and operation.operands[1] not in reversed_filters:
            times = prod(operation.params["lhs_dilation"])
            if times > 1:
                found[operation.index] = float(times)
    return found


def spread_copies(order: Sequence[Operation]) -> Iterator[tuple[Operation, float, int, int]]:
    """For each copy of a spread image the first convolution that reads it, how many times larger it is than the image,
    and from which to which place of the order it lives."""
    spread = spread_images(order)
    found: dict[tuple[int, float], tuple[int, int]] = {}
    for place, operation in enumerate(order):
        image = operation.operands[0] if operation.index in spread else None
        if isinstance(image, int):
            key = image, spread[operation.index]
            found[key] = found.get(key, (place, place))[0], place
    for (_, times), (first, last) in found.items():
        yield order[first], times, first, last
