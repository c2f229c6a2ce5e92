"""Stacks that loops read in another order of dimensions than they lie in.

XLA decides for each loop in which order the slices of a stack lie that it reads. Where a product or a convolution asks
for another order than that in which a loop before has written the stack, the whole stack is copied before the loop that
reads it.

>>> import jax, jax.numpy as jnp, shardplan
>>> def step(keys, x):
...     def layer(x, keys):
...         return jnp.einsum("bhqk,bkhd->bqhd", jnp.einsum("bqhd,bkhd->bhqk", x, keys), keys), None
...     return jax.lax.scan(layer, x, keys)[0]
>>> keys, x = (jax.ShapeDtypeStruct((*some, 2, 16, 4, 8), "float32") for some in ((3,), ()))
>>> program = shardplan.plan(step, 1, keys, x).program
>>> [lies_turned(program, frozenset(), value) for value in program.regions[1].inputs]
[True, True]
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from shardplan import _jax
from shardplan.memory.convolutions import CONVOLUTION, PLANE
from shardplan.memory.fusion import readers_in
from shardplan.memory.products import product_operands
from shardplan.once import once
from shardplan.program import Operation, Program


@once
def lies_turned(program: Program, pointwise: Collection[int], value: int) -> bool:
    """Whether products or convolutions read a value, or what is computed of its elements, otherwise than it is written.

    ``pointwise`` are the operations, by index, that compute element by element.
    """
    readers, operands = readers_in(program), product_operands(program, pointwise)
    dims = {value: tuple(range(len(program.values[value].shape)))}  # per value, the value's dimensions
    stack = [value]
    while stack:
        read = stack.pop()
        for reader in readers.get(read, ()):
            copies = [operands.get((reader.index, n)) for n, o in enumerate(reader.operands) if o == read]
            orders = [[dims[copy.value][dim] for dim in copy.order] for copy in copies if copy and copy.value in dims]
            if any(order != sorted(order) for order in orders) or _has_channels_before(reader, read, dims[read]):
                return True
            for result, order in _alike(program, reader, read, pointwise):
                if result not in dims:
                    dims[result] = tuple(dims[read][dim] for dim in order)
                    stack.append(result)
    return False


def _has_channels_before(reader: Operation, read: int, lies: Sequence[int]) -> bool:
    """Whether a convolution reads a value as an image whose channels (the batch, for a gradient of filters) do not lie
    innermost, or outermost where there are three dimensions of space. ``lies``: the image's dimensions in memory."""
    if reader.primitive.name != CONVOLUTION or reader.operands[0] != read:
        return False
    outer, inner, *space = reader.params["dimension_numbers"].lhs_spec
    ends = ((outer, inner), (inner, outer))
    ways = [(first, last, *space) if len(space) > PLANE else (first, *space, last) for first, last in ends]
    return all(order != sorted(order) for order in ([lies[dim] for dim in way] for way in ways))


def _alike(
    program: Program, reader: Operation, read: int, pointwise: Collection[int]
) -> Iterator[tuple[int, Sequence[int]]]:
    """What an operation makes of each element of a value that it reads, with the order of that one's dimensions."""
    shape = program.values[read].shape
    if reader.primitive.name == "transpose":
        yield reader.results[0], reader.params["permutation"]
    elif reader.primitive is _jax.optimization_barrier:
        places = zip(reader.operands, reader.results, strict=True)
        yield from ((result, range(len(shape))) for operand, result in places if operand == read)
    elif reader.index in pointwise:
        alike = (result for result in reader.results if program.values[result].shape == shape)
        yield from ((result, range(len(shape))) for result in alike)
