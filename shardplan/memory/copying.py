"""When the transposed and padded copies exist that products read (`shardplan.memory.products`).

A copy lives from the first product that reads it to the last. What is computed, and copied in several orders, or read
as it is besides, one kernel writes in all of these: so a copy that the backward pass reads is there from the forward
pass on. What is but moved on the way, as the heads of a product's result are, is moved for each order by itself.

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
...     copies = product_copies(problem.program, order, operands, kernels_of(problem))
...     return [(copy.first, copy.last) for operand, copy in copies.items() if operand.order != (0, 1, 2, 3)]
>>> spans(jnp.tanh), spans(lambda x: x)
([(1, 1), (1, 2)], [(0, 0), (1, 1)])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardplan.memory.products import ProductOperand
from shardplan.memory.recomputing import Kernels
from shardplan.program import Operation, Program

_MOVING = frozenset(
    {"transpose", "reshape", "squeeze", "expand_dims", "slice", "split", "dynamic_slice", "gather", "rev"}
    | {"broadcast_in_dim", "copy", "copy_p", "stop_gradient"}
)


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy: of the operand at a position of the first product that reads it, in memory from one place to another."""

    reader: Operation
    position: int
    first: int
    last: int


def product_copies(
    program: Program, order: Sequence[Operation], copied: Mapping[tuple[int, int], ProductOperand], kernels: Kernels
) -> dict[ProductOperand, Copy]:
    """The copies that products read, by what is copied, where operations run in ``order``.

    ``copied`` are the operands that are read as copies, by the operation's index and their position.
    """
    copies: dict[ProductOperand, Copy] = {}
    began: dict[int, int] = {}  # per value that is computed, where the kernel runs that writes its copies
    makers = {result: operation for operation in order for result in operation.results}
    places = {operation.index: place for place, operation in enumerate(order)}
    for place, operation in enumerate(order):
        for position in range(len(operation.operands)):
            copy = copied.get((operation.index, position))
            if copy is None:
                continue
            known = copies.get(copy)
            if known is None:
                first, maker = place, makers.get(copy.value)
                if maker is not None and maker.index in kernels.fused and maker.primitive.name not in _MOVING:
                    stored = copy.value in kernels.read or copy.value in kernels.stored
                    first = began.setdefault(copy.value, places[maker.index] if stored else place)
                known = Copy(operation, position, first, place)
            copies[copy] = replace(known, last=place)
    return copies
