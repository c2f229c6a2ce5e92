"""The operands of convolutions that cuDNN reads from copies.

cuDNN reads images with their channels innermost, and filters with what they sum over innermost; arguments of the step
in another order are transposed. Zeros are written between the elements of an image that a transposed convolution
spreads, and around one that is padded more at one end than at the other. The gradient of filters needs neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from shardplan.once import once
from shardplan.operation_kinds import CONVOLUTION
from shardplan.problem import Problem
from shardplan.program import Operation, Program, operand_type
from shardplan.strategy import Strategy

_PLANE = 2
"""Images with more dimensions than this are read with their channels outermost."""


class ConvolutionCopy(NamedTuple):
    """What a convolution reads: a value, in an order of its dimensions, ``times`` as large as the value."""

    value: int
    order: tuple[int, ...]
    times: float
    copied: bool = True


@once
def convolution_copies(program: Program) -> Mapping[tuple[int, int], ConvolutionCopy]:
    """The operands of convolutions that are read from copies, by the operation's index and the operand's position.

    An argument is transposed where the first convolution that reads it finds it in another order.
    """
    found: dict[tuple[int, int], ConvolutionCopy] = {}
    turned: dict[int, tuple[int, ...]] = {}
    inputs = {*program.inputs}.union(value for region in program.regions[1:] for value in region.inputs)
    for operation in program.operations:
        if operation.primitive.name != CONVOLUTION:
            continue
        numbers, times = operation.params["dimension_numbers"], _spread(program, operation)
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


@once
def unreversed(program: Program) -> Mapping[int, int]:
    """Filters that convolutions read in reverse, which cuDNN does by itself, with what they are the reverse of."""
    filters = {o.operands[1] for o in program.operations if o.primitive.name == CONVOLUTION}
    reversing = (o for o in program.operations if o.primitive.name == "rev" and o.results[0] in filters)
    return {o.results[0]: o.operands[0] for o in reversing if isinstance(o.operands[0], int)}


def _spread(program: Program, operation: Operation) -> tuple[float, float]:
    """How many times larger the image and the filters are with the zeros that are written into copies."""
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
    """Whether cuDNN computes a convolution as the gradient of filters: these are larger than the result."""
    numbers = operation.params["dimension_numbers"]
    filters = [operand_type(program, operation.operands[1]).shape[d] for d in numbers.rhs_spec[2:]]
    made = [program.values[operation.results[0]].shape[d] for d in numbers.out_spec[2:]]
    strided = any(stride > 1 for stride in operation.params["window_strides"])
    return not strided and any(f > m for f, m in zip(filters, made, strict=True))


def is_cut_out(program: Program, operation: Operation) -> bool:
    """Whether the gradient of an image is cut out of a larger one: the image was padded more at one end."""
    numbers, params = operation.params["dimension_numbers"], operation.params
    filters = [operand_type(program, operation.operands[1]).shape[d] for d in numbers.rhs_spec[2:]]
    pairs = zip(params["padding"], filters, params["rhs_dilation"], strict=True)
    before = [((f - 1) * d - low, (f - 1) * d - high) for (low, high), f, d in pairs]
    strided = any(spread > 1 for spread in params["lhs_dilation"])
    return strided and is_gradient_of_image(program, operation) and any(low != high for low, high in before)


def neighbour_bytes(problem: Problem, operation: Operation, strategy: Strategy) -> float:
    """Bytes on one device of the copies with rows of neighbours that an operation split along its windows reads."""
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
