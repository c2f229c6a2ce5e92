"""The shared state of several programs: arguments of one program that keep the layouts of another one's state.

An argument is matched by its path, or by the end of its path, without the position of its tree in the call. So the
parameters of a state (`0/params/layer_0/kernel`) match those of an evaluation (`0/layer_0/kernel`). Of several leaves
with this end, the match has the most common components, then the shortest path, then `params` in its path. It is a
parameter and not one of its moments. A leaf of the state that an argument has by its whole path is no match for others.

>>> state = {"0/params/layer/kernel": "f32[8]", "0/opt/mu/layer/kernel": "f32[8]", "0/params/layer/bias": "f32[2]"}
>>> matched(state, {"0/layer/kernel": "f32[8]", "0/layer/bias": "f32[2]", "1": "f32[8]"})
{'0/layer/kernel': '0/params/layer/kernel', '0/layer/bias': '0/params/layer/bias'}
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from shardplan import _jax
from shardplan.errors import ArgumentError
from shardplan.plans.plan_data import PlanData, PlannedArgument
from shardplan.program.call_arguments import Call

_MAX_LISTED = 8


def matched(state: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, str]:
    """The path in a state, by the paths of the arguments that match a leaf of the same type."""
    by_end: dict[str, list[str]] = {}
    for path in state:
        by_end.setdefault(path.rpartition("/")[2], []).append(path)
    found = {path: path for path, kind in arguments.items() if state.get(path) == kind}
    exact = set(found)
    for path, kind in arguments.items():
        ends = () if path in exact else by_end.get(path.rpartition("/")[2], ())
        places = [one for one in ends if one not in exact and state[one] == kind and _shared(one, path)]
        if places:
            found[path] = max(places, key=lambda one: (_shared(one, path), -one.count("/"), "/params/" in one))
    return found


def _shared(one: str, other: str) -> int:
    """The length of the common end of two paths, in components without the positions of their arguments."""
    pairs = zip(reversed(one.split("/")[1:]), reversed(other.split("/")[1:]), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(one.count("/"), other.count("/")))


def state_of(plan: PlanData) -> dict[str, PlannedArgument]:
    """The arguments that results replace. All arguments of a program without any."""
    fed_back = {one.path: one for one in plan.arguments if one.fed_back}
    return fed_back or {one.path: one for one in plan.arguments}


def layouts_like(reference: PlanData, call: Call, mesh: Any) -> dict[str, PartitionSpec]:
    """The layouts of arguments that are in the state of another plan.

    Raises ArgumentError without any match, for a match of another type, and for a plan of another mesh.
    """
    if not isinstance(mesh, (int, str)) and {**mesh.shape} != reference.mesh_axes:
        raise ArgumentError(f"like is a plan over the mesh {reference.mesh_axes}, got {dict(mesh.shape)}: use one mesh")
    state, given = state_of(reference), call.types()
    types = {path: one.type_text for path, one in state.items()}
    found = matched(types, given)
    close = matched(dict.fromkeys(types, ""), dict.fromkeys(given.keys() - found.keys(), ""))
    other = {
        path: place
        for path, place in close.items()
        if "/" in path and _shared(path, place) == path.count("/") and place not in found
    }
    if other or not found:
        rows = [f"`{path}` is {given[path]}, and `{place}` is {types[place]} there" for path, place in other.items()]
        rows = rows or [f"`{path}` is {kind}" for path, kind in given.items()]
        rows += [f"the state has `{path}`, {kind}" for path, kind in types.items()] if not other else []
        more = f"\n  and {len(rows) - _MAX_LISTED} more" if len(rows) > _MAX_LISTED else ""
        listed = "\n  ".join(rows[:_MAX_LISTED])
        raise ArgumentError(f"the state of `like` is not that of these arguments:\n  {listed}{more}")
    return {path: state[place].spec for path, place in found.items()}


def layouts_kept(first: PlanData, call: Call) -> dict[str, PartitionSpec]:
    """The layouts of arguments by the first plan of the same function: its state, and arrays already in its layouts."""
    planned, given = {one.path: one for one in first.arguments}, call.types()
    found = {}
    for path, leaf in call.by_path().items():
        one = planned.get(path)
        if one is None or one.type_text != given[path] or _jax.typed_layout(leaf) is not None:
            continue
        if one.fed_back or _has_layout(leaf, one.spec, first.mesh_axes):
            found[path] = one.spec
    return found


def _has_layout(leaf: Any, spec: PartitionSpec, axes: Mapping[str, int]) -> bool:
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or {**sharding.mesh.shape} != axes:
        return False
    return bool(sharding.is_equivalent_to(NamedSharding(sharding.mesh, spec), len(leaf.shape)))


def as_pins(layouts: Mapping[str, PartitionSpec], pins: Mapping[str, PartitionSpec] | None) -> dict[str, PartitionSpec]:
    """The pins, and the layouts of arguments without a pin."""
    more = {path: spec for path, spec in layouts.items() if not _pinned(path, pins or ())}
    return {**(pins or {}), **{glob.escape(path): spec for path, spec in more.items()}}


def _pinned(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)
