"""The comparison of plans of one program by several methods.

    comparison = shardplan.compare(train_step, mesh, state, batch)
    print(comparison)
    for row in comparison:
        row.method, row.communication_bytes, row.gap

The same cost model prices every row. `exact` is the planner's own search. `data_parallel`, `zero1`, `fsdp` and
`tensor_parallel` fix the layouts of their scheme, and the same search completes the rest
(`shardplan.problem.baselines`). So they are at least as good as handwritten layouts of the scheme. The other methods
are searches of the same network.

`checkpoint:nothing_saveable`, `checkpoint:dots_saveable` and `checkpoint:dots_with_no_batch_dims_saveable` compute
again what these policies of `jax.checkpoint` compute again around every layer
(`shardplan.optimize.checkpoint_policies`). They have the layouts of the plan without a limit. They are compared where
`exact` computes values again or runs in blocks.

`placement:depth_first`, `placement:min_cut` and `placement:round_robin` split nothing: every operation runs whole on
one device (`shardplan.timing.operator_placement`). They have no plan and no objective. The traffic and the memory of
such a row are those of the busiest device. With one of them, all rows are simulated, and have the time of a step."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from shardplan.auto import options_from
from shardplan.common.tables import html_table, size_cell, text_table
from shardplan.compare_plot import save_plot
from shardplan.errors import ArgumentError, InfeasibleError
from shardplan.hardware import load
from shardplan.layout.mesh import GivenMesh, as_mesh, mesh_axes, with_auto_axes
from shardplan.optimize.checkpoint_policies import POLICIES
from shardplan.options import Options
from shardplan.plans.choose_mesh import make_plan
from shardplan.plans.fitting import Fitting
from shardplan.plans.pipeline import DEFAULT_HARDWARE, RESERVED_MEMORY, build_problem, plan_program
from shardplan.plans.plan import Plan
from shardplan.plans.planned_call import trace_call
from shardplan.plans.recomputed_plan import RecomputedPlans
from shardplan.plans.report import above_share, mesh_text, objective_text
from shardplan.plans.simulate import simulate
from shardplan.plans.stopwatch import Stopwatch
from shardplan.problem.baselines import BASELINES
from shardplan.problem.tofu_annotations import annotate
from shardplan.program.program import Program
from shardplan.search import METHODS
from shardplan.timing.operator_placement import PLACEMENT_METHODS, simulate_placement
from shardplan.timing.simulator import Simulation
from shardplan.timing.step_time import step_time

DEFAULT_METHODS = ("exact", "data_parallel", "zero1", "fsdp", "tensor_parallel")

CHECKPOINTS = MappingProxyType({f"checkpoint:{policy}": policy for policy in POLICIES})
"""The policies of `jax.checkpoint`, by their methods. They are part of the default where a step does not fit."""


@dataclass(frozen=True, slots=True)
class ComparedPlan:
    """One row: a method, its plan (or None, with the reason in ``note``), and the seconds that it took.

    ``simulation`` exists in comparisons with placements. A placement has nothing else.
    ``lower_bound`` is the best bound of all rows. It is a bound of the problem, and holds for every method.
    """

    method: str
    plan: Plan | None = field(repr=False)
    lower_bound: float
    seconds: float
    note: str = ""
    simulation: Simulation | None = field(default=None, repr=False)

    @property
    def communication_bytes(self) -> float:
        """Bytes that one device sends per step. For a placement, the device that sends most."""
        if self.plan:
            return self.plan.communication_bytes
        return max(self.simulation.sent_bytes) if self.simulation else math.nan

    @property
    def objective(self) -> float:
        return self.plan.objective if self.plan else math.nan

    @property
    def peak_bytes(self) -> float:
        """Peak memory of one device. For a placement, the device with the highest peak."""
        if self.plan:
            return self.plan.peak_bytes
        return max(self.simulation.peak_bytes) if self.simulation else math.nan

    @property
    def simulated_seconds(self) -> float:
        """Seconds of one step by `shardplan.simulate`, in simulated rows."""
        return self.simulation.seconds if self.simulation else math.nan

    @property
    def step_seconds(self) -> float:
        """Seconds of one step by the model of step time (`shardplan.timing.step_time`)."""
        return step_time(self.plan.schedule).seconds if self.plan else math.nan

    @property
    def gap(self) -> float:
        """The largest possible distance to the optimum of the cost model, as a share of the objective."""
        if not self.plan or math.isinf(self.lower_bound):
            return math.nan
        return max(0.0, 1 - self.lower_bound / self.objective) if self.objective else 0.0


_HEADER = ("method", "MB sent", "objective", "at most above optimum", "peak MB", "step ms", "seconds", "")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The rows in the order of the methods. It prints as a table."""

    mesh_axes: dict[str, int]
    rows: tuple[ComparedPlan, ...]

    def __iter__(self) -> Iterator[ComparedPlan]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, method: str) -> ComparedPlan:
        for row in self.rows:
            if row.method == method:
                return row
        raise KeyError(f"`{method}` was not compared; there are {', '.join(row.method for row in self.rows)}")

    def save_plot(self, path: str | os.PathLike[str]) -> None:
        """Writes bytes sent and peak memory as bars, as PNG, SVG or PDF by the end of the path.

        Raises ArgumentError without Matplotlib (the extra `notebook`), and for a path that cannot be written.
        """
        save_plot(self.rows, self._title(), path)

    def __str__(self) -> str:
        return f"{self._title()}\n{text_table(self._header(), self._cells(), numbers=self._numbers())}"

    def _repr_html_(self) -> str:
        return html_table(self._header(), self._cells(), numbers=self._numbers(), caption=self._title())

    @property
    def _simulated(self) -> bool:
        return any(row.simulation is not None for row in self.rows)

    def _header(self) -> tuple[str, ...]:
        return (*_HEADER[:-2], *(("simulated ms",) if self._simulated else ()), *_HEADER[-2:])

    def _numbers(self) -> range:
        return range(1, len(self._header()) - 1)

    def _title(self) -> str:
        return f"Mesh ({mesh_text(self.mesh_axes)}), per device and step, by the cost model"

    def _cells(self) -> list[tuple[str, ...]]:
        return [_cells(row, self._simulated) for row in self.rows]


def _cells(row: ComparedPlan, simulated: bool) -> tuple[str, ...]:
    seconds = f"{row.seconds:.2f}"
    step = (f"{1e3 * row.simulated_seconds:.2f}" if row.simulation else "",) if simulated else ()
    if row.plan is None and row.simulation is None:
        return (row.method, "", "", "", "", "", *step, seconds, row.note)
    sent, peak = size_cell(row.communication_bytes), size_cell(row.peak_bytes)
    if row.plan is None:
        return (row.method, sent, "", "", peak, "", *step, seconds, row.note)
    share = None if math.isinf(row.lower_bound) else above_share(row.objective, row.lower_bound)
    above = "" if share is None else f"{100 * share:.4f} %" if share < 0.01 else f"{100 * share:,.1f} %"
    objective = objective_text(row.plan, row.objective)
    return (row.method, sent, objective, above, peak, f"{1e3 * row.step_seconds:.2f}", *step, seconds, row.note)


def compare(
    fn: Callable[..., Any],
    mesh: GivenMesh,
    *args: Any,
    methods: Sequence[str] | None = None,
    **options: Any,
) -> Comparison:
    """Plans ``fn`` by several methods.

    Args:
        fn, mesh, args, options: as for ``shardplan.plan``. For a number of devices, the mesh is the best one for
            `exact`.
        methods: names of `shardplan.problem.baselines.BASELINES`, of `shardplan.search.METHODS`, of `CHECKPOINTS`, and
            of `shardplan.timing.operator_placement.PLACEMENT_METHODS`. By default `DEFAULT_METHODS`, and `CHECKPOINTS`
            where the step does not fit by layouts.

    Raises:
        ArgumentError: a method or an option is unknown. Raised before any work starts.
    """
    chosen = options_from(options)
    mesh = as_mesh(mesh)
    chosen.check()
    if isinstance(methods, str) or not isinstance(methods, (Iterable, type(None))):
        raise ArgumentError(f"`methods` is a list of names, got `{methods!r}`")
    known = (*BASELINES, *METHODS, *CHECKPOINTS, *PLACEMENT_METHODS)
    asked = DEFAULT_METHODS if methods is None else tuple(methods)
    unknown = [method for method in asked if method not in known]
    if unknown or not asked:
        listed = ", ".join(known)
        named = ", ".join(f"`{method}`" for method in unknown) or "that is none"
        raise ArgumentError(f"there is no method {named}; there are {listed}")
    program = trace_call(fn, args, {}, chosen)
    concrete = make_plan(program, mesh, chosen).mesh if isinstance(mesh, (int, str)) else with_auto_axes(mesh)
    rows = [_compared(program, concrete, chosen, method) for method in asked]
    if methods is None and rows[0].plan and (rows[0].plan.recomputed or rows[0].plan.blocks):
        rows += [_compared(program, concrete, chosen, method) for method in CHECKPOINTS]
    if any(method in PLACEMENT_METHODS for method in asked):
        rows = [replace(row, simulation=simulate(row.plan)) if row.plan else row for row in rows]
    bound = max((row.lower_bound for row in rows), default=-math.inf)
    axes = mesh_axes(concrete)
    sizes = dict(zip(axes.names, axes.sizes, strict=True))
    return Comparison(sizes, tuple(replace(row, lower_bound=bound) for row in rows))


def _compared(program: Program, mesh: Mesh | AbstractMesh, options: Options, method: str) -> ComparedPlan:
    """One row. Methods other than `exact` may exceed the memory limit, with a note."""
    started = time.perf_counter()
    try:
        if method in ("auto", "exact"):
            plan = Plan.of(Fitting(program, mesh).plan(options))
            return ComparedPlan(method, plan, plan.lower_bound, time.perf_counter() - started)
        if method in PLACEMENT_METHODS:
            return _placed(program, mesh, options, method)
        unlimited = replace(options, memory_limit=math.inf)
        if method in BASELINES:
            plan = Plan.of(plan_program(program, mesh, unlimited, prepare=BASELINES[method]))
        elif method in CHECKPOINTS:
            watch = Stopwatch(options.time_limit)
            free = plan_program(program, mesh, unlimited)
            recomputed = RecomputedPlans(program, free, unlimited, watch)
            plan = Plan.of(recomputed.by_policy(CHECKPOINTS[method], watch))
        else:
            plan = Plan.of(plan_program(program, mesh, unlimited, prepare=annotate, method=method))
    except (InfeasibleError, ArgumentError) as error:
        note = str(error).splitlines()[0]
        return ComparedPlan(method, None, -math.inf, time.perf_counter() - started, note)
    fits = plan.peak_bytes <= _memory_limit(options)
    seconds = time.perf_counter() - started
    return ComparedPlan(method, plan, -math.inf, seconds, "" if fits else "does not fit the memory")


def _placed(program: Program, mesh: Mesh | AbstractMesh, options: Options, method: str) -> ComparedPlan:
    started = time.perf_counter()
    simulation = simulate_placement(build_problem(program, mesh, options), method)
    fits = max(simulation.peak_bytes) <= _memory_limit(options)
    seconds, note = time.perf_counter() - started, "" if fits else "does not fit the memory"
    return ComparedPlan(method, None, -math.inf, seconds, note, simulation)


def _memory_limit(options: Options) -> float:
    return options.memory_limit or load(options.hardware or DEFAULT_HARDWARE).memory_bytes * (1 - RESERVED_MEMORY)
