"""Choosing: the plan that a call gets, from the cache where it was found before, on the best mesh where it is free.

A number of devices, or hosts by devices, makes several meshes. Each is first searched until its bound is near: only
meshes whose bound lies under the best plan so far are then planned in full. ``statistics["meshes"]`` of the plan has a
row for each.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from shardplan.errors import InfeasibleError, warn
from shardplan.hardware import load
from shardplan.layout.layout import axes_of
from shardplan.layout.mesh import GivenMesh, hosts_by_devices, mesh_axes, shapes_of, with_auto_axes
from shardplan.options import Options
from shardplan.plans.cache import default_cache, key_of
from shardplan.plans.cache_entry import kept_entry, restored
from shardplan.plans.extra_figures import with_reports
from shardplan.plans.feedback import target_of, verified
from shardplan.plans.pipeline import (
    DEFAULT_HARDWARE,
    build_problem,
    plan_problem,
    remarks_on_layouts,
    remarks_on_operations,
)
from shardplan.plans.plan_data import PlanData
from shardplan.plans.recomputed_plan import plan_recomputing, plan_to_fit
from shardplan.problem.cost_network import Problem
from shardplan.program.program import Program
from shardplan.search import solve

# The first search of each of several meshes ends where its bound is so near, or its share of the time is over.
_NEAR = 0.02
_SHARE = 0.2


def make_plan(program: Program, mesh: GivenMesh, options: Options, traced_seconds: float = 0.0) -> PlanData:
    """Plans a traced program over a checked mesh, or over the best of the meshes that a number of devices makes."""
    started = time.perf_counter()
    options = _with_hosts(mesh, options)
    meshes = _meshes(mesh, options)
    cache = default_cache()
    target = target_of(meshes[0], options) if options.verify else ""
    key = key_of(program, [mesh_axes(one) for one in meshes], options, target) if cache else ""
    kept = cache.read(key, partial(restored, program, meshes, options)) if cache else None
    if kept:
        plan, (on_operations, on_layouts) = kept
        spent = {"build": time.perf_counter() - started, "search": 0.0}
        plan = replace(plan, statistics={**plan.statistics, "cached": True, "seconds": spent})
    else:
        plan = plan_to_fit(program, meshes[0], options) if len(meshes) == 1 else _best(program, meshes, options)
        plan = verified(plan, options, partial(_again, program, plan.mesh))
        plan = with_reports(plan, program, options)
        on_operations = on_layouts = True
    said = (
        remarks_on_operations(plan.schedule) if on_operations else [],
        remarks_on_layouts(program, plan.mesh, options.pins) if on_layouts else [],
    )
    if cache and not kept:
        cache.write(key, kept_entry(plan, [bool(remarks) for remarks in said]))
    for remark in (*said[0], *said[1]):
        warn(remark)
    seconds = {"trace": traced_seconds, **plan.statistics["seconds"]}
    return replace(plan, statistics={**plan.statistics, "seconds": seconds})


def _meshes(mesh: GivenMesh, options: Options) -> list[Mesh | AbstractMesh]:
    """The meshes to choose from: of several, those with the axes that pins name."""
    if not isinstance(mesh, (int, str)):
        return [with_auto_axes(mesh)]
    shapes = shapes_of(mesh, options.objective == "time")
    pinned = {axis for spec in (options.pins or {}).values() for entry in spec for axis in axes_of(entry)}
    return [*([shape for shape in shapes if pinned <= {*shape.axis_names}] or shapes)]


def _with_hosts(mesh: GivenMesh, options: Options) -> Options:
    """The options with a hardware profile whose hosts have as many devices as the mesh says."""
    if not isinstance(mesh, str):
        return options
    profile = load(options.hardware or DEFAULT_HARDWARE)
    return replace(options, hardware=replace(profile, devices_per_host=hosts_by_devices(mesh)[1]))


def _again(program: Program, mesh: Mesh | AbstractMesh, options: Options, excess: Mapping[int, float]) -> PlanData:
    """Plans the program once more over one mesh, with excess bytes per operation."""
    return plan_to_fit(program, mesh, options, excess)


@dataclass(frozen=True, slots=True)
class _Candidate:
    mesh: Mesh | AbstractMesh
    problem: Problem
    cost: float
    lower_bound: float
    seconds: float


def _best(program: Program, meshes: list[Mesh | AbstractMesh], options: Options) -> PlanData:
    """The best plan of all meshes. Raises InfeasibleError where it fits on none."""
    allowed = _SHARE * options.time_limit / len(meshes)
    candidates = sorted((_first_look(program, mesh, options, allowed) for mesh in meshes), key=lambda c: c.cost)
    best: PlanData | None = None
    failure: InfeasibleError | None = None
    rows = []
    for candidate in candidates:
        row: dict[str, Any] = {"mesh": _sizes(candidate.mesh), "lower_bound": candidate.lower_bound, "objective": None}
        rows.append(row)
        if best is not None and candidate.lower_bound >= best.objective:
            continue
        try:
            rebuild = partial(build_problem, program, candidate.mesh, options)
            problem, own, spent = candidate.problem, candidate.mesh, candidate.seconds
            plan = plan_problem(problem, own, options, spent, rebuild=rebuild, may_recompute=True)
        except InfeasibleError as error:
            failure = failure or error
            row["lower_bound"] = np.inf
            continue
        row |= {"objective": plan.objective, "lower_bound": plan.lower_bound, "sent": plan.communication_bytes}
        if best is None or plan.objective < best.objective:
            best = plan
    if best is None:
        if failure is None:
            raise InfeasibleError("no mesh was planned within the time limit")
        best = plan_recomputing(program, candidates[0].mesh, options, failure)
    return replace(best, statistics={**best.statistics, "meshes": rows})


def _first_look(program: Program, mesh: Mesh | AbstractMesh, options: Options, seconds: float) -> _Candidate:
    started = time.perf_counter()
    problem = build_problem(program, mesh, options)
    found = solve(problem.network, gap=_NEAR, time_limit=seconds)
    if found.status == "infeasible":
        return _Candidate(mesh, problem, np.inf, np.inf, time.perf_counter() - started)
    bound = float(min(found.lower_bound, found.cost))
    return _Candidate(mesh, problem, float(found.cost), bound, time.perf_counter() - started)


def _sizes(mesh: Mesh | AbstractMesh) -> dict[str, int]:
    axes = mesh_axes(mesh)
    return dict(zip(axes.names, axes.sizes, strict=True))
