"""What XLA:GPU does to the operands of matrix products: transposed and padded copies, and products merged into one.

A product over batch dimensions reads each operand with these in front, and the contracted dimensions side by side.
Heads of attention lie behind the sequence, so that XLA writes transposed copies of queries, keys and values: one per
order of dimensions that is read, from which forward and backward pass may both read. The value itself need not be
stored for them, if what it is computed from is. Without batch dimensions, a transposition is part of the product, but
for numbers of 8 bits: what is summed over lies innermost in these, or they are copied so (a matrix of `x @ w`).

>>> import jax, jax.numpy as jnp
>>> from shardplan.tracing import trace_program
>>> heads = jax.ShapeDtypeStruct((2, 16, 4, 8), "float32")
>>> program = trace_program(lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), (heads, heads), {})
>>> [(operand.value, operand.order, operand.copied) for operand in product_operands(program).values()]
[(0, (0, 2, 1, 3), True), (1, (0, 2, 3, 1), True)]
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any, NamedTuple

import jax

from shardplan import _jax
from shardplan.memory.lying import PRODUCT, lying_of
from shardplan.memory.order import order_of
from shardplan.memory.repeated import Apart, repeated_in
from shardplan.memory.updating import updates_of_inputs
from shardplan.once import once
from shardplan.program import Operation, Program
from shardplan.strategy import operand_type

_VIEWS = frozenset({"reshape", "squeeze", "expand_dims", "stop_gradient"})

_SUMMED = 1e7
"""A product of a vector and a matrix is a multiplication and a sum where the matrix has fewer elements than this on
each device; one of two vectors always is."""

MULTIPLE = 8
"""Dimensions of products of 16-bit numbers are padded to multiples of this, which tensor cores need."""

_MERGED_BYTES = 64 * 2**20
"""A product that moves more is merged only with one that does not."""

_LOOKED_AT, _MOST_TRIED = 40, 2
"""Operations that are looked at to tell whether products need each other, per operation of the program, and merged
products of one operand that another one is tried to be merged with."""


@dataclass(frozen=True, slots=True)
class ProductOperand:
    """What a product reads: a value in an ``order`` of its dimensions larger than 1, ``padding`` times as large.

    ``copied`` says whether it reads a copy; where it does not, transpositions on the way are part of the product. A
    copy in a narrower type is less than once as large. What is ``rounded`` is converted to a wider type and back, for
    products of numbers in two types that multiply in the narrower one: other products' copies do not serve these.
    """

    value: int
    order: tuple[int, ...]
    padding: float
    copied: bool
    masked: bool = False
    rounded: bool = False


def is_sum(program: Program, operation: Operation) -> bool:
    """Whether a product is one of a vector and a small matrix, per batch: XLA multiplies and adds up, in one kernel.

    Nothing is known of layouts here: devices are taken to split the batch, and what it leaves of them the matrix.
    """
    return operation.primitive.name == PRODUCT and operation.index in _sums(program)


@once
def _sums(program: Program) -> frozenset[int]:
    return frozenset(o.index for o in program.operations if o.primitive.name == PRODUCT and _adds_up(program, o))


def _adds_up(program: Program, operation: Operation) -> bool:
    free, contracted, batches = [], 1, 1
    for operand, contraction, batch in zip(operation.operands, *operation.params["dimension_numbers"], strict=True):
        shape = operand_type(program, operand).shape
        free.append(prod(size for dim, size in enumerate(shape) if dim not in (*contraction, *batch)))
        contracted, batches = prod(shape[dim] for dim in contraction), prod(shape[dim] for dim in batch)
    split = program.devices / gcd(program.devices, batches)  # what the batch leaves to split the rows over
    return max(free) == 1 or (min(free) == 1 and contracted * sum(free) < _SUMMED * split)


def is_outer(program: Program, operation: Operation) -> bool:
    """Whether a product adds nothing up (an outer product, per batch): XLA multiplies element by element."""
    if operation.primitive.name != PRODUCT:
        return False
    (contracted, _), _ = operation.params["dimension_numbers"]
    shape = operand_type(program, operation.operands[0]).shape
    return prod(shape[dim] for dim in contracted) == 1


@once
def multiplied(program: Program) -> frozenset[int]:
    """The products that are left to a library, by index."""
    products = (o for o in program.operations if o.primitive.name == PRODUCT)
    return frozenset(o.index for o in products if not is_outer(program, o) and not is_sum(program, o))


def is_multiplied(program: Program, operation: Operation) -> bool:
    """Whether a product is left to a library."""
    return operation.primitive.name == PRODUCT and operation.index in multiplied(program)


@once
def product_operands(
    program: Program, pointwise: Collection[int] = frozenset(), reshaped: Collection[int] = frozenset()
) -> dict[tuple[int, int], ProductOperand]:
    """What products read, by the operation's index and the operand's position.

    ``pointwise`` are the operations, by index, that compute element by element, and leave the order of dimensions;
    ``reshaped`` the products that lose dimensions of their batch, see `loses_batch`; the complements of their indices,
    where they lose all of them.
    """
    makers = program.makers
    lying = lying_of(program, frozenset(pointwise)).orders
    found = {}
    for operation in program.operations:
        if is_multiplied(program, operation):
            for position, operand in enumerate(operation.operands):
                if isinstance(operand, int):
                    place = operation, position, operation.index in reshaped, ~operation.index in reshaped
                    found[operation.index, position] = _product_operand(program, makers, lying, place)
    return found


def loses_batch(sizes: Sequence[float]) -> bool:
    """Whether a product over batch dimensions of these sizes on one device reads each operand in one order alone.

    XLA drops those of size 1, which puts another shape between the product and the transposition before it, that it
    would make part of the product else. Of one dimension that is left it still sees so.
    """
    return min(sizes, default=2) <= 1 and sum(size > 1 for size in sizes) > 1


@once
def turned_carries(program: Program) -> frozenset[int]:
    """The values that a loop's body, or a branch, writes into what it is given, and that leave in its place, of which
    products read copies in another order; and what it is given, which is turned to that before, and back behind."""
    if len(program.regions) == 1:
        return frozenset()
    read = {one.value for one in product_operands(program).values() if [*one.order] != sorted(one.order)}
    found = set[int]()
    for region in program.regions[1:]:
        for output in region.outputs:
            updates = updates_of_inputs(program, region, output) if isinstance(output, int) else []
            if read.intersection(updates):
                found.update(updates, (o for o in program.makers[updates[-1]].operands[:1] if isinstance(o, int)))
    return frozenset(found)


def copied_operands(
    program: Program,
    pointwise: Collection[int],
    masked: Collection[tuple[int, int]],
    carried: Collection[int] = (),
    reshaped: Collection[int] = frozenset(),
) -> dict[tuple[int, int], ProductOperand]:
    """The operands of which products read copies, where some are ``masked``, each for products that mask it alone, and
    some are ``carried`` as they are read; ``reshaped`` as in `product_operands`."""
    found = {}
    for place, read in product_operands(program, pointwise, reshaped).items():
        if (read.copied and (read.value not in carried or read.padding != 1)) or place in masked:
            found[place] = replace(read, copied=True, masked=place in masked)
    return found


def copied_again(operands: Mapping[tuple[int, int], ProductOperand]) -> frozenset[tuple[int, int]]:
    """The operands of products of which a product before has a copy."""
    first: dict[ProductOperand, tuple[int, int]] = {}
    copied = [(place, operand) for place, operand in operands.items() if operand.copied]
    return frozenset(place for place, operand in copied if first.setdefault(operand, place) != place)


def _product_operand(
    program: Program,
    makers: Mapping[int, Operation],
    lying: Mapping[int, tuple[int, ...]],
    place: tuple[Operation, int, bool, bool],
) -> ProductOperand:
    operation, position, reshaped, alone = place
    operand: Any = operation.operands[position]
    dimensions = tuple(range(len(program.values[operand].shape)))
    while operand in makers and makers[operand].primitive.name == "transpose":
        permutation = makers[operand].params["permutation"]
        operand, dimensions = makers[operand].operands[0], tuple(permutation[d] for d in dimensions)
    value = program.values[operand]
    contracted, batch = _sorted_dimensions(operation)
    contracted, batch = (tuple(dimensions[d] for d in numbers[position]) for numbers in (contracted, batch))
    free = tuple(d for d in dimensions if d not in contracted and d not in batch)
    orders = [(*batch, *free, *contracted), (*batch, *contracted, *free)]
    sizes = [prod(value.shape[d] for d in side) for side in (free, contracted)]
    own = _jax.item_bytes(value.dtype)
    read, widest = _bytes_read(program, operation, own), _widest(program, operation)
    padding = prod(-(-size // MULTIPLE) * MULTIPLE / size for size in sizes if read == widest == 2 and size > 1)
    middle = [(*free, *batch, *contracted), (*contracted, *batch, *free)]
    orders, middle = ([tuple(d for d in order if value.shape[d] > 1) for order in some] for some in (orders, middle))
    joined = batch and not alone and any(sum(value.shape[d] > 1 for d in side) > 1 for side in (free, contracted))
    if reshaped or (joined and 1 not in value.shape):
        orders, middle = [orders[position]] * 2, []  # behind which no transposition is seen, unless dimensions are gone
    if read == 1:  # cuBLAS reads numbers of 8 bits along what it sums over
        orders, middle = orders[:1] * 2, middle[:1]
    written = range(len(dimensions))
    tried = [lying.get(operand, written), *([dimensions] if joined else []), *([written] if batch else [])]
    as_it_is, *ways = (tuple(d for d in order if value.shape[d] > 1) for order in tried)
    gone = batch if alone else ()
    known = [tuple(d for d in order if d not in gone) for order in (*orders, *middle)]
    fitting = (way for way in (as_it_is, *ways) if tuple(d for d in way if d not in gone) in known)
    order = next(fitting, orders[position])
    copied = padding > 1 or read != own or order != as_it_is
    return ProductOperand(operand, order, padding * read / own, copied, rounded=read == own < widest)


def _sorted_dimensions(product: Operation) -> tuple[Any, Any]:
    """The dimensions over which a product adds up, and those of its batch: XLA puts the first in order, of the operand
    in which they lie one behind the other."""
    contracted, batch = product.params["dimension_numbers"]
    for side in contracted:
        if len(side) > 1 and max(side) - min(side) == len(side) - 1:
            order = sorted(range(len(side)), key=side.__getitem__)
            return tuple(tuple(dims[place] for place in order) for dims in contracted), batch
    return contracted, batch


def _bytes_read(program: Program, operation: Operation, own: int) -> int:
    """The bytes of an element in the type in which a product reads an operand, of which one has so many: both operands
    are converted to the wider one's type, or to the type that the product asks for."""
    if operation.params["precision"] is jax.lax.DotAlgorithmPreset.BF16_BF16_F32:
        return min(own, 2)
    return _widest(program, operation)


def _widest(program: Program, operation: Operation) -> int:
    """The bytes of an element of a product's wider operand, as they are given: padded are only products of numbers that
    have 16 bits before they are rounded."""
    return max(_jax.item_bytes(operand_type(program, operand).dtype) for operand in operation.operands)


def merged_products(
    program: Program,
    operations: Iterable[Operation],
    sizes: Mapping[int, float],
    layouts: Mapping[int, Sequence[object]] | None = None,
    apart: Apart = (),
    parts: Mapping[int, Sequence[float]] | None = None,
) -> list[list[int]]:
    """Products that read the same operand and become one, as lists of operation indices.

    XLA merges two where one of them moves few bytes (``sizes``, per operation on one device; of several that are merged
    already, what they share counts once: ``parts``, bytes per operation and operand), neither needs the other,
    and both read what they share in one order of its dimensions, and in one layout (``layouts``, per operation and
    operand, where the program is split). Their other operands are put side by side, and so are
    their results, in one buffer. Where one might be merged with several, it goes through what is shared in the order in
    which it is made, the forward pass first.
    """
    same, groups = repeated_in(program, apart), dict[Any, list[list[int]]]()
    left = _LOOKED_AT * len(program.operations)
    for operation in operations:
        if operation.index not in sizes:
            continue
        pair = [same.get(o, o) if isinstance(o, int) else None for o in operation.operands]
        for position, shared in enumerate(pair):
            other = pair[1 - position]
            if shared is None or other is None:
                continue
            read = _read_as(program, operation, position)
            layout = layouts[operation.index][position] if layouts is not None else None
            dtype = str(program.values[other].dtype)
            alike = groups.setdefault((shared, position, read, operation.region, dtype, layout or ()), [])
            for group in alike[:_MOST_TRIED]:
                again = sum(parts[index][position] for index in group[1:]) if parts is not None else 0.0
                together = sum(sizes[index] for index in group) - again
                small = min(sizes[operation.index], together) <= _MERGED_BYTES
                members = [_first(program, index, same) for index in group]
                between = _made_between(program, other, members, left, apart) if small else frozenset(members)
                left -= len(between)
                if between.isdisjoint(members):
                    group.append(operation.index)
                    break
            else:
                alike.append([operation.index])
    merged: list[list[int]] = []
    taken: set[int] = set()
    for _, alike in sorted(groups.items(), key=lambda item: _made_at(program, *item)):
        for group in alike:
            remaining = [index for index in group if index not in taken]
            if len(remaining) > 1:
                merged.append(remaining)
                taken.update(remaining)
    return merged


def _made_at(program: Program, key: tuple[Any, ...], groups: Sequence[Sequence[int]]) -> tuple[int, int]:
    """When what products share is made: what XLA turns or flattens for them, for the first of them."""
    places = _places(program)
    value, _, read, *_ = key
    if read.turned:
        return min(places[index] for group in groups for index in group), value
    return places[program.makers[value].index] if value in program.makers else -1, value


@once
def _places(program: Program) -> dict[int, int]:
    """Per operation, by index, its place in XLA's order."""
    return {index: place for place, index in enumerate(order_of(program))}


def _first(program: Program, index: int, same: Mapping[int, int]) -> int:
    """The first operation that computes what an operation does."""
    result = program.operations[index].results[0]
    return program.makers[same.get(result, result)].index


class _Read(NamedTuple):
    """The order of dimensions in which a product reads an operand, where its batch ends and what it contracts begins,
    and whether XLA turns or flattens it for that first."""

    order: tuple[int, ...]
    batch: int
    contracted: int
    turned: bool


def _read_as(program: Program, operation: Operation, position: int) -> _Read:
    """How a product reads an operand: as it is written where both operands have one dimension besides at most, else
    with the batch in front, and what is contracted next to the other operand's."""
    numbers = operation.params["dimension_numbers"]
    ranks = [len(operand_type(program, operand).shape) for operand in operation.operands]
    contracted, batch = (tuple(some[position]) for some in numbers)
    in_front = all(tuple(batches) == tuple(range(len(batches))) for batches in numbers[1])
    if in_front and len(contracted) == 1 and max(ranks) <= len(batch) + 2:
        return _Read(tuple(range(ranks[position])), len(batch), contracted[0], False)
    free = tuple(d for d in range(ranks[position]) if d not in contracted and d not in batch)
    order = (*batch, *contracted, *free) if position else (*batch, *free, *contracted)
    turned = order != tuple(range(len(order))) or max(len(batch), len(contracted), len(free)) > 1
    return _Read(order, len(batch), order.index(contracted[0]) if contracted else len(order), turned)


def leaving_products(program: Program) -> frozenset[int]:
    """Results of products that leave the program as they are, but for their shape. A part of a merged product is copied
    to where it leaves by a kernel that nothing waits for, and that runs last."""
    makers = program.makers
    found = set()
    for output in program.outputs:
        while isinstance(output, int) and output in makers and makers[output].primitive.name in _VIEWS:
            output = makers[output].operands[0]
        if isinstance(output, int) and output in makers and makers[output].primitive.name == PRODUCT:
            found.add(output)
    return frozenset(found)


def _made_between(program: Program, value: int, among: Collection[int], most: int, apart: Apart) -> frozenset[int]:
    """Operations that a value is computed from, back to the first of ``among``; all of these if there are too many."""
    if not among:
        return frozenset()
    found = _made_since(program, value, min(among), min(most, len(program.operations)), apart)
    return frozenset(among) if found is None else found


@once
def _made_since(program: Program, value: int, first: int, most: int, apart: Apart) -> frozenset[int] | None:
    """Operations from a first one on that a value is computed from, None if these are more than ``most``."""
    makers, made_from = program.makers, _made_from(program, apart)
    stack = [makers[value].index] if value in makers and makers[value].index >= first else []
    found = {*stack}
    while stack:
        for maker in made_from[stack.pop()]:
            if maker >= first and maker not in found:
                found.add(maker)
                stack.append(maker)
        if len(found) > most:
            return None
    return frozenset(found)


@once
def _made_from(program: Program, apart: Apart) -> list[list[int]]:
    """Per operation, those that make its operands."""
    same, makers = repeated_in(program, apart), program.makers
    read = ([same.get(o, o) for o in operation.operands if isinstance(o, int)] for operation in program.operations)
    return [[makers[value].index for value in values if value in makers] for values in read]
