"""Plans of one program by several methods, side by side.

    comparison = shardplan.compare(train_step, mesh, state, batch)
    print(comparison)
    for row in comparison:
        row.method, row.communication_bytes, row.gap

Every row is priced by the same cost model. `exact` is the planner's own search; `data_parallel`, `zero1`, `fsdp` and
`tensor_parallel` fix what their names say and let the same search complete the rest (`shardplan.baselines`), so they
are at least as good as these layouts are by hand; the other methods are searches that get the same network.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from shardplan.annotate import annotate
from shardplan.auto import options_from, trace_call
from shardplan.baselines import BASELINES
from shardplan.choosing import make_plan
from shardplan.errors import ArgumentError, InfeasibleError
from shardplan.hardware import load
from shardplan.mesh import GivenMesh, check_mesh, mesh_axes, with_auto_axes
from shardplan.options import Options
from shardplan.plan import Plan
from shardplan.plan_report import mesh_text, objective_text
from shardplan.planning import DEFAULT_HARDWARE, RESERVED_MEMORY, plan_program
from shardplan.program import Program
from shardplan.search import METHODS
from shardplan.tables import html_table, megabytes, text_table

DEFAULT_METHODS = ("exact", "data_parallel", "zero1", "fsdp", "tensor_parallel")


@dataclass(frozen=True, slots=True)
class ComparedPlan:
    """One row: a method, its plan (None where it gives none; then ``note`` says why), and the seconds that it took.

    ``lower_bound`` is that of the problem itself, so it holds for every method: the best one that a row proved.
    """

    method: str
    plan: Plan | None = field(repr=False)
    lower_bound: float
    seconds: float
    note: str = ""

    @property
    def communication_bytes(self) -> float:
        """Bytes that one device sends per step."""
        return self.plan.communication_bytes if self.plan else math.nan

    @property
    def objective(self) -> float:
        return self.plan.objective if self.plan else math.nan

    @property
    def peak_bytes(self) -> float:
        return self.plan.peak_bytes if self.plan else math.nan

    @property
    def gap(self) -> float:
        """How far above the optimum of the cost model the plan can be, as a share of its objective."""
        if not self.plan or math.isinf(self.lower_bound):
            return math.nan
        return max(0.0, 1 - self.lower_bound / self.objective) if self.objective else 0.0


_HEADER = ("method", "MB sent", "objective", "at most above optimum", "peak MB", "seconds", "")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The rows in the order in which they were asked for; prints as a table."""

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

    def __str__(self) -> str:
        return f"{self._title()}\n{text_table(_HEADER, self._cells(), numbers=range(1, 6))}"

    def _repr_html_(self) -> str:
        return html_table(_HEADER, self._cells(), numbers=range(1, 6), caption=self._title())

    def _title(self) -> str:
        return f"Mesh ({mesh_text(self.mesh_axes)}), per device and step, by the cost model"

    def _cells(self) -> list[tuple[str, ...]]:
        return [_cells(row) for row in self.rows]


def _cells(row: ComparedPlan) -> tuple[str, ...]:
    seconds = f"{row.seconds:.2f}"
    if row.plan is None:
        return (row.method, "", "", "", "", seconds, row.note)
    gap = "" if math.isnan(row.gap) else f"{100 * row.gap:.4f} %" if row.gap < 0.01 else f"{100 * row.gap:.1f} %"
    objective = objective_text(row.plan, row.objective)
    return (
        row.method,
        megabytes(row.communication_bytes),
        objective,
        gap,
        megabytes(row.peak_bytes),
        seconds,
        row.note,
    )


def compare(
    fn: Callable[..., Any],
    mesh: GivenMesh,
    *args: Any,
    methods: Sequence[str] = DEFAULT_METHODS,
    **options: Any,
) -> Comparison:
    """Plans ``fn`` by several methods.

    Args:
        fn, mesh, args, options: as for ``shardplan.plan``. A number of devices is compared on the mesh that is best for
            `exact`.
        methods: names of `shardplan.baselines.BASELINES` and of `shardplan.search.METHODS`.

    Raises:
        ArgumentError: a method or an option is unknown; before any work starts.
    """
    chosen = options_from(options)
    check_mesh(mesh)
    chosen.check()
    unknown = [method for method in methods if method not in BASELINES and method not in METHODS]
    if unknown or not methods:
        listed = ", ".join((*BASELINES, *METHODS))
        named = ", ".join(f"`{method}`" for method in unknown) or "that is none"
        raise ArgumentError(f"there is no method {named}; there are {listed}")
    program = trace_call(fn, args, {}, chosen)
    concrete = make_plan(program, mesh, chosen).mesh if isinstance(mesh, (int, str)) else with_auto_axes(mesh)
    rows = [_compared(program, concrete, chosen, method) for method in methods]
    bound = max((row.lower_bound for row in rows), default=-math.inf)
    axes = mesh_axes(concrete)
    sizes = dict(zip(axes.names, axes.sizes, strict=True))
    return Comparison(sizes, tuple(replace(row, lower_bound=bound) for row in rows))


def _compared(program: Program, mesh: Mesh | AbstractMesh, options: Options, method: str) -> ComparedPlan:
    """One row. What is compared with may exceed the memory limit, and the row says so."""
    started = time.perf_counter()
    try:
        if method in ("auto", "exact"):
            plan = plan_program(program, mesh, options, method=method)
            return ComparedPlan(method, plan, plan.lower_bound, time.perf_counter() - started)
        unlimited = replace(options, memory_limit=math.inf)
        if method in BASELINES:
            plan = plan_program(program, mesh, unlimited, prepare=BASELINES[method])
        else:
            plan = plan_program(program, mesh, unlimited, prepare=annotate, method=method)
    except (InfeasibleError, ArgumentError) as error:
        note = str(error).splitlines()[0]
        return ComparedPlan(method, None, -math.inf, time.perf_counter() - started, note)
    fits = plan.peak_bytes <= _memory_limit(options)
    seconds = time.perf_counter() - started
    return ComparedPlan(method, plan, -math.inf, seconds, "" if fits else "does not fit the memory")


def _memory_limit(options: Options) -> float:
    return options.memory_limit or load(options.hardware or DEFAULT_HARDWARE).memory_bytes * (1 - RESERVED_MEMORY)
