"""Flax linen adapter: boxes that name mesh axes (``nn.with_partitioning``) are pins of their arrays.

Names that are no mesh axes are ignored. They are logical names, which need the user's own translation first.
"""

from __future__ import annotations

import importlib
from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardplan.program.call_arguments import Call
from shardplan.program.tracing import path_name

meta: Any = importlib.import_module("flax.core.meta")
"""Imported by the script already: this package imports no library by itself."""

_IN_BOX = jax.tree_util.GetAttrKey("value")


def boxed_layouts(call: Call, axes: tuple[str, ...]) -> dict[str, PartitionSpec]:
    """The layouts of boxed arguments by their paths, from boxes that name axes of the mesh."""
    leaves = jax.tree_util.tree_leaves_with_path((call.args, call.kwargs), is_leaf=_is_box)
    found = {}
    for path, box in leaves:
        if _is_box(box):
            entries = tuple(_axes(name, axes) for name in box.names)
            if any(entries):
                found[path_name((*path[1:], _IN_BOX))] = PartitionSpec(*(entry or None for entry in entries))
    return found


def _is_box(node: Any) -> bool:
    return isinstance(node, meta.Partitioned)


def _axes(name: Any, axes: tuple[str, ...]) -> tuple[str, ...]:
    """The mesh axes that one entry of a box names."""
    named = name if isinstance(name, tuple) else (name,)
    return tuple(one for one in named if one in axes)
