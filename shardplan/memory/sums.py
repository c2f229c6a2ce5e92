"""Reductions so small that XLA:GPU computes each result in a thread of its own, as part of the kernels that read it.

A reduction of its own is a kernel whose threads reduce together. That needs enough to reduce: along what lies
innermost a warp, or what divides a warp; along other dimensions at least a warp, and more where little lies inside of
them. With less, a thread adds up what one result needs, wherever that is needed: a product of three coordinates, or a
mean over a few neighbours. What adds up many is never part of what adds up many itself.

Where neither what is reduced lies together nor what is kept (a group norm reduces space and the channels of a group),
the largest dimension is reduced first, and the others then.

>>> [reduces_together((1024, size), (1,)) for size in (3, 8, 31, 32)]
[False, True, False, True]
>>> [reduces_together((size, 1024), (0,)) for size in (16, 32)], reduces_together((32, 8), (0,))
([False, True], False)
>>> steps_of((4, 32, 32, 16, 12), (1, 2, 4))
[((4, 1024, 16, 12), (1,)), ((64, 12), (1,))]
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import groupby
from math import ceil, isqrt, prod

from shardplan import _jax
from shardplan.memory.products import is_sum
from shardplan.once import once
from shardplan.program import Operation, Program
from shardplan.strategy import operand_type

REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod"})

SEARCHES = frozenset({"argmax", "argmin"})

_WARP = 32
_MANY = 16
"""Numbers that are reduced to one: as many or more are many."""

WHOLE, WHOLE_ROW, _BUSY = 4096, 16384, 53.0
"""Reductions of up to so many rows, or of rows of up to so many numbers, are made at once; of more, parts are reduced
first. Those down columns are made by one block of threads for each 32 columns, or for each 64 if there are as many, and
an even number; where a kernel reads numbers of 16 bits or less, for each 128, if four divides them. With fewer blocks
than the last, by XLA's count, an H100 reads slower: one reads 63 GB/s, whether from memory or from the caches."""

_OF_THREAD, _THREADS, _MOST_THREADS = 16, 256, 1024
"""Numbers of a row that a thread adds up, and threads of a block, of one row at most."""

LAUNCH = 3.35e6
"""Bytes that an H100 reads in the microsecond in which a kernel starts."""

_SHORT = ((2, 32), (4, 8), (8, 3))
"""Reductions over fewer warps' worth than the first, with less inside of them than the second, are short."""


def reduces_together(shape: Sequence[int], dims: Collection[int]) -> bool:
    """Whether threads work together to reduce dimensions of a tensor of a shape (without those of size 1)."""
    reduced = [dim in dims for dim in range(len(shape))]
    kept = [dim for dim, gone in enumerate(reduced) if not gone]
    if not kept or reduced[-1]:  # a row
        first = max(kept, default=-1) + 1
        size = prod(shape[first:])
        return size >= _WARP or _WARP % max(size, 1) == 0
    last = max(dim for dim, gone in enumerate(reduced) if gone)
    size, inside = prod(shape[dim] for dim in dims), prod(shape[last + 1 :])
    return size >= _WARP and not any(size < warps * _WARP and inside < least for warps, least in _SHORT)


def _operand(program: Program, operation: Operation) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shape of what an operation reduces, and the dimensions over which it does."""
    if operation.primitive.name in REDUCTIONS | SEARCHES:
        return operand_type(program, operation.operands[0]).shape, tuple(operation.params["axes"])
    if is_sum(program, operation):
        shapes = [operand_type(program, operand).shape for operand in operation.operands]
        larger = max(range(2), key=lambda position: prod(shapes[position]))
        return shapes[larger], tuple(operation.params["dimension_numbers"][0][larger])
    return None


def steps_of(shape: Sequence[int], dims: Collection[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The reductions one after another that make one: the shape of what each reduces, and the dimensions over which it
    does, where those of size 1 are left out and those that lie together are one."""
    numbers = [(dim in dims, size) for dim, size in enumerate(shape) if size > 1]
    joined = [(gone, prod(size for _, size in some)) for gone, some in groupby(numbers, lambda number: number[0])]
    sizes, reduced = [size for _, size in joined], [number for number, (gone, _) in enumerate(joined) if gone]
    if len(reduced) < 2 or (len(sizes) < 4 and reduces_together(sizes, reduced)):
        return [(tuple(sizes), tuple(reduced))]
    first = max(reduced, key=sizes.__getitem__)
    left = [number for number in range(len(sizes)) if number != first]
    others = [place for place, number in enumerate(left) if number in reduced]
    return [(tuple(sizes), (first,)), *steps_of([sizes[number] for number in left], others)]


def reduced_in(program: Program, operation: Operation) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The reductions one after another that make an operation, see `steps_of`; none of what reduces nothing."""
    found = _operand(program, operation)
    return steps_of(*found) if found is not None else []


def adds_few(program: Program, operation: Operation) -> bool:
    """Whether each result of a reduction is computed by a thread of its own."""
    return operation.index in _adding_few(program)


@once
def _adding_few(program: Program) -> frozenset[int]:
    def adds(operation: Operation) -> bool:
        found = _operand(program, operation)
        steps = steps_of(*found) if found is not None else []
        return found is not None and not any(dims and reduces_together(shape, dims) for shape, dims in steps)

    return frozenset(operation.index for operation in program.operations if adds(operation))


def adds_many(program: Program, operation: Operation) -> bool:
    """Whether a reduction is of those that never become part of another one."""
    found = _operand(program, operation)
    return found is not None and prod(found[0][dim] for dim in found[1]) >= _MANY


def columns_of(program: Program, operation: Operation, lying: Sequence[int] | None = None) -> tuple[int, int]:
    """How many numbers lie side by side that a reduction by threads together leaves, and how many of these are reduced
    to one then; no columns where it reduces rows. ``lying`` has the dimensions of what it reads from the outermost
    inwards, if they do not lie as they are written."""
    if lying is None:
        return _columns(program).get(operation.index, (0, 1))
    found = None if adds_few(program, operation) else _operand(program, operation)
    return (0, 1) if found is None else _columns_in(*found, lying)


@once
def _columns(program: Program) -> dict[int, tuple[int, int]]:
    """The same of all reductions by threads together, by index, where what they read lies as it is written."""
    together = (operation for operation in program.operations if not adds_few(program, operation))
    found = ((operation.index, _operand(program, operation)) for operation in together)
    return {index: _columns_in(*reduced, ()) for index, reduced in found if reduced is not None}


def _columns_in(whole: Sequence[int], reduced: Sequence[int], lying: Sequence[int]) -> tuple[int, int]:
    order = range(len(whole)) if len(lying) != len(whole) else lying
    (shape, dims), *others = steps_of([whole[dim] for dim in order], [order.index(dim) for dim in reduced])
    columns = prod(shape[max(dims, default=-1) + 1 :])
    return (columns, prod(shape[dim] for shape, dims in others for dim in dims)) if columns > 1 else (0, 1)


def waiting_for_blocks(columns: int, read: float, made: float, width: int = 4) -> float:
    """The least time in which a sum down columns reads anything, as a share of that in which an H100 that is kept busy
    reads it from memory: above 1, it is slower than that; below, this is what reading from caches takes at least.

    ``columns`` are those that lie side by side, ``read`` and ``made`` the numbers that one device sums up, and gets;
    ``width``: the bytes of the smallest number that the kernel reads.

    >>> [waiting_for_blocks(1024, 4096 * 1024, 1024, width) for width in (4, 2)]
    [3.3125, 6.625]

    More rows are summed up in two steps, so many parts first as have about so many rows each.

    >>> round(waiting_for_blocks(256, 8192 * 256, 256), 3)
    0.207
    """
    if not read:
        return 0.0
    if read > WHOLE * made:
        made *= parts_of(round(read / made))
    own = max(1.0, min(columns, made))
    sizes = (4, 2) if width < 4 else (2,)
    of_block = next((size for size in sizes if own >= size * _WARP and columns % size == 0), 1) * _WARP
    return _BUSY * own / (-(-own // of_block) * made)


@lru_cache
def parts_of(length: int) -> int:
    """Into how many parts XLA cuts so many rows: the largest number up to their root that divides them, or the root,
    where only far smaller ones do (it adds zeros then).

    >>> [parts_of(length) for length in (8192, 17640, 8191)]
    [64, 126, 90]
    """
    root = isqrt(length)
    return next((parts for parts in range(root, root // 2, -1) if length % parts == 0), root)


def tile_of_column(read: float, made: float) -> int:
    """How many numbers a tile has of each column that is summed up, at first: all, up to the next power of two.

    >>> tile_of_column(48 * 512, 512), tile_of_column(8192 * 512, 512)
    (64, 128)
    """
    length = ceil(read / made - 1e-9)
    length = -(-length // parts_of(length)) if length > WHOLE else length
    return 2 ** max(length - 1, 0).bit_length()


def waiting_for_rows(read: float, made: float) -> float:
    """Likewise, of a sum along rows: a thread adds up 16 numbers, a block has 256 threads, or more for one long row.

    >>> [round(waiting_for_rows(2048 * rows, rows), 3) for rows in (1, 53, 4096)]
    [53.0, 1.963, 0.026]
    """
    length = read / max(made, 1.0)
    if not read or length > WHOLE_ROW:
        return 0.0
    threads = min(-(-length // (_OF_THREAD * _WARP)) * _WARP, _MOST_THREADS)
    return _BUSY / -(-made // max(_THREADS // threads, 1.0))


@once
def summed_products(program: Program) -> list[Operation]:
    """The products that XLA multiplies and adds up, with threads that work together."""
    return [o for o in program.operations if is_sum(program, o) and not adds_few(program, o)]


def reads_slowly(program: Program, product: Operation, read: float, made: float) -> bool:
    """Whether XLA multiplies a matrix by a vector in a kernel of its own, and stores it, before it adds that up down
    columns: where so few columns keep too little of the device busy, and it is quicker to write and read what is
    multiplied once than to read both there. ``read`` and ``made`` are the bytes on one device of the matrix and of the
    result.

    >>> import jax, jax.numpy as jnp
    >>> from shardplan.tracing import trace_program
    >>> def apart(rows, columns):
    ...     shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((rows,), (rows, columns))]
    ...     program = trace_program(jnp.dot, shapes, {})
    ...     return reads_slowly(program, program.operations[0], 4 * rows * columns, 4 * columns)
    >>> apart(2048, 1024), apart(2048, 2048), apart(256, 512), apart(8192, 512)
    (True, False, False, False)
    """
    columns, width = columns_of(program, product)[0], _jax.item_bytes(program.values[product.results[0]].dtype)
    slower = waiting_for_blocks(columns, read / width, made / width, width) if columns else 0.0
    return (slower - 2) * read > LAUNCH
