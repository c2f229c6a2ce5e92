"""What XLA:GPU stores beside operands and results of some operations, as large as a multiple of an operand.

Places in full and sorted keys (`shardplan.memory.indices`). What adds up along a dimension (`jnp.cumsum`) reads what
blocks of 16 elements have been reduced to, and blocks of these. Decompositions and triangular solves are a library's,
which reads columns one behind the other: what lies in rows is copied for it, unless the kernel that computes it, or the
library that makes it, writes columns. A singular value decomposition gives back its operand, which nothing reads, and
all vectors even where values alone are asked for.

>>> import jax, jax.numpy as jnp, shardplan
>>> from shardplan.memory.liveness import Lifetimes
>>> matrix = jax.ShapeDtypeStruct((64, 64), "float32")
>>> def copied(step):
...     program = shardplan.plan(step, 1, matrix).schedule.problem
...     lifetimes = Lifetimes(program, range(len(program.program.operations)))
...     return [times for _, _, times, _ in stored_beside(lifetimes, program.program)]
>>> copied(jax.lax.linalg.lu), copied(lambda x: jax.lax.linalg.lu(jnp.tanh(x))), copied(lambda x: jnp.cumsum(x, 1))
([1.0], [], [0.0625])
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardplan.memory.bringing import computed_until
from shardplan.memory.fusion import BLOCK, CUMULATIVE, is_view
from shardplan.memory.indices import places_and_keys
from shardplan.memory.products import is_multiplied
from shardplan.once import once
from shardplan.program import Operation, Program

if TYPE_CHECKING:
    from shardplan.memory.liveness import Lifetimes

_DECOMPOSITIONS = frozenset(
    {"cholesky", "eigh", "geqrf", "householder_product", "lu", "qr", "svd", "triangular_solve", "tridiagonal_solve"}
)

Stored = tuple[Operation, int, float, tuple[int, int]]
"""An operation, the position of an operand, how many times as large as this what is stored is, and from which to which
place of the order."""


def stored_beside(lifetimes: Lifetimes, program: Program) -> Iterator[Stored]:
    """All of it, but for what is there for one kind of operation alone."""
    yield from places_and_keys(lifetimes, program)
    for operation in _working(program):
        found = _blocks if operation.primitive.name in CUMULATIVE else _columns
        yield from found(lifetimes, program, operation)


@once
def _working(program: Program) -> list[Operation]:
    return [o for o in program.operations if o.primitive.name in CUMULATIVE | _DECOMPOSITIONS]


def _blocks(lifetimes: Lifetimes, program: Program, operation: Operation) -> Iterator[Stored]:
    operand, times = operation.operands[0], 0.0
    length = program.values[operand].shape[operation.params["axis"]] if isinstance(operand, int) else 0
    while length > BLOCK:
        length, times = -(-length // BLOCK), (times + 1.0) / BLOCK
    if times:
        yield operation, 0, times, (lifetimes.place[operation.index], computed_until(lifetimes, operation))


def _columns(lifetimes: Lifetimes, program: Program, operation: Operation) -> Iterator[Stored]:
    place, values = lifetimes.place[operation.index], program.values
    rank = max([len(values[operand].shape) for operand in operation.operands if isinstance(operand, int)], default=0)
    for position, operand in enumerate(operation.operands):
        if isinstance(operand, int) and len(values[operand].shape) == rank:  # neither a diagonal nor factors of columns
            maker = program.makers.get(operand)
            while maker is not None and is_view(program, maker) and isinstance(maker.operands[0], int):
                maker = program.makers.get(maker.operands[0])
            written = maker is not None and (maker.index in lifetimes.fused or _writes_columns(program, maker))
            times = float(not written)
            if operation.primitive.name == "svd":
                times += 1.0 if operation.params["compute_uv"] else 3.0
            if times:
                yield operation, position, times, (place, place)


def _writes_columns(program: Program, operation: Operation) -> bool:
    return operation.primitive.name in _DECOMPOSITIONS or is_multiplied(program, operation)
