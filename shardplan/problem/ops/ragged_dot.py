"""Ragged dots: products of rows in groups (``jax.lax.ragged_dot``), each device with some of the rows and the groups.

The rows of a group depend on the sizes of all groups before it, and XLA does an all-gather of operands that are split
along rows or groups. Every device has all sizes. It therefore knows the start and the end of each group, and the part
of it in its own rows:

>>> import jax.numpy as jnp
>>> sizes = jnp.array([3, 0, 4])                       # of 8 rows; the last one belongs to no group
>>> [rows_of_groups(sizes, first, 4)[1].tolist() for first in (0, 4)]      # per half of the rows, rows of each group
[[3, 0, 1], [0, 0, 3]]

With its own groups alone, a device gives zeros in the rows of other groups: the product is a sum over the devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardplan.layout.layout import MeshAxes
from shardplan.problem.strategy import Strategy
from shardplan.program.program import Operation

RAGGED = "ragged_dot_general"
MATRICES = 1
"""The position of the matrices among a product's operands, or of the other rows that the matrices are a sum of."""


def axes_of_rows(operation: Operation, strategy: Strategy) -> tuple[int, ...]:
    """The mesh axes that split the rows, none if these are batches that have groups."""
    rows = strategy.operands[0]
    numbers = operation.params["ragged_dot_dimension_numbers"]
    (ragged,) = numbers.lhs_ragged_dimensions
    return () if rows is None or ragged in numbers.dot_dimension_numbers[1][0] else rows[ragged]


def axes_of_groups(operation: Operation, strategy: Strategy) -> tuple[int, ...]:
    """The mesh axes that split the groups: those of the matrices, or those of the result with one matrix per group."""
    numbers = operation.params["ragged_dot_dimension_numbers"]
    if numbers.rhs_group_dimensions:
        matrices = strategy.operands[1]
        return matrices[numbers.rhs_group_dimensions[0]] if matrices is not None else ()
    return strategy.results[0][0] if sums_rows(operation) else ()


def splits_rows_or_groups(operation: Operation, strategy: Strategy) -> bool:
    """Whether a strategy splits the rows or the groups of a product.

    XLA does an all-gather of rows and matrices then, and repeats the work of a gradient of the matrices that is split
    by group.
    """
    if operation.primitive.name != RAGGED:
        return False
    return bool(axes_of_rows(operation, strategy) or axes_of_groups(operation, strategy))


def sums_rows(operation: Operation) -> bool:
    """Whether a product sums over the rows of each group: the gradient of the matrices."""
    numbers = operation.params["ragged_dot_dimension_numbers"]
    (ragged,) = numbers.lhs_ragged_dimensions
    return ragged in numbers.dot_dimension_numbers[0][0]


def rows_of_groups(sizes: Any, first: Any, count: int) -> tuple[Any, Any]:
    """The start of each group in `count` rows from row `first` on, and its number of these rows, both int32."""
    ends = jnp.clip(jnp.cumsum(sizes.astype(jnp.int32)) - first, 0, count)
    begins = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
    return begins, ends - begins


def on_blocks(operation: Operation, strategy: Strategy, mesh: MeshAxes, run: Callable[..., Any]) -> Callable[..., Any]:
    """The product on one device's blocks inside a ``shard_map``. ``run`` is the operation on whole arrays.

    The rows are rotated so that those of the device's first group come first, as the operation expects. Rows of no
    group give zeros, which are the device's parts of other devices' rows.
    """
    numbers = operation.params["ragged_dot_dimension_numbers"]
    (ragged,) = numbers.lhs_ragged_dimensions
    (contracted, contracted_with), (batch, _) = numbers.dot_dimension_numbers
    of_rows, of_groups = axes_of_rows(operation, strategy), axes_of_groups(operation, strategy)

    def place(axes: tuple[int, ...]) -> Any:
        return jax.lax.axis_index(tuple(mesh.names[axis] for axis in axes)) if axes else 0

    def blocks(rows: Any, other: Any, sizes: Any) -> Any:
        count = rows.shape[ragged]
        begins, local = rows_of_groups(sizes, place(of_rows) * count, count)
        if not of_groups:
            return run(rows, other, local.astype(sizes.dtype))
        share = sizes.shape[0] // mesh.degree(of_groups)
        mine = place(of_groups) * share
        local = jax.lax.dynamic_slice_in_dim(local, mine, share).astype(sizes.dtype)
        shift = begins[mine]
        rows = jnp.roll(rows, -shift, ragged)
        if sums_rows(operation):
            return run(rows, jnp.roll(other, -shift, contracted_with[contracted.index(ragged)]), local)
        before = [dim for dim in range(ragged) if dim not in batch and dim not in contracted]
        return jnp.roll(run(rows, other, local), shift, len(batch) + len(before))

    return blocks
