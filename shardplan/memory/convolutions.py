"""Convolutions: the copies of their operands that XLA:GPU makes.

cuDNN reads one block of memory per operand. Where an image is split along its windows, each device puts the rows of its
neighbours around its own in a copy, which lives while the convolution runs. The kernel that makes it computes the image
on the way: what is cheap to compute (a rectifier) is then stored nowhere. Where a transposed convolution spreads its
image, zeros are written between the elements, in a copy, and so they are around an image that is padded more at one end
than at the other. The gradient of filters needs none, unless those are larger than what they make, or the convolution
is a transposed one: then it is a forward convolution like any other, which reads its operands with the batch in the
place of their channels, from transposed copies. Filters that the step is given in another order than cuDNN's are
transposed once for the whole step, and so are images.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from shardplan.once import once
from shardplan.problem import Problem
from shardplan.program import Operation, Program
from shardplan.strategy import Strategy, operand_type

_SCALING = frozenset({"mul", "div", "add", "sub", "max", "min"})
CONVOLUTION = "conv_general_dilated"
POOLING_GRADIENT = "select_and_scatter_add"

_CUTTING = frozenset({"slice", "split", "concatenate", "pad"})
"""What cuts values into parts, or puts them together: dimensions stay in their places."""

ReadingCopies = Mapping[tuple[int, float], Sequence[tuple[int, int]]]
"""Per spread operand and how many times larger its copy is, the places of the convolutions that read it, with the
position there."""

PLANE = 2
"""Images with more dimensions than this are read with their channels outermost."""


@once
def convolutions_of(program: Program) -> tuple[Operation, ...]:
    """The convolutions of a program."""
    return tuple(operation for operation in program.operations if operation.primitive.name == CONVOLUTION)


def copied_with_neighbours(problem: Problem, strategies: Mapping[int, Strategy]) -> set[tuple[int, int]]:
    """The operands of convolutions that are copied with rows of neighbours, by the operation's index and the operand's
    position."""
    found = ((o.index, strategies[o.index].halos) for o in convolutions_of(problem.program) if o.index in strategies)
    return {(index, halo.operand) for index, halos in found for halo in halos}


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
                block = problem.program.values[operand].total_bytes / problem.domain(operand).parts[layout]
                found += block * _times_larger(problem, operation, strategy, position)
    return found


def reordered_inputs(
    program: Program,
    order: Iterable[Operation],
    copied: Collection[tuple[int, int]] = (),
    entering: Mapping[int, int] = MappingProxyType({}),
) -> dict[int, tuple[Operation, int]]:
    """The step's arguments that convolutions read from a transposed copy, each with the first one and the position,
    also where they are ``entering`` loops as other values that stay as they are there.

    cuDNN reads images with their channels innermost, and filters with what they sum over; where there are three
    dimensions of space, these are innermost. What is computed is written so at once, and so is what is gathered, and
    what is ``copied`` with rows of neighbours; an argument that is read as it is stored is transposed. Filters that are
    reversed, for the gradient of images, are read from the same copy.
    """
    found: dict[int, tuple[Operation, int]] = {}
    if not convolutions_of(program):
        return found
    read = {value.index for value in program.values} - {*program.inputs}
    for operation in order:
        if operation.primitive.name != CONVOLUTION:
            continue
        numbers = operation.params["dimension_numbers"]
        for position, (outer, inner, *space) in enumerate((numbers.lhs_spec, numbers.rhs_spec)):
            operand = operation.operands[position]
            while isinstance(operand, int) and operand in entering:
                operand = entering[operand]
            if isinstance(operand, int) and operand not in read:
                read.add(operand)
                shape = program.values[operand].shape
                dims = (outer, inner, *space) if len(space) > PLANE else (outer, *space, inner)
                wanted = [dim for dim in dims if shape[dim] > 1]
                if wanted != sorted(wanted) and (operation.index, position) not in copied:
                    found[operand] = operation, position
    return found


def unreversed(program: Program) -> dict[int, int]:
    """Filters that convolutions read in reverse, which cuDNN does by itself, with what they are the reverse of."""
    filters = {operation.operands[1] for operation in convolutions_of(program)}
    reversing = (o for o in program.operations if o.primitive.name == "rev" and o.results[0] in filters)
    return {o.results[0]: o.operands[0] for o in reversing if isinstance(o.operands[0], int)}


def reordered_in(
    problem: Problem, order: Iterable[Operation], copied: Collection[tuple[int, int]]
) -> dict[int, tuple[Operation, int]]:
    """Those of a program with loops: filters that stay as they are while one runs are transposed before it."""
    entering = dict[int, int]()
    for links in problem.links.values():
        carried = {link.target for link in links.inside}
        for link in links.enter:
            if isinstance(link.source, int) and link.stacked is None and link.target not in carried:
                entering[link.target] = link.source
    return reordered_inputs(problem.program, order, copied, entering)


@dataclass(frozen=True, slots=True)
class _Window:
    """How a convolution goes through one dimension of its image: sizes without what dilates them."""

    image: int
    filters: int
    made: int
    low: int
    high: int
    spread: int  # elements of the image are so far apart
    dilation: int  # and those of the filters

    def changed_places(self) -> _Window:
        """The same where the image is taken for the filters, and these for the image."""
        more = (self.image - 1) * self.spread - (self.filters - 1) * self.dilation
        low, high = self.low + more, self.high + more
        return _Window(self.filters, self.image, self.made, low, high, self.dilation, self.spread)

    def padded(self) -> int:
        """The size of the image with all zeros written, and without what is cut off."""
        return (self.image - 1) * self.spread + 1 + self.low + self.high

    def unlike(self) -> tuple[int, int] | None:
        """The zeros to write before and behind an image so that cuDNN pads both ends alike for the gradient of filters;
        None if it would have to cut off some."""
        least = self.made + (self.filters - 1) * self.dilation - self.image - self.low
        high = min(max(self.low, least), least + self.dilation - 1)
        return None if min(self.low, high) < 0 else (self.low - min(self.low, high), high - min(self.low, high))


def spread_operands(
    program: Program, operations: Iterable[Operation], copied: Collection[tuple[int, int]] = ()
) -> dict[tuple[int, int], float]:
    """The operands of convolutions that are read from a copy with zeros between their elements, or around them, by the
    operation's index and the position, and how many times larger that is.

    Where filters are reversed, cuDNN computes the gradient of an image, without a copy. Where filters are larger than
    their images (the gradient of a transposed convolution's filters), XLA lets both change places, in a plane. Filters
    that are larger than what is made, and keep their place, are a gradient: cuDNN computes that of filters, and leaves
    space between their elements. All others are forward convolutions: XLA writes the zeros between the elements of an
    image, or around one that is not padded alike at both ends, and then those of filters too; and what has features
    where the convolution wants the batch is transposed, into a copy as large. An image that is ``copied`` all the same
    (its operation's index and position), with rows of neighbours or in an island, is so with what is around it.
    """
    found, lying = dict[tuple[int, int], float](), dict[int, tuple[int, int]]()
    for operation in operations if convolutions_of(program) else ():
        if operation.primitive.name == CONVOLUTION:
            turned = _turned(operation, lying)
            reverses = operation.operands[1] in _reversed(program) and _reverses(program, operation)
            if (operation.index, 0) in copied:
                times = float(prod(operation.params["lhs_dilation"]))
                found |= {(operation.index, 0): times} if times > 1 and not reverses else {}
            else:
                found |= {(operation.index, n): times for n, times in _spread(program, operation, reverses, turned)}
        elif operation.results:
            shape, cuts = program.values[operation.results[0]].shape, operation.primitive.name in _CUTTING
            for operand in operation.operands:
                if isinstance(operand, int) and operand in lying and (cuts or program.values[operand].shape == shape):
                    lying |= {r: lying[operand] for r in operation.results if r not in lying}
    return found


def _spread(
    program: Program, operation: Operation, reverses: bool, turned: Collection[int]
) -> Iterator[tuple[int, float]]:
    """The operands, by position, that are read from a copy with zeros, or ``turned``, and how many times larger each
    is."""
    windows, image, filters = _windows(program, operation), 0, 1
    grouped = operation.params["feature_group_count"] > 1
    alone = not grouped and operation.params["batch_group_count"] == 1
    change = alone and _change_places(windows)
    if change:
        windows, image, filters = [window.changed_places() for window in windows], 1, 0
    elif reverses and not grouped:
        return
    strides = any(stride > 1 for stride in operation.params["window_strides"])
    padding = [w.unlike() for w in windows]
    times: dict[int, float] = {}
    if not (reverses or change or strides or grouped) and _is_gradient(windows) and None not in padding:
        times[image] = prod((w.image + sum(more or ())) / w.image for w, more in zip(windows, padding, strict=True))
        times = {n: size for n, size in times.items() if size != 1}
    else:
        times = dict.fromkeys(turned, 1.0)
        if any(w.low != w.high or w.low < 0 or w.spread > 1 for w in windows):
            times[image] = prod(w.padded() / w.image for w in windows)
            if any(w.dilation > 1 for w in windows):
                times[filters] = prod(((w.filters - 1) * w.dilation + 1) / w.filters for w in windows)
    yield from times.items()


@once
def forward_convolutions(program: Program) -> frozenset[int]:
    """The convolutions, by index, that are neither the gradient of an image nor that of filters to cuDNN, and add
    channels up."""
    found = set[int]()
    for operation in convolutions_of(program):
        params, image = operation.params, operand_type(program, operation.operands[0])
        windows = _windows(program, operation)
        if operation.operands[1] in _reversed(program) and _reverses(program, operation):
            continue
        if _change_places(windows):
            windows = [window.changed_places() for window in windows]
        groups, strides = params["feature_group_count"], any(stride > 1 for stride in params["window_strides"])
        alone = groups == params["batch_group_count"] == 1
        gradient = alone and not strides and _is_gradient(windows)
        if not gradient and (groups == 1 or groups < image.shape[params["dimension_numbers"].lhs_spec[1]]):
            found.add(operation.index)
    return frozenset(found)


def _turned(operation: Operation, lying: dict[int, tuple[int, int]]) -> list[int]:
    """The operands, by position, whose features are what a convolution takes for the batch; ``lying`` has the
    dimensions that are the batch and the features of each image seen so far."""
    numbers, found = operation.params["dimension_numbers"], []
    for position, spec in enumerate((numbers.lhs_spec, numbers.rhs_spec)):
        operand = operation.operands[position]
        if isinstance(operand, int):
            if position == 0:
                lying.setdefault(operand, spec[:2])
            if lying.get(operand) == spec[1::-1]:
                found.append(position)
    lying.setdefault(operation.results[0], numbers.out_spec[:2])
    return found


@once
def _reversed(program: Program) -> frozenset[int]:
    """What is the reverse of something to XLA: not of what is scaled by one number, the reverse of which it scales."""
    makers = program.makers
    return frozenset(
        operation.results[0]
        for operation in program.operations
        if operation.primitive.name == "rev" and not _is_scaled(program, makers, operation.operands[0])
    )


def _is_scaled(program: Program, makers: Mapping[int, Operation], value: object) -> bool:
    """Whether a value is computed element by element from another one and one number."""
    maker = makers.get(value) if isinstance(value, int) else None
    if maker is None or maker.primitive.name not in _SCALING:
        return False
    for operand in maker.operands:
        spread = makers.get(operand) if isinstance(operand, int) else None
        source = spread.operands[0] if spread is not None and spread.primitive.name == "broadcast_in_dim" else operand
        if prod(operand_type(program, source).shape) == 1:
            return True
    return False


def _reverses(program: Program, operation: Operation) -> bool:
    """Whether a convolution with filters in reverse is the gradient of an image to cuDNN: not where these are of one
    element, where their elements lie apart, and where it takes strides (the gradient of a transposed convolution)."""
    windows = _windows(program, operation)
    if any(stride > 1 for stride in operation.params["window_strides"]):
        return False
    single = all(w.filters == w.spread == 1 for w in windows)
    return not single and all(w.dilation == 1 for w in windows)


def _change_places(windows: Sequence[_Window]) -> bool:
    """Whether filters are so large that XLA takes them for the image: not those with more dimensions than a plane."""
    return len(windows) <= PLANE and prod(w.filters for w in windows) > prod(w.image for w in windows)


def _is_gradient(windows: Sequence[_Window]) -> bool:
    """Whether a convolution is the gradient of its filters, by their sizes, as XLA tells it."""
    larger = [window.filters > window.made for window in windows]
    return all(w.spread == 1 for w in windows) and (
        any(larger) if any(w.dilation > 1 for w in windows) else all(larger)
    )


def _windows(program: Program, operation: Operation) -> list[_Window]:
    shapes = [operand_type(program, operand).shape for operand in operation.operands]
    shapes.append(program.values[operation.results[0]].shape)
    numbers, params = operation.params["dimension_numbers"], operation.params
    specs = (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)
    sizes = ([shape[dim] for dim in spec[2:]] for shape, spec in zip(shapes, specs, strict=True))
    low, high = zip(*params["padding"], strict=True)
    return [
        _Window(*found) for found in zip(*sizes, low, high, params["lhs_dilation"], params["rhs_dilation"], strict=True)
    ]


def spread_copies(
    order: Sequence[Operation], reading: ReadingCopies, made: Mapping[tuple[int, int], int] | None = None
) -> Iterator[tuple[Operation, int, float, int, int]]:
    """For each copy of a spread operand the first convolution that reads it, and its position there, how many times
    larger it is than the operand, and from which to which place of the order it lives: from where it is ``made``, if
    that is known."""
    for (_, times), places in reading.items():
        place, position = places[0]
        start = (made or {}).get((order[place].index, position), place)
        yield order[place], position, times, start, places[-1][0]


def spread_until(order: Sequence[Operation], reading: ReadingCopies) -> dict[tuple[int, int], int]:
    """Per operand of a convolution that is read from a copy with zeros, by the operation's index and the position, the
    place of the order where the copy is made."""
    return {(order[place].index, n): places[0][0] for places in reading.values() for place, n in places}


@once
def spread_once(program: Program) -> frozenset[tuple[int, int]]:
    """The operands of convolutions that are read from a copy with zeros, by the operation's index and the position."""
    return frozenset(spread_operands(program, program.operations))


@once
def spread_again(program: Program) -> frozenset[tuple[int, int]]:
    """The operands of convolutions of which a convolution before has a copy with zeros, by the operation's index and
    the position."""
    found = reading_copies(program, program.operations)
    return frozenset((program.operations[place].index, n) for places in found.values() for place, n in places[1:])


def reading_copies(
    program: Program, order: Sequence[Operation], copied: Collection[tuple[int, int]] = ()
) -> ReadingCopies:
    """The copies that convolutions read where operations run in an order."""
    spread = spread_operands(program, order, copied)
    found: dict[tuple[int, float], list[tuple[int, int]]] = {}
    for place, operation in enumerate(order if spread else ()):
        for position, operand in enumerate(operation.operands):
            if isinstance(operand, int) and (operation.index, position) in spread:
                found.setdefault((operand, spread[operation.index, position]), []).append((place, position))
    return found
