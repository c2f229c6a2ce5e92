"""Row lookups in a table with split rows: partial rows are reduced first, and missing rows are filled afterwards.

JAX fills rows for indices outside of a table (the default of ``table[ids]`` and ``jnp.take``) after its gather. If the
devices hold different rows of the table, the gather ends in a sum over them. XLA cannot move the planned slice of that
sum through the fill, and sends the whole sum to every device. The gather therefore runs as if all indices were inside,
its sum is reduced as planned, and the fill comes last.

The sum may be deferred (the eight corners of a cell in a grid of features, a bag of words), or be reduced in several
steps. Each device then looks up the rows of its block and gives zeros for all others. The first device fills. The zeros
have the sign of a row of -0.0, which becomes 0.0.

The gradient of a lookup adds rows to a table of zeros. If the rows are split, each device adds up its own rows, and the
devices' tables are partial sums. A table other than zeros is in the part of the first device.
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
from shardplan.problem.strategy import Strategy
from shardplan.program.program import Operation


def fills(operation: Operation) -> bool:
    """Whether the operation looks up rows, and fills missing ones.

    Single elements (a loss that looks up one logit of each row) are no rows. They have few bytes, and XLA would merge
    their scattered sum with those of gradients, for which all logits would have to wait.
    """
    return _has_filling(operation) and prod(operation.params["slice_sizes"]) > 1


def fills_elements(operation: Operation) -> bool:
    """Whether the operation looks up single elements, and fills missing ones.

    Their sum is sent whole to each device: XLA finds no reduce-scatter through the fill.
    """
    return _has_filling(operation) and prod(operation.params["slice_sizes"]) == 1


def _has_filling(operation: Operation) -> bool:
    return operation.primitive.name == "gather" and operation.params["mode"] == GatherScatterMode.FILL_OR_DROP


def unfilled_params(operation: Operation) -> dict[str, Any]:
    """The parameters of the lookup as if all indices were inside. Its result for an index outside is undefined."""
    return {**operation.params, "mode": GatherScatterMode.PROMISE_IN_BOUNDS, "fill_value": None}


def filled(operation: Operation, table_shape: tuple[int, ...], indices: Any, found: Any) -> Any:
    """The looked-up rows, with the operation's fill value for indices outside of the table.

    `indices` are `[..., one per indexed dimension]`, `found` has their leading dimensions and those of the slices.
    """
    numbers, sizes = operation.params["dimension_numbers"], operation.params["slice_sizes"]
    last = np.array([table_shape[dim] - sizes[dim] for dim in numbers.start_index_map])
    indices = indices.astype(jnp.int32 if max(table_shape) < 2**31 else jnp.int64)
    inside = jnp.all((indices >= 0) & (indices <= last.astype(indices.dtype)), axis=-1)
    leading = [dim for dim in range(found.ndim) if dim not in numbers.offset_dims]
    inside = jax.lax.broadcast_in_dim(inside, found.shape, leading)
    return jnp.where(inside, found, jnp.full_like(found, operation.params["fill_value"]))


def looks_up_rows(operation: Operation, strategy: Strategy) -> bool:
    """Whether each device can look up rows in its own block of the table: no row may cross two blocks."""
    if operation.primitive.name != "gather" or prod(operation.params["slice_sizes"]) == 1:
        return False
    sizes, data = operation.params["slice_sizes"], strategy.operands[0] or ()
    indexed = operation.params["dimension_numbers"].start_index_map
    return all(sizes[dim] == 1 for dim in indexed if data and data[dim])


def lookup_block(operation: Operation, strategy: Strategy, mesh: MeshAxes) -> Callable[..., Any]:
    """The lookup on one device's blocks inside of a ``shard_map``: its result is a partial sum."""
    numbers, axes = operation.params["dimension_numbers"], strategy.operands[0] or ()
    whole = operation.equation.invars[0].aval.shape  # type: ignore[attr-defined]
    windows = operation.params["slice_sizes"]
    fill = operation.params["fill_value"] if _has_filling(operation) else None

    def blocks(table: Any, indices: Any) -> Any:
        inside, own, first = jnp.bool_(True), jnp.bool_(True), jnp.bool_(True)
        places = []
        for column, dim in enumerate(numbers.start_index_map):
            given = indices[..., column]
            place = clamp(given, whole[dim] - windows[dim])
            inside &= place == given
            place = place.astype(jnp.int32 if whole[dim] < 2**31 else jnp.int64)
            if axes[dim]:
                number = jax.lax.axis_index(tuple(mesh.names[axis] for axis in axes[dim]))
                place -= number * table.shape[dim]
                own &= (place >= 0) & (place < table.shape[dim])
                place, first = jnp.clip(place, 0, table.shape[dim] - 1), first & (number == 0)
            places.append(place)
        sizes = [min(size, rows) for size, rows in zip(windows, table.shape, strict=True)]
        mode = GatherScatterMode.PROMISE_IN_BOUNDS
        found = jax.lax.gather(table, jnp.stack(places, -1), numbers, tuple(sizes), mode=mode)
        leading = [dim for dim in range(found.ndim) if dim not in numbers.offset_dims]
        found = jnp.where(jax.lax.broadcast_in_dim(own, found.shape, leading), found, jnp.zeros_like(found))
        if fill is None:
            return found
        filling = jnp.where(first, jnp.full_like(found, fill), jnp.zeros_like(found))
        return jnp.where(jax.lax.broadcast_in_dim(inside, found.shape, leading), found, filling)

    return blocks


def adds_whole_rows(operation: Operation, strategy: Strategy) -> bool:
    """Whether each device can add its own rows to its block of the table: it needs these rows whole."""
    data = strategy.operands[0] or ()
    indexed = operation.params["dimension_numbers"].scatter_dims_to_operand_dims
    return not any(data[dim] for dim in indexed)


def adding_block(strategy: Strategy, mesh: MeshAxes, add: Callable[..., Any]) -> Callable[..., Any]:
    """The addition of rows on one device's blocks inside of a ``shard_map``: its result is a partial sum of the table.

    ``add`` runs the operation on blocks.
    """
    names = tuple(mesh.names[axis] for axis in sorted(strategy.pending[0]))

    def blocks(table: Any, indices: Any, rows: Any) -> Any:
        first = jax.lax.axis_index(names) == 0
        return add(jnp.where(first, table, jnp.zeros_like(table)), indices, rows)

    return blocks


def clamp_start(operation: Operation, operands: Sequence[Any]) -> Sequence[Any]:
    """The operands of a slice at a start that is data, with the start moved so that the slice is inside.

    The slice moves it in the same way. XLA 0.10.2 was measured to merge such a slice with the slice of a device's
    block, and to move the start of both together. If the first one had to be moved, the blocks were wrong.
    """
    if operation.primitive.name != "dynamic_slice":
        return operands
    source, *starts = operands
    last = (size - window for size, window in zip(source.shape, operation.params["slice_sizes"], strict=True))
    return [source, *(clamp(start, most) for start, most in zip(starts, last, strict=True))]


def clamp(start: Any, last: int) -> Any:
    """A window's start, moved into 0 to `last`, of the same type."""
    dtype = jnp.result_type(start)
    return jnp.clip(start, 0, min(last, jnp.iinfo(dtype).max)).astype(dtype)
