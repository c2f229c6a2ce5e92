"""Convolutions: the copies of their operands that XLA:GPU makes.

cuDNN reads one block of memory per operand. Where an image is split along its windows, each device puts the rows of its
neighbours around its own in a copy, which lives while the convolution runs. The kernel that makes it computes the image
on the way: what is cheap to compute (a rectifier) is then stored nowhere. Where a transposed convolution spreads its
image, zeros are written between the elements, in a copy, and so they are around an image that is padded more at one end
than at the other. The gradient of its filters, which are larger than the image,
needs none, unless it runs in an island. Filters that the step is given in another order than cuDNN's are transposed
once for the whole step, and so are images.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import prod

from shardplan.once import once
from shardplan.problem import Problem
from shardplan.program import Constant, Operation, Program
from shardplan.strategy import Strategy, operand_type

CONVOLUTION = "conv_general_dilated"
POOLING_GRADIENT = "select_and_scatter_add"

_PLANE = 2
"""Images with more dimensions than this are read with their channels outermost."""


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


def reordered_inputs(
    program: Program, order: Iterable[Operation], copied: Collection[tuple[int, int]] = ()
) -> dict[int, tuple[Operation, int]]:
    """The step's arguments that convolutions read from a transposed copy, each with the first one and the position.

    cuDNN reads images with their channels innermost, and filters with what they sum over; where there are three
    dimensions of space, these are innermost. What is computed is written so at once, and so is what is gathered, and
    what is ``copied`` with rows of neighbours; an argument that is read as it is stored is transposed. Filters that are
    reversed, for the gradient of images, are read from the same copy.
    """
    found: dict[int, tuple[Operation, int]] = {}
    read = {value.index for value in program.values} - {*program.inputs}
    for operation in order:
        if operation.primitive.name != CONVOLUTION:
            continue
        numbers = operation.params["dimension_numbers"]
        for position, (outer, inner, *space) in enumerate((numbers.lhs_spec, numbers.rhs_spec)):
            operand = operation.operands[position]
            if isinstance(operand, int) and operand not in read:
                read.add(operand)
                shape = program.values[operand].shape
                dims = (outer, inner, *space) if len(space) > _PLANE else (outer, *space, inner)
                wanted = [dim for dim in dims if shape[dim] > 1]
                if wanted != sorted(wanted) and (operation.index, position) not in copied:
                    found[operand] = operation, position
    return found


def unreversed(program: Program) -> dict[int, int]:
    """Filters that convolutions read in reverse, which cuDNN does by itself, with what they are the reverse of."""
    filters = {o.operands[1] for o in program.operations if o.primitive.name == CONVOLUTION}
    reversing = (o for o in program.operations if o.primitive.name == "rev" and o.results[0] in filters)
    return {o.results[0]: o.operands[0] for o in reversing if isinstance(o.operands[0], int)}


def spread_images(
    program: Program, operations: Iterable[Operation], copied: Collection[tuple[int, int]] = ()
) -> dict[int, float]:
    """The convolutions that read a copy of their image with zeros between its elements, or around them, by index, and
    how many times larger it is.

    Where filters are reversed, cuDNN computes the gradient of an image, without a copy. Where filters are larger than
    their images (the gradient of a transposed convolution's filters), XLA lets both change places: the image becomes
    filters, between whose elements cuDNN leaves space. It does not where the image is ``copied`` all the same (an
    operation's index and a position), with rows of neighbours or in an island.
    """
    reversed_filters, found = set[int](), {}
    for operation in operations:
        if operation.primitive.name == "rev":
            reversed_filters.update(operation.results)
        elif operation.primitive.name == CONVOLUTION and operation.operands[1] not in reversed_filters:
            times = prod(operation.params["lhs_dilation"])
            padded = _times_padded(program, operation)
            if times > 1 and ((operation.index, 0) in copied or not _change_places(program, operation)):
                found[operation.index] = float(times)
            elif padded > 1 and times == 1 and (operation.index, 0) not in copied:
                found[operation.index] = padded
    return found


def _times_padded(program: Program, operation: Operation) -> float:
    """How many times larger an image is with the zeros around it that XLA writes: cuDNN pads both ends alike, so that
    where they differ (a stride of 2 over an even size, a causal convolution) it is given a padded copy, and for the
    gradient of filters one that is padded by the difference."""
    image = operand_type(program, operation.operands[0]).shape
    padding = [(max(low, 0), max(high, 0)) for low, high in operation.params["padding"]]
    if all(low == high for low, high in padding):
        return 1.0
    if _filters_larger(program, operation):
        padding = [(low - min(low, high), high - min(low, high)) for low, high in padding]
    sizes = [image[dim] for dim in operation.params["dimension_numbers"].lhs_spec[2:]]
    return prod((low + size + high) / size for size, (low, high) in zip(sizes, padding, strict=True))


def _filters_larger(program: Program, operation: Operation) -> bool:
    """Whether filters are larger than what a convolution makes, as in the gradient of filters."""
    made, filters = program.values[operation.results[0]].shape, operand_type(program, operation.operands[1]).shape
    numbers = operation.params["dimension_numbers"]
    return prod(filters[d] for d in numbers.rhs_spec[2:]) > prod(made[d] for d in numbers.out_spec[2:])


def _change_places(program: Program, operation: Operation) -> bool:
    """Whether a convolution's filters are larger than its images, and may change places with these."""
    image, filters = (operand_type(program, operand).shape for operand in operation.operands)
    numbers = operation.params["dimension_numbers"]
    sizes = [
        prod(shape[d] for d in spec[2:]) for shape, spec in ((image, numbers.lhs_spec), (filters, numbers.rhs_spec))
    ]
    groups = operation.params["feature_group_count"] * operation.params["batch_group_count"]
    return groups == 1 and sizes[1] > sizes[0]


def spread_copies(
    program: Program, order: Sequence[Operation], copied: Collection[tuple[int, int]] = ()
) -> Iterator[tuple[Operation, float, int, int]]:
    """For each copy of a spread image the first convolution that reads it, how many times larger it is than the image,
    and from which to which place of the order it lives."""
    for (_, times), places in _reading_copies(program, order, copied).items():
        yield order[places[0]], times, places[0], places[-1]


def spread_until(
    program: Program, order: Sequence[Operation], copied: Collection[tuple[int, int]] = ()
) -> dict[int, int]:
    """Per convolution that reads a copy of a spread image, by index, the place of the order where the copy is made."""
    found = _reading_copies(program, order, copied)
    return {order[place].index: places[0] for places in found.values() for place in places}


def _reading_copies(
    program: Program, order: Sequence[Operation], copied: Collection[tuple[int, int]]
) -> dict[tuple[int, float], list[int]]:
    """Per spread image and how many times larger its copy is, the places of the convolutions that read it."""
    spread = spread_images(program, order, copied)
    found: dict[tuple[int, float], list[int]] = {}
    for place, operation in enumerate(order):
        image = operation.operands[0] if operation.index in spread else None
        if isinstance(image, int):
            found.setdefault((image, spread[operation.index]), []).append(place)
    return found


@once
def rectifiers_of_poolings(program: Program) -> dict[int, list[Operation]]:
    """Per pooling gradient of images that were rectified, by index: the rectifier whose kernel makes its zeros, and
    where there are several, the gradients of rectifiers after it.

    XLA scatters into the zeros that rectifiers of such images compare with: equal values are one, and what is needed
    in memory is made in the kernel of the first that computes with it. That kernel stores what it rectifies as well.
    Gradients of several rectifiers read these zeros again, so that the pooling's gradient scatters into a copy.
    """
    rectifiers: dict[tuple[object, ...], list[Operation]] = {}
    found: dict[int, list[Operation]] = {}
    scattering: dict[tuple[object, ...], list[Operation]] = {}
    for operation in program.operations:
        if not operation.results:
            continue
        value = program.values[operation.results[0]]
        shape = *value.shape, value.dtype
        constants = [operand.value for operand in operation.operands if isinstance(operand, Constant)]
        if operation.primitive.name == "max" and constants == [0]:
            rectifiers.setdefault(shape, []).append(operation)
        elif operation.primitive.name == POOLING_GRADIENT and shape in rectifiers:
            found[operation.index] = scattering[shape] = [rectifiers[shape][0]]
        elif operation.primitive.name == "select_n" and shape in scattering and len(rectifiers[shape]) > 1:
            scattering[shape].append(operation)
    return found
