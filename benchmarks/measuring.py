"""Measurements of training steps, planned or split by hand, compiled for H100 without one.

    job = Job("gpt", "2x4", "plan")
    found = measured(job)               # in a process of its own; kept, until the code that it depends on changes
    found.planned.bytes_sent, found.compiled.bytes_sent

Every job runs in a process of its own, so that its times are cold. Results are kept in `build/benchmarks`, so that an
interrupted run continues. If only the bytes of a compiled program count, no program is compiled twice (most plans
within a limit are those without one), and the programs of a model share kernels.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from threading import get_ident
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

import shardplan
from benchmarks.baselines import AXES, Baseline, lower
from benchmarks.processes import in_own_process, timed
from benchmarks.recipes import baselines_of
from shardplan.audits.audit import audit, measure
from shardplan.compiled.program import CompiledReport
from shardplan.compiled.target import gpu_mesh
from shardplan.errors import InfeasibleError
from shardplan.models import Training, load
from shardplan.plans.plan import Plan

TARGET = "h100"
MESHES = {"8": {"data": 8}, "2x4": {"data": 2, "model": 4}, "2x2x2": {"data": 2, "model": 2, "more": 2}}
ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "build" / "benchmarks"
COMPILER = ("shardplan/compiled", "shardplan/gpu_targets")
"""The code on which compilation and reading depend."""
PLAN, PLAIN, TIGHT = "plan", "plain jit", "tight plan"
ALLOWED = 1.2
"""The limit of a tight plan, as a multiple of the least peak that the planner finds."""


@dataclass(frozen=True, slots=True)
class Job:
    """One measurement: a model, a mesh (of `MESHES`), and a way to split.

    The way is `PLAN`, `TIGHT` (a plan within `ALLOWED` times the least peak), `PLAIN` (the plan's shardings without its
    constraints), or the title of a baseline of the model (on its own mesh).
    """

    model: str
    mesh: str
    way: str


@dataclass(frozen=True, slots=True)
class Compiled:
    """A step as it was compiled: bytes sent per device and step, in all and by reductions per element type.

    Lowering and compiling took `seconds`, and `work` in seconds of all cores together, which a busy machine distorts
    less.
    """

    bytes_sent: float
    reduced_bytes: dict[str, float]
    peak: int
    seconds: float
    work: float


@dataclass(frozen=True, slots=True)
class Planned:
    """The figures and times of planning, tracing included. See `Compiled` for the units. `unexplained` is the
    audit's."""

    bytes_sent: float
    peak: float
    gap: float
    seconds: float
    work: float
    unexplained: float = 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a job. `limit` is the limit of a tight plan in bytes, and `error` is the message of a failure."""

    planned: Planned | None = None
    compiled: Compiled | None = None
    limit: float | None = None
    error: str = ""


def measured(job: Job, kernels: str | None = None) -> Measured:
    """The measurement of a job: the kept one, or a new one in a fresh process. A failure is reported, and not kept.

    `kernels` is a file in which jobs whose seconds do not matter share their compiled kernels.
    """
    path = KEPT / f"{_key(job)}.json"
    if path.exists():
        return _from_json(json.loads(path.read_text(encoding="utf-8"))["found"])
    try:
        found = in_own_process(run, job, kernels)
    except Exception as error:
        lines = str(error).splitlines() or [""]
        return Measured(error=f"{type(error).__name__}: {lines[0]}")
    _keep(path, {"job": asdict(job), "found": asdict(found)})
    return found


def run(job: Job, kernels: str | None = None) -> Measured:
    """Measures a job in this process."""
    module = load(job.model)
    training = module.training(module.BENCHMARK)
    if job.way not in (PLAN, PLAIN, TIGHT):
        recipe = baselines_of(job.model)
        baseline = next(b for b in recipe if b.title == job.way)
        shared = None if baseline is recipe[0] else kernels
        return Measured(compiled=compile_baseline(baseline, training, module.BENCHMARK.compute_dtype, shared))
    sizes = MESHES[job.mesh]
    mesh = gpu_mesh(TARGET, tuple(sizes.values()), tuple(sizes))
    planning = partial(shardplan.plan, training.train_step, mesh, training.state, training.batch, donate_argnums=(0,))
    limit = ALLOWED * least_peak(planning) if job.way == TIGHT else None
    plan, seconds, work = timed(partial(planning, memory_limit=limit))
    planned = Planned(plan.communication_bytes, float(plan.peak_bytes), plan.gap, seconds, work)
    if job.way == TIGHT:
        return Measured(planned, compile_once(lambda: plan.lower(mesh), kernels), limit)
    start_compiler(mesh)
    if job.way == PLAIN:
        shardings = {"in_shardings": plan.in_shardings, "out_shardings": plan.out_shardings}
        plain = jax.jit(training.train_step, donate_argnums=0, **shardings)
        read, *spent = timed(lambda: measure(plain.lower(training.state, training.batch)))
        return Measured(compiled=_compiled(read, *spent))
    found, *spent = timed(lambda: audit(plan, mesh=mesh))
    compiled = _compiled(found.compiled, *spent)
    _keep(_program_path(plan.lower(mesh)), asdict(compiled))
    return Measured(replace(planned, unexplained=found.unexplained_bytes), compiled)


def compile_baseline(
    baseline: Baseline, training: Training, compute_dtype: DTypeLike, kernels: str | None = None
) -> Compiled:
    """A layout by hand, compiled."""
    mesh = gpu_mesh(TARGET, (baseline.data, baseline.tensor), AXES)
    start_compiler(mesh)
    return compile_once(lambda: lower(baseline, training, mesh, compute_dtype), kernels)


def compile_once(lower_it: Callable[[], jax.stages.Lowered], kernels: str | None) -> Compiled:
    """The compiled figures of a program, kept from an earlier compilation of the very same one."""
    lowered, *lowering = timed(lower_it)
    path = _program_path(lowered)
    if path.exists():
        return Compiled(**json.loads(path.read_text(encoding="utf-8")))
    read, *compiling = timed(lambda: measure(lowered, kernels=kernels))
    found = _compiled(read, *map(sum, zip(lowering, compiling, strict=True)))
    _keep(path, asdict(found))
    return found


def _program_path(lowered: jax.stages.Lowered) -> Path:
    """The file of a program's result. Its name is a digest of the program's text, with mesh, shardings and donation."""
    facts = (lowered.as_text(), code(COMPILER))
    return KEPT / f"program-{hashlib.sha256(repr(facts).encode()).hexdigest()[:24]}.json"


def _keep(path: Path, facts: dict[str, Any]) -> None:
    KEPT.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}-{get_ident()}")
    temporary.write_text(json.dumps(facts, indent=1), encoding="utf-8")
    temporary.replace(path)


def _compiled(read: CompiledReport, seconds: float, work: float) -> Compiled:
    return Compiled(read.communication_bytes, read.reduced_bytes(), read.memory.peak, seconds, work)


def least_peak(planning: Callable[..., Plan]) -> float:
    """The least peak that the planner finds, from its error without a feasible plan.

    A limit below the arguments alone is refused without a search, with their sum.
    """
    limit = 1.0
    for _ in range(2):
        try:
            return float(planning(memory_limit=limit).peak_bytes)
        except InfeasibleError as error:
            limit = error.least_peak_bytes
    return limit


def start_compiler(mesh: Mesh) -> None:
    """Compiles a small program, so that the compiler's start is part of no measurement."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    rows = jax.ShapeDtypeStruct((64 * mesh.size, 64), jnp.float32)
    measure(jax.jit(lambda x: jnp.sum(x @ x.T), in_shardings=sharding).lower(rows))


def _key(job: Job) -> str:
    """A name for the results of a job, by the code that they depend on."""
    model = (f"models/{job.model}.py", "models/training.py", "models/logical.py")
    facts: tuple[Any, ...]
    if job.way in (PLAN, PLAIN, TIGHT):
        folders = ("shardplan", "rules", "search")
        facts = (job.mesh, job.way, code((*model, "benchmarks/measuring.py", *folders)))
    else:
        baseline = next(b for b in baselines_of(job.model) if b.title == job.way)
        facts = (repr(baseline), code((*model, "benchmarks/baselines.py", *COMPILER)))
    return f"{job.model}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:24]}"


@cache
def code(places: tuple[str, ...]) -> str:
    """A digest of files of the repository, of all files below folders, and of JAX's version."""
    digest = hashlib.sha256(jax.__version__.encode())
    for place in places:
        path = ROOT / place
        below = (file for file in path.rglob("*") if file.is_file() and file.suffix != ".pyc")
        for file in sorted(below) if path.is_dir() else [path]:
            digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _from_json(found: dict[str, Any]) -> Measured:
    planned, compiled = found["planned"], found["compiled"]
    return Measured(
        Planned(**planned) if planned else None,
        Compiled(**compiled) if compiled else None,
        found["limit"],
        found["error"],
    )
