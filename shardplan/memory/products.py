"""The operands of matrix products: what cuBLAS reads as it is stored, and what XLA:GPU copies for it.

A product over batch dimensions reads each operand with the contracted dimensions together, and the others together.
Heads of attention are behind the sequence, so that XLA writes transposed copies of queries, keys and values. Without
batch dimensions a transposition is part of the product. Products of 16-bit numbers read copies that are padded to
multiples of 8, and operands of two element types the wider one.

>>> import jax, jax.numpy as jnp
>>> from shardplan.tracing import trace_program
>>> heads = jax.ShapeDtypeStruct((2, 16, 4, 8), "float32")
>>> program = trace_program(lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), (heads, heads), {})
>>> [(operand.value, operand.order, operand.copied) for operand in product_operands(program).values()]
[(0, (0, 2, 1, 3), True), (1, (0, 2, 3, 1), True)]
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from shardplan import _jax
from shardplan.groups import axes_of_groups, sums_rows
from shardplan.memory.gpu import H100
from shardplan.memory.operations import multiplied
from shardplan.once import once
from shardplan.problem import Problem
from shardplan.program import Operation, Program, operand_type
from shardplan.strategy import Strategy

_SIZES = 2
"""The position of the groups' sizes among the operands of a product of rows in groups."""

_SHOWN = frozenset({"reshape", "convert_element_type", "transpose", "squeeze", "expand_dims"})


class ProductOperand(NamedTuple):
    """What a product reads: a value, in an order of its dimensions larger than 1, ``times`` as large as the value.

    ``copied`` says whether that is a copy; if not, transpositions between value and product are part of the product.
    """

    value: int
    order: tuple[int, ...]
    times: float
    copied: bool


def partial_sums(problem: Problem, product: Operation, strategy: Strategy) -> float:
    """Bytes on one device of the partial sums of a product whose contraction is cut into parts, in float32; 0 where it
    is not.

    XLA:GPU cuts a long contraction into a power of two of parts where the tiles of the result are too few for the GPU.
    """
    both, (batch, _) = product.params["dimension_numbers"]
    mesh, program = problem.space.mesh, problem.program
    if batch:
        return 0.0
    sides, length = [], 1.0
    for operand, layout, dims in zip(product.operands, strategy.operands, both, strict=True):
        shape = operand_type(program, operand).shape
        split = layout[-len(shape) :] if layout is not None and shape else ((),) * len(shape)
        local = [size / mesh.degree(axes) for size, axes in zip(shape, split, strict=True)]
        length = prod(local[d] for d in dims)
        sides.append(prod(size for d, size in enumerate(local) if d not in dims))
    cut, parts = H100.products, 1
    tiles = prod(-(-side // cut.tile) for side in sides)
    most = min(cut.most_parts, cut.blocks / max(tiles, 1))
    while 2 * parts <= most and length >= cut.least_contracted:
        parts *= 2
    return 4.0 * parts * prod(sides) if parts > 1 and length / parts > 2 * tiles - 1 else 0.0


def masked_rows(problem: Problem, product: Operation, strategy: Strategy) -> float:
    """Bytes on one device of the copies that a product of rows in groups makes for all of its groups, with zeros in the
    rows of the others: of its first operand, and of both where it adds rows up."""
    groups, found = operand_type(problem.program, product.operands[_SIZES]).shape[-1], 0.0
    for position in (0, 1) if sums_rows(product) else (0,):
        own, layout = operand_type(problem.program, product.operands[position]), strategy.operands[position]
        axes = {axis for axes in layout or () for axis in axes} | {*axes_of_groups(product, strategy)}
        size = prod(own.shape) * _jax.item_bytes(own.dtype)
        found += groups * size / problem.space.mesh.degree(tuple(sorted(axes)))
    return found


@once
def product_operands(program: Program) -> dict[tuple[int, int], ProductOperand]:
    """What library calls read, by the product's index and the operand's position."""
    return {
        (index, position): _product_operand(program, program.operations[index], position)
        for index in sorted(multiplied(program))
        for position, operand in enumerate(program.operations[index].operands)
        if isinstance(operand, int)
    }


def _product_operand(program: Program, product: Operation, position: int) -> ProductOperand:
    operand: Any = product.operands[position]
    makers, dimensions = program.makers, tuple(range(len(program.values[operand].shape)))
    while operand in makers and makers[operand].primitive.name == "transpose":
        if not _is_in_memory(program, makers[operand].operands[0]):
            break
        permutation = makers[operand].params["permutation"]
        operand, dimensions = makers[operand].operands[0], tuple(permutation[d] for d in dimensions)
    value = program.values[operand]
    numbers = product.params["dimension_numbers"]
    contracted, batch = (tuple(dimensions[d] for d in some[position]) for some in numbers)
    free = tuple(d for d in dimensions if d not in contracted and d not in batch)
    own = _jax.item_bytes(value.dtype)
    widest = max(_jax.item_bytes(operand_type(program, o).dtype) for o in product.operands)
    sides = [prod(value.shape[d] for d in side) for side in (free, contracted)]
    multiple = H100.products.multiple
    padding = prod(-(-size // multiple) * multiple / size for size in sides if widest == 2 and size > 1)
    groups = [(batch, free, contracted), (batch, contracted, free), (free, batch, contracted)]
    groups.append((contracted, batch, free))
    orders = [tuple(d for group in some for d in group if value.shape[d] > 1) for some in groups]
    stored = tuple(d for d in range(len(value.shape)) if value.shape[d] > 1)
    fits = stored in orders or (not batch and _is_run(free, stored) and _is_run(contracted, stored))
    return ProductOperand(
        operand, stored if fits else orders[position], padding * widest / own, padding > 1 or widest != own or not fits
    )


def _is_in_memory(program: Program, value: Any) -> bool:
    """Whether a value is given, or a library's result, maybe in another shape or type: a kernel that computes a value
    writes it in the order in which a product reads it."""
    while (maker := program.makers.get(value)) is not None and maker.primitive.name in _SHOWN:
        value = maker.operands[0]
    return maker is None or maker.index in multiplied(program)


def _is_run(group: tuple[int, ...], stored: tuple[int, ...]) -> bool:
    """Whether dimensions are side by side in memory, in any order that a product may take them in."""
    places = [stored.index(d) for d in group if d in stored]
    return not places or max(places) - min(places) == len(places) - 1
