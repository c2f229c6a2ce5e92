"""Maxima and minima over devices: they are reduced as integers if floats would lose a NaN.

A maximum is NaN if one of its elements is, and collectives lose that. NCCL takes the maximum of two floats by CUDA's
`fmaxf` (of 16 bits by `__hmax`), which gives the operand that is a number. XLA:GPU hands its all-reduces and
reduce-scatters to NCCL. XLA:CPU 0.10.2 was measured to lose NaNs too. Integers have no such case. A maximum over
devices is therefore taken of integers in the order of the floats, with NaN beyond all numbers. Floats of 4 or 8 bytes
have integers of the same size. Narrower ones take 4 bytes, since NCCL has no maximum of 16-bit integers.

Most maxima need no integers: those of a softmax, see `shardplan.problem.nan_flow`.

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
    """``max`` or ``min`` for an operation whose reduction over devices would lose a NaN, else None."""
    partial = operation.primitive.name in _EXTREMES and any(strategy.pending)
    return strategy.reducers[0] if partial and loses_nan(program, operation.index) else None


def compared_dtype(dtype: Any) -> Any:
    """The integers in which floats of a type are compared."""
    return jnp.dtype(jnp.int64 if _jax.item_bytes(dtype) > 4 else jnp.int32)


def to_integers(array: Any, reducer: str) -> Any:
    """Integers in the order of the floats of an array, with NaN last for ``max`` and first for ``min``.

    >>> to_integers(jnp.float32([-2, -0.0, 0, 1, jnp.inf, jnp.nan]), "max").tolist()
    [-1073741825, -1, 0, 1065353216, 2139095040, 2147483647]
    """
    dtype = compared_dtype(array.dtype)
    wide = array.astype(jnp.float64 if dtype == jnp.int64 else jnp.float32)
    beyond = jnp.iinfo(dtype).max if reducer == "max" else jnp.iinfo(dtype).min
    return jnp.where(
        jnp.isnan(wide), jnp.asarray(beyond, dtype), _ordered_bits(jax.lax.bitcast_convert_type(wide, dtype))
    )


def from_integers(integers: Any, dtype: Any) -> Any:
    """The floats of a type from the integers of `to_integers`."""
    wide = jnp.float64 if integers.dtype == jnp.int64 else jnp.float32
    return jax.lax.bitcast_convert_type(_ordered_bits(integers), wide).astype(dtype)


def _ordered_bits(bits: Any) -> Any:
    """The bits of a float, with all but the sign inverted for negative ones: their order is that of the floats."""
    last = jnp.iinfo(bits.dtype)
    return bits ^ ((bits >> (last.bits - 1)) & last.max)


def bind_integers(operation: Operation, operands: Sequence[Any], reducer: str) -> Any:
    """A maximum or minimum of floats, computed on integers, with an integer result."""
    arrays = map(jnp.asarray, operands)
    mapped: list[Any] = [to_integers(one, reducer) if _jax.is_float(one.dtype) else one for one in arrays]
    if operation.primitive.name.startswith("scatter"):  # its parameters have a maximum of floats
        scatter = {"max": jax.lax.scatter_max, "min": jax.lax.scatter_min}[reducer]
        return (scatter(*mapped, **{name: operation.params[name] for name in _OF_SCATTERS}),)
    return _jax.bind_again(operation.equation, operation.primitive, operation.params, mapped)
