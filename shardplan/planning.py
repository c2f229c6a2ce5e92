"""Planning: from a function and its arguments to a plan, stage by stage."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from shardplan.errors import ArgumentError, InfeasibleError, ShardplanWarning
from shardplan.hardware import HardwareProfile, load
from shardplan.layout import Layout, LayoutSpace, MeshAxes, from_spec
from shardplan.mesh import GivenMesh, mesh_axes, shapes_of, with_auto_axes
from shardplan.plan import Plan, PlannedCollective
from shardplan.prices import Prices
from shardplan.problem import Problem, match_paths
from shardplan.program import Program
from shardplan.schedule import Schedule
from shardplan.search import Solution, solve

PRECISION = 1e-5
"""The gap at which a search may stop: a plan within a thousandth of a percent of the optimum is as good as optimal."""

DEFAULT_HARDWARE = "h100"


@dataclass(frozen=True, slots=True)
class Options:
    """What a user may say about a plan; the arguments of ``shardplan.auto``."""

    memory_limit: float | None = None
    objective: str = "bytes"
    hardware: HardwareProfile | str | None = None
    pins: Mapping[str, PartitionSpec] | None = None
    donate_argnums: int | Sequence[int] | None = None
    static_argnums: int | Sequence[int] = ()
    reduce_dtype: Any = None
    time_limit: float = 60.0

    def check(self) -> None:
        """Raises ArgumentError for options that no program could be planned with."""
        if self.objective not in ("bytes", "time"):
            raise ArgumentError(f"there is no objective `{self.objective}`: choose 'bytes' or 'time'")
        if not self.time_limit > 0:
            raise ArgumentError(f"a time limit is a number of seconds above 0, got `{self.time_limit}`")
        if self.memory_limit is not None and not self.memory_limit > 0:
            raise ArgumentError(f"a memory limit is a number of bytes above 0, got `{self.memory_limit}`")
        for path, spec in (self.pins or {}).items():
            if not isinstance(spec, PartitionSpec):
                raise ArgumentError(f"the pin `{path}` is `{spec!r}`: a jax.sharding.PartitionSpec was expected")

    @property
    def static(self) -> tuple[int, ...]:
        return as_positions(self.static_argnums)


def as_positions(argnums: int | Iterable[int] | None) -> tuple[int, ...]:
    """Argument positions as a sorted tuple."""
    if argnums is None:
        return ()
    return (argnums,) if isinstance(argnums, int) else tuple(sorted(argnums))


def make_plan(program: Program, mesh: GivenMesh, options: Options, traced_seconds: float = 0.0) -> Plan:
    """Plans a traced program over a checked mesh; of a device count, over the best of the meshes that it makes."""
    candidates = shapes_of(mesh) if isinstance(mesh, int) else [with_auto_axes(mesh)]
    plans = [plan_program(program, candidate, options, traced_seconds) for candidate in candidates]
    return min(plans, key=lambda plan: plan.objective)


def plan_program(program: Program, mesh: Mesh | AbstractMesh, options: Options, traced_seconds: float) -> Plan:
    """Plans a traced program over one mesh."""
    started = time.perf_counter()
    axes = mesh_axes(mesh)
    space = LayoutSpace(axes)
    prices = Prices(options.objective, load(options.hardware or DEFAULT_HARDWARE), axes)
    fixed = _fixed_layouts(program, axes, options.pins)
    problem = Problem(program, space, prices, fixed, options.reduce_dtype)
    built = time.perf_counter()
    solution = solve(problem.network, gap=PRECISION, time_limit=options.time_limit)
    if solution.status == "infeasible":
        raise InfeasibleError(_infeasible_message(options, solution))
    solved = time.perf_counter()
    schedule = Schedule(problem, problem.decode(solution.choices))
    collectives = _planned_collectives(schedule)
    _warn(problem)
    statistics = {
        "operations": len(program.operations),
        "values": len(program.values),
        "variables": len(problem.network),
        "status": solution.status,
        "seconds": {"trace": traced_seconds, "build": built - started, "search": solved - built},
    }
    return Plan(
        mesh=mesh,
        objective=float(solution.cost),
        lower_bound=float(min(solution.lower_bound, solution.cost)),
        peak_bytes=0.0,
        collectives=collectives,
        statistics=statistics,
        schedule=schedule,
        donated=_donated(options),
    )


def _donated(options: Options) -> tuple[int, ...]:
    static = options.static
    wanted = as_positions(options.donate_argnums)
    return tuple(position - sum(s < position for s in static) for position in wanted if position not in static)


def _fixed_layouts(program: Program, axes: MeshAxes, pins: Mapping[str, PartitionSpec] | None) -> dict[int, Any]:
    names = {index: program.values[index].name or "" for index in program.inputs}
    fixed: dict[int, Any] = {}
    for pattern, found in match_paths(pins or {}, names).items():
        if not found:
            raise ArgumentError(f"the pin `{pattern}` matches no argument; there are {_some(names.values())}")
        for index in found:
            fixed[index] = _pinned_layout(program, axes, index, pattern, (pins or {})[pattern])
    return fixed


def _pinned_layout(program: Program, axes: MeshAxes, index: int, pattern: str, spec: PartitionSpec) -> Layout:
    value = program.values[index]
    try:
        layout = from_spec(axes, spec, len(value.shape))
    except ValueError as error:
        raise ArgumentError(f"the pin `{pattern}` on `{value.name}`: {error}") from None
    for dim, (size, splitting) in enumerate(zip(value.shape, layout)):
        blocks = axes.degree(splitting)
        if size % blocks:
            raise ArgumentError(
                f"the pin `{pattern}` splits dimension {dim} of `{value.name}` {value.shape} over {blocks} devices, "
                f"which leaves {size % blocks} of its {size} rows: pin another dimension or pad to {-(-size // blocks) * blocks}"
            )
    return layout


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(f"`{name}`" for name in listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")


def _planned_collectives(schedule: Schedule) -> tuple[PlannedCollective, ...]:
    mesh = schedule.space.mesh
    found = []
    for sent in schedule.collectives():
        operation = sent.operation
        found.append(
            PlannedCollective(
                kind=sent.step.kind,
                axes=tuple(mesh.names[axis] for axis in sorted(sent.step.axes)),
                bytes=sent.bytes,
                times=1,
                tensor=sent.tensor.name or f"value {sent.tensor.index}",
                operation=f"{operation.scope} {operation.primitive.name}" if operation else "output",
                source=operation.source if operation else "",
            )
        )
    return tuple(found)


def _infeasible_message(options: Options, solution: Solution) -> str:
    return f"no layout keeps within {options.memory_limit} bytes; the least peak found is {solution.peak_usage}"


def _warn(problem: Problem) -> None:
    for name, operations in problem.unknown.items():
        warnings.warn(
            f"`{name}` ({len(operations)} times, first at {operations[0].source}) is not described: it is computed whole on "
            "every device. Describe it with shardplan.describe(primitive, expression).",
            ShardplanWarning,
            stacklevel=2,
        )
