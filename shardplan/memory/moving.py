"""What kernels store between products and what lies otherwise (`shardplan.memory.transposed`).

Kernels move what products wrote, and move back what products read: what is moved already is stored before that, and
what a transform and products read of one result is stored as either of them does.

>>> import jax, jax.numpy as jnp, shardplan
>>> def step(weights, x):
...     hidden = jnp.tanh(x @ weights)
...     return jnp.fft.rfft(hidden, axis=1), hidden @ weights
>>> shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, 64), (4, 64, 64))]
>>> program = shardplan.plan(step, 1, *shapes).program
>>> pointwise = frozenset(o.index for o in program.operations if o.primitive.name == "tanh")
>>> [program.makers[value].primitive.name for value in turned_back(program, pointwise)[0]]
['tanh']
>>> [program.makers[value].primitive.name for value in moved_for_transforms(program, pointwise)]
['dot_general']
"""

from __future__ import annotations

from collections.abc import Collection

from shardplan.memory.lying import lying_of
from shardplan.memory.padded import turns
from shardplan.memory.products import PRODUCT, product_operands
from shardplan.once import once
from shardplan.program import Program


@once
def turned_back(program: Program, pointwise: Collection[int]) -> tuple[frozenset[int], frozenset[int]]:
    """What is computed of what kernels have moved, and products read with another dimension innermost: in one order, in
    which the kernels that make it write it, or in several ones, for each of which it is copied from where it is stored
    as it lies."""
    lying, orders = lying_of(program, pointwise), dict[int, set[tuple[int, ...]]]()
    for read in product_operands(program, pointwise).values() if lying.moved else ():
        if read.copied and read.value in lying.orders:
            orders.setdefault(read.value, set()).add(read.order)
    back = {v: some for v, some in orders.items() if any(turns(program, v, order, lying.orders[v]) for order in some)}
    several = frozenset(value for value, some in back.items() if len(some) > 1)
    return frozenset(back) - several, several


@once
def moved_for_transforms(program: Program, pointwise: Collection[int]) -> frozenset[int]:
    """What products wrote of which kernels compute, where it lies otherwise, what Fourier transforms read: it is stored
    as it lies there, too."""
    lying, makers, reaching = lying_of(program, pointwise), program.makers, set[int]()  # what transforms come from
    for operation in reversed(program.operations if lying.moved else ()):
        shown = operation.index in pointwise or operation.primitive.name == "transpose"
        if operation.primitive.name == "fft" or (shown and not reaching.isdisjoint(operation.results)):
            reaching.update(operand for operand in operation.operands if isinstance(operand, int))
    read = {o for value in lying.moved & reaching for o in makers[value].operands if isinstance(o, int)}
    made = {value for value in read & makers.keys() if makers[value].primitive.name == PRODUCT}
    return frozenset(made | (read & lying.added))
