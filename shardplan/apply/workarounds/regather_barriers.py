"""Barriers in front of a tensor that is gathered once more, so that XLA keeps the gathers of several readers separate.

Within a memory limit a plan may gather a tensor once for each reader instead of keeping the copy: a layer's weights for
the forward pass, and again for the backward pass. XLA's common-subexpression elimination merges equal gathers, so each
further one reads the tensor through a barrier.
"""

from __future__ import annotations

from typing import Any

import jax


def behind_barrier(array: Any, dtype: Any) -> Any:
    """An array through a barrier.

    An array that was converted from a narrower type passes the barrier in this ``dtype``, without loss: XLA moves
    conversions behind collectives, and sees none through a barrier.
    """
    passed = jax.lax.optimization_barrier(array if dtype is None else array.astype(dtype))
    return passed if dtype is None else passed.astype(array.dtype)
