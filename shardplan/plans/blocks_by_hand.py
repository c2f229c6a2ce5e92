"""Blocks that are asked for: ``blocks={"1/tokens": 8}`` runs the step in 8 blocks of the first dimension of `1/tokens`.

``{"batch": 8}`` stands for the first dimension of the largest argument that no result replaces. Two dimensions of one
argument, as ``{"1/image[1]": 4, "1/image[2]": 4}``, are two indices of one loop.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from jax.sharding import PartitionSpec

from shardplan import _jax
from shardplan.errors import ArgumentError
from shardplan.layout.layout import Layout, MeshAxes, axes_by_dim, from_spec
from shardplan.plans.report import glob_of
from shardplan.program.blocks import Blocked, Blocks, in_blocks
from shardplan.program.program import Program

BATCH = "batch"
_MOST_NEAREST = 3


def blocks_by_hand(
    program: Program, wanted: Mapping[str, int], mesh: MeshAxes, pins: Mapping[str, PartitionSpec] | None
) -> tuple[Blocked, ...]:
    """The program in the blocks that a user asks for, one rewriting after another.

    Blocks that overlap are inside of each device's part where a pin of the argument says which dimensions are split.

    Raises ArgumentError for a path without an argument, for a number of blocks that the index does not have, and for an
    index along which nothing runs in blocks."""
    grouped: dict[int, dict[int, int]] = {}
    for path, count in wanted.items():
        value, dim = _place(program, path)
        extent = program.values[value].shape[dim]
        if not 2 <= count <= extent:
            said = f"blocks: `{path}` has {extent} positions, which do not make {count} blocks"
            raise ArgumentError(f"{said}: use 2 to {extent}" if extent > 1 else said)
        grouped.setdefault(program.inputs.index(value), {})[dim] = count
    found = list[Blocked]()
    for position, dims in grouped.items():
        value = program.inputs[position]
        one = in_blocks(program, _blocks(value, dims, strided=mesh.device_count > 1))
        split = _split(program, value, mesh, pins)
        if split is not None and any(tiles.overlaps for _, tiles in one.loops):
            dims |= {dim: 1 for dim, axes in enumerate(split) if axes and dim not in dims}
            deep = in_blocks(program, _blocks(value, dims, mesh=axes_by_dim(mesh, split, [*dims])))
            one = deep if deep.loops else one
        if not one.loops:
            raise ArgumentError(
                f"blocks: nothing runs in blocks of `{program.values[value].name}`: {_reasons(program, one)}"
            )
        found.append(one)
        program = one.program
    return tuple(found)


def _blocks(value: int, dims: Mapping[int, int], **options: Any) -> Blocks:
    return Blocks(tuple((value, dim) for dim in dims), tuple(dims.values()), **options)


def _split(program: Program, value: int, mesh: MeshAxes, pins: Mapping[str, PartitionSpec] | None) -> Layout | None:
    """The layout of an argument that a pin gives all mesh axes, None without such a pin."""
    name, rank = program.values[value].name or "", len(program.values[value].shape)
    for pattern, spec in (pins or {}).items():
        with suppress(ValueError):  # of another mesh
            layout = from_spec(mesh, spec, rank)
            if fnmatchcase(name, pattern) and {axis for axes in layout for axis in axes} == {*mesh.splitting}:
                return layout if mesh.splitting else None
    return None


def _place(program: Program, path: str) -> tuple[int, int]:
    """The argument and its dimension that a path names."""
    if path == BATCH:
        return _batch(program), 0
    found = re.fullmatch(r"(.*?)(?:\[(\d+)\])?", path)
    assert found is not None
    name, dim = found[1], int(found[2] or 0)
    matching = [value for value in program.inputs if fnmatchcase(program.values[value].name or "", name)]
    if not matching:
        names = [program.values[value].name or "" for value in program.inputs]
        nearest = ", ".join(f"`{one}`" for one in get_close_matches(name, names, _MOST_NEAREST, 0.0))
        raise ArgumentError(f"blocks: no argument matches `{name}`. The nearest are {nearest}")
    value = max(matching, key=lambda one: (program.values[one].total_bytes, -one))
    if dim >= len(program.values[value].shape):
        raise ArgumentError(f"blocks: `{name}` has the shape {program.values[value].shape}, without a dimension {dim}")
    return value, dim


def _batch(program: Program) -> int:
    state = {program.inputs[position] for position in program.ties.values()}
    data = [value for value in program.inputs if value not in state and program.values[value].shape]
    if not data:
        raise ArgumentError("blocks: there is no batch, since every argument is replaced by a result: name a path")
    return max(data, key=lambda one: (program.values[one].total_bytes, -one))


def _reasons(program: Program, found: Blocked) -> str:
    """Where the index stops first, and why."""
    cuts = sorted(found.cuts.items())
    said = [
        f"`{program.operations[index].primitive.name}` at {program.operations[index].source}: {reason}"
        for index, reason in cuts[:_MOST_NEAREST]
        if index < len(program.operations)
    ]
    return "; ".join(said) or "no operation has the index"


def rows_of(
    program: Program, found: Blocked, freed: float | None = None, seconds: float | None = None
) -> list[dict[str, Any]]:
    """What `Plan.blocks` says of each loop: the first has what all of them free and add, where that is known."""
    rows = []
    for number, (region, tiles) in enumerate(found.loops):
        rows.append(
            {
                "index": _index(program, found, number),
                "count": list(tiles.counts),
                "module": _module(program, region.operations),
                "operations": len(region.operations),
                "bytes": freed if number == 0 or freed is None else 0.0,
                "seconds": seconds if number == 0 or seconds is None else 0.0,
            }
        )
    return rows


def _index(program: Program, found: Blocked, number: int) -> str:
    """The dimensions of the argument that a loop takes blocks of, or of the first value."""
    places, tiles = found.places, found.loops[number][1]
    arguments = [value for value in program.inputs if value in tiles.spans[0] and value in places[0]]
    value = arguments[0] if arguments else min(value for value in tiles.spans[0] if value in places[0])
    maker = program.makers.get(value)
    name = program.values[value].name or (_module(program, (maker.index,)) if maker else f"value {value}")
    return name + "".join(f"[{of[value].dim}]" for of in places)


def remarks_on(program: Program, found: Blocked, mesh: MeshAxes) -> list[str]:
    """Per loop, a sentence where the smallest mesh axis has more devices than a block has positions, else no text."""
    said, least = list[str](), min((mesh.sizes[axis] for axis in mesh.splitting), default=1)
    for _, tiles in found.loops:
        value = min((v for v in program.inputs if v in tiles.spans[0]), default=None)
        rows = least if value is None or max(tiles.devices) > 1 else tiles.spans[0][value].step
        extent = program.values[value].shape[found.places[0][value].dim] if value is not None else 0
        few = rows < least <= extent
        said.append(
            f"A block of {rows} is smaller than a mesh axis: use at most {extent // least} blocks" if few else ""
        )
    return said


def _module(program: Program, operations: Iterable[int]) -> str:
    """The module that has most of some operations, or the source line."""
    counted = Counter[str]()
    for index in operations:
        operation = program.operations[index]
        path = glob_of("/".join(["", *_jax.module_path(operation.equation).split("/")])).lstrip("/")
        counted[path or operation.source] += 1
    return counted.most_common(1)[0][0]
