"""The plan of a call: from the cache, or by planning, on the best mesh where the user leaves it open.

A number of devices, or hosts by devices, gives several candidate meshes. The first search of each ends at a coarse gap.
Only meshes with a bound below the best plan so far are planned in full. ``statistics["meshes"]`` of the plan has a row
for each.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from shardplan.errors import InfeasibleError, warn
from shardplan.hardware import load
from shardplan.layout.layout import axes_of
from shardplan.layout.mesh import GivenMesh, axes_across_hosts, hosts_by_devices, mesh_axes, shapes_of, with_auto_axes
from shardplan.layout.objectives import OBJECTIVES
from shardplan.options import Options
from shardplan.plans.blocks_by_hand import blocks_by_hand, remarks_on, rows_of
from shardplan.plans.cache import default_cache, key_of
from shardplan.plans.cache_entry import kept_entry, restored
from shardplan.plans.extra_figures import with_reports
from shardplan.plans.feedback import target_of, verified
from shardplan.plans.fitting import Fitting
from shardplan.plans.pipeline import (
    DEFAULT_HARDWARE,
    build_problem,
    memory_limit_of,
    plan_problem,
    remarks_on_layouts,
    remarks_on_operations,
)
from shardplan.plans.plan_data import PlanData
from shardplan.plans.stopwatch import Stopwatch
from shardplan.problem.cost_network import Problem
from shardplan.program.program import Program
from shardplan.search import solve

# The gap and the share of the time at which the first search of each of several meshes ends.
_FIRST_GAP = 0.02
_FIRST_TIME_SHARE = 0.2


def make_plan(program: Program, mesh: GivenMesh, options: Options, traced_seconds: float = 0.0) -> PlanData:
    """Plans a traced program over a checked mesh, or over the best mesh of a number of devices."""
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
        plan = _made(program, meshes, options)
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


def _made(program: Program, meshes: list[Mesh | AbstractMesh], options: Options) -> PlanData:
    """The plan of a program, in the blocks that are asked for, with all its evidence."""
    asked = blocks_by_hand(program, options.blocks or {}, mesh_axes(meshes[0]), options.pins)
    own = asked[-1].program if asked else program
    fitting = Fitting(own, meshes[0])
    plan = fitting.plan(options) if len(meshes) == 1 else _best(own, meshes, options)
    if asked and options.pins and plan.mesh is not meshes[0]:  # pins say which blocks devices split
        return _made(program, [plan.mesh], options)
    fitting = fitting if plan.mesh is meshes[0] else Fitting(own, plan.mesh)
    plan = with_reports(verified(plan, options, fitting.plan), own, options)
    if not asked:
        return plan
    before = (program, *(one.program for one in asked[:-1]))
    axes, rows = mesh_axes(plan.mesh), list[dict[str, Any]]()
    for was, one in zip(before, asked, strict=True):
        said = zip(rows_of(was, one), remarks_on(was, one, axes), strict=True)
        rows += [row | ({"remark": remark} if remark else {}) for row, remark in said]
    statistics = {**plan.statistics, "blocks": [*rows, *plan.statistics.get("blocks", ())]}
    return replace(plan, recipe=replace(plan.recipe, fingerprint=program.fingerprint()), statistics=statistics)


def _meshes(mesh: GivenMesh, options: Options) -> list[Mesh | AbstractMesh]:
    """The candidate meshes. Of several, those with the axes of all pins."""
    if not isinstance(mesh, (int, str)):
        return [with_auto_axes(mesh)]
    shapes = shapes_of(mesh, OBJECTIVES[options.objective].counts_time)
    pinned = {axis for spec in (options.pins or {}).values() for entry in spec for axis in axes_of(entry)}
    return [*([shape for shape in shapes if pinned <= {*shape.axis_names}] or shapes)]


def _with_hosts(mesh: GivenMesh, options: Options) -> Options:
    """The options with the links of the mesh in the hardware profile: by its number of devices per host, or by the
    hosts of its own devices."""
    crossing = axes_across_hosts(mesh) if isinstance(mesh, Mesh) else None
    if not isinstance(mesh, str) and crossing is None:
        return options
    profile = load(options.hardware or DEFAULT_HARDWARE)
    if isinstance(mesh, str):
        return replace(options, hardware=replace(profile, devices_per_host=hosts_by_devices(mesh)[1]))
    links = {axis: profile.inter_host if crosses else profile.intra_host for axis, crosses in (crossing or {}).items()}
    return replace(options, hardware=replace(profile, axes={**links, **profile.axes}))


@dataclass(frozen=True, slots=True)
class _Candidate:
    mesh: Mesh | AbstractMesh
    problem: Problem
    cost: float
    lower_bound: float
    seconds: float


def _best(program: Program, meshes: list[Mesh | AbstractMesh], options: Options) -> PlanData:
    """The best plan of all meshes. Raises InfeasibleError if no mesh has one."""
    allowed = _FIRST_TIME_SHARE * options.time_limit / len(meshes)
    candidates = sorted((_first_search(program, mesh, options, allowed) for mesh in meshes), key=lambda c: c.cost)
    best: PlanData | None = None
    exceeding: PlanData | None = None
    failure: InfeasibleError | None = None
    limit, rows = memory_limit_of(options), []
    for candidate in candidates:
        row: dict[str, Any] = {"mesh": _sizes(candidate.mesh), "lower_bound": candidate.lower_bound, "objective": None}
        rows.append(row)
        if best is not None and candidate.lower_bound >= best.objective:
            continue
        try:
            rebuild = partial(build_problem, program, candidate.mesh, options)
            problem, own, spent = candidate.problem, candidate.mesh, candidate.seconds
            plan = plan_problem(problem, own, options, spent, rebuild=rebuild, may_exceed=bool(options.fit))
        except InfeasibleError as error:
            failure = failure or error
            row["lower_bound"] = np.inf
            continue
        if plan.peak_bytes > limit:
            exceeding = exceeding or plan
            row["lower_bound"] = np.inf
            continue
        row |= {"objective": plan.objective, "lower_bound": plan.lower_bound, "sent": plan.communication_bytes}
        if best is None or plan.objective < best.objective:
            best = replace(plan, unlimited=None)
    if best is None and exceeding is not None:
        fitting = Fitting(program, exceeding.mesh)
        fitting.take(exceeding, limit)
        best = fitting.by_other_means(options, Stopwatch(options.time_limit))
    if best is None:
        raise failure or InfeasibleError("no mesh was planned within the time limit")
    return replace(best, statistics={**best.statistics, "meshes": rows})


def _first_search(program: Program, mesh: Mesh | AbstractMesh, options: Options, seconds: float) -> _Candidate:
    started = time.perf_counter()
    problem = build_problem(program, mesh, options)
    found = solve(problem.network, gap=_FIRST_GAP, time_limit=seconds)
    if found.status == "infeasible":
        return _Candidate(mesh, problem, np.inf, np.inf, time.perf_counter() - started)
    bound = float(min(found.lower_bound, found.cost))
    return _Candidate(mesh, problem, float(found.cost), bound, time.perf_counter() - started)


def _sizes(mesh: Mesh | AbstractMesh) -> dict[str, int]:
    axes = mesh_axes(mesh)
    return dict(zip(axes.names, axes.sizes, strict=True))
