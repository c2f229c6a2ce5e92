"""The element types of reductions over devices.

A sum is reduced in its own type, as in XLA, or in float32 if it is small and narrower than that. One device adds up
narrow floats in float32, and rounds once. Several devices round each part, and the sum of each two. A user may name
another type (``reduce_dtype``).

>>> import jax
>>> [str(precise_dtype(jax.ShapeDtypeStruct(shape, "bfloat16"))) for shape in ((), (8192,), (32, 64), (512, 512))]
['float32', 'float32', 'float32', 'bfloat16']
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from shardplan import _jax
from shardplan.program.program import Operation

_CONTRACTIONS = frozenset({"dot_general", "ragged_dot_general"})

_MAX_FLOAT32_ELEMENTS = 4096
"""The most elements of a narrow sum that is reduced in float32: about those of a large model's vectors."""


def reduction_dtype(operation: Operation, tensor: Any, reduce_dtype: Any) -> Any:
    """The element type in which the partial results of an operation are reduced.

    A wider type from the user holds for every sum of floats. A narrower one holds for contractions (gradients and
    activations) alone, since plain sums are statistics and losses.
    """
    exact = operation.primitive.name in ("shard_map", "gather")  # of the parts of a lookup all but one are zeros
    if not _jax.is_float(tensor.dtype) or exact:
        return tensor.dtype
    if reduce_dtype is None:
        return precise_dtype(tensor)
    narrower = _jax.item_bytes(reduce_dtype) < _jax.item_bytes(tensor.dtype)
    return tensor.dtype if narrower and operation.primitive.name not in _CONTRACTIONS else reduce_dtype


def deferred_dtype(tensor: Any, reduce_dtype: Any) -> Any:
    """The element type in which a deferred sum is reduced. Vectors (statistics, biases) are not narrowed."""
    if not _jax.is_float(tensor.dtype):
        return tensor.dtype
    if reduce_dtype is None:
        return precise_dtype(tensor)
    narrower = _jax.item_bytes(reduce_dtype) < _jax.item_bytes(tensor.dtype)
    return tensor.dtype if narrower and len(tensor.shape) < 2 else reduce_dtype


def precise_dtype(tensor: Any) -> Any:
    """float32 for a scalar, a vector (statistics, gradients of biases) or a small tensor of narrower floats, whose
    bytes hardly count. All others have their own type."""
    small = len(tensor.shape) < 2 or prod(tensor.shape) <= _MAX_FLOAT32_ELEMENTS
    narrow = _jax.is_float(tensor.dtype) and _jax.item_bytes(tensor.dtype) < 4
    return np.dtype(np.float32) if small and narrow else tensor.dtype
