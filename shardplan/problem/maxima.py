"""Maxima and minima over devices, of integers where floats would lose a NaN.

A maximum is NaN where one of its elements is. A collective loses that. NCCL takes the maximum of two floats by CUDA's
`fmaxf` (of 16 bits by `__hmax`), which gives the operand that is a number, and XLA:GPU hands its all-reduces and
reduce-scatters to NCCL; XLA:CPU 0.10.2 was measured to do the same. Integers have no such case. So a maximum over
devices is taken of integers that are ordered as the floats are, with NaN beyond all numbers. Floats of 4 or 8 bytes
have integers of the same size. Narrower ones take 4 bytes, since NCCL has no maximum of 16-bit integers.

Most maxima need nothing of that: those of a softmax, see `shardplan.problem.nan_flow`.

>>> from_integers(to_integers(jnp.float32([1, jnp.nan, 2]), "max").max(), jnp.float32)
Array(nan, dtype=float32)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardplan import _jax
from shardplan.problem.nan_flow import loses_nan
from shardplan.problem.strategy import Strategy
from shardplan.program.program import Operation, Program

_EXTREMES = frozenset({"reduce_max", "reduce_min", "scatter-max", "scatter-min"})

_OF_SCATTERS = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")


def compared_as_integers(program: Program, operation: Operation, strategy: Strategy) -> str | None:
    """``max`` or ``min``, where an operation takes one over devices that would lose a NaN, else None."""
    partial = operation.primitive.name in _EXTREMES and any(strategy.pending)
    return strategy.reducers[0] if partial and loses_nan(program, operation.index) else None


def compared_dtype(dtype: Any) -> Any:
    """The integers in which floats of a type are compared."""
    return jnp.dtype(jnp.int64 if _jax.item_bytes(dtype) > 4 else jnp.int32)


def to_integers(array: Any, reducer: str) -> Any:
    """Integers that are ordered as the floats of an array are, NaN last where ``max`` is wanted and first for ``min``.

    >>> to_integers(jnp.float32([-2, -0.0, 0, 1, jnp.inf, jnp.nan]), "max").tolist()
    [-1073741825, -1, 0, 1065353216, 2139095040, 2147483647]
    """
    dtype = compared_dtype(array.dtype)
    wide = array.astype(jnp.float64 if dtype == jnp.int64 else jnp.float32)
    beyond = jnp.iinfo(dtype).max if reducer == "max" else jnp.iinfo(dtype).min
    return jnp.where(jnp.isnan(wide), jnp.asarray(beyond, dtype), _turned(jax.lax.bitcast_convert_type(wide, dtype)))


def from_integers(integers: Any, dtype: Any) -> Any:
    """The floats of a type that `to_integers` made these of."""
    wide = jnp.float64 if integers.dtype == jnp.int64 else jnp.float32
    return jax.lax.bitcast_convert_type(_turned(integers), wide).astype(dtype)


def _turned(bits: Any) -> Any:
    """The bits of a float, those of negative ones but for the sign inverted: their order is then that of the floats."""
    last = jnp.iinfo(bits.dtype)
    return bits ^ ((bits >> (last.bits - 1)) & last.max)


def bind_integers(operation: Operation, operands: Sequence[Any], reducer: str) -> Any:
    """A maximum or minimum of floats, taken of integers, and as integers."""
    arrays = map(jnp.asarray, operands)
    mapped: list[Any] = [to_integers(one, reducer) if _jax.is_float(one.dtype) else one for one in arrays]
    if operation.primitive.name.startswith("scatter"):  # its parameters have a maximum of floats
        scatter = {"max": jax.lax.scatter_max, "min": jax.lax.scatter_min}[reducer]
        return (scatter(*mapped, **{name: operation.params[name] for name in _OF_SCATTERS}),)
    return _jax.bind_again(operation.equation, operation.primitive, operation.params, mapped)
