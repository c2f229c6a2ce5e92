"""The state of a plan: its initialisation and placement in planned layouts, and its abstract description.

The functions take a part of a call, usually one argument. They find it by its structure and its shapes.

>>> import jax, jax.numpy as jnp, shardplan
>>> def step(state, x):
...     return {"w": state["w"] + x.sum()}
>>> state = {"w": jax.ShapeDtypeStruct((64, 64), "float32")}
>>> plan = shardplan.plan(step, "data=8", state, jnp.ones(8), pins={"0/w": jax.P("data")})
>>> made = plan.init(lambda: {"w": jnp.zeros((64, 64))})
>>> made["w"].sharding.spec, plan.abstract[0]["w"].sharding == made["w"].sharding
(P('data',), True)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import starmap
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from shardplan import _jax
from shardplan.common.checks import check_function
from shardplan.errors import ArgumentError, PlanMismatchError
from shardplan.options import Options
from shardplan.plans.argument_placement import placed
from shardplan.plans.plan_data import PlanData
from shardplan.plans.planned_call import checked_call, plan_call
from shardplan.plans.runner import Runner, devices_for
from shardplan.program.call_arguments import type_text

_MAX_LISTED = 6


def shardings_of(plan: PlanData) -> Any:
    """``NamedSharding``s over existing devices, in the structure of the arguments."""
    return _in_call(plan, plan.leaf_shardings(_devices(plan)))


def abstract_of(plan: PlanData) -> Any:
    """``jax.ShapeDtypeStruct``s with these shardings, in the structure of the arguments."""
    values = [plan.program.values[index] for index in plan.program.inputs]
    return _in_call(plan, list(map(_jax.shape_of, values, plan.leaf_shardings(_devices(plan)))))


def place(plan: PlanData, tree: Any, argument: int | str | None = None) -> Any:
    """A part of a call in its planned layout: arrays of any kind, or the rows of this process.

    Raises ArgumentError for a tree that is no part of a call."""
    shapes = jax.tree.map(_shape_of, tree)
    found = _part_like(plan, shapes, argument)
    if found is not None:
        return jax.tree.map(placed, tree, jax.tree.map(lambda one: one.sharding, found))
    local = _part_like(plan, shapes, argument, own=True) if jax.process_count() > 1 else None
    if local is None:
        raise _not_part_error(plan, shapes)
    return jax.tree.map(_from_own, tree, local)


def init(plan: PlanData, fn: Callable[..., Any], args: tuple[Any, ...], argument: int | str | None = None) -> Any:
    """The result of a function, computed in its planned layout, without a whole copy on any device."""
    check_function("init_fn", fn)
    shapes = jax.eval_shape(fn, *args)
    found = _part_like(plan, jax.tree.map(_shape_of, shapes), argument)
    if found is None:
        raise _not_part_error(plan, jax.tree.map(_shape_of, shapes), "init_fn makes what")
    given, own = plan.recipe.options, Options()
    options = replace(own, hardware=given.hardware, memory_limit=given.memory_limit, time_limit=given.time_limit)
    shardings = jax.tree.map(lambda one: one.sharding, found)
    layouts = jax.tree.map(lambda one: one.spec, shardings)
    mesh, call = _devices(plan), checked_call(fn, args, {}, options)
    made = plan_call(call, mesh, replace(options, out_shardings=layouts), typed=False)
    return jax.tree.map(placed, call.finished(Runner(made, mesh)(call)), shardings)


def moving_bytes(plan: PlanData, tree: Any, argument: int | str | None = None) -> int:
    """The bytes that all devices together receive when a part of a call is resharded to the plan: the elements of each
    device's block that it does not hold already."""
    found = _part_like(plan, jax.tree.map(_shape_of, tree), argument)
    if found is None:
        raise _not_part_error(plan, jax.tree.map(_shape_of, tree))
    return sum(starmap(_received, zip(jax.tree.leaves(tree), jax.tree.leaves(found), strict=True)))


def _received(leaf: Any, wanted: Any) -> int:
    shape, received = tuple(wanted.shape), 0
    held = leaf.sharding.devices_indices_map(shape) if isinstance(leaf, jax.Array) else {}
    for device, index in wanted.sharding.devices_indices_map(shape).items():
        box = _box(index, shape)
        own = _box(held[device], shape) if device in held else None
        both = [max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in zip(box, own, strict=True)] if own else [0]
        received += prod(stop - start for start, stop in box) - (prod(both) if own is not None else 0)
    return received * _jax.item_bytes(wanted.dtype)


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [one.indices(size)[:2] for one, size in zip(index, shape, strict=True)]


def _devices(plan: PlanData) -> Mesh:
    found = plan.mesh if isinstance(plan.mesh, Mesh) else devices_for(plan)
    if found is None:
        raise PlanMismatchError(
            f"the plan's mesh {plan.mesh_axes} takes {plan.device_count} devices, and {len(jax.devices())} are here"
        )
    return found


def _in_call(plan: PlanData, leaves: Any) -> Any:
    args, kwargs = jax.tree.unflatten(plan.program.in_tree, leaves)
    return args if not kwargs else (args, kwargs)


def _shape_of(leaf: Any) -> Any:
    try:
        jax.typeof(leaf)
    except TypeError:
        raise ArgumentError(f"arrays were expected, got `{leaf!r}` of type `{type(leaf).__name__}`") from None
    return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype if hasattr(leaf, "dtype") else jax.typeof(leaf).dtype)


def _parts(plan: PlanData) -> dict[str, Any]:
    """The possible parts: each argument, first those that no result replaces, and all positional ones together."""
    leaves = jax.tree.leaves(abstract_of(plan))
    args, kwargs = jax.tree.unflatten(plan.program.in_tree, leaves)
    state = {one.path.split("/")[0] for one in plan.arguments if one.fed_back}
    parts = {**{str(place): argument for place, argument in enumerate(args)}, **kwargs}
    return {**dict(sorted(parts.items(), key=lambda part: part[0] in state)), "all": args}


def _part_like(plan: PlanData, shapes: Any, argument: int | str | None, own: bool = False) -> Any:
    """The part of a call with this structure and these shapes, or those of this process's rows. None without one.

    Raises ArgumentError for an unknown argument, and where several parts with different layouts are like that.
    """
    parts = _parts(plan)
    if argument is not None and str(argument) not in parts:
        known = ", ".join(name for name in parts if name != "all")
        raise ArgumentError(f"there is no argument `{argument}`: the arguments are {known}")
    named = parts if argument is None else {str(argument): parts[str(argument)]}
    found = {name: part for name, part in named.items() if _is_like(part, shapes, own)}
    layouts = {tuple(leaf.sharding for leaf in jax.tree.leaves(part)) for part in found.values()}
    if len(layouts) > 1:
        raise ArgumentError(
            f"the arguments {', '.join(found)} have these shapes, in different layouts: say which one is meant, "
            f"argument={next(iter(found))}"
        )
    return next(iter(found.values()), None)


def _is_like(part: Any, shapes: Any, own: bool) -> bool:
    structures: list[Any] = [jax.tree.structure(part), jax.tree.structure(shapes)]
    if structures[0] != structures[1]:
        return False
    pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(part), strict=True)
    return all((a.shape, a.dtype) == (_own_shape(b) if own else b.shape, b.dtype) for a, b in pairs)


def _own_shape(wanted: Any) -> tuple[int, ...]:
    """The shape of the elements of a tensor on the devices of this process, each element once."""
    held = wanted.sharding.addressable_devices_indices_map(wanted.shape).values()
    boxes = [_box(index, wanted.shape) for index in held]
    sides = zip(*boxes, strict=True)
    return tuple(max(stop for _, stop in side) - min(start for start, _ in side) for side in sides)


def _from_own(leaf: Any, wanted: Any) -> Any:
    sharding: NamedSharding = wanted.sharding
    return jax.make_array_from_process_local_data(sharding, np.asarray(leaf), wanted.shape)


def _not_part_error(plan: PlanData, shapes: Any, what: str = "this") -> ArgumentError:
    """The error of a tree that is no part of a call: the differences from the most similar argument, by path. Without a
    similar one, it lists the arguments."""
    differing = _differing(plan, shapes)
    if differing:
        return ArgumentError(f"{what} is no argument of the planned step: {differing}")
    given = [type_text(one.shape, one.dtype) for one in jax.tree.leaves(shapes)]
    rows = []
    for name, part in _parts(plan).items():
        if name != "all":
            leaves = jax.tree.leaves(part)
            types = [type_text(one.shape, one.dtype) for one in leaves[:_MAX_LISTED]]
            own = [str(list(_own_shape(one))) for one in leaves[:_MAX_LISTED]] if jax.process_count() > 1 else []
            rows.append(f"`{name}`: {', '.join(types)}" + (f"; of this process {', '.join(own)}" if own else ""))
    return ArgumentError(
        f"{what} is no argument of the planned step: it has {', '.join(given[:_MAX_LISTED]) or 'no arrays'}"
        f"{' and more' if len(given) > _MAX_LISTED else ''}. The arguments are\n  " + "\n  ".join(rows)
    )


def _differing(plan: PlanData, shapes: Any) -> str:
    """The differences by path from the argument with the most common paths. Empty if none has a third of them."""
    found = _types_by_path(shapes)
    parts = {name: _types_by_path(part) for name, part in _parts(plan).items() if name != "all"}
    name, wanted = max(parts.items(), key=lambda part: len(found.keys() & part[1].keys()), default=("", {}))
    common = found.keys() & wanted.keys() - {""}
    if 3 * len(common) < max(len(found), len(wanted)) or not common:
        return ""
    rows = [
        f"`{path}` is {found.get(path, 'not there')}, and {wanted.get(path, 'not there')} in argument `{name}`"
        for path in dict.fromkeys((*wanted, *found))
        if found.get(path) != wanted.get(path)
    ]
    more = f"\n  and {len(rows) - _MAX_LISTED} more" if len(rows) > _MAX_LISTED else ""
    return "\n  " + "\n  ".join(rows[:_MAX_LISTED]) + more if rows else ""


def _types_by_path(tree: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): type_text(leaf.shape, leaf.dtype)
        for path, leaf in leaves
    }
