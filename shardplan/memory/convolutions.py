"""The copies of operands for cuDNN's convolutions: transposed, dilated, or padded.

cuDNN reads images with their channels innermost, and filters with their contracted dimension innermost. Arguments of
the step in another dimension order are transposed. An image that a transposed convolution dilates is copied with zeros
between its elements. An image with more padding at one end is copied with zeros around it. The gradient of filters
needs neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from shardplan.memoize import memoize
from shardplan.problem.cost_network import Problem
from shardplan.problem.strategy import Strategy
from shardplan.program.operation_kinds import CONVOLUTION
from shardplan.program.program import Operation, Program, operand_type

_PLANE = 2
"""The most space dimensions of an image with channels innermost. With more, its channels are outermost."""


class ConvolutionCopy(NamedTuple):
    """The operand of a convolution: a value, in a dimension order, ``times`` as large as the value."""

    value: int
    order: tuple[int, ...]
    times: float
    copied: bool = True


@memoize
def convolution_copies(program: Program) -> Mapping[tuple[int, int], ConvolutionCopy]:
    """The operands that convolutions read from copies, by the operation's index and the operand's position.

    The first convolution that reads an argument in another dimension order gets a transpose copy.
    """
    found: dict[tuple[int, int], ConvolutionCopy] = {}
    turned: dict[int, tuple[int, ...]] = {}
    inputs = {*program.inputs}.union(value for region in program.regions[1:] for value in region.inputs)
    for operation in program.operations:
        if operation.primitive.name != CONVOLUTION:
            continue
        numbers, times = operation.params["dimension_numbers"], _dilation_factors(program, operation)
        for position, (outer, inner, *space) in enumerate((numbers.lhs_spec, numbers.rhs_spec)):
            operand = operation.operands[position]
            if not isinstance(operand, int):
                continue
            shape = program.values[operand].shape
            dims = (outer, inner, *space) if len(space) > _PLANE else (outer, *space, inner)
            wanted = tuple(dim for dim in dims if shape[dim] > 1)
            if operand in inputs:
                turned.setdefault(operand, () if wanted == tuple(sorted(wanted)) else wanted)
            order = turned.get(operand, ())
            if order or times[position] != 1.0:
                found[operation.index, position] = ConvolutionCopy(operand, order, times[position])
    return found


@memoize
def filters_before_reversal(program: Program) -> Mapping[int, int]:
    """Reversed filters, by the filters before reversal. cuDNN itself reads filters in reverse."""
    filters = {o.operands[1] for o in program.operations if o.primitive.name == CONVOLUTION}
    reversing = (o for o in program.operations if o.primitive.name == "rev" and o.results[0] in filters)
    return {o.results[0]: o.operands[0] for o in reversing if isinstance(o.operands[0], int)}


def _dilation_factors(program: Program, operation: Operation) -> tuple[float, float]:
    """The growth of the image and of the filters by the zeros in their copies."""
    params, numbers = operation.params, operation.params["dimension_numbers"]
    image = [operand_type(program, operation.operands[0]).shape[d] for d in numbers.lhs_spec[2:]]
    filters = [operand_type(program, operation.operands[1]).shape[d] for d in numbers.rhs_spec[2:]]
    spread, dilation = params["lhs_dilation"], params["rhs_dilation"]
    if is_gradient_of_image(program, operation):
        return 1.0, 1.0
    uneven = any(low != high or low < 0 for low, high in params["padding"])
    if not uneven and all(s == 1 for s in spread):
        return 1.0, 1.0
    sizes = zip(image, spread, params["padding"], strict=True)
    times = prod(((size - 1) * s + 1 + low + high) / size for size, s, (low, high) in sizes)
    if is_gradient_of_filters(program, operation):
        return times, 1.0
    return times, prod(((size - 1) * d + 1) / size for size, d in zip(filters, dilation, strict=True))


def is_gradient_of_image(program: Program, operation: Operation) -> bool:
    """Whether cuDNN computes a convolution as the gradient of an image: with reversed filters, and no strides."""
    filters = operation.operands[1]
    maker = program.makers.get(filters) if isinstance(filters, int) else None
    strided = any(stride > 1 for stride in operation.params["window_strides"])
    return maker is not None and maker.primitive.name == "rev" and not strided


def is_gradient_of_filters(program: Program, operation: Operation) -> bool:
    """Whether cuDNN computes a convolution as the gradient of filters: its filters are larger than the result."""
    numbers = operation.params["dimension_numbers"]
    filters = [operand_type(program, operation.operands[1]).shape[d] for d in numbers.rhs_spec[2:]]
    made = [program.values[operation.results[0]].shape[d] for d in numbers.out_spec[2:]]
    strided = any(stride > 1 for stride in operation.params["window_strides"])
    return not strided and any(f > m for f, m in zip(filters, made, strict=True))


def is_asymmetrically_padded(program: Program, operation: Operation) -> bool:
    """Whether the gradient of an image is a slice of a larger one, since the image has more padding at one end."""
    numbers, params = operation.params["dimension_numbers"], operation.params
    filters = [operand_type(program, operation.operands[1]).shape[d] for d in numbers.rhs_spec[2:]]
    pairs = zip(params["padding"], filters, params["rhs_dilation"], strict=True)
    before = [((f - 1) * d - low, (f - 1) * d - high) for (low, high), f, d in pairs]
    strided = any(spread > 1 for spread in params["lhs_dilation"])
    return strided and is_gradient_of_image(program, operation) and any(low != high for low, high in before)


def halo_bytes(problem: Problem, operation: Operation, strategy: Strategy) -> float:
    """Bytes on one device of the operands with halos, for an operation that is split along its windows."""
    shapes, mesh, found = problem.program.values, problem.space.mesh, 0.0
    for position in {halo.operand for halo in strategy.halos}:
        operand, layout = operation.operands[position], strategy.operands[position]
        if isinstance(operand, int) and layout is not None:
            rows: dict[int, float] = {}
            for halo in strategy.halos:
                if halo.operand == position:
                    block = -(-shapes[operand].shape[halo.dim] // mesh.degree(halo.axes))
                    rows[halo.dim] = rows.get(halo.dim, 0.0) + halo.rows / block
            own = shapes[operand].total_bytes / problem.domain(operand).parts[layout]
            found += own * prod(1 + more for more in rows.values())
    return found
