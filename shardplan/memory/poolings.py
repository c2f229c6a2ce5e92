"""The kernels of a pooling's gradient: of the places that it scatters to, of the zeros, and the scatter itself.

XLA:GPU finds the place of each window's largest element first, an int32 per dimension. That kernel reads the image and
nothing else, so that it may run long before the gradient is there, and the image need not be in memory after it; the
places are, until the scatter. Zeros are one more kernel, which reads nothing, and larger than the image by what is put
before it. Where the image was rectified, the rectifier's kernel has made the zeros (`shardplan.memory.pooled`). Where
several images of one size were (a VGG), their places are found just before the scatter: that is what was compiled.
What is added to another gradient needs no zeros: that is what the scatter writes into.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

from shardplan.memory.combining import Gather
from shardplan.memory.convolutions import POOLING_GRADIENT
from shardplan.memory.copying import copying_kernel
from shardplan.memory.fusion import readers_in
from shardplan.memory.pooled import added_poolings, rectifiers_of_poolings
from shardplan.memory.sizes import bytes_in, layout_left
from shardplan.memory.times import BYTES_MOVED
from shardplan.memory.workspaces import window_bytes
from shardplan.program import Operation, Program

if TYPE_CHECKING:
    from shardplan.memory.graph import Graph
    from shardplan.memory.liveness import Lifetimes

IMAGE = 1
"""The position of the image among the operands of a pooling's gradient."""

_ALONE = 2
"""A rectifier of images of one size that is alone, and its gradient."""


def take_poolings_apart(graph: Graph) -> None:
    """Adds kernels to a graph for the places of poolings' gradients, and for zeros where no rectifier makes them."""
    problem, rectified = graph.schedule.problem, rectifiers_of_poolings(graph.program)
    added = added_poolings(graph.program)
    for index in sorted(graph.reads):
        operation, strategy = graph.program.operations[index], graph.schedule.assignment.strategies.get(index)
        if operation.primitive.name != POOLING_GRADIENT or strategy is None or len(rectified.get(index, ())) > _ALONE:
            continue
        if index not in rectified and index not in added:
            left = bytes_in(graph.schedule, operation.results[0], layout_left(problem, operation, strategy, 0))
            zeros = left * times_padded(operation, graph.program)
            graph.filling[index] = graph.add(index - 0.5, set(), set(), zeros / BYTES_MOVED)
            graph.needs[index].add(graph.filling[index])
        gradient, image, layout = operation.operands[0], operation.operands[IMAGE], strategy.operands[IMAGE]
        if isinstance(image, int) and layout is not None:
            moved = bytes_in(graph.schedule, image, layout) + sum(window_bytes(operation, problem, strategy))
            places = copying_kernel(graph, (index, operation), Gather(image, layout), moved / BYTES_MOVED)
            gone = graph.sources(image) - (graph.sources(gradient) if isinstance(gradient, int) else frozenset())
            graph.needs[index] -= {maker for value in gone if (maker := graph.maker(value)) is not None}
            graph.needs[index].add(places)
            graph.values[index] -= gone
            graph.beside[index, IMAGE] = places
            readers = (reader.index for reader in readers_in(graph.program).get(image, ()) if reader.index < index)
            graph.place[places] = max(readers, default=index - 1) + 0.5


def times_padded(gradient: Operation, program: Program) -> float:
    """How many times the size of an image the zeros have that its pooling's gradient scatters into: rows and columns
    that are put before it are a part of them, those behind it are not."""
    shape = program.values[gradient.results[0]].shape
    padded = zip(shape, gradient.params["padding"], strict=True)
    return prod((before + size + after) / size for size, (before, after) in padded if before)


def zeros_of_poolings(lifetimes: Lifetimes, program: Program) -> Iterator[tuple[Operation, int, int]]:
    """Pooling gradients, and from which to which place the zeros are in memory that they scatter into."""
    for gradient, (rectifier, *others) in rectifiers_of_poolings(program).items():
        place = lifetimes.place[gradient]
        until = max((lifetimes.place[other.index] for other in others), default=place - 1)
        yield lifetimes.order[place], lifetimes.place[rectifier.index], until
    for gradient, first in lifetimes.filled.items():  # or a copy of these, which a kernel makes some time before
        place, operation = lifetimes.place[gradient], program.operations[gradient]
        if operation.primitive.name == POOLING_GRADIENT and first < place:
            yield operation, first, place - 1
