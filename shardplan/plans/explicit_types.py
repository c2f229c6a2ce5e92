"""The result types of calls on mesh axes of type Explicit, whose types contain layouts.

The type of an array on such axes has a layout, and ``jax.jit`` derives the types of results from those of arguments. A
planned step returns results of the same types, in the place of ``jax.jit``. This holds for calls with an argument of
such a type, or under a ``jax.set_mesh`` with such axes. Results of all other calls have types without layouts, for any
planned mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardplan import _jax
from shardplan.errors import CallError
from shardplan.plans.result_layouts import laid_out
from shardplan.program.call_arguments import Call
from shardplan.program.tracing import path_name

AxisTypes = tuple[AxisType, ...]


def axis_types_of(call: Call, mesh: Any) -> AxisTypes | None:
    """The types of the mesh axes of a call's results. None where all are Auto."""
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        return None
    shardings = (getattr(leaf, "sharding", None) for leaf in call.leaves())
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    for one in (*meshes, jax.sharding.get_abstract_mesh()):
        if AxisType.Explicit in one.axis_types and _same_axes(one, mesh):
            return tuple(AxisType.Auto if kind == AxisType.Manual else kind for kind in one.axis_types)
    return None


def typed_results(call: Call, mesh: Mesh | AbstractMesh) -> dict[str, PartitionSpec] | None:
    """The layouts of the results by their paths, by the types of ``jax.jit``. None where it derives no types.

    Raises CallError for a mix of arguments with and without such types.
    """
    try:
        traced = _traced(call, mesh)
    except Exception as error:  # the trace for the plan raises other errors
        _check_not_mixed(call, mesh, error)
        return None
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(traced.out_info)]
    types: list[Any] = traced.jaxpr.out_avals
    return dict(zip(paths, map(_spec_of, types), strict=True))


def without_types(call: Call, mesh: Mesh | AbstractMesh) -> Callable[..., Any]:
    """A function with constraints in the place of typed layouts (``out_sharding=``, ``jax.sharding.reshard``), for
    arguments of the call's shapes only."""
    traced = _traced(call, mesh)
    structure = jax.tree.structure(traced.out_info)

    @functools.wraps(call.fn)
    def constrained(*args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree.leaves((args, kwargs))
        return jax.tree.unflatten(structure, _jax.run_without_types(traced.jaxpr, leaves, laid_out))

    return constrained


def _traced(call: Call, mesh: Mesh | AbstractMesh) -> Any:
    """The trace of the call by ``jax.jit``, with the layouts of its arguments' types."""
    shapes, structure = jax.tree.flatten(call.shapes())
    shapes = [_with_layout(shape, leaf, mesh) for shape, leaf in zip(shapes, call.leaves(), strict=True)]
    args, kwargs = jax.tree.unflatten(structure, shapes)
    return jax.jit(call.fn).trace(*args, **kwargs)


def _spec_of(aval: Any) -> PartitionSpec:
    """The layout in the type of a result: whole without such an operand, free along axes of type Auto."""
    sharding, open_dim = aval.sharding, PartitionSpec.UNCONSTRAINED
    if not _is_typed(sharding):
        return PartitionSpec()
    rest = None if set(sharding.mesh.axis_types) == {AxisType.Explicit} else open_dim
    entries = (*sharding.spec, *[None] * (len(aval.shape) - len(sharding.spec)))
    return PartitionSpec(*(rest if entry is None else entry for entry in entries))


def _with_layout(shape: Any, leaf: Any, mesh: Mesh | AbstractMesh) -> Any:
    """The shape of an argument with the layout and the mesh of its type."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(shape, jax.ShapeDtypeStruct) or not isinstance(sharding, NamedSharding):
        return shape
    if not _same_axes(sharding.mesh, mesh):
        return shape
    if shape.sharding is None:  # the function gets it on the devices
        sharding = NamedSharding(sharding.mesh, sharding.spec)
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, weak_type=shape.weak_type, sharding=sharding)


def _check_not_mixed(call: Call, mesh: Mesh | AbstractMesh, error: Exception) -> None:
    kinds: dict[bool, str] = {}
    for path, leaf in call.by_path().items():
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and _same_axes(sharding.mesh, mesh):
            kinds.setdefault(_is_typed(sharding), path)
    if len(kinds) > 1:
        raise CallError(
            f"`{kinds[True]}` is on mesh axes of type Explicit and `{kinds[False]}` on the same axes of type Auto, "
            "which do not go together in one function (nor in jax.jit): make one mesh, with axis_types=(jax.sharding."
            f"AxisType.Auto,) * {len(mesh.axis_names)}, and jax.device_put both on it"
        ) from error


def _is_typed(sharding: Any) -> bool:
    return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types


def _same_axes(one: Any, other: Any) -> bool:
    return [*one.shape.items()] == [*other.shape.items()]
