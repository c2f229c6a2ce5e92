"""Planning time, and its growth: `python -m benchmarks.planning_time`.

Every plan is made in a process of its own, cold. Seconds are wall-clock seconds, tracing included, unless stated
otherwise. `--tables growth cache` makes only these tables.
"""

import argparse
import dataclasses
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractMesh

import shardplan
from benchmarks.documents import Document, progress
from benchmarks.measuring import MESHES, least_peak
from benchmarks.processes import in_own_process, peak_memory_bytes, timed
from shardplan.common.tables import megabytes
from shardplan.models import NAMES, Training, load
from shardplan.optimize.solve_once import Search
from shardplan.optimize.within_memory import search_within
from shardplan.options import Options
from shardplan.plans.pipeline import RESERVED_MEMORY, build_problem
from shardplan.plans.planned_call import trace_call
from shardplan.plans.report import bytes_on_device
from shardplan.problem.schedule import Schedule

INTRODUCTION = (
    "Seconds to plan training steps, tracing included, each in a process of its own; memory is the most that the "
    "process held. Meshes are abstract: nothing is compiled here."
)
LETTERS = "abcdefgh"


@dataclass(frozen=True, slots=True)
class Program:
    """A model with some of its configuration's fields changed, on a mesh of these sizes, within a memory limit."""

    model: str
    mesh: tuple[int, ...]
    base: str = ""
    changes: tuple[tuple[str, Any], ...] = ()
    memory_limit: float | None = None
    fit: tuple[str, ...] = ("recompute", "blocks")

    def training(self) -> Training:
        module = load(self.model)
        config = module.CONFIGS[self.base] if self.base else module.BENCHMARK
        return module.training(dataclasses.replace(config, **dict(self.changes)))

    @property
    def abstract(self) -> AbstractMesh:
        return AbstractMesh(self.mesh, tuple(LETTERS[: len(self.mesh)]))

    @property
    def title(self) -> str:
        changed = ", ".join(f"{name} {value}" for name, value in self.changes)
        limit = f"{self.memory_limit / 1e9:.0f} GB" if self.memory_limit else ""
        unlimited = "no memory limit" if self.memory_limit == math.inf else limit
        return ", ".join(filter(None, (self.base or self.model, changed, unlimited)))


@dataclass(frozen=True, slots=True)
class Spent:
    """A plan's seconds and bytes; `again` are the seconds of the second planning, from the cache."""

    seconds: float
    work: float
    traced: float
    built: float
    searched: float
    gap: float
    operations: int
    bytes_sent: float
    memory: int
    again: float = 0.0


def spend(program: Program, twice: bool = False) -> Spent:
    """Plans a program, on request a second time from a fresh cache."""
    training = program.training()
    state, batch = training.state, training.batch
    with tempfile.TemporaryDirectory() as folder:
        if twice:
            os.environ["SHARDPLAN_CACHE_DIR"] = folder

        def plan() -> shardplan.Plan:
            options: dict[str, Any] = {"memory_limit": program.memory_limit, "fit": program.fit}
            return shardplan.plan(training.train_step, program.abstract, state, batch, donate_argnums=0, **options)

        found, seconds, work = timed(plan)
        again = timed(plan)[1] if twice else 0.0
    parts = found.statistics["seconds"]
    return Spent(
        *(seconds, work, parts["trace"], parts["build"], parts["search"], found.gap),
        *(found.statistics["operations"], found.communication_bytes, peak_memory_bytes(), again),
    )


def stages(program: Program) -> list[float]:
    """Seconds of all cores for tracing, rules, network, search, and writing the schedule down."""
    training = program.training()
    state, batch = training.state, training.batch
    options = Options(donate_argnums=0)
    traced, *_, trace = timed(lambda: trace_call(training.train_step, (state, batch), {}, options))
    problem, *_, rules = timed(lambda: build_problem(traced, program.abstract, options))
    *_, network = timed(lambda: problem.network)
    limit = problem.prices.hardware.memory_bytes * (1 - RESERVED_MEMORY)
    search = Search("auto", options.time_limit, limit, frozenset(traced.ties.values()))
    found, *_, searched = timed(lambda: search_within(problem, search))
    *_, scheduled = timed(lambda: Schedule(problem, problem.decode(found.solution.choices)).collectives())
    return [trace, rules, network, searched - scheduled, scheduled]


Row = tuple[str, ...]


def _cells(program: Program, spent: Spent) -> Row:
    return (
        program.title,
        "x".join(map(str, program.mesh)),
        str(spent.operations),
        *(f"{seconds:.2f}" for seconds in (spent.seconds, spent.traced, spent.built, spent.searched, spent.work)),
        f"{100 * spent.gap:.4f} %",
        f"{spent.memory / 1e9:.2f}",
        megabytes(spent.bytes_sent),
    )


SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Positions of memory limits between the least peak and the peak of the plan without a limit."""


def peaks(program: Program) -> tuple[float, float]:
    """The bytes of the least peak that is found, and of the plan without a limit."""
    training = program.training()
    state, batch = training.state, training.batch

    def plan(memory_limit: float) -> shardplan.Plan:
        step = training.train_step
        return shardplan.plan(step, program.abstract, state, batch, donate_argnums=0, memory_limit=memory_limit)

    return least_peak(plan), plan(math.inf).peak_bytes


def _within_limits(program: Program) -> Row:
    """CPU seconds without a limit, the factor by which a limit multiplies them, and the gap within the limit."""
    least, most = in_own_process(peaks, program)
    free = in_own_process(spend, dataclasses.replace(program, memory_limit=math.inf))
    cells = []
    for share in SHARES:
        limit = least + share * (most - least)
        spent = in_own_process(spend, dataclasses.replace(program, memory_limit=limit))
        cells.append(f"{spent.work / free.work:.1f}, {100 * spent.gap:.1f} %")
    mesh = "x".join(map(str, program.mesh))
    return (program.title, mesh, f"{free.work:.2f}", f"{least / most:.2f}", *cells)


def state_and_peak(program: Program) -> tuple[float, float]:
    """The bytes of one device's part of the state, and of the peak, in the plan without a limit."""
    training = program.training()
    options: dict[str, Any] = {"donate_argnums": 0, "memory_limit": math.inf}
    plan = shardplan.plan(training.train_step, program.abstract, training.state, training.batch, **options)
    return sum(bytes_on_device(one, plan.mesh_axes) for one in plan.arguments), plan.peak_bytes


def _made_to_fit(program: Program) -> Row:
    """CPU seconds without a limit, and the factors by which a limit half-way from the state to the peak multiplies
    them, by recomputation alone and with blocks."""
    state, peak = in_own_process(state_and_peak, program)
    free = in_own_process(spend, dataclasses.replace(program, memory_limit=math.inf))
    cells = []
    for fit in (("recompute",), ("recompute", "blocks")):
        within = dataclasses.replace(program, memory_limit=(state + peak) / 2, fit=fit)
        try:
            cells.append(f"{in_own_process(spend, within).work / free.work:.1f}")
        except shardplan.InfeasibleError:
            cells.append("does not fit")
    return (program.title, "x".join(map(str, program.mesh)), f"{free.work:.2f}", *cells)


HEADER: Row = (
    "step",
    "mesh",
    "operations",
    "seconds",
    "trace",
    "build",
    "search",
    "CPU seconds",
    "gap",
    "GB",
    "MB sent",
)


def _planned(*programs: Program) -> list[tuple[Program, Callable[[Program], Row]]]:
    return [(program, lambda program: _cells(program, in_own_process(spend, program))) for program in programs]


def _scanned(model: str) -> tuple[tuple[str, Any], ...]:
    """The changes that make a model scan over its layers, if it can."""
    fields = {field.name for field in dataclasses.fields(load(model).Config)}
    return (("scan_layers", True),) if "scan_layers" in fields else ()


@dataclass(frozen=True, slots=True)
class Part:
    """A table of the document: its columns, and a function per row."""

    title: str
    header: Row
    rows: list[tuple[Program, Callable[[Program], Row]]]


def _large() -> Part:
    """The programs for which a planner has to be fast."""
    kept, tokens = ("checkpoint", "nothing_saveable"), (("batch", 8), ("sequence", 2048))
    programs = [
        Program("llama", (2, 4), "llama3-8b", tokens),
        Program("llama", (2, 4), "llama3-8b", (("scan_layers", True), kept)),
        Program("llama", (2, 2, 2), "llama3-70b", tokens, memory_limit=math.inf),
        Program("gpt", (8, 8, 8), "gpt3-175b", (("batch", 256), kept, *_scanned("gpt"))),
        Program("llama", (2, 4), "llama3-8b", (("batch", 8), ("sequence", 8192)), memory_limit=80e9),
        Program("llama", (8, 8), "llama3-70b", (*_scanned("llama"), ("batch", 64), ("sequence", 8192)), 80e9),
    ]
    return Part("Large programs", HEADER, _planned(*programs))


def _models() -> Part:
    meshes = [tuple(axes.values()) for axes in MESHES.values()]
    return Part("Models", HEADER, _planned(*(Program(model, mesh) for model in NAMES for mesh in meshes)))


def _growth() -> Part:
    programs = (Program("gpt", (2, 4), changes=(("layers", layers),)) for layers in (12, 24, 48, 96))
    return Part("Growing depth, unrolled", HEADER, _planned(*programs))


def _devices() -> Part:
    """The same program and mesh axes, with sizes that all divide it."""
    sizes = (("layers", 4), ("width", 4096), ("heads", 64), ("batch", 64))
    programs = (Program("gpt", mesh, changes=sizes) for mesh in ((2, 4), (8, 8), (16, 32), (64, 64)))
    return Part("Growing meshes of two axes", HEADER, _planned(*programs))


def _cache() -> Part:
    def row(program: Program) -> Row:
        spent = in_own_process(spend, program, True)
        first, again = f"{spent.seconds:.2f}", f"{spent.again:.2f}"
        return (program.title, first, f"{spent.traced:.2f}", again, f"{100 * spent.again / spent.seconds:.0f} %")

    programs = [Program(model, (2, 4)) for model in NAMES]
    header = ("step, mesh 2x4", "seconds", "of them tracing", "planned again", "again / first")
    return Part("The second planning, from the cache", header, [(program, row) for program in programs])


def _limits() -> Part:
    """The cost of a memory limit: the factor of planning time, and the gap."""
    shares = (f"{100 * share:.0f} % between: times, gap" for share in SHARES)
    header = ("step", "mesh", "CPU seconds without", "least peak / free", *shares)
    models = ("gpt", "llama", "lstm", "mamba", "mlp", "moe", "unet3d", "vit", "wide_resnet")
    programs = [Program(model, mesh) for model in models for mesh in ((8,), (2, 4), (2, 2, 2))]
    return Part("Within a memory limit", header, [(program, _within_limits) for program in programs])


def _fitting() -> Part:
    """The cost of making a step fit that no layout fits."""
    models = ("gpt", "llama", "bert", "vit", "t5", "mamba", "moe", "resnet")
    header = ("step", "mesh", "CPU seconds without", "recomputed: times", "with blocks: times")
    programs = [Program(model, mesh) for model in models for mesh in ((1,), (8,), (2, 4))]
    return Part("Made to fit half of the memory above the state", header, [(one, _made_to_fit) for one in programs])


def _repeated() -> Part:
    programs = []
    for model in (model for model in NAMES if _scanned(model)):
        for mesh in ((8,), (2, 4)):
            depth = (("layers", 4),)
            programs += [Program(model, mesh, changes=depth), Program(model, mesh, changes=depth + _scanned(model))]
    return Part("Unrolled and scanned", HEADER, _planned(*programs))


def _stages() -> Part:
    def row(program: Program) -> Row:
        cells = (f"{seconds:.2f}" for seconds in in_own_process(stages, program))
        return (program.title, "x".join(map(str, program.mesh)), *cells)

    meshes = [tuple(axes.values()) for axes in MESHES.values()]
    header = ("step", "mesh", "trace", "rules", "network", "search", "schedule")
    programs = [Program(model, mesh) for model in NAMES for mesh in meshes]
    return Part("Stages, CPU seconds", header, [(program, row) for program in programs])


PARTS: dict[str, Callable[[], Part]] = {
    "large": _large,
    "models": _models,
    "growth": _growth,
    "devices": _devices,
    "cache": _cache,
    "limits": _limits,
    "fitting": _fitting,
    "repeated": _repeated,
    "stages": _stages,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", nargs="+", choices=PARTS, help="these tables; the document is left as it is")
    options = parser.parse_args(arguments)
    writes = not options.tables
    document = Document("planning_time", "Planning time", INTRODUCTION, "planning_time", writes=writes)
    parts = [PARTS[name]() for name in options.tables or PARTS]
    with progress() as shown:
        task = shown.add_task("planning time", total=sum(len(part.rows) for part in parts))
        for part in parts:
            table = document.table(part.header, part.title)
            for program, row in part.rows:
                shown.update(task, description=program.title)
                try:
                    table.add(row(program))
                except Exception as error:
                    said = (str(error).splitlines() or [type(error).__name__])[0]
                    table.add((program.title, said, *[""] * (len(part.header) - 2)))
                shown.advance(task)
    document.print()


if __name__ == "__main__":
    main()
