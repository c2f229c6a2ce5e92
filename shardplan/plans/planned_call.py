"""The plan of a call: its checks, its trace, its resolved options, and their plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from shardplan._jax import is_ref
from shardplan.common.progress import log_planning, show_progress
from shardplan.errors import ArgumentError, CallError, PlanMismatchError
from shardplan.frameworks import adapt_call, boxed_layouts
from shardplan.layout.mesh import GivenMesh, NoMesh, can_run, has_gpus
from shardplan.options import Options
from shardplan.plans.choose_mesh import make_plan
from shardplan.plans.explicit_types import typed_results, without_types
from shardplan.plans.jit_options import pins_of, specs_of
from shardplan.plans.like import as_pins
from shardplan.plans.mesh_profile import profile_of
from shardplan.plans.pause_gc import paused_gc
from shardplan.plans.plan_data import PlanData
from shardplan.plans.processes import group_of, one_plan
from shardplan.plans.report import plan_line
from shardplan.plans.result_layouts import Specs, pin_results, trace_with_layouts
from shardplan.problem.hard_layouts import unmatched, with_explicit
from shardplan.program.call_arguments import Call, Calls, name_of
from shardplan.program.program import Program

NO_MESH = NoMesh()

Refined = Callable[[Callable[[Options], PlanData], Options], PlanData]
"""The choice among the plans that a function makes of several options."""


def plan_call(call: Call, mesh: GivenMesh, options: Options, typed: bool, refined: Refined | None = None) -> PlanData:
    """The plan of a call.

    ``typed``: whether results have the types of ``jax.jit``. ``refined`` chooses among several plans for
    ``options.refine``."""
    started = time.perf_counter()
    if options.verify is None:
        options = replace(options, verify=_runs_on_gpus(mesh) and group_of(mesh) is None)
    with paused_gc(), show_progress(call.name):
        found = _traced_plan(call, mesh, options, typed, refined)
    log_planning(plan_line(found), time.perf_counter() - started, found.statistics["cached"])
    return found


def _runs_on_gpus(mesh: GivenMesh) -> bool:
    return isinstance(mesh, Mesh) and has_gpus(mesh) and can_run(mesh.devices.flat[0])


def _traced_plan(
    call: Call, mesh: GivenMesh, options: Options, typed: bool, refined: Refined | None = None
) -> PlanData:
    started = time.perf_counter()

    def decide(traced: Program, resolved: Options) -> PlanData:
        spent = time.perf_counter() - started

        def make(chosen: Options) -> PlanData:
            return replace(make_plan(traced, mesh, chosen, spent), donated=call.donated)

        return refined(make, resolved) if refined is not None and resolved.refine > 1 else make(resolved)

    return one_plan(mesh, partial(resolved_call, call, mesh, options, typed), decide)


def resolved_call(call: Call, mesh: GivenMesh, options: Options, typed: bool) -> tuple[Program, Options]:
    """The program of a call, and its own options as plain data."""
    pins = as_pins(pins_of(options, call.args, mesh), options.pins)
    pins = as_pins(boxed_layouts(call, mesh), pins)
    resolved = replace(
        options,
        pins=with_explicit(pins or None, call.by_path(), mesh),
        hardware=profile_of(mesh) if options.hardware is None else options.hardware,
        results=typed_results(call, mesh) if typed and isinstance(mesh, (Mesh, AbstractMesh)) else None,
        static_argnums=call.static_positions,
        static_argnames=call.static_names or None,
        donate_argnums=call.donated_positions,
        donate_argnames=call.donated_names or None,
    )
    resolved.check_host()  # the hardware is known now
    return _trace(call, resolved, mesh)


def trace_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], options: Options) -> Program:
    """The program of a checked call."""
    return _trace(checked_call(fn, args, kwargs, options), options)[0]


def checked_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], options: Options) -> Call:
    calls = calls_of(fn, options)
    calls.check(args, kwargs)
    return adapt_call(calls.take(args, kwargs))


def calls_of(fn: Callable[..., Any], options: Options) -> Calls:
    names = options.static_argnames, options.donate_argnames
    return Calls(fn, options.static_argnums, options.donate_argnums, *names, options.on_host)


def _positions_on_host(call: Call) -> frozenset[int]:
    """The leaves that pins put into host memory. Raises ArgumentError for pins of nothing, and of references."""
    arguments = call.by_path()
    for pattern in call.on_host:
        found = [path for path in arguments if fnmatchcase(path, pattern)]
        if not found:
            raise ArgumentError(unmatched(pattern, arguments))
        for path in found:
            if is_ref(arguments[path]):
                raise ArgumentError(
                    f"the pin `{pattern}` puts `{path}` into host memory, which is a Ref: pass an array"
                )
    return call.positions_on_host


def traced_for(plan: PlanData, call: Call) -> Program:
    """The program of a call for a plan. Its trace error names the differences from the planned call."""
    try:
        return _trace(call, plan.recipe.options, plan.mesh)[0]
    except Exception as error:
        different = plan.other_arguments(call.types())
        if different:
            raise PlanMismatchError(
                f"the plan was made for {different}\nWith these the function fails: {error}"
            ) from error
        raise


def _trace(call: Call, options: Options, mesh: GivenMesh | NoMesh = NO_MESH) -> tuple[Program, Options]:
    """The program of a call with the wanted layouts of its results, and the resolved options: pins of the arguments
    that these results replace, and no trees."""
    args, kwargs = call.shapes()
    typed, given, on_host = options.results, options.out_shardings, _positions_on_host(call)

    def wanted(results: Any) -> Specs:
        return {**(typed or {}), **specs_of(given, results, mesh, "out_shardings")}

    layouts = wanted if typed is not None or given is not None else None
    try:
        traced, found = trace_with_layouts(call.fn, args, kwargs, layouts, on_host)
    except ValueError as error:
        if "Ref sharding" in str(error):  # references of arguments have no sharding in a trace
            raise CallError(
                f"`{name_of(call.fn)}` closes over a Ref on mesh axes of type Explicit: pass it as an argument"
            ) from error
        if "of type Auto" not in str(error) or not isinstance(mesh, (Mesh, AbstractMesh)):
            raise
        traced, found = trace_with_layouts(without_types(call, mesh), args, kwargs, layouts, on_host)
    program, pins = pin_results(traced, found, options.pins)
    resolved = replace(options, pins=pins, results=found or None, in_shardings=None, out_shardings=None, like=None)
    return replace(program, name=call.name, parameters=call.parameters), resolved
