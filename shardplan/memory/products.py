"""The operands of matrix products: in place for cuBLAS, or transposed, padded and converted copies.

A product over batch dimensions needs the contracted dimensions of each operand adjacent, and the others too. Heads of
attention are behind the sequence, so XLA makes transpose copies of queries, keys and values. Without batch dimensions
the product itself transposes. Products of 16-bit numbers read copies that are padded to multiples of 8. Operands of two
element types are converted to the wider one.

>>> import jax, jax.numpy as jnp
>>> from shardplan.program.tracing import trace_program
>>> heads = jax.ShapeDtypeStruct((2, 16, 4, 8), "float32")
>>> program = trace_program(lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), (heads, heads), {})
>>> [(operand.value, operand.order, operand.copied) for operand in product_operands(program).values()]
[(0, (0, 2, 1, 3), True), (1, (0, 2, 3, 1), True)]
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from shardplan import _jax
from shardplan.memoize import memoize
from shardplan.memory.gpu import H100
from shardplan.memory.operations import library_products
from shardplan.problem.cost_network import Problem
from shardplan.problem.ops.ragged_dot import axes_of_groups, sums_rows
from shardplan.problem.strategy import Strategy
from shardplan.program.program import Operation, Program, operand_type

_GROUP_SIZES = 2
"""The position of the group sizes among the operands of a ragged product."""

_VIEWS = frozenset({"reshape", "convert_element_type", "transpose", "squeeze", "expand_dims"})


class ProductOperand(NamedTuple):
    """The operand of a product: a value, in an order of its dimensions larger than 1, ``times`` as large as the value.

    ``copied`` says whether that is a copy. If not, the product includes the transpositions after the value.
    """

    value: int
    order: tuple[int, ...]
    times: float
    copied: bool


def partial_sums(problem: Problem, product: Operation) -> list[float]:
    """Per strategy, the bytes on one device of the partial sums of a split-K product, in float32. 0 for other products.

    XLA:GPU splits a long contraction into a power of two of parts if the result has too few tiles for the GPU. Equal
    products share one list.
    """
    choices, shapes = problem.choices[product.index], [operand_type(problem.program, o).shape for o in product.operands]
    key = "partial sums", id(choices), product.params["dimension_numbers"], *shapes
    if key not in problem.memo:
        problem.memo[key] = [_partial_sums(problem, product, strategy) for strategy in choices.strategies]
    found: list[float] = problem.memo[key]
    return found


def _partial_sums(problem: Problem, product: Operation, strategy: Strategy) -> float:
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
    """Bytes on one device of the masked copies of a ragged product: one per group, with zeros in other groups' rows.

    The first operand is copied, and both where the product contracts the rows."""
    groups, found = operand_type(problem.program, product.operands[_GROUP_SIZES]).shape[-1], 0.0
    for position in (0, 1) if sums_rows(product) else (0,):
        own, layout = operand_type(problem.program, product.operands[position]), strategy.operands[position]
        axes = {axis for axes in layout or () for axis in axes} | {*axes_of_groups(product, strategy)}
        size = prod(own.shape) * _jax.item_bytes(own.dtype)
        found += groups * size / problem.space.mesh.degree(tuple(sorted(axes)))
    return found


@memoize
def product_operands(program: Program) -> dict[tuple[int, int], ProductOperand]:
    """The operands of library products, by the product's index and the operand's position."""
    return {
        (index, position): _product_operand(program, program.operations[index], position)
        for index in sorted(library_products(program))
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
    """Whether a value is an argument or the result of a library call, up to shape and type.

    The kernel of any other value writes it in the dimension order of the product."""
    while (maker := program.makers.get(value)) is not None and maker.primitive.name in _VIEWS:
        value = maker.operands[0]
    return maker is None or maker.index in library_products(program)


def _is_run(group: tuple[int, ...], stored: tuple[int, ...]) -> bool:
    """Whether dimensions are adjacent in memory, in any order that a product accepts."""
    places = [stored.index(d) for d in group if d in stored]
    return not places or max(places) - min(places) == len(places) - 1
