"""Proof by execution: an operation runs whole and block by block, and the combined result is compared.

Block ``k`` gets exactly its part by the split. All other elements are destroyed first: they become noise if the blocks'
results are concatenated, and the reducer's identity if partial results are combined. The operation then runs on the
rest, and only the block's own part of the result is used. The proof runs the primitive itself, not the description from
which the split was derived.

>>> import numpy as np
>>> from jax import lax
>>> for verdict in verify(lax.dot, np.ones((4, 6), np.float32), np.ones((6, 8), np.float32), blocks=(2, 3)):
...     print(verdict)
dot_general: i in 2 blocks holds
dot_general: j in 2 blocks holds
dot_general: k in 2 blocks holds
dot_general: k in 3 blocks holds
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from shardplan.rules.analysis import Slot, Split
from shardplan.rules.errors import RuleError
from shardplan.rules.operations import Operation, operations

BLOCKS = (2, 3, 4, 8)
_TOLERANCE = 1e-5
"""Relative to the largest magnitude in a result: sums of blocks have another rounding than the sum of the whole."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one split of one operation gave the result of the whole operation. If not, ``problem`` is the
    difference."""

    operation: str
    shapes: tuple[tuple[int, ...], ...]
    index: str
    blocks: int
    problem: str | None = None

    @property
    def holds(self) -> bool:
        """Whether the split is true."""
        return self.problem is None

    def __str__(self) -> str:
        outcome = "holds" if self.holds else f"is wrong: {self.problem}"
        return f"{self.operation}: {self.index} in {self.blocks} blocks {outcome}"


def verify(
    function: Callable[..., Any], *operands: Any, blocks: Sequence[int] = BLOCKS, uneven: bool = False
) -> tuple[Verdict, ...]:
    """Runs every operation of ``function`` on these operands whole and in every derived split, or every uneven one.

    Returns a verdict for each operation, index and number of blocks. A wrong split raises no error. ``operands``:
    arrays of any shapes. Their values matter, for instance those of indices.
    """
    verdicts: list[Verdict] = []
    for operation in operations(function, *operands):
        verdicts += verify_operation(operation, blocks, uneven)
    return tuple(verdicts)


def verify_or_raise(function: Callable[..., Any], *operands: Any, blocks: Sequence[int] = BLOCKS) -> None:
    """The same as :func:`verify`, but raises :class:`RuleError` that lists every wrong split."""
    wrong = [str(verdict) for verdict in verify(function, *operands, blocks=blocks) if not verdict.holds]
    if wrong:
        raise RuleError("refuted by execution:\n" + "\n".join(wrong))


def verify_operation(operation: Operation, blocks: Sequence[int], uneven: bool = False) -> list[Verdict]:
    """The verdicts on one operation."""
    splits_of = operation.rule.uneven_splits if uneven else operation.rule.splits
    splits = [(n, split) for n in blocks for split in splits_of(n)]
    if not splits:
        return []
    run = jax.jit(operation.run)
    whole = [_host(result) for result in run(*operation.operands)]
    shapes = tuple(np.shape(operand) for operand in operation.operands)
    return [
        Verdict(operation.name, shapes, split.index, n, _problem(operation, run, whole, split, n))
        for n, split in splits
    ]


def verify_linear(function: Callable[..., Any], *operands: Any) -> tuple[Verdict, ...]:
    """Checks for every operation of ``function`` that a deferred sum may pass through it as its rule says.

    The operands of each such set are divided into two summands each. The results for both must add up to the whole. A
    summand without a finite result (a division by 0, say) is not compared. ``index`` of a verdict is the set.
    """
    verdicts = []
    for operation in operations(function, *operands):
        for pending in operation.rule.linear:
            if not all(jnp.issubdtype(operation.operands[n].dtype, jnp.number) for n in pending):
                continue  # there are no sums of booleans or keys
            problem = _linear_problem(operation, pending)
            shapes = tuple(np.shape(operand) for operand in operation.operands)
            verdicts.append(Verdict(operation.name, shapes, f"sum through {sorted(pending)}", 2, problem))
    return tuple(verdicts)


def _linear_problem(operation: Operation, pending: frozenset[int]) -> str | None:
    noise = np.random.default_rng(len(pending))
    first = [
        noise.integers(-4, 5, np.shape(operand)).astype(operand.dtype) if n in pending else operand
        for n, operand in enumerate(operation.operands)
    ]
    second = [
        np.asarray(operand) - part if n in pending else operand
        for n, (operand, part) in enumerate(zip(operation.operands, first, strict=True))
    ]
    runs = [[_host(result) for result in operation.run(*given)] for given in (operation.operands, first, second)]
    for number, (whole, left, right) in enumerate(zip(*runs, strict=True)):
        finite = np.isfinite(whole) & np.isfinite(left) & np.isfinite(right)
        scale = max(np.abs(np.where(finite, left, 0)).max(initial=1), 1)
        if not _equal(np.where(finite, whole, 0) / scale, np.where(finite, left + right, 0) / scale, scale=1.0):
            return f"result {number} is not the sum of its parts"
    return None


def _problem(
    operation: Operation, run: Callable[..., Any], whole: list[np.ndarray], split: Split, n: int
) -> str | None:
    """The difference between the whole result and the one from blocks, or ``None``."""
    reducers = {slot.reducer for slot in split.results if slot.reducer}
    if len(reducers) > 1:
        return f"its results are combined by several reducers: {sorted(reducers)}"
    reducer = next(iter(reducers), None)
    if reducer and not any(slot.dim is not None and slot.halo == (0, 0) for slot in split.operands):
        return "no operand is split, so that every block would give the whole result"
    noise = np.random.default_rng(n)
    parts = []
    for block in range(n):
        held = [
            _masked(operand, slot, block, n, reducer, noise)
            for operand, slot in zip(operation.operands, split.operands, strict=True)
        ]
        parts.append([_host(result) for result in run(*held)])
    empty = None
    if reducer in ("sum", "prod"):
        held = [
            _masked(operand, slot, None, n, reducer, noise)
            for operand, slot in zip(operation.operands, split.operands, strict=True)
        ]
        empty = [_host(result) for result in run(*held)]
    for number, (expected, slot) in enumerate(zip(whole, split.results, strict=True)):
        each = [part[number] for part in parts]
        found = _combined(each, slot, None if empty is None else empty[number])
        if not _equal(expected, found):
            return f"result {number} differs"
    return None


def _masked(
    operand: Any, slot: Slot, block: int | None, n: int, reducer: str | None, noise: np.random.Generator
) -> Any:
    """The operand with everything destroyed outside of a block. ``block=None`` destroys all of split operands."""
    if slot.dim is None:
        return operand
    shape = np.shape(operand)
    size = -(-shape[slot.dim] // n)
    place = np.arange(shape[slot.dim])
    low, high = slot.halo
    start = 0 if block is None else block * size
    stop = 0 if block is None else start + size + high
    mine = (place >= start - (low if block is not None else 0)) & (place < stop)
    mask = np.expand_dims(mine, [dim for dim in range(len(shape)) if dim != slot.dim])
    if reducer is not None and slot.halo == (0, 0):
        return np.where(mask, operand, _identity(reducer, operand.dtype))
    if jnp.issubdtype(operand.dtype, jax.dtypes.prng_key):
        other = jax.random.split(jax.random.key(int(noise.integers(1 << 30)), impl=jax.random.key_impl(operand)), shape)
        return jnp.where(mask, operand, other)
    return np.where(mask, operand, _garbage(shape, operand.dtype, noise))


def _identity(reducer: str, dtype: Any) -> Any:
    if reducer in ("sum", "or"):
        return np.zeros((), dtype)
    if reducer == "prod":
        return np.ones((), dtype)
    if reducer == "and":
        return np.array(True) if dtype == np.bool_ else np.array(-1).astype(dtype)
    if dtype == np.bool_:
        return np.array(reducer == "min")
    if jnp.issubdtype(dtype, jnp.floating):
        return np.array(-np.inf if reducer == "max" else np.inf).astype(dtype)
    limits = jnp.iinfo(dtype)
    return np.array(limits.min if reducer == "max" else limits.max, dtype)


def _garbage(shape: tuple[int, ...], dtype: Any, noise: np.random.Generator) -> np.ndarray:
    if dtype == np.bool_:
        return noise.integers(0, 2, shape).astype(bool)
    if jnp.issubdtype(dtype, jnp.integer):
        return noise.integers(0, 100, shape).astype(dtype)
    values = noise.normal(0, 100, shape)
    return (
        (values + 1j * noise.normal(0, 100, shape)).astype(dtype)
        if jnp.issubdtype(dtype, jnp.complexfloating)
        else values.astype(dtype)
    )


_COMBINE = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}


def _combined(parts: list[np.ndarray], slot: Slot, empty: np.ndarray | None) -> np.ndarray:
    """The whole result from the blocks'. ``empty``: the result of a block without elements, which counts once."""
    if slot.dim is not None:
        extent = parts[0].shape[slot.dim]
        size = -(-extent // len(parts))
        rows = [range(block * size, min((block + 1) * size, extent)) for block in range(len(parts))]
        return np.concatenate([part.take(own, slot.dim) for part, own in zip(parts, rows, strict=True)], slot.dim)
    if slot.reducer is None:
        return parts[-1] if all(_equal(parts[0], part) for part in parts) else np.full_like(parts[0], 0)
    total = parts[0]
    for part in parts[1:]:
        total = _COMBINE[slot.reducer](total, part)
        if slot.reducer == "sum":
            total = total - empty
        elif slot.reducer == "prod":
            total = total // empty if np.issubdtype(total.dtype, np.integer) else total / empty
    return total


def _equal(expected: np.ndarray, found: np.ndarray, scale: float | None = None) -> bool:
    """Whether results are equal up to rounding. ``scale``: the magnitude to which the tolerance is relative."""
    if expected.shape != found.shape:
        return False
    if not jnp.issubdtype(expected.dtype, jnp.inexact):
        return np.array_equal(expected, found)
    wide = np.complex128 if jnp.issubdtype(expected.dtype, jnp.complexfloating) else np.float64
    expected, found = expected.astype(wide), found.astype(wide)
    if scale is None:
        finite = np.abs(expected[np.isfinite(expected)])
        scale = float(finite.max()) if finite.size else 1.0
    return np.allclose(expected, found, rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True)


def _host(value: Any) -> np.ndarray:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)
