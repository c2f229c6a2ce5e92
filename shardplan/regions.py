"""The collectives that a ``shard_map`` region calls by name: they run as they are written, and count as what they send.

>>> import jax
>>> from jax.sharding import AbstractMesh, AxisType, PartitionSpec
>>> mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
>>> specs = {"in_specs": PartitionSpec("x"), "out_specs": PartitionSpec()}
>>> region = jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, **specs)
>>> (equation,) = jax.make_jaxpr(region)(jax.ShapeDtypeStruct((64, 16), "float32")).eqns
>>> collectives_of_region(equation.params["jaxpr"], {"x": 8})   # of 8 x 16 floats on every device: 2 * 7/8 * 512 bytes
(Named(kind='all-reduce', axes=('x',), bytes=896.0),)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from shardplan import _jax

_KINDS = {
    **dict.fromkeys(("psum", "psum2", "psum_invariant", "pmax", "pmin"), "all-reduce"),
    **dict.fromkeys(("all_gather", "all_gather_invariant"), "all-gather"),
    "reduce_scatter": "reduce-scatter",
    **dict.fromkeys(("all_to_all", "ragged_all_to_all"), "all-to-all"),
    "ppermute": "collective-permute",
}


@dataclass(frozen=True, slots=True)
class Named:
    """A collective over named mesh axes; ``bytes`` are what one device sends in one run of the region."""

    kind: str
    axes: tuple[str, ...]
    bytes: float


def collectives_of_region(jaxpr: Any, sizes: Mapping[str, int]) -> tuple[Named, ...]:
    """The collectives in a region's jaxpr, loops counted by their length, by the ring costs of plans.

    Of branches, those of the one that sends most. A loop of unknown length counts once.
    """
    return tuple(_collectives(getattr(jaxpr, "jaxpr", jaxpr), sizes))


def _collectives(jaxpr: Any, sizes: Mapping[str, int]) -> Iterator[Named]:
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name in _KINDS:
            yield from _named(equation, sizes)
        elif name == "cond":
            branches = [collectives_of_region(branch, sizes) for branch in params["branches"]]
            yield from max(branches, key=lambda found: sum(one.bytes for one in found))
        else:
            times = params["length"] if name == "scan" else 1
            for body in _bodies(params):
                yield from (replace(one, bytes=times * one.bytes) for one in _collectives(body, sizes))


def _bodies(params: Mapping[str, Any]) -> Iterator[Any]:
    for value in params.values():
        body = getattr(value, "jaxpr", value)
        if hasattr(body, "eqns"):
            yield body


def _named(equation: Any, sizes: Mapping[str, int]) -> Iterator[Named]:
    params = equation.params
    wanted = params.get("axes", params.get("axis_name"))
    axes = tuple(axis for axis in (wanted if isinstance(wanted, tuple) else (wanted,)) if isinstance(axis, str))
    groups = params.get("axis_index_groups")
    n = len(groups[0]) if groups else prod(sizes[axis] for axis in axes)
    kind = _KINDS[equation.primitive.name]
    moved = equation.outvars if kind == "all-gather" else equation.invars[: None if kind == "all-reduce" else 1]
    size = sum(prod(v.aval.shape) * _jax.item_bytes(v.aval.dtype) for v in moved)
    if axes and n > 1:
        around = 1.0 if kind == "collective-permute" else (n - 1) / n * (1 + (kind == "all-reduce"))
        yield Named(kind, axes, size * around)
