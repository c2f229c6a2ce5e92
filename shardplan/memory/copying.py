"""When the transposed and padded copies exist that products read (`shardplan.memory.products`).

A copy lives from the first product that reads it to the last. What is computed, and copied in several orders, or read
as it is besides, one kernel writes in all of these: so a copy that the backward pass reads is there from the forward
pass on. What is but moved on the way, as the heads of a product's result are, is moved for each order by itself.

What is computed from a product's result that lies otherwise than it is written (the probabilities of heads that share
their keys) is copied by one kernel in one order alone, where another dimension is innermost, if it is stored; all else
kernels of their own compute or copy, for the first product that reads it.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardplan.memory.fusion import pointwise_operations
from shardplan.memory.lying import lying_of
from shardplan.memory.products import ProductOperand
from shardplan.memory.recomputing import Kernels
from shardplan.problem import Problem
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
    problem: Problem, order: Sequence[Operation], copied: Mapping[tuple[int, int], ProductOperand], kernels: Kernels
) -> dict[ProductOperand, Copy]:
    """The copies that products read, by what is copied, where operations run in ``order``.

    ``copied`` are the operands that are read as copies, by the operation's index and their position.
    """
    lying = lying_of(problem.program, pointwise_operations(problem)).orders
    beside: dict[int, ProductOperand] = {}  # per value that lies otherwise, the copy that the kernel writes as well
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
                    made = places[maker.index] if stored else place
                    if copy.value not in lying:
                        first = began.setdefault(copy.value, made)
                    elif stored and _turns(problem.program, copy, lying[copy.value]):
                        first = made if beside.setdefault(copy.value, copy) == copy else place
                known = Copy(operation, position, first, place)
            copies[copy] = replace(known, last=place)
    return copies


def _turns(program: Program, copy: ProductOperand, lying: Sequence[int]) -> bool:
    """Whether a copy has another dimension innermost than the value has that lies in this order of its dimensions."""
    innermost = [dim for dim in lying if program.values[copy.value].shape[dim] > 1][-1:]
    return [*copy.order[-1:]] != innermost
