"""Meshes as users give them: of devices, abstract, as a number of devices, or as hosts by devices."""

from __future__ import annotations

import math
import re
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardplan.errors import ArgumentError
from shardplan.layout.layout import MeshAxes

GivenMesh = Mesh | AbstractMesh | int | str
MeshT = TypeVar("MeshT", bound=Mesh | AbstractMesh)

_GPU_PLATFORMS = ("gpu", "cuda", "rocm")


def as_mesh(mesh: Any) -> GivenMesh:
    """A mesh as it was given, with texts parsed: ``data=2,model=4`` or a number. Hosts by devices stay text.

    Raises ArgumentError with examples of valid meshes.

    >>> as_mesh("data=2,model=4").shape_tuple, as_mesh("8"), as_mesh("2x8")
    ((('data', 2), ('model', 4)), 8, '2x8')
    """
    if isinstance(mesh, str):
        mesh = int(mesh) if mesh.isdigit() else mesh if _parsed(mesh) else _of_text(mesh)
    if isinstance(mesh, bool) or not isinstance(mesh, GivenMesh):
        raise ArgumentError(
            f"a mesh was expected, got `{mesh!r}` of type `{type(mesh).__name__}`: pass jax.make_mesh(sizes, names), "
            "a jax.sharding.AbstractMesh, a text such as `data=2,model=4`, the number of devices, or hosts by devices "
            "as in `2x8`"
        )
    if isinstance(mesh, str):
        return mesh
    if isinstance(mesh, int):
        if mesh < 1:
            raise ArgumentError(f"a mesh needs at least one device, got the count `{mesh}`")
        return mesh
    names = tuple(mesh.axis_names)
    if not names:
        raise ArgumentError("the mesh has no axes: name at least one, as in jax.make_mesh((8,), ('data',))")
    repeated = sorted({str(name) for name in names if names.count(name) > 1})
    if repeated:
        raise ArgumentError(
            f"the mesh axis name `{repeated[0]}` is used twice in {names}: give every axis its own name"
        )
    return mesh


def _of_text(text: str) -> AbstractMesh:
    parts = [part.partition("=") for part in text.split(",")]
    if not all(name.strip() and size.strip().isdigit() and int(size) > 0 for name, _, size in parts):
        raise ArgumentError(
            f"a mesh was expected, got `{text!r}` of type `str`: a mesh is written `data=2,model=4`, as a number of "
            "devices, or as hosts by devices, as in `2x8`"
        )
    names, sizes = [name.strip() for name, _, _ in parts], [int(size) for _, _, size in parts]
    if len(set(names)) < len(names):
        raise ArgumentError(f"the mesh `{text}` uses an axis name twice: give every axis its own name")
    return AbstractMesh(tuple(sizes), tuple(names), axis_types=(AxisType.Auto,) * len(names))


class NoMesh:
    """A placeholder for the mesh of a function that was given none."""


def mesh_of_context() -> GivenMesh:
    """The mesh for functions that were given none: the one of ``jax.set_mesh``, or all devices."""
    held = jax.sharding.get_mesh()
    return jax.device_count() if held.empty else held


def mesh_axes(mesh: Mesh | AbstractMesh) -> MeshAxes:
    """Names and sizes of a checked mesh."""
    return MeshAxes(tuple(mesh.axis_names), tuple(mesh.shape[name] for name in mesh.axis_names))


def with_axis_types(mesh: MeshT, types: tuple[AxisType, ...]) -> MeshT:
    """The same mesh with axes of these types."""
    if tuple(mesh.axis_types) == types:
        return mesh
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=types)  # type: ignore[return-value]
    return AbstractMesh(tuple(mesh.axis_sizes), tuple(mesh.axis_names), axis_types=types)  # type: ignore[return-value]


def with_auto_axes(mesh: MeshT) -> MeshT:
    """The same mesh with axes of type Auto, which sharding constraints inside a step need."""
    return with_axis_types(mesh, (AxisType.Auto,) * len(mesh.axis_names))


def can_run(device: jax.Device) -> bool:
    """Whether a device can execute programs: a compile-only device cannot."""
    try:
        return device in jax.devices(device.platform)
    except RuntimeError:  # a compile-only device, whose platform is not here
        return False


def has_gpus(mesh: Mesh) -> bool:
    """Whether the devices of a mesh are GPUs, of this machine or compile-only ones."""
    return mesh.devices.flat[0].platform in _GPU_PLATFORMS


def memory_for_arrays(mesh: Mesh) -> int | None:
    """Bytes that JAX's allocator may give out on a local device of a mesh. None if it does not tell (CPUs)."""
    stats = mesh.local_devices[0].memory_stats() if mesh.local_devices else None
    return int(stats["bytes_limit"]) if stats and "bytes_limit" in stats else None


def hosts_by_devices(text: str) -> tuple[int, int]:
    """``"2x8"``: the number of hosts and of devices on each. Raises ArgumentError for other texts."""
    found = _parsed(text)
    if found is None:
        raise ArgumentError(f"hosts by devices are written as in `2x8`, got `{text}`")
    return found


def _parsed(text: str) -> tuple[int, int] | None:
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    return (int(found[1]), int(found[2])) if found else None


def axes_across_hosts(mesh: Mesh) -> dict[str, bool] | None:
    """Whether each axis of a mesh leads from one host to another; None where all devices are on one host.

    GPUs say which of them share a host (JAX's ``slice_index``), of other devices those of one process do.
    """
    host_of = np.vectorize(lambda device: getattr(device, "slice_index", device.process_index), otypes=[int])
    hosts = host_of(mesh.devices)
    if (hosts == hosts.flat[0]).all():
        return None
    return {axis: bool((hosts != hosts.take([0], place)).any()) for place, axis in enumerate(mesh.axis_names)}


def shapes_of(devices: int | str, ordered: bool = False) -> list[AbstractMesh]:
    """The meshes of up to two axes over a number of devices, or hosts by devices, with the hosts in front.

    A mesh of two axes has all layouts of the flat mesh and more. The flat mesh comes first. Two axes are tried in
    ascending order of their sizes alone, unless they are ``ordered``: the order of axes matters where links differ.

    >>> [mesh.axis_sizes for mesh in shapes_of(16)]
    [(16,), (2, 8), (4, 4)]
    >>> [mesh.axis_sizes for mesh in shapes_of("2x8")]
    [(2, 8), (2, 2, 4)]
    """
    hosts, per_host = hosts_by_devices(devices) if isinstance(devices, str) else (1, devices)
    inside: list[tuple[tuple[int, ...], tuple[str, ...]]] = [((per_host,), ("devices",))]
    if per_host == 1 and hosts > 1:
        inside = [((), ())]
    factors = [factor for factor in range(2, math.isqrt(per_host) + 1) if per_host % factor == 0]
    if ordered:
        factors = sorted({*factors, *(per_host // factor for factor in factors)})
    inside.extend(((factor, per_host // factor), ("outer", "inner")) for factor in factors)
    if hosts > 1:
        inside = [((hosts, *sizes), ("hosts", *names)) for sizes, names in inside]
    return [AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes)) for sizes, names in inside]
