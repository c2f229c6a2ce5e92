"""Slices at one place (``x[k]``, ``x[:, 3:7]``, ``lax.dynamic_slice``) of a tensor that is split along the slice.

Each device takes the part of the window in its block, and zeros for the rest. The window is the sum over devices. XLA
0.10.2 was measured to do an all-gather of the operand instead, or to reshard it. An example is a tensor of 8 rows on 2
devices, read at row 5: the first device gives zeros and the second its row 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from shardplan.layout.layout import MeshAxes
from shardplan.problem.ops.gather import clamp, lookup_block
from shardplan.problem.strategy import Strategy
from shardplan.program.program import Operation

SLICES = frozenset({"slice", "dynamic_slice"})


def windows_read(operation: Operation) -> dict[int, int]:
    """The window's size per dimension of the first operand of which the operation reads a part.

    Empty, unless the operation reads one window.
    """
    name, params = operation.primitive.name, operation.params
    if name not in SLICES and name != "gather":
        return {}
    sizes = operation.equation.invars[0].aval.shape  # type: ignore[attr-defined]
    if name == "gather":
        numbers, indices = params["dimension_numbers"], operation.equation.invars[1].aval.shape  # type: ignore[attr-defined]
        if prod(indices[:-1]) != 1 or numbers.operand_batching_dims:
            return {}
        return {d: params["slice_sizes"][d] for d in numbers.start_index_map if params["slice_sizes"][d] < sizes[d]}
    parts = operation.equation.outvars[0].aval.shape  # type: ignore[attr-defined]
    strides = params.get("strides") or (1,) * len(sizes)
    return {d: p for d, (p, size, by) in enumerate(zip(parts, sizes, strides, strict=True)) if p < size and by == 1}


def reads_place(operation: Operation, strategy: Strategy) -> bool:
    """Whether a strategy splits a dimension of which the operation reads one window, so that its parts are partial
    sums."""
    data = strategy.operands[0] if strategy.operands else None
    if not data or not any(strategy.pending):
        return False
    return len(data) == operation.equation.invars[0].aval.ndim and any(data[dim] for dim in windows_read(operation))  # type: ignore[attr-defined]


def gives_whole_windows(operation: Operation, strategy: Strategy) -> bool:
    """Whether the result has the window whole along the dimensions in which it is read."""
    kept = list(range(operation.equation.invars[0].aval.ndim))  # type: ignore[attr-defined]
    given = dict(zip(kept, kept, strict=True))
    if operation.primitive.name == "gather":
        numbers = operation.params["dimension_numbers"]
        kept = [dim for dim in kept if dim not in numbers.collapsed_slice_dims]
        given = dict(zip(kept, numbers.offset_dims, strict=True))
    return not any(strategy.results[0][given[dim]] for dim in windows_read(operation) if dim in given)


def is_useless_split(rule: Any, split: Any, n: int) -> bool:
    """Whether a split of a slice into n blocks has no use.

    A window larger than a block sends more bytes as a sum than resharding the blocks does. Elements other than numbers
    cannot be summed. XLA was measured to exchange parts of a window that all devices have whole.
    """
    dim, reducer = split.operands[0].dim, split.results[0].reducer
    if reducer is None:
        return rule.primitive == "slice" and dim is None
    part, size = rule.expression.result_shapes[0][dim], rule.expression.operand_shapes[0][dim]
    return reducer != "sum" or part * n > size


def read_block(operation: Operation, strategy: Strategy, mesh: MeshAxes) -> Callable[..., Any]:
    """The slice or lookup on one device's blocks inside of a ``shard_map``: its result is a partial sum."""
    if not reads_place(operation, strategy):
        return lookup_block(operation, strategy, mesh)
    moved, axes = windows_read(operation), strategy.operands[0] or ()
    whole = operation.equation.invars[0].aval.shape  # type: ignore[attr-defined]

    def blocks(data: Any, *places: Any) -> Any:
        data = _strided(operation, strategy, mesh, data)
        starts, inside = _starts(operation, places), jnp.bool_(True)
        sizes, padding, first = list(data.shape), [(0, 0, 0)] * data.ndim, jnp.bool_(True)
        for dim, window in moved.items():
            inside &= (starts[dim] >= 0) & (starts[dim] <= whole[dim] - window)
            starts[dim], sizes[dim] = clamp(starts[dim], whole[dim] - window), window
            if axes[dim]:  # a window outside of the block reads the zeros around it
                number = jax.lax.axis_index(tuple(mesh.names[axis] for axis in axes[dim]))
                padding[dim], first = (window, window, 0), first & (number == 0)
                own = starts[dim].astype(jnp.int32) - number * data.shape[dim] + window
                starts[dim] = jnp.clip(own, 0, data.shape[dim] + window)
        zero, kind = jnp.zeros((), data.dtype), jnp.result_type(*starts)
        starts = [start.astype(kind) for start in starts]
        found = jax.lax.dynamic_slice(jax.lax.pad(data, zero, padding), starts, sizes)
        if operation.primitive.name != "gather":
            return found
        if operation.params["mode"] == GatherScatterMode.FILL_OR_DROP:  # the fill of one device is the sum
            filling = jnp.asarray(operation.params["fill_value"], data.dtype)
            found = jnp.where(inside, found, jnp.where(first, filling, zero))
        return _as_gathered(operation, found)

    return blocks


def _starts(operation: Operation, places: Sequence[Any]) -> list[Any]:
    """The start of the window in each dimension of the whole tensor, as integers that can be negative."""
    rank = operation.equation.invars[0].aval.ndim  # type: ignore[attr-defined]
    starts: list[Any] = [jnp.int32(0)] * rank
    if operation.primitive.name == "slice":
        for dim in windows_read(operation):
            starts[dim] = jnp.asarray(int(operation.params["start_indices"][dim]))
    elif operation.primitive.name == "dynamic_slice":
        for dim in windows_read(operation):
            starts[dim] = _signed(places[dim])
    else:
        (indices,) = places
        for number, dim in enumerate(operation.params["dimension_numbers"].start_index_map):
            starts[dim] = _signed(indices.reshape(-1)[number])
    return starts


def _signed(place: Any) -> Any:
    return jnp.asarray(place).astype(jnp.promote_types(jnp.result_type(place), jnp.int32))


def _strided(operation: Operation, strategy: Strategy, mesh: MeshAxes, data: Any) -> Any:
    """A block with only every n-th row in the dimensions of a strided slice, of whole blocks if they are split."""
    params = operation.params
    strides = params.get("strides") or () if operation.primitive.name == "slice" else ()
    for dim, stride in enumerate(strides):
        if stride != 1:
            start, parts = int(params["start_indices"][dim]), mesh.degree(strategy.results[0][dim])
            count = operation.equation.outvars[0].aval.shape[dim] // parts  # type: ignore[attr-defined]
            data = jax.lax.slice_in_dim(data, start, start + (count - 1) * stride + 1, stride, dim)
    return data


def _as_gathered(operation: Operation, window: Any) -> Any:
    """A window of the operand, with the dimensions in the order of a gather's result."""
    numbers = operation.params["dimension_numbers"]
    found = jax.lax.squeeze(window, numbers.collapsed_slice_dims)
    rank = operation.equation.outvars[0].aval.ndim  # type: ignore[attr-defined]
    return jnp.expand_dims(found, tuple(int(dim) for dim in np.setdiff1d(np.arange(rank), numbers.offset_dims)))
