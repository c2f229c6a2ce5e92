"""What is measured of a training step: planned, or split by hand, and compiled for H100 without one.

    job = Job("gpt", "2x4", "plan")
    found = measured(job)               # in a process of its own; kept, until the code that it depends on changes
    found.planned.bytes_sent, found.compiled.bytes_sent

Every compilation runs in a process of its own, so that it is timed cold. Results are kept in `build/benchmarks`, so
that an interrupted run goes on where it was.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

import shardplan
from benchmarks.baselines import AXES, Baseline, lower
from benchmarks.processes import in_own_process, timed
from benchmarks.recipes import baselines_of
from shardplan.audit import audit, measure
from shardplan.compiled import CompiledReport
from shardplan.errors import InfeasibleError
from shardplan.models import Training, load
from shardplan.plan import Plan
from shardplan.target import gpu_mesh

TARGET = "h100"
MESHES = {"8": {"data": 8}, "2x4": {"data": 2, "model": 4}, "2x2x2": {"data": 2, "model": 2, "more": 2}}
ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "build" / "benchmarks"
PLAN, PLAIN, LEAST = "plan", "plain jit", "least peak"


@dataclass(frozen=True, slots=True)
class Job:
    """One measurement: a model, a mesh (of `MESHES`), and a way to split.

    The way is `PLAN` (within `limit` bytes, where given), `PLAIN` (the plan's shardings without its constraints),
    `LEAST` (only the least peak, nothing is compiled), or the title of a baseline of the model (on its own mesh).
    """

    model: str
    mesh: str
    way: str
    limit: float | None = None

    def __str__(self) -> str:
        within = f" within {self.limit / 1e9:.2f} GB" if self.limit else ""
        return f"{self.model} {self.mesh} {self.way}{within}"


@dataclass(frozen=True, slots=True)
class Compiled:
    """A step as it was compiled: bytes sent per device and step, in all and by reductions per element type.

    Lowering and compiling took `seconds`, and `work` in seconds of all cores together, which a busy machine distorts
    less.
    """

    bytes_sent: int
    reduced_bytes: dict[str, float]
    peak: int
    seconds: float
    work: float


@dataclass(frozen=True, slots=True)
class Planned:
    """What planning said and took, tracing included; see `Compiled` for the units. `unexplained` is the audit's."""

    bytes_sent: float
    peak: float
    gap: float
    seconds: float
    work: float
    unexplained: float = 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """What a job gave; `least_peak` in bytes for `LEAST`; `error` where it failed."""

    planned: Planned | None = None
    compiled: Compiled | None = None
    least_peak: float | None = None
    error: str = ""


def measured(job: Job) -> Measured:
    """The measurement of a job: the kept one, or a new one in a fresh process. A failure is said, and not kept."""
    path = KEPT / f"{_key(job)}.json"
    if path.exists():
        return _from_json(json.loads(path.read_text(encoding="utf-8"))["found"])
    try:
        found = in_own_process(run, job)
    except Exception as error:
        lines = str(error).splitlines() or [""]
        return Measured(error=f"{type(error).__name__}: {lines[0]}")
    KEPT.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps({"job": asdict(job), "found": asdict(found)}, indent=1), encoding="utf-8")
    temporary.replace(path)
    return found


def run(job: Job) -> Measured:
    """Measures a job in this process."""
    module = load(job.model)
    training = module.training(module.BENCHMARK)
    if job.way not in (PLAN, PLAIN, LEAST):
        baseline = next(b for b in baselines_of(job.model) if b.title == job.way)
        return Measured(compiled=compile_baseline(baseline, training, module.BENCHMARK.compute_dtype))
    sizes = MESHES[job.mesh]
    mesh = gpu_mesh(TARGET, tuple(sizes.values()), tuple(sizes))
    planning = partial(shardplan.plan, training.train_step, mesh, training.state, training.batch, donate_argnums=(0,))
    if job.way == LEAST:
        return Measured(least_peak=_least_peak(planning))
    plan, seconds, work = timed(partial(planning, memory_limit=job.limit))
    start_compiler(mesh)
    if job.way == PLAIN:
        shardings = {"in_shardings": plan.in_shardings, "out_shardings": plan.out_shardings}
        plain = jax.jit(training.train_step, donate_argnums=0, **shardings)
        read, *spent = timed(lambda: measure(plain.lower(training.state, training.batch)))
        return Measured(compiled=_compiled(read, *spent))
    found, *spent = timed(lambda: audit(plan, mesh=mesh))
    planned = Planned(
        plan.communication_bytes, float(plan.peak_bytes), plan.gap, seconds, work, found.unexplained_bytes
    )
    return Measured(planned, _compiled(found.compiled, *spent))


def compile_baseline(baseline: Baseline, training: Training, compute_dtype: DTypeLike) -> Compiled:
    """A layout by hand, compiled."""
    mesh = gpu_mesh(TARGET, (baseline.data, baseline.tensor), AXES)
    start_compiler(mesh)
    return _compiled(*timed(lambda: measure(lower(baseline, training, mesh, compute_dtype))))


def _compiled(read: CompiledReport, seconds: float, work: float) -> Compiled:
    return Compiled(read.communication_bytes, read.reduced_bytes(), read.memory.peak, seconds, work)


def _least_peak(planning: Callable[..., Plan]) -> float:
    """The least peak that the planner finds, from what it says where nothing fits."""
    try:
        return float(planning(memory_limit=1.0).peak_bytes)
    except InfeasibleError as error:
        return error.least_peak_bytes


def start_compiler(mesh: Mesh) -> None:
    """Compiles a small program, so that what the compiler does once in a process is not counted as anyone's work."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    rows = jax.ShapeDtypeStruct((64 * mesh.size, 64), jnp.float32)
    measure(jax.jit(lambda x: jnp.sum(x @ x.T), in_shardings=sharding).lower(rows))


def _key(job: Job) -> str:
    """A name for the results of a job by the code that they depend on, as it is now."""
    model = (f"models/{job.model}.py", "models/training.py", "models/logical.py")
    facts: tuple[Any, ...]
    if job.way in (PLAN, PLAIN, LEAST):
        folders = ("shardplan", "rules", "search")
        facts = (job.mesh, job.way, job.limit, code((*model, "benchmarks/measuring.py", *folders)))
    else:
        baseline = next(b for b in baselines_of(job.model) if b.title == job.way)
        compiler = ("shardplan/hlo/collectives.py", "shardplan/target.py", "shardplan/gpu_targets")
        facts = (repr(baseline), code((*model, "benchmarks/baselines.py", *compiler)))
    return f"{job.model}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:24]}"


@cache
def code(places: tuple[str, ...]) -> str:
    """A digest of the files at some places of the repository, folders with all that is below, and of JAX's version."""
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
        found["least_peak"],
        found["error"],
    )
