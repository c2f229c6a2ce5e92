"""The planning pipeline: from a traced program to a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from types import MappingProxyType
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from shardplan import _jax
from shardplan.common.progress import set_stage
from shardplan.common.tables import size_text
from shardplan.errors import InfeasibleError, PlanMismatchError
from shardplan.hardware import load
from shardplan.layout.layout import LayoutSpace, MeshAxes, to_spec
from shardplan.layout.mesh import mesh_axes
from shardplan.layout.objectives import OBJECTIVES
from shardplan.optimize.repeated_work import repeated_work
from shardplan.optimize.searches import SEARCHES
from shardplan.optimize.solve_once import FoundSchedule, Search
from shardplan.optimize.step_time_objective import LEAST_SHARE
from shardplan.options import HOST, Options, as_positions
from shardplan.plans.blocks_by_hand import blocks_by_hand
from shardplan.plans.plan_data import PINNED, PlanData, PlannedArgument, PlannedCollective, Recipe
from shardplan.problem.cost_network import Problem
from shardplan.problem.hard_layouts import hard_layouts, named_orders, undivided
from shardplan.problem.host_memory import host_bytes
from shardplan.problem.schedule import Schedule
from shardplan.problem.shared_tables import SharedTables
from shardplan.problem.uneven_sizes import padded_sizes
from shardplan.program.blocks import in_blocks
from shardplan.program.program import Operation, Program
from shardplan.program.recompute import recomputable, recomputing
from shardplan.program.regions.region import region_of
from shardplan.timing.step_time import timing_of, waiting_for_copies

DEFAULT_HARDWARE = "h100"

RESERVED_MEMORY = 0.08
"""The share of a device's memory that the default limit reserves for the runtime, its communication buffers and
fragmentation."""


def build_problem(
    program: Program,
    mesh: Mesh | AbstractMesh,
    options: Options,
    share: float = LEAST_SHARE,
    traffic: Mapping[int, int] | None = None,
    like: Problem | None = None,
) -> Problem:
    """The problem of a program over a mesh.

    For the objective "time" it is priced at a share (`shardplan.optimize.step_time_objective`). For "bytes" it includes
    the given memory traffic of repeated work (`shardplan.optimize.repeated_work`). What it has in common with a problem
    ``like`` it, of the same options, is not derived again."""
    axes = mesh_axes(mesh)
    program = program.on(axes.device_count)
    objective = OBJECTIVES[options.objective]
    hardware = load(options.hardware or DEFAULT_HARDWARE)
    prices = objective(hardware, axes, share if objective.counts_time else None)
    space = _layout_space(program, axes, options.pins)
    shared = SharedTables(space, prices, options.reduce_dtype, options.islands)
    shared = shared if like is None else shared.like(like.shared)
    problem = Problem(program, shared, hard_layouts(program, shared.space, options.pins).layouts)
    problem.traffic = timing_of(problem).memory_bytes if objective.counts_time else traffic or {}
    return problem


def plan_program(
    program: Program,
    mesh: Mesh | AbstractMesh,
    options: Options,
    prepare: Callable[[Problem], None] | None = None,
    method: str = "auto",
    excess: Mapping[int, float] = MappingProxyType({}),
    may_exceed: bool = False,
) -> PlanData:
    """Plans a traced program over one mesh by a method of ``shardplan.search``. ``prepare`` may exclude choices.

    ``excess``: per operation, by index, bytes that a compiled program held there above its prediction. With
    ``may_exceed`` the plan without a limit is the result where the first searches find no layout within the limit."""
    started = time.perf_counter()

    def build(
        share: float = LEAST_SHARE, traffic: Mapping[int, int] | None = None, like: Problem | None = None
    ) -> Problem:
        problem = build_problem(program, mesh, options, share, traffic, like)
        if prepare is not None:
            prepare(problem)
        return problem

    problem = build()
    spent, again = time.perf_counter() - started, partial(build, like=problem)
    return plan_problem(problem, mesh, options, spent, method, again, excess, may_exceed)


def plan_problem(
    problem: Problem,
    mesh: Mesh | AbstractMesh,
    options: Options,
    spent_seconds: float = 0.0,
    method: str = "auto",
    rebuild: Callable[..., Problem] | None = None,
    excess: Mapping[int, float] = MappingProxyType({}),
    may_exceed: bool = False,
) -> PlanData:
    """Plans a problem over its mesh.

    ``spent_seconds`` is the time spent on it before. ``rebuild`` prices it at a share, or with the memory traffic of
    repeated work. ``excess`` and ``may_exceed`` as for `plan_program`."""
    started = time.perf_counter()
    set_stage("stating the choices")
    variables = len(problem.network)  # the network is built here
    built = time.perf_counter()
    set_stage(f"searching {variables:,} choices")
    limit = memory_limit_of(options)
    check_arguments(problem, limit)
    leaves = donated_leaves(problem.program, donated_places(options))
    search = Search(method, options.time_limit, limit, leaves, excess, may_exceed)
    found = SEARCHES[options.objective](problem, search, rebuild)
    seconds = {"build": spent_seconds + built - started, "search": time.perf_counter() - built}
    plan = plan_of(found, mesh, options, seconds)
    if found.unlimited is None or not may_exceed:
        return plan
    return replace(plan, unlimited=plan_of(found.unlimited, mesh, options, seconds))


def plan_of(
    found: FoundSchedule, mesh: Mesh | AbstractMesh, options: Options, seconds: Mapping[str, float]
) -> PlanData:
    """The plan of a schedule that a search has found in so many seconds, with its evidence."""
    solution, schedule, problem = found.solution, found.schedule, found.schedule.problem
    problem.network.derived.clear()  # tables of the search, which the plan would keep in memory
    donated, program = donated_places(options), problem.program
    pinned = {"offloaded": rows} if (rows := pinned_rows(schedule, options)) else {}
    statistics = {
        "operations": len(program.operations),
        "values": len(program.values),
        "variables": len(problem.network),
        "status": solution.status,
        "cached": False,
        "traffic": bool(problem.traffic),
        "stages": [dict(row) for row in found.stages],
        "repeated": repeated_work(schedule),
        "search_processor_seconds": solution.processor_seconds,
        "seconds": dict(seconds),
        **pinned,
    }
    return PlanData(
        mesh=mesh,
        objective=float(solution.cost),
        lower_bound=float(min(solution.lower_bound, solution.cost)),
        peak_bytes=found.peak_bytes,
        collectives=planned_collectives(schedule),
        statistics=statistics,
        arguments=planned_arguments(schedule),
        recipe=Recipe(options, tuple(map(int, solution.choices)), problem.variables.digest()),
        built=schedule,
        donated=donated,
        host_bytes=host_bytes(schedule, donated_leaves(program, donated)),
    )


def pinned_rows(schedule: Schedule, options: Options, waiting: float = 0.0) -> list[dict[str, object]]:
    """The arguments that pins put into host memory, a row for each pin: their number, their bytes of a device, and
    their share of the seconds that it waits for copies. ``waiting``: of these, those for other values."""
    if not options.on_host:
        return []
    program, sizes = schedule.program, dict[str, list[float]]()
    for index in program.inputs:
        value = program.values[index]
        pin = next((one for one in options.on_host if fnmatchcase(value.name or "", one)), None)
        if pin is not None:
            parts = schedule.problem.domain(index).parts[schedule.assignment.values[index]]
            sizes.setdefault(pin, []).append(value.stored_bytes / parts)
    per_byte = max(0.0, waiting_for_copies(schedule) - waiting) / max(1.0, sum(map(sum, sizes.values())))
    return [
        {"module": pin, "made_by": PINNED, "count": len(of), "bytes": sum(of), "seconds": per_byte * sum(of)}
        for pin, of in sizes.items()
    ]


Made = TypeVar("Made", bound=PlanData)


def rebuild(plan: Made, program: Program) -> Made:
    """A plan over the same program, traced again.

    Raises PlanMismatchError for another program, or if this version builds another problem of it.
    """
    plan.check_program(program)
    schedule = schedule_of(program, plan.mesh, plan.recipe)
    collectives = planned_collectives(schedule)
    nowhere = [replace(c, source="") for c in plan.collectives]  # source lines may have moved
    if planned_arguments(schedule) == plan.arguments and [replace(c, source="") for c in collectives] == nowhere:
        return replace(plan, built=schedule, collectives=collectives)
    raise PlanMismatchError("the plan was made by another version of shardplan, with other prices: plan again")


def rewritten(program: Program, recipe: Recipe, mesh: Mesh | AbstractMesh) -> Program:
    """The program that a recipe plans, which may make some values again and run in blocks.

    Raises PlanMismatchError where it has no such values.
    """
    program = asked_for(program, recipe.options, mesh)
    if recipe.recomputed is not None:
        gone = {*recipe.recomputed, *(one.value for one in recipe.offloaded)}
        stages = {value for one in recipe.offloaded for value in (one.away, one.back)}
        if not (gone <= recomputable(program) and stages <= program.makers.keys()):
            raise PlanMismatchError("the plan computes other values again than the program has: plan again")
        program = recomputing(program, frozenset(recipe.recomputed), recipe.offloaded)
    for blocks in recipe.blocks:
        known = all(0 <= v < len(program.values) and 0 <= d < len(program.values[v].shape) for v, d in blocks.seeds)
        if not known or len(blocks.counts) != len(blocks.seeds) or min(blocks.counts, default=0) < 1:
            raise PlanMismatchError("the plan runs other blocks than the program has: plan again")
        program = in_blocks(program, blocks).program
    return program


def asked_for(program: Program, options: Options, mesh: Mesh | AbstractMesh) -> Program:
    """The program in the blocks that the user asks for."""
    found = blocks_by_hand(program, options.blocks or {}, mesh_axes(mesh), options.pins)
    return found[-1].program if found else program


def schedule_of(program: Program, mesh: Mesh | AbstractMesh, recipe: Recipe) -> Schedule:
    """The schedule of a recipe and its program, without a search.

    Raises PlanMismatchError if this version builds another problem of it.
    """
    problem = build_problem(rewritten(program, recipe, mesh), mesh, recipe.options)
    if problem.variables.digest() != recipe.network:
        raise PlanMismatchError(
            "the plan was made by another version of shardplan, with other numbers of layouts: plan again"
        )
    sizes, choices = problem.variables.sizes, np.array(recipe.choices)
    among = len(choices) == len(sizes) and bool((choices < sizes).all())
    if not (among and np.isfinite(problem.network.cost(choices))):
        raise PlanMismatchError("the plan's choices do not go together: they were changed since; plan again")
    return Schedule(problem, problem.decode(choices))


def planned_arguments(schedule: Schedule) -> tuple[PlannedArgument, ...]:
    program, mesh = schedule.program, schedule.space.mesh
    tied = set(program.ties.values())
    found = []
    for position, index in enumerate(program.inputs):
        value = program.values[index]
        spec = to_spec(mesh, schedule.assignment.values[index])
        found.append(
            PlannedArgument(
                path=value.name or "",
                shape=value.shape,
                dtype=str(value.dtype),
                total_bytes=value.stored_bytes,
                spec=spec,
                fed_back=position in tied,
                memory_kind=value.memory_kind,
                is_ref=position in program.refs,
            )
        )
    return tuple(found)


def donated_places(options: Options) -> tuple[int | str, ...]:
    """The positions of donated arguments among the dynamic ones, and the names of donated keyword arguments."""
    static, names = options.static, options.donate_argnames or ()
    wanted = as_positions(options.donate_argnums)
    places = (position - sum(s < position for s in static) for position in wanted if position not in static)
    return (*places, *((names,) if isinstance(names, str) else names))


def memory_limit_of(options: Options) -> float:
    """The memory limit of one device: the user's, or the hardware's memory without the reserve."""
    memory_bytes = load(options.hardware or DEFAULT_HARDWARE).memory_bytes
    return options.memory_limit or memory_bytes * (1 - RESERVED_MEMORY)


def host_memory_of(options: Options) -> float:
    """The host memory for values that wait there: none where they may not, else the user's, or as much as a device
    has."""
    if HOST not in options.fit:
        return 0.0
    return float(options.host_memory or load(options.hardware or DEFAULT_HARDWARE).memory_bytes)


def check_arguments(problem: Problem, limit: float) -> None:
    """Raises InfeasibleError if the arguments alone exceed the limit, split as far as the mesh allows."""
    program = problem.program
    sizes = [program.values[index].total_bytes / problem.domain(index).degrees.max() for index in program.inputs]
    if sum(sizes) > limit:
        raise InfeasibleError(
            f"the arguments alone take {size_text(sum(sizes))} per device, split as far as the mesh can split them, "
            f"and the limit is {size_text(limit)}. What helps: more devices, or a smaller state",
            float(sum(sizes)),
        )


def donated_leaves(program: Program, donated: tuple[int | str, ...]) -> frozenset[int]:
    """The positions of the leaves of donated arguments, and of references, among the flattened arguments."""
    args, kwargs = jax.tree.unflatten(program.in_tree, range(len(program.inputs)))
    held = (kwargs.get(place) if isinstance(place, str) else args[place] for place in donated)
    return program.refs.union(*map(jax.tree.leaves, held))


def planned_collectives(schedule: Schedule) -> tuple[PlannedCollective, ...]:
    mesh = schedule.space.mesh
    found = []
    for sent in schedule.collectives():
        operation = sent.operation
        found.append(
            PlannedCollective(
                kind=sent.step.kind.value,
                axes=tuple(mesh.names[axis] for axis in sorted(sent.step.axes)),
                bytes=sent.bytes,
                times=sent.times,
                tensor=sent.tensor.name or f"value {sent.tensor.index}",
                operation=f"{operation.scope} {operation.primitive.name}" if operation else "output",
                source=operation.source if operation else "",
            )
        )
    return tuple(found)


def remarks_on_operations(schedule: Schedule) -> list[str]:
    """Warnings of operations that could run better, a sentence or two each."""
    found = []
    for name, operations in schedule.problem.unknown.items():
        if name not in _jax.HOST_CALLS:
            found.append(
                f"`{name}` ({len(operations)} times, first at {operations[0].source}) is not described: it is computed "
                "whole on every device. Describe it with shardplan.describe(primitive, expression)."
            )
    for operation in schedule.program.operations:
        region = region_of(schedule.space.mesh, operation)
        regions = [schedule.program.regions[body] for body in operation.bodies]
        values = [value for region in regions if region.assumed for value in region.inputs]
        unknown = region is not None and any(call.assumed for call in region.calls)
        if unknown or any(len(schedule.problem.domain(value)) > 1 for value in values):
            found.append(
                f"the loop at {operation.source} runs as often as its data say: what it sends is counted once. State "
                "how often it runs, about, by `with shardplan.trip_count(n):` around it."
            )
    return [*found, *_remarks_on_regions(schedule)]


def _remarks_on_regions(schedule: Schedule) -> Iterator[str]:
    """Warnings of regions split by hand that repeat work, or that XLA splits further."""
    mesh = schedule.space.mesh
    found: dict[tuple[int, ...], list[Operation]] = {}
    for operation in schedule.program.operations:
        region = region_of(mesh, operation)
        if region is not None and region.left_out:
            found.setdefault(region.left_out, []).append(operation)
        if region is not None and region.inexact:
            yield f"the `shard_map` at {operation.source} {region.inexact}: XLA may send less or more than is planned."
    for axes, operations in found.items():
        names = ", ".join(mesh.names[axis] for axis in axes)
        yield (
            f"`shard_map` ({len(operations)} times, first at {operations[0].source}) leaves out the mesh axes "
            f"({names}), along which every device computes all of it. Name them in its specs, or take out of it what "
            "they should split."
        )


def remarks_on_layouts(
    program: Program, mesh: Mesh | AbstractMesh, pins: Mapping[str, PartitionSpec] | None
) -> list[str]:
    """Warnings of sizes that the mesh does not divide, and of ignored constraints, a sentence or two each."""
    space = _layout_space(program, mesh_axes(mesh), pins)
    return [*undivided(program, space), *hard_layouts(program, space, pins).ignored]


def _layout_space(program: Program, mesh: MeshAxes, pins: Mapping[str, PartitionSpec] | None) -> LayoutSpace:
    return LayoutSpace(mesh, padded_sizes(program, mesh), named_orders(program, mesh, pins))
