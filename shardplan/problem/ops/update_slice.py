"""Updates at one place (``x.at[k].set(row)``, ``lax.dynamic_update_slice``) of a tensor that is split along it.

Only devices with the place in their block have work. XLA:GPU turns a scatter with one index into slices before it
partitions, and then does an all-gather of the operand. XLA:CPU 0.10.2 was measured to merge the updated slice with the
slice of a device's block, and to write rows of other devices into blocks without the place. Such an update therefore
runs in a ``shard_map``, in which every device tests whether the place is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import GatherScatterMode

from shardplan.layout.layout import MeshAxes
from shardplan.problem.ops.gather import clamp
from shardplan.problem.strategy import Strategy
from shardplan.program.program import Operation

Bind = Callable[[dict[str, Any], Sequence[Any]], Any]
"""The result of the operation with other parameters on some operands."""


def windows(operation: Operation) -> dict[int, int]:
    """The window's size per dimension of the first operand along which the operation moves a window.

    Empty, unless the operation updates one place.
    """
    shapes = [variable.aval.shape for variable in operation.equation.invars]  # type: ignore[attr-defined]
    if operation.primitive.name == "dynamic_update_slice":
        data, update, *_ = shapes
        return {dim: window for dim, (size, window) in enumerate(zip(data, update, strict=True)) if window < size}
    if not operation.primitive.name.startswith("scatter"):
        return {}
    data, indices, updates = shapes
    numbers = operation.params["dimension_numbers"]
    if prod(indices[:-1]) != 1 or numbers.operand_batching_dims:
        return {}
    kept = [dim for dim in range(len(data)) if dim not in numbers.inserted_window_dims]
    found = dict.fromkeys(numbers.inserted_window_dims, 1)
    found |= {dim: updates[place] for dim, place in zip(kept, numbers.update_window_dims, strict=True)}
    return {dim: found[dim] for dim in numbers.scatter_dims_to_operand_dims if found[dim] < data[dim]}


def splits_places(operation: Operation, strategy: Strategy) -> bool:
    """Whether a strategy splits a dimension along which the operation updates one place."""
    moved = windows(operation)
    data = (strategy.operands[0] or ()) if moved else ()
    rank = operation.equation.invars[0].aval.ndim if moved else 0  # type: ignore[attr-defined]
    return len(data) == rank and any(data[dim] for dim in moved)  # parts of a sum have another dimension


def splits_moved_windows(operation: Operation, strategy: Strategy) -> bool:
    """Whether a scatter's updates are split along a window that its indices move.

    The indices have the start of the window, and a block of it has another start.
    """
    if not operation.primitive.name.startswith("scatter"):
        return False
    data, _, updates = (variable.aval.shape for variable in operation.equation.invars)  # type: ignore[attr-defined]
    numbers, layout = operation.params["dimension_numbers"], strategy.operands[2] or ()
    outside_window = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = (dim for dim in range(len(data)) if dim not in outside_window)
    windows = zip(kept, numbers.update_window_dims, strict=True)
    moved = [
        place for dim, place in windows if dim in numbers.scatter_dims_to_operand_dims and updates[place] < data[dim]
    ]
    return bool(layout) and any(layout[place - len(updates)] for place in moved)  # a partial sum has its parts in front


def runs_by_place(strategy: Strategy) -> bool:
    """Whether `update_block` computes a strategy without windows across blocks (`split_runs`).

    It does if all blocks are equal, and no result is partial.
    """
    return not (strategy.halos or strategy.padded or any(strategy.pending))


def update_block(operation: Operation, strategy: Strategy, mesh: MeshAxes, bind: Bind) -> Callable[..., Any]:
    """The update on one device's blocks inside of a ``shard_map``."""
    data = strategy.operands[0] or ()
    split = {dim: tuple(mesh.names[axis] for axis in data[dim]) for dim in windows(operation) if data[dim]}
    blocks = {dim: mesh.degree(data[dim]) for dim in split}

    def first(dim: int, size: int) -> Any:
        return jax.lax.axis_index(split[dim]) * size if dim in split else 0

    update = _slice_updated if operation.primitive.name == "dynamic_update_slice" else _scattered
    return partial(update, operation, blocks, first, bind)


First = Callable[[int, int], Any]
"""The start of a device's block of this size in a dimension of the whole tensor, 0 without a split."""


def _scattered(
    operation: Operation, blocks: dict[int, int], first: First, bind: Bind, data: Any, indices: Any, updates: Any
) -> Any:
    params, dims = operation.params, operation.params["dimension_numbers"].scatter_dims_to_operand_dims
    starts = [indices[..., number] for number in range(len(dims))]
    if params["mode"] == GatherScatterMode.CLIP:
        sizes, moved = [data.shape[dim] * blocks.get(dim, 1) for dim in dims], windows(operation)
        limits = [size - moved.get(dim, size) for dim, size in zip(dims, sizes, strict=True)]
        starts = [clamp(start, limit) for start, limit in zip(starts, limits, strict=True)]
    signed = jnp.promote_types(indices.dtype, jnp.int32)
    local = [start.astype(signed) - first(dim, data.shape[dim]) for start, dim in zip(starts, dims, strict=True)]
    params = {**params, "mode": GatherScatterMode.FILL_OR_DROP}
    # after a barrier the block is no slice that XLA could merge with the updated one
    return bind(params, (jax.lax.optimization_barrier(data), jnp.stack(local, -1), updates))


def _slice_updated(
    operation: Operation, blocks: dict[int, int], first: First, bind: Bind, data: Any, update: Any, *starts: Any
) -> Any:
    own, inside = [], jnp.bool_(True)
    signed = jnp.promote_types(jnp.result_type(*starts), jnp.int32)
    for dim, start in enumerate(starts):
        size, window = data.shape[dim], update.shape[dim]
        place = clamp(start, size * blocks.get(dim, 1) - window).astype(signed) - first(dim, size)
        own.append(jnp.clip(place, 0, size - window))
        inside &= own[-1] == place
    data = jax.lax.optimization_barrier(data)
    kept = jax.lax.dynamic_slice(data, own, update.shape)
    return bind(operation.params, (data, jnp.where(inside, update, kept), *own))
