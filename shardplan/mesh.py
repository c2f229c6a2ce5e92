"""Meshes as users give them: of devices, without devices, or just a number of devices."""

from __future__ import annotations

from typing import Any

from jax.sharding import AbstractMesh, AxisType, Mesh

from shardplan.errors import ArgumentError
from shardplan.layout import MeshAxes

GivenMesh = Mesh | AbstractMesh | int


def check_mesh(mesh: Any) -> None:
    """Raises ArgumentError for what is no mesh, with what would be one."""
    if isinstance(mesh, bool) or not isinstance(mesh, GivenMesh):
        raise ArgumentError(
            f"a mesh was expected, got `{mesh!r}` of type `{type(mesh).__name__}`: pass jax.make_mesh(sizes, names), "
            "a jax.sharding.AbstractMesh, or the number of devices"
        )
    if isinstance(mesh, int):
        if mesh < 1:
            raise ArgumentError(f"a mesh needs at least one device, got the count `{mesh}`")
        return
    names = tuple(mesh.axis_names)
    if not names:
        raise ArgumentError("the mesh has no axes: name at least one, as in jax.make_mesh((8,), ('data',))")
    repeated = sorted({str(name) for name in names if names.count(name) > 1})
    if repeated:
        raise ArgumentError(
            f"the mesh axis name `{repeated[0]}` is used twice in {names}: give every axis its own name"
        )


def mesh_axes(mesh: Mesh | AbstractMesh) -> MeshAxes:
    """Names and sizes of a checked mesh."""
    return MeshAxes(tuple(mesh.axis_names), tuple(mesh.shape[name] for name in mesh.axis_names))


def with_auto_axes(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The same mesh with axes of type Auto, which is what constraints inside a step need."""
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if tuple(mesh.axis_types) == types:
        return mesh
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    return AbstractMesh(tuple(mesh.axis_sizes), tuple(mesh.axis_names), axis_types=types)


def shapes_of(device_count: int) -> list[AbstractMesh]:
    """The meshes of up to two axes that a number of devices makes, the flat one first.

    A mesh of two axes has all layouts of the flat one and more; both factors are tried in ascending order alone, since
    without a hardware profile per axis the order of the axes changes nothing.
    """
    meshes = [AbstractMesh((device_count,), ("devices",), axis_types=(AxisType.Auto,))]
    factor = 2
    while factor * factor <= device_count:
        if device_count % factor == 0:
            sizes = (factor, device_count // factor)
            meshes.append(AbstractMesh(sizes, ("outer", "inner"), axis_types=(AxisType.Auto,) * 2))
        factor += 1
    return meshes
