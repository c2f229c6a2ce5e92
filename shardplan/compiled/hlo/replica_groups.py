"""Replica groups of compiled collectives, and the mesh axes that they run over.

XLA prints the groups of a collective in one of three spellings. All of them mean a tuple of groups, each a tuple of
device ids. An id is the device's row-major position in the mesh:

>>> replica_groups("{{0,1},{2,3}}", device_count=4)
((0, 1), (2, 3))
>>> replica_groups("[2,2]<=[4]", device_count=4)
((0, 1), (2, 3))
>>> replica_groups("[2,2]<=[2,2]T(1,0)", device_count=4)
((0, 2), (1, 3))
>>> replica_groups("mesh['a'=2,'b'=2] {'a'}", device_count=4)
((0, 2), (1, 3))

`mesh_axes` leads back from groups to the axes of the user's mesh:

>>> mesh_axes(((0, 2), (1, 3)), {"data": 2, "model": 2})
('data',)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

Groups = tuple[tuple[int, ...], ...]
"""Groups of device ids."""

_BRACED = re.compile(r"\{([\d,\s]*)\}")
_IOTA = re.compile(r"^\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?$")
_MESH = re.compile(r"^mesh\[([^\]]*)\](?:, device_ids=\((.*)\))? ?\{([^}]*)\}$")
_AXIS = re.compile(r"^'?([^':]+)'?(?::\((\d+)\)(\d+))?$")


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _groups_of(array: np.ndarray) -> Groups:
    """Rows of a `[groups, group_size]` array of device ids."""
    return tuple(tuple(row) for row in array.tolist())


def _iota(tile: tuple[int, ...], source: tuple[int, ...], permutation: tuple[int, ...]) -> np.ndarray:
    """The array of `tile<=[source]T(permutation)`: an iota, reshaped, transposed, reshaped."""
    counted = np.arange(math.prod(source)).reshape(source)
    return counted.transpose(permutation).reshape(tile) if permutation else counted.reshape(tile)


def _mesh_array(sizes: tuple[int, ...], device_ids: str | None) -> np.ndarray:
    """Device ids of a printed mesh of shape `sizes`: an iota, unless its order is printed."""
    if device_ids is None:
        return np.arange(math.prod(sizes)).reshape(sizes)
    iota = _IOTA.match(device_ids.strip())
    if iota and iota[3]:
        return _iota(sizes, _integers(iota[2] or iota[1]), _integers(iota[3]))
    return np.array(_integers(device_ids)).reshape(sizes)


def _mesh_groups(axes: str, device_ids: str | None, grouped: str) -> Groups:
    """Groups of `mesh['a'=4,'b'=2] {'a':(1)2}`: one group per position on all the axes that are not named.

    A part of an axis is printed as `'a':(before)size`: the factor of that size that has a product `before` of more
    significant factors in front of it.
    """
    names: list[str] = []
    sizes: list[int] = []
    for entry in filter(None, axes.split(",")):
        name, size = entry.rsplit("=", 1)
        names.append(name.strip().strip("'\""))
        sizes.append(int(size))
    array = _mesh_array(tuple(sizes), device_ids)
    shape: list[int] = []
    kept: list[int] = []
    references = [_AXIS.match(entry.strip()) for entry in filter(None, grouped.split(","))]
    for name, axis_size in zip(names, sizes, strict=True):
        parts = [(reference[2], reference[3]) for reference in references if reference and reference[1] == name]
        factors, named = _factors(axis_size, parts)
        kept += [len(shape) + position for position in named]
        shape += factors
    others = [position for position in range(len(shape)) if position not in kept]
    group_size = math.prod(shape[position] for position in kept)
    return _groups_of(array.reshape(shape).transpose(others + kept).reshape(-1, group_size))


def _factors(size: int, parts: list[tuple[str | None, str | None]]) -> tuple[list[int], list[int]]:
    """The factors of an axis, most significant first, and the positions of the named ones."""
    if not parts:
        return [size], []
    if parts[0][0] is None:
        return [size], [0]
    factors: list[int] = []
    named: list[int] = []
    done = 1
    for before, part in sorted((int(before or 1), int(part or 1)) for before, part in parts):
        if before > done:
            factors.append(before // done)
        named.append(len(factors))
        factors.append(part)
        done = before * part
    if size > done:
        factors.append(size // done)
    return factors, named


@lru_cache(maxsize=4096)
def replica_groups(text: str, device_count: int) -> Groups:
    """Reads one printed `replica_groups` value. A value without groups is one group of all devices.

    Raises:
        ValueError: `text` is none of the spellings.
    """
    text = text.strip()
    if text.startswith("{"):
        groups = tuple(_integers(match[1]) for match in _BRACED.finditer(text[1:-1]))
        return groups or (tuple(range(device_count)),)
    if (iota := _IOTA.match(text)) and iota[2]:
        return _groups_of(_iota(_integers(iota[1]), _integers(iota[2]), _integers(iota[3] or "")))
    if mesh := _MESH.match(text):
        return _mesh_groups(mesh[1], mesh[2], mesh[3])
    raise ValueError(f"replica groups `{text}` are spelled in none of the known ways")


def _coordinates(device_ids: np.ndarray, mesh_shape: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Position of each device id on each mesh axis."""
    return dict(zip(mesh_shape, np.unravel_index(device_ids, tuple(mesh_shape.values())), strict=True))


def mesh_axes(groups: Groups, mesh_shape: Mapping[str, int]) -> tuple[str, ...] | None:
    """The mesh axes of groups of device ids, in the order of the mesh, without those of size 1.

    None for groups along a part of an axis, and for unequal groups.
    """
    return _mesh_axes(groups, tuple(mesh_shape.items()))


@lru_cache(maxsize=4096)
def _mesh_axes(groups: Groups, mesh_shape: tuple[tuple[str, int], ...]) -> tuple[str, ...] | None:
    sizes = dict(mesh_shape)
    if not groups or len({len(group) for group in groups}) > 1:
        return None
    device_ids = np.array(groups)
    if device_ids.max() >= math.prod(sizes.values()):
        return None
    varying = tuple(
        axis for axis, position in _coordinates(device_ids, sizes).items() if (position != position[:, :1]).any()
    )
    return varying if math.prod(sizes[axis] for axis in varying) == device_ids.shape[1] else None


def permute_axes(pairs: tuple[tuple[int, int], ...], mesh_shape: Mapping[str, int]) -> tuple[str, ...] | None:
    """The mesh axes of a collective-permute's `(source, target)` pairs, in the order of the mesh."""
    if not pairs:
        return ()
    device_ids = np.array(pairs)
    if device_ids.max() >= math.prod(mesh_shape.values()):
        return None
    coordinates = _coordinates(device_ids, mesh_shape)
    return tuple(axis for axis, position in coordinates.items() if (position[:, 0] != position[:, 1]).any())
