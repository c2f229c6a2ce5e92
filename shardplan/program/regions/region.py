"""A ``shard_map`` on the mesh of a plan: all axes are manual, operands and results have the layouts of its specs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from shardplan.errors import ArgumentError
from shardplan.layout.layout import Layout, MeshAxes, replicated
from shardplan.program.program import Operation
from shardplan.program.regions._jax import has_region, shard_map_specs
from shardplan.program.regions.collectives import Named, collectives_of_region, gathers, layouts_of


@dataclass(frozen=True, slots=True)
class Region:
    """A ``shard_map`` on a mesh: layouts of its operands and results, its collectives, and the mesh axes that it leaves
    out.

    All devices along these axes compute the same.
    """

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    calls: tuple[Named, ...]
    left_out: tuple[int, ...]
    inexact: str = ""
    """The reason for which XLA may send other bytes than those of the calls, empty without one."""


def region_of(mesh: MeshAxes, operation: Operation) -> Region | None:
    """A ``shard_map`` operation on a mesh. None for every other operation.

    Its own mesh may have other axes. A split into blocks that this mesh cannot make is whole outside of the region.

    Raises ArgumentError for a mesh of more or fewer devices.
    """
    specs = shard_map_specs(operation.equation)
    if specs is None:
        return None
    own = MeshAxes(tuple(specs.axes), tuple(specs.axes.values()))
    if own.device_count != mesh.device_count:
        raise ArgumentError(
            f"the `shard_map` at {operation.source} is over {own.device_count} devices, {specs.axes}, and the plan is "
            f"for {mesh.device_count}: give both the same mesh"
        )
    read, given = operation.equation.invars, operation.equation.outvars
    operands = [_layout_on(mesh, own, layout) for layout in layouts_of(own, read, specs.operands)]
    written = layouts_of(own, given, specs.results)
    results = [_layout_on(mesh, own, layout) for layout in written]
    gathered = [pair for pair, found in zip(zip(given, written, strict=True), results, strict=True) if found is None]
    calls = [*collectives_of_region(specs.body, specs.axes), *gathers(own, gathered)]
    by_hand = _axes_on(mesh, own, map(own.names.index, specs.manual)) or ()
    inexact = "holds another one" if has_region(specs.body) else ""
    if None in (*operands, *results):
        inexact = f"splits over blocks of its own mesh, {specs.axes}, that the plan's has not"
    return Region(
        _whole_without(operands, read),
        _whole_without(results, given),
        tuple(replace(call, axes=_names_on(mesh, own, call)) for call in calls),
        tuple(axis for axis in mesh.splitting if axis not in by_hand),
        inexact,
    )


def orders_of_region(mesh: MeshAxes, operation: Operation) -> set[tuple[int, ...]]:
    """The orders of mesh axes on one dimension that a ``shard_map`` names."""
    region = region_of(mesh, operation)
    layouts = () if region is None else (*region.operands, *region.results)
    return {axes for layout in layouts for axes in layout if len(axes) > 1}


def _axes_on(mesh: MeshAxes, own: MeshAxes, axes: Iterable[int]) -> tuple[int, ...] | None:
    """The axes of a mesh that make the same blocks as ``axes`` of another mesh of the same devices, None without such
    axes.

    >>> _axes_on(MeshAxes(("x", "y"), (2, 4)), MeshAxes(("a", "b", "c"), (2, 2, 2)), (1, 2))
    (1,)
    """
    starts = {prod(mesh.sizes[:axis]): axis for axis in mesh.splitting}
    found: list[int] = []
    end = start = 1  # of the blocks that axes in a row make, in devices from the first axis on
    for axis in (axis for axis in axes if own.sizes[axis] > 1):
        before = prod(own.sizes[:axis])
        if before != end:
            if start != end:
                return None
            start = before
        end = before * own.sizes[axis]
        while start in starts and start * mesh.sizes[starts[start]] <= end:
            found.append(starts[start])
            start *= mesh.sizes[starts[start]]
    return tuple(found) if start == end else None


def _layout_on(mesh: MeshAxes, own: MeshAxes, layout: Layout) -> Layout | None:
    """A layout of another mesh of the same devices, None if this mesh cannot make its blocks."""
    found = tuple(_axes_on(mesh, own, axes) for axes in layout)
    return None if None in found else found  # type: ignore[return-value]


def _whole_without(layouts: Sequence[Layout | None], tensors: Sequence[Any]) -> tuple[Layout, ...]:
    pairs = zip(layouts, tensors, strict=True)
    return tuple(replicated(len(var.aval.shape)) if layout is None else layout for layout, var in pairs)


def _names_on(mesh: MeshAxes, own: MeshAxes, call: Named) -> tuple[str, ...]:
    """The mesh axes of a collective: all of them if it runs over a part of an axis."""
    axes = _axes_on(mesh, own, sorted(map(own.names.index, call.axes)))
    return tuple(mesh.names[axis] for axis in (mesh.splitting if axes is None else axes))
