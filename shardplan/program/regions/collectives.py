"""The collectives that a ``shard_map`` region calls by name, with the bytes that they send.

>>> import jax
>>> from jax.sharding import AbstractMesh, AxisType, PartitionSpec
>>> mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
>>> specs = {"in_specs": PartitionSpec("x"), "out_specs": PartitionSpec()}
>>> region = jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, **specs)
>>> (equation,) = jax.make_jaxpr(region)(jax.ShapeDtypeStruct((64, 16), "float32")).eqns
>>> collectives_of_region(equation.params["jaxpr"], {"x": 8})   # of 8 x 16 floats on every device: 2 * 7/8 * 512 bytes
(Named(kind='all-reduce', axes=('x',), bytes=896.0, assumed=False),)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import Any

from jax.sharding import PartitionSpec

from shardplan import _jax
from shardplan.layout.collectives import CollectiveKind
from shardplan.layout.layout import Layout, MeshAxes, from_spec
from shardplan.program.control_flow import stated_trip_count, while_trip_count
from shardplan.program.program import Constant
from shardplan.program.regions._jax import shard_map_specs

_KINDS = {
    **dict.fromkeys(("psum", "psum2", "psum_invariant", "pmax", "pmin"), CollectiveKind.ALL_REDUCE),
    **dict.fromkeys(("all_gather", "all_gather_invariant"), CollectiveKind.ALL_GATHER),
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER,
    **dict.fromkeys(("all_to_all", "ragged_all_to_all"), CollectiveKind.ALL_TO_ALL),
    "ppermute": CollectiveKind.PERMUTE,
}


@dataclass(frozen=True, slots=True)
class Named:
    """A collective over named mesh axes. ``bytes`` is the number that one device sends in one run of the region.

    ``assumed`` marks a collective in a loop of unknown trip count, which counts as one.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    bytes: float
    assumed: bool = False


def layouts_of(own: MeshAxes, tensors: Sequence[Any], specs: Sequence[PartitionSpec]) -> list[Layout]:
    return [from_spec(own, spec, len(var.aval.shape)) for var, spec in zip(tensors, specs, strict=True)]


def gathers(mesh: MeshAxes, tensors: Iterable[tuple[Any, Layout]]) -> Iterator[Named]:
    """The all-gathers that make tensors of these layouts whole."""
    gather = CollectiveKind.ALL_GATHER
    for var, layout in tensors:
        axes = [axis for dim in layout for axis in dim]
        n = mesh.degree(axes)
        if n > 1:
            yield Named(gather, tuple(mesh.names[axis] for axis in axes), gather.sent(n) * _bytes(var))


def _bytes(var: Any) -> int:
    return prod(var.aval.shape) * _jax.item_bytes(var.aval.dtype)


def collectives_of_region(jaxpr: Any, sizes: Mapping[str, int]) -> tuple[Named, ...]:
    """The collectives in a region's jaxpr, by the ring costs of plans: loops by their known or stated length.

    Of branches, the one that sends most counts. A loop of unknown length counts once.
    """
    return tuple(_collectives(getattr(jaxpr, "jaxpr", jaxpr), sizes, None))


def _collectives(jaxpr: _jax.Jaxpr, sizes: Mapping[str, int], stated: int | None) -> Iterator[Named]:
    """The collectives of a jaxpr. ``stated`` is the length that the user states for loops directly in it."""
    for equation in jaxpr.eqns:
        here = stated_trip_count(_jax.module_path(equation)) or stated
        call, specs = _jax.call_body(equation), shard_map_specs(equation)
        if equation.primitive.name in _KINDS:
            yield from _named(equation, sizes)
        elif call is not None:
            yield from _collectives(call.jaxpr, sizes, here)
        elif specs is not None:  # whose results are whole around it
            mesh = MeshAxes(tuple(sizes), tuple(sizes.values()))
            yield from _collectives(specs.body, sizes, here)
            layouts = layouts_of(mesh, equation.outvars, specs.results)
            yield from gathers(mesh, zip(equation.outvars, layouts, strict=True))
        else:
            yield from _of_control(equation, sizes, here)


def _of_control(equation: _jax.Equation, sizes: Mapping[str, int], stated: int | None) -> Iterator[Named]:
    """The collectives of a loop or of branches, none for every other equation."""
    bodies = _jax.control_bodies(equation)
    inside = [tuple(_collectives(body, sizes, None)) for body, _, _ in bodies]
    trips = bodies[0][2] if bodies else None
    if equation.primitive.name == "cond":
        inside = [max(inside, key=lambda found: sum(one.bytes for one in found))]
    elif equation.primitive.name == "while":
        trips = _trips(equation, stated)
    for one in chain(*inside):
        yield replace(one, bytes=(1 if trips is None else trips) * one.bytes, assumed=one.assumed or trips is None)


def _trips(equation: _jax.Equation, stated: int | None) -> int | None:
    """The length of a while loop: by its bounds, or as stated by the user, or None."""
    operands = (Constant(v.val, v.aval) if isinstance(v, _jax.Literal) else 0 for v in equation.invars)
    found = while_trip_count(equation.params, tuple(operands))
    return stated if found is None else found


def _named(equation: Any, sizes: Mapping[str, int]) -> Iterator[Named]:
    params = equation.params
    wanted = params.get("axes", params.get("axis_name"))
    axes = tuple(axis for axis in (wanted if isinstance(wanted, tuple) else (wanted,)) if isinstance(axis, str))
    groups = params.get("axis_index_groups")
    n = len(groups[0]) if groups else prod(sizes[axis] for axis in axes)
    kind = _KINDS[equation.primitive.name]
    reduced = kind == CollectiveKind.ALL_REDUCE
    moved = equation.outvars if kind == CollectiveKind.ALL_GATHER else equation.invars[: None if reduced else 1]
    size = sum(map(_bytes, moved))
    if axes and n > 1:
        yield Named(kind, axes, size * kind.sent(n))
