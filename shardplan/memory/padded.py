"""What XLA:GPU pads for products: what it turns before, which is in memory and which other products read as well; and
how large the products' results are then, of which the kernels that read them take a part.

Products of 16 bits read copies that are padded to multiples of 8. A kernel that moves another dimension to the
innermost place does so in tiles, and pads nothing: that is the next kernel's. Keys with a bias, of 197 tokens, so are
stored as they are turned for the scores. The gradient of the queries, which needs them in another order, is computed
from these, and not from the result of the product that made them.

>>> import jax, jax.numpy as jnp, shardplan
>>> def turned(tokens):
...     def step(x, w, bias, q):
...         keys = jnp.einsum("btf,fhd->bthd", x, w) + bias
...         scores = jnp.einsum("bqhd,bkhd->bhqk", q, keys)
...         return jnp.einsum("bhqk,bkhd->bhqd", scores, keys)
...     shapes = (2, tokens, 64), (64, 4, 32), (4, 32), (2, 16, 4, 32)
...     program = shardplan.plan(step, 1, *(jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes)).program
...     pointwise = frozenset(o.index for o in program.operations if o.primitive.name == "add")
...     return [program.makers[value].primitive.name for value in turned_before_padding(program, pointwise)]
>>> turned(96), turned(97)
([], ['add'])
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod

from shardplan.memory.fusion import readers_in
from shardplan.memory.lying import lying_of
from shardplan.memory.products import MULTIPLE, PRODUCT, product_operands
from shardplan.once import once
from shardplan.program import Operation, Program
from shardplan.strategy import operand_type

MOVING = frozenset(
    {"transpose", "reshape", "squeeze", "expand_dims", "slice", "split", "dynamic_slice", "gather", "rev"}
    | {"broadcast_in_dim", "copy", "copy_p", "stop_gradient"}
)
"""Primitives that move what they read, or repeat it."""


@once
def turned_before_padding(
    program: Program, pointwise: Collection[int], reshaped: Collection[int] = frozenset()
) -> frozenset[int]:
    """The values that are stored as they are turned for the first product that reads them, which are then padded for
    that: of such as are computed from a product's result alone, and that products read in several orders."""
    lying, orders = lying_of(program, frozenset(pointwise)).orders, dict[int, list[tuple[tuple[int, ...], bool]]]()
    for _, read in sorted(product_operands(program, frozenset(pointwise), frozenset(reshaped)).items()):
        orders.setdefault(read.value, []).append((read.order, read.padding > 1))
    found = set[int]()
    for value, ((first, padded), *others) in orders.items():
        maker = program.makers.get(value)
        if maker is None or maker.index not in pointwise or not padded or value in lying:
            continue
        written = range(len(program.values[value].shape))
        if turns(program, value, first, written) and any(order != first for order, _ in others):
            found.update({value} if is_moved(program, pointwise, value) else ())
    return frozenset(found)


@once
def padded_results(
    program: Program, pointwise: Collection[int], reshaped: Collection[int] = frozenset()
) -> dict[int, float]:
    """How many times as large the results of products with padded operands are in memory, by value: the kernels that
    read them take a part of what the product wrote, where such kernels alone read them."""
    operands, readers, found = product_operands(program, pointwise, reshaped), readers_in(program), dict[int, float]()
    outputs = {o for region in program.regions for o in region.outputs if isinstance(o, int)}
    for index in {index for (index, _), read in operands.items() if read.padding > 1}:
        operation = program.operations[index]
        [result] = operation.results
        reading = readers.get(result, ())
        if result not in outputs and reading and all(reader.primitive.name != PRODUCT for reader in reading):
            sides = [size for size in _sides(program, operation) if size > 1]
            found[result] = prod(-(-size // MULTIPLE) * MULTIPLE / size for size in sides)
    return found


def _sides(program: Program, product: Operation) -> list[int]:
    """Of each operand of a product, the size of all that is neither summed over nor of the batch."""
    sides = zip(product.operands, *product.params["dimension_numbers"], strict=True)
    shapes = [(operand_type(program, operand).shape, {*summed, *batch}) for operand, summed, batch in sides]
    return [prod(size for dim, size in enumerate(shape) if dim not in others) for shape, others in shapes]


def turns(program: Program, value: int, order: Sequence[int], lying: Sequence[int]) -> bool:
    """Whether an order of a value's dimensions has another one innermost than that in which it lies."""
    innermost = [dim for dim in lying if program.values[value].shape[dim] > 1][-1:]
    return [*order[-1:]] != innermost


def is_moved(program: Program, pointwise: Collection[int], value: int) -> bool:
    """Whether a value is computed element by element from one that a product made, is moved, or is an argument, and
    from nothing else but what is repeated along dimensions."""
    values = program.values
    shape = values[value].shape
    while (maker := program.makers.get(value)) is not None and maker.index in pointwise:
        whole = [o for o in maker.operands if isinstance(o, int) and values[o].shape == shape]
        whole = [o for o in whole if o not in program.makers or program.makers[o].primitive.name != "broadcast_in_dim"]
        if len(whole) != 1:
            return False
        [value] = whole
    return maker is None or maker.primitive.name in MOVING or maker.primitive.name == PRODUCT
