"""When the transposed and padded copies exist that products read (`shardplan.memory.products`).

A copy lives from the first product that reads it to the last. What is computed, and copied in several orders, or read
as it is besides, one kernel writes in all of these: so a copy that the backward pass reads is there from the forward
pass on. What is but moved on the way, as the heads of a product's result are, is moved for each order by itself, and so
is what is computed from it element by element (keys with a bias), if the first order that is read has another dimension
innermost: a kernel that transposes on the way in makes nothing that is transposed otherwise. The later kernel computes
it anew, from what is held until then.

Kernels that only move what one product made are one where they write as much, in one order or, where none goes in
tiles, in any: of queries, keys and values that are cut out of one product, the forward pass' first kernels write what
the backward pass reads too, and the product's result is gone then. Not so where they read different parts of the
product's own matrix, which XLA sees do not overlap: of products that it has merged, or of rows without a sequence.
Where a sequence is between, the matrix is seen in another shape first.

What is computed from a product's result that lies otherwise than it is written (the probabilities of heads that share
their keys) is copied by one kernel in one order alone, where another dimension is innermost, if it is stored, and
nothing is turned in tiles there already; all else kernels of their own compute or copy, for the first product that
reads it. Where few such heads lie innermost, no kernel
turns them in tiles (`shardplan.memory.coalescing`; odd numbers of 16 bits neither, which are not packed), and those
that do not are one: the copy for the gradient of the values is made in the forward pass, with the one that is
multiplied by these. A kernel that goes through rows which it has reduced (`shardplan.memory.rows`) writes one result:
copies of that are kernels of their own.

>>> import jax, jax.numpy as jnp, shardplan
>>> from shardplan.memory.products import product_operands
>>> from shardplan.memory.recomputing import kernels_of
>>> def spans(compute):
...     def step(x, keys, values):
...         heads = compute(x)
...         return jnp.einsum("bqhd,bhdk->bhqk", heads, keys), jnp.einsum("bqhd,bhqe->bhde", heads, values)
...     shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((2, 64, 4, 8), (2, 4, 8, 16), (2, 4, 64, 16))]
...     problem = shardplan.plan(step, 1, *shapes).schedule.problem
...     operands, order = product_operands(problem.program), problem.program.operations
...     copies = product_copies(problem, order, operands, kernels_of(problem))
...     return [(copy.first, copy.last) for operand, copy in copies.items() if operand.order != (0, 1, 2, 3)]
>>> spans(jnp.tanh), spans(lambda x: x)
([(1, 1), (1, 2)], [(0, 0), (1, 1)])
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from shardplan.memory.coalescing import is_read_apart
from shardplan.memory.combining import Gather
from shardplan.memory.fusion import pointwise_operations, readers_in
from shardplan.memory.lying import PRODUCT, lying_of
from shardplan.memory.padded import MOVING, is_moved, turned_before_padding, turns
from shardplan.memory.products import ProductOperand
from shardplan.memory.recomputing import Kernels
from shardplan.memory.rows import made_by_rows
from shardplan.problem import Problem
from shardplan.program import Operation, Program

if TYPE_CHECKING:
    from shardplan.memory.graph import Graph

_NO_KERNEL = MOVING | {"optimization_barrier"}
"""What makes nothing: a copy of what it gives is a kernel of its own."""

_TILED = 8
"""The size of the innermost dimension from which on kernels that move it do so in tiles."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy: of the operand at a position of the first product that reads it, in memory from one place to another."""

    reader: Operation
    position: int
    first: int
    last: int


def product_copies(
    problem: Problem,
    order: Sequence[Operation],
    copied: Mapping[tuple[int, int], ProductOperand],
    kernels: Kernels,
    made: Mapping[tuple[int, int], int] | None = None,
) -> dict[ProductOperand, Copy]:
    """The copies that products read, by what is copied, where operations run in ``order``.

    ``copied`` are the operands that are read as copies, by the operation's index and their position; ``made`` says
    before which place the kernels run that only copy, where that is known.
    """
    copying, copies = _Copying(problem, order, kernels), dict[ProductOperand, Copy]()
    for place, index, position in sorted((copying.places[index], index, position) for index, position in copied):
        copy, operation = copied[index, position], order[place]
        begins = copying.begins(copy, operation)
        begins = (made or {}).get((index, position), place) if begins == place else begins
        known = copies.get(copy) or Copy(operation, position, begins, place)
        copies[copy] = replace(known, last=place)
    return copies


def written_by(
    problem: Problem, order: Sequence[Operation], copied: Mapping[tuple[int, int], ProductOperand], kernels: Kernels
) -> dict[ProductOperand, Operation | None]:
    """The operation with which each copy is written: the one whose kernel makes what is copied, or another reader that
    comes first; None where a kernel only copies for the first reader."""
    places = {operation.index: place for place, operation in enumerate(order)}
    found = product_copies(problem, order, copied, kernels)
    alone = {read: copy.first == places[copy.reader.index] for read, copy in found.items()}
    return {read: None if alone[read] else order[copy.first] for read, copy in found.items()}


def written_otherwise(problem: Problem, place: Mapping[int, int], copies: Mapping[ProductOperand, Copy]) -> set[int]:
    """The operations, by index, whose kernels write copies as well, in another order or larger: they read what they
    compute these from elsewhere than where they write it."""
    lying, makers = lying_of(problem.program, pointwise_operations(problem)).orders, problem.program.makers
    found = set[int]()
    for read, copy in copies.items():
        maker = makers.get(read.value)
        if maker is not None and place.get(maker.index) == copy.first:
            written = [dim for dim in lying.get(read.value, sorted(read.order)) if dim in read.order]
            found.update({maker.index} if [*read.order] != written or read.padding > 1 else ())
    return found


class _Copying:
    """Which kernels write copies, and where these run."""

    def __init__(self, problem: Problem, order: Sequence[Operation], kernels: Kernels) -> None:
        self._program, self._kernels = problem.program, kernels
        self._pointwise = pointwise_operations(problem)
        lying = lying_of(problem.program, self._pointwise)
        self._lying, self._tiled = lying.orders, _turned_in_tiles(problem.program, lying.turned, kernels)
        self._makers = problem.program.makers
        in_memory = kernels.read | kernels.stored
        self._padded = turned_before_padding(problem.program, self._pointwise, kernels.reshaped)
        self._by_rows = made_by_rows(problem.program, self._pointwise, kernels.fused, in_memory)
        self.places = {operation.index: place for place, operation in enumerate(order)}
        """Per operation, by index, its place in the order."""
        self._beside: dict[int, ProductOperand] = {}  # per value that lies otherwise, what its kernel writes as well
        self._began: dict[int, int | None] = {}  # per value, where one kernel writes all copies; None: each its own
        self._moved: dict[tuple[Hashable, int], int] = {}  # per kernel that only moves, and region, where it runs

    def begins(self, copy: ProductOperand, reader: Operation) -> int:
        """Where a copy is written that a product reads first."""
        maker, value, place = self._makers.get(copy.value), copy.value, self.places[reader.index]
        if maker is None or maker.index not in self._kernels.fused or maker.primitive.name in _NO_KERNEL:
            return self._moved.setdefault((self._moving_kernel(copy), reader.region), place)
        if value in self._by_rows or copy.rounded:
            return place
        stored = value in self._kernels.read or value in self._kernels.stored
        made = self.places[maker.index] if stored else place
        if value in self._lying:
            turned = turns(self._program, value, copy.order, self._lying[value])
            if turned and not stored and is_read_apart(self._program, value, copy.order, self._lying[value]):
                self._began.setdefault(value, place)
                return self._began[value] or place
            alone = not turned or not stored or value in self._tiled or self._beside.setdefault(value, copy) != copy
            return place if alone else made
        if value not in self._began:
            written = range(len(self._program.values[value].shape))
            apart = not stored and turns(self._program, value, copy.order, written)
            apart = (apart and is_moved(self._program, self._pointwise, value)) or value in self._padded
            self._began[value] = None if apart else made
        began = self._began[value]
        return place if began is None else began

    def _moving_kernel(self, copy: ProductOperand) -> Hashable:
        """The kernel that copies what is but moved on the way from a library's result, told apart from others."""
        values, value = self._program.values, copy.value
        part, taken = value, value  # the outermost part on the way, and what it is taken from
        while (maker := self._makers.get(value)) is not None and maker.primitive.name in MOVING:
            moved = maker.operands[0]
            if not isinstance(moved, int):
                return copy
            if values[moved].total_bytes > values[value].total_bytes:
                part, taken = value, moved
            value = moved
        if maker is None:
            return copy
        batch = len(maker.params["dimension_numbers"][1][0]) if maker.primitive.name == PRODUCT else 0
        shape, viewed = values[copy.value].shape, len(values[taken].shape) > batch + 2
        tiles = (shape, copy.order) if _moves_in_tiles(shape, copy.order) else None
        return value if viewed else part, prod(shape), tiles, copy.rounded


def _turned_in_tiles(program: Program, turned: Mapping[int, Sequence[int]], kernels: Kernels) -> set[int]:
    """What kernels make that turn something in tiles on the way: they turn nothing else."""
    readers, in_memory = readers_in(program), kernels.read | kernels.stored
    stack = [value for value, order in turned.items() if not is_read_apart(program, value, order)]
    found = {*stack}
    while stack:
        for reader in readers.get(stack.pop(), ()):
            if reader.index in kernels.fused:
                stack += [result for result in reader.results if result not in found and result not in in_memory]
                found.update(reader.results)
    return found


def _moves_in_tiles(shape: Sequence[int], order: Sequence[int]) -> bool:
    """Whether a kernel that writes dimensions in another order goes through them in tiles: where others are innermost
    then, of 16 elements at least, or 8 by 64."""
    runs: list[list[int]] = []  # dimensions that stay side by side
    for dim in (dim for dim in order if shape[dim] > 1):
        if runs and all(shape[between] == 1 for between in range(runs[-1][-1] + 1, dim)) and runs[-1][-1] < dim:
            runs[-1].append(dim)
        else:
            runs.append([dim])
    if len(runs) < 2 or runs[-1] == max(runs):
        return False
    sizes = [prod(shape[dim] for dim in run) for run in (runs[-1], max(runs))]
    return min(sizes) >= 2 * _TILED or (min(sizes) >= _TILED and prod(sizes) >= 64 * _TILED)


def copying_kernel(graph: Graph, reader: tuple[int, Operation], read: Gather, takes: float) -> int:
    """The kernel that copies what an operation of a node reads, as a node."""
    node, operation = reader
    sources = graph.sources(read.value)
    makers = {maker for value in sources if (maker := graph.maker(value)) is not None}
    ends = {graph.reduced[maker] for maker in makers & graph.reduced.keys()}
    needs, values = graph.needs[node] & (makers | ends), graph.values[node] & sources
    alone = replace(read, alone=operation.index)  # what this reader has brought anew: another copy may come later
    brought = (alone if alone in graph.gathers else read, *graph.brought(read.value))
    needs |= {graph.gathers[gather] for gather in brought if gather in graph.gathers}
    return graph.add(node - 0.5, needs, values, takes)
