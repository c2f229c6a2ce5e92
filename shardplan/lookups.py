"""Lookups in a table whose rows are split: the rows are added up first, and filled where there is none afterwards.

JAX fills what is looked up outside of a table (the default of ``table[ids]`` and ``jnp.take``) behind its gather. Where
the devices hold different rows of the table, the gather ends in a sum over them; XLA cannot take the planned slice of
that sum through the filling, and sends the whole sum to everyone. So the gather is run as if nothing were outside,
its sum is reduced as planned, and the filling comes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from shardplan.program import Operation


def fills(operation: Operation) -> bool:
    """Whether the operation looks up rows, and gives another value where there is none.

    Single elements (a loss that looks up one logit of each row) are no rows: there is little to send, and XLA would
    merge their scattered sum with those of gradients, for which all logits would have to wait.
    """
    return _has_filling(operation) and prod(operation.params["slice_sizes"]) > 1


def fills_elements(operation: Operation) -> bool:
    """Whether the operation looks up single elements, and gives another value where there is none.

    Their sum over devices is sent whole to each of them: XLA sees no reduce-scatter through the filling.
    """
    return _has_filling(operation) and prod(operation.params["slice_sizes"]) == 1


def _has_filling(operation: Operation) -> bool:
    return operation.primitive.name == "gather" and operation.params["mode"] == GatherScatterMode.FILL_OR_DROP


def unfilled_params(operation: Operation) -> dict[str, Any]:
    """The parameters of the lookup as if no index were outside; what it then gives for one that is, is not said."""
    return {**operation.params, "mode": GatherScatterMode.PROMISE_IN_BOUNDS, "fill_value": None}


def filled(operation: Operation, table_shape: tuple[int, ...], indices: Any, found: Any) -> Any:
    """What was looked up, with the operation's fill value where an index is outside of the table.

    `indices` are `[..., one per indexed dimension]`, `found` has their leading dimensions and those of the slices.
    """
    numbers, sizes = operation.params["dimension_numbers"], operation.params["slice_sizes"]
    last = np.array([table_shape[dim] - sizes[dim] for dim in numbers.start_index_map])
    indices = indices.astype(jnp.int32 if max(table_shape) < 2**31 else jnp.int64)
    inside = jnp.all((indices >= 0) & (indices <= last.astype(indices.dtype)), axis=-1)
    leading = [dim for dim in range(found.ndim) if dim not in numbers.offset_dims]
    inside = jax.lax.broadcast_in_dim(inside, found.shape, leading)
    return jnp.where(inside, found, jnp.full_like(found, operation.params["fill_value"]))


def starting_inside(operation: Operation, operands: Sequence[Any]) -> Sequence[Any]:
    """The operands of a slice whose start is data, its starts moved so that all of it lies inside, as the slice does.

    XLA 0.10.2 was measured to join such a slice with the one that takes a device's block of it, and to move the start
    of both together: where the first would have been moved, the blocks were wrong.
    """
    if operation.primitive.name != "dynamic_slice":
        return operands
    source, *starts = operands
    last = (size - window for size, window in zip(source.shape, operation.params["slice_sizes"], strict=True))
    return [source, *(between(start, most) for start, most in zip(starts, last, strict=True))]


def between(start: Any, last: int) -> Any:
    """A start of a window, moved to lie in 0 to `last`, of the type that it has."""
    dtype = jnp.result_type(start)
    return jnp.clip(start, 0, min(last, jnp.iinfo(dtype).max)).astype(dtype)
