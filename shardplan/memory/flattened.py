"""What XLA computes as matrices, of what is computed from products of more dimensions.

A product with several rows', columns' or batch dimensions is one of matrices, and its result a view of a matrix in
another shape; so is a transposition of it that moves nothing. XLA moves such views, and what the program reshapes,
behind what is computed element by element, as long as all that reads a view can be computed so; what is left reads
through a view. Of what two operations of a kernel read each through a view of its own, XLA counts that the kernel goes
through it twice.

>>> import jax, jax.numpy as jnp, shardplan
>>> def flat(function):
...     x, w = jax.ShapeDtypeStruct((4, 8, 64), "float32"), jax.ShapeDtypeStruct((64, 64), "float32")
...     program = shardplan.plan(lambda x, w: function(x, x @ w), 1, x, w).program
...     made = flattened(shardplan.plan(lambda x, w: function(x, x @ w), 1, x, w).schedule.problem)
...     return [o.primitive.name for o in program.operations if not made.keys().isdisjoint(o.results)]
>>> flat(lambda x, h: jnp.tanh(2 * h) + x), flat(lambda x, h: h * jnp.tanh(h))
(['dot_general', 'mul', 'tanh'], ['dot_general'])
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from shardplan.memory.fusion import pointwise_operations, readers_of
from shardplan.memory.lying import lies_in, lying_of
from shardplan.memory.products import is_multiplied
from shardplan.once import once
from shardplan.problem import Problem
from shardplan.program import Operation, Program
from shardplan.strategy import operand_type

Shape = tuple[int, ...]


@once
def flattened(problem: Problem) -> dict[int, Shape]:
    """The values that are computed in another shape, each with that shape."""
    moving = _Moving(problem)
    moving.start()
    while found := moving.movable():
        moving.move(found)
    return moving.shapes


class _Moving:
    """Views as they are moved, all at once whose readers can be computed as what they are views of."""

    def __init__(self, problem: Problem) -> None:
        self.shapes: dict[int, Shape] = {}
        self._program, self._pointwise = problem.program, pointwise_operations(problem)
        self._generated = problem.generated
        self._orders = lying_of(problem.program, self._pointwise).orders
        self._readers = readers_of(problem.program.operations)
        self._waiting: dict[int, int] = {}  # per operation, how many of its operands are no views yet
        self._candidates: dict[int, Operation] = {}

    def start(self) -> None:
        """Finds what products and reshapes make."""
        for operation in self._program.operations:
            if operation.primitive.name == "reshape":
                shown = operation.operands[0]
                if not isinstance(shown, int) or shown not in self.shapes:
                    self._show(operation.results[0], operand_type(self._program, shown).shape)
            elif is_multiplied(self._program, operation):
                shape = matrices_of(self._program, operation)
                if len(shape) < len(self._program.values[operation.results[0]].shape):
                    self._show(operation.results[0], shape)

    def move(self, operations: Mapping[int, Shape]) -> None:
        """Moves views behind these operations."""
        for index, shape in operations.items():
            for result in self._candidates.pop(index).results:
                self._show(result, shape)

    def movable(self) -> dict[int, Shape]:
        """The operations that views can be moved behind, each with the shape that it is computed in then."""
        left = {index: shape for index, o in self._candidates.items() if (shape := self._shape(o)) is not None}
        while True:
            views = {value for index in left for value in self._reads(self._candidates[index])}
            stuck = {value for value in views if not all(self._moves(o, left) for o in self._readers[value])}
            if not stuck:
                return left
            left = {i: shape for i, shape in left.items() if stuck.isdisjoint(self._reads(self._candidates[i]))}

    def _show(self, value: int, shape: Shape) -> None:
        """Lets a value be a view of what has another shape."""
        known = value in self.shapes  # a view of a view is one of what that shows
        self.shapes[value] = shape
        for index in dict.fromkeys(reader.index for reader in self._readers.get(value, ())):
            reader = self._program.operations[index]
            if index in self._pointwise and not known and reader.primitive.name != "broadcast_in_dim":
                self._waiting[index] = self._waiting.get(index, len(set(self._reads(reader)))) - 1
                if not self._waiting[index]:
                    self._candidates[index] = reader
            elif (
                reader.primitive.name == "reshape" and self._program.values[reader.results[0]].shape != shape
            ) or self._stays(reader):
                self._show(reader.results[0], shape)

    def _stays(self, operation: Operation) -> bool:
        """Whether an operation is a transposition that moves nothing."""
        result = operation.results[0] if operation.primitive.name == "transpose" else None
        return result is not None and lies_in(self._program, self._orders, result) != result

    def _moves(self, reader: Operation, moving: Mapping[int, Shape]) -> bool:
        """Whether an operation reads no view, or moves it."""
        ends = reader.primitive.name == "reshape" or is_multiplied(self._program, reader) or self._stays(reader)
        return ends or reader.index in moving or not self.shapes.keys().isdisjoint(reader.results)

    def _reads(self, operation: Operation) -> Iterator[int]:
        """The operands that have to be views, which what is spread from a number, or from a vector, need not."""
        makers = self._program.makers
        for operand in operation.operands:
            if isinstance(operand, int) and (
                operand not in makers or makers[operand].primitive.name != "broadcast_in_dim"
            ):
                yield operand

    def _shape(self, operation: Operation) -> Shape | None:
        """The shape that an operation is computed in where what it reads is, and what else it reads can be; or None."""
        values = self._program.values
        [shape, *others] = {(self.shapes[value], values[value].shape) for value in self._reads(operation)}
        if others:
            return None
        spread = [o for o in operation.operands if isinstance(o, int) and o not in self.shapes]
        order = self._orders.get(operation.results[0], range(len(shape[1])))
        kept = [_is_spread(self._program, self._program.makers[o], *shape, order) for o in spread]
        return shape[0] if all(kept) else None


def _is_spread(program: Program, spreading: Operation, flat: Shape, shape: Shape, order: Sequence[int]) -> bool:
    """Whether something can be spread to another shape as well: a number, a vector, or what has dimensions of both.
    ``order``: the dimensions as they lie, from the outermost inwards."""
    tensor, dimensions = operand_type(program, spreading.operands[0]), spreading.params["broadcast_dimensions"]
    if sum(size > 1 for size in tensor.shape) <= 1:
        return True
    same = {(prod(flat[:place]), size) for place, size in enumerate(flat)}
    lying = [shape[dim] for dim in order]
    places = [order.index(dimension) for dimension in dimensions]
    return all((prod(lying[:place]), lying[place]) in same for place in places)


def matrices_of(program: Program, product: Operation) -> Shape:
    """The shape that a library computes a product in: rows and columns, of all matrices one after another."""
    contracted, batch = product.params["dimension_numbers"]
    sides = [operand_type(program, operand).shape for operand in product.operands]
    free = [
        prod([size for place, size in enumerate(side) if place not in {*c, *b}])
        for side, c, b in zip(sides, contracted, batch, strict=True)
    ]
    return (*([prod([sides[0][place] for place in batch[0]])] if batch[0] else []), *free)
