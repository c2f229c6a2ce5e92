"""The options of ``jax.jit``: a user's shardings of arguments and results, and the options of a wrapped function.

Shardings are trees, or prefixes of trees, of ``NamedSharding`` or ``PartitionSpec``, or None for unspecified leaves:

>>> mesh = AbstractMesh((8,), ("data",))
>>> specs_of(PartitionSpec("data"), {"x": np.ones((8, 2)), "n": np.ones(8)}, mesh, "out_shardings")
{'n': P('data',), 'x': P('data',)}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardplan import _jax
from shardplan.errors import ArgumentError
from shardplan.layout.layout import axes_of
from shardplan.options import Options
from shardplan.program.tracing import path_name

_PAIRS = (("static_argnums", "static_argnames"), ("donate_argnums", "donate_argnames"))


def with_options_of(fn: Callable[..., Any], options: Options) -> Options:
    """The options with those of ``fn``, if that is a function of ``jax.jit``. Options given here win."""
    own = _jax.options_of_jit(fn)
    for pair in _PAIRS:
        if any(getattr(options, name) not in (None, (), "") for name in pair):
            own = {name: value for name, value in own.items() if name not in pair}
    given = {name for name in own if getattr(options, name) not in (None, (), "", False)}
    return replace(options, **{name: value for name, value in own.items() if name not in given})


def specs_of(prefix: Any, tree: Any, mesh: Any, option: str) -> dict[str, PartitionSpec]:
    """The layouts by the paths of a tree's leaves, without unspecified ones.

    Raises ArgumentError for any other tree, and for layouts that do not fit the leaves.
    """
    try:
        whole = jax.tree.broadcast(prefix, tree, is_leaf=_is_leaf)
    except ValueError as error:
        raise ArgumentError(f"{option} has another structure than what it is for: {error}") from None
    said = jax.tree.leaves(whole, is_leaf=_is_leaf)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    found = {}
    for (path, leaf), one in zip(leaves, said, strict=True):
        spec = _spec_of(one, mesh, option, path_name(path))
        if spec is not None:
            _check(spec, np.shape(leaf), mesh, f"{option} of `{path_name(path)}`")
            found[path_name(path)] = spec
    return found


def _is_leaf(one: Any) -> bool:
    return one is None or isinstance(one, PartitionSpec)


def _spec_of(one: Any, mesh: Any, option: str, path: str) -> PartitionSpec | None:
    if one is None or isinstance(one, PartitionSpec):
        return one
    if not isinstance(one, NamedSharding):
        raise ArgumentError(
            f"{option} has `{one!r}` for `{path}`: a jax.sharding.NamedSharding or PartitionSpec was expected, or None"
        )
    if isinstance(mesh, (Mesh, AbstractMesh)) and {**one.mesh.shape} != {**mesh.shape}:
        raise ArgumentError(
            f"{option} has a layout over the mesh {dict(one.mesh.shape)} for `{path}`, and {dict(mesh.shape)} is "
            "planned for: use one mesh"
        )
    if one.memory_kind not in (None, "device", _default_kind(one)):
        raise ArgumentError(
            f"{option} moves `{path}` to `{one.memory_kind}`: pins may, pins={{path: 'pinned_host'}}. Or put arguments "
            "there with jax.device_put, and results inside the function, jax.device_put(x, jax.memory.Space.Host)"
        )
    return one.spec


def _default_kind(sharding: NamedSharding) -> str | None:
    if isinstance(sharding.mesh, AbstractMesh):
        return None
    return str(sharding.mesh.devices.flat[0].default_memory().kind)


def _check(spec: PartitionSpec, shape: tuple[int, ...], mesh: Any, where: str) -> None:
    """Raises ArgumentError for a layout that does not fit a shape."""
    if len(spec) > len(shape):
        raise ArgumentError(f"{where} is `{spec}`, which has more dimensions than {list(shape)}")
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        return
    for size, entry in zip(shape, spec, strict=False):
        axes = () if entry is PartitionSpec.UNCONSTRAINED else axes_of(entry)
        if unknown := [axis for axis in axes if axis not in mesh.shape]:
            raise ArgumentError(f"{where} names the mesh axis `{unknown[0]}`; there are {', '.join(mesh.shape)}")
        blocks = int(np.prod([mesh.shape[axis] for axis in axes]))
        if size % blocks:
            raise ArgumentError(f"{where} is `{spec}`, which splits {size} of {list(shape)} over {blocks} devices")


def pins_of(options: Options, args: tuple[Any, ...], mesh: Any) -> Mapping[str, PartitionSpec]:
    """The pins of ``in_shardings``, which are for positional arguments."""
    if options.in_shardings is None:
        return {}
    return specs_of(options.in_shardings, args, mesh, "in_shardings")
