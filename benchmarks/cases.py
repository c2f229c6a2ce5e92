"""The steps that plans are judged on, and what is measured of each.

Every compilation runs in a process of its own, so that it is timed cold. Nothing needs a GPU: programs are compiled for
H100 and read back.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["SHARDPLAN_CACHE_DIR"] = ""  # planning is timed, not the finding of an earlier plan

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardplan
from benchmarks.baselines import DATA_PARALLEL as DATA_PARALLEL
from benchmarks.baselines import FSDP as FSDP
from benchmarks.baselines import Baseline, lower
from shardplan.audit import measure
from shardplan.models import Training, gpt, mlp, resnet
from shardplan.tables import markdown_table, text_table
from shardplan.target import gpu_mesh

DOCUMENTS = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"
TARGET = "h100"
Result = TypeVar("Result")
MESHES = {"8": {"data": 8}, "2x4": {"data": 2, "model": 4}}


@dataclass(frozen=True, slots=True)
class Case:
    """A training step and the options that it is planned with."""

    title: str
    training: Callable[[], Training]
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "gpt-f32": Case("GPT, 2 layers, f32", lambda: gpt.training(gpt.Config())),
    "gpt-bf16": Case("GPT, 2 layers, bf16", lambda: gpt.training(gpt.Config(compute_dtype=jnp.bfloat16))),
    "gpt-bf16-reduced": Case(
        "GPT, 2 layers, bf16, reductions in bf16",
        lambda: gpt.training(gpt.Config(compute_dtype=jnp.bfloat16)),
        {"reduce_dtype": jnp.bfloat16},
    ),
    "resnet": Case("ResNet-50, 224 x 224, f32", lambda: resnet.training(resnet.Config())),
    "mlp": Case("MLP, 8 layers, f32", lambda: mlp.training(mlp.Config())),
}


PLAN = "the plan"
UNCONSTRAINED = "the plan's shardings alone"


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
    """What planning said and took, tracing included; see `Compiled` for the units."""

    bytes_sent: float
    peak: float
    gap: float
    seconds: float
    work: float


@dataclass(frozen=True, slots=True)
class Measured:
    """A case on a mesh: as planned, and as compiled in every way (`PLAN`, `UNCONSTRAINED`, names of baselines)."""

    case: str
    mesh: str
    planned: Planned
    ways: dict[str, Compiled]


def compile_way(name: str, mesh_name: str, way: str | Baseline) -> tuple[Planned | None, Compiled]:
    """Splits a case in one way, compiles it and reads it back. (Two ways in one process would share kernels.)"""
    case, mesh_axes = CASES[name], MESHES[mesh_name]
    training = case.training()
    state, batch = training.state, training.batch
    mesh = gpu_mesh(TARGET, tuple(mesh_axes.values()), tuple(mesh_axes))
    planned = None
    if isinstance(way, Baseline):
        lowering = partial(lower, way, training.train_step, state, batch, mesh)
    else:
        planning = partial(shardplan.plan, training.train_step, mesh, state, batch, donate_argnums=(0,))
        plan, seconds, work = _timed(partial(planning, **case.options))
        planned = Planned(plan.communication_bytes, plan.peak_bytes, plan.gap, seconds, work)
        lowering = partial(plan.lower, mesh)
        if way == UNCONSTRAINED:
            shardings = {"in_shardings": plan.in_shardings, "out_shardings": plan.out_shardings}
            lowering = partial(jax.jit(training.train_step, donate_argnums=0, **shardings).lower, state, batch)
    _start_compiler(mesh)
    found, seconds, work = _timed(lambda: measure(lowering()))
    return planned, Compiled(found.communication_bytes, found.reduced_bytes(), found.memory.peak, seconds, work)


def measure_case(name: str, mesh_name: str, ways: Sequence[str | Baseline]) -> Measured:
    """Compiles a case in several ways, each in a fresh process, one after another."""
    compiled: dict[str, Compiled] = {}
    for way in (PLAN, *ways):
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
            found, read = pool.submit(compile_way, name, mesh_name, way).result()
        title = way.name if isinstance(way, Baseline) else way
        compiled[title] = read
        if title == PLAN:
            planned = found
        print(f"measured {name} on {mesh_name}, {title}", file=sys.stderr, flush=True)
    assert planned is not None  # the plan was the first way
    return Measured(name, mesh_name, planned, compiled)


def _timed(work: Callable[[], Result]) -> tuple[Result, float, float]:
    """A result, and the seconds that it took: by the clock, and of all cores together."""
    started, before = time.perf_counter(), time.process_time()
    result = work()
    return result, time.perf_counter() - started, time.process_time() - before


def _start_compiler(mesh: Mesh) -> None:
    """Compiles a small program, so that what the compiler does once in a process is not counted as anyone's work."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    rows = jax.ShapeDtypeStruct((64 * mesh.size, 64), jnp.float32)
    measure(jax.jit(lambda x: jnp.sum(x @ x.T), in_shardings=sharding).lower(rows))


@dataclass(frozen=True, slots=True)
class Document:
    """A table under `docs/benchmarks/`: `columns` maps a heading to the text of a cell."""

    name: str
    introduction: str
    columns: dict[str, Callable[[Measured], str]]
    ways: tuple[str | Baseline, ...]

    def print_and_write(self, measured: Sequence[Measured], write: bool) -> None:
        header = ["step", "mesh", *self.columns]
        rows = [[CASES[m.case].title, m.mesh, *(cell(m) for cell in self.columns.values())] for m in measured]
        print(text_table(header, rows, numbers=range(2, len(header))))
        if write:
            how = f"`python -m benchmarks.{self.name}`, JAX {jax.__version__}, compiled for H100 without one"
            parts = (f"# {self.name.capitalize()}", self.introduction, how + ".", markdown_table(header, rows))
            DOCUMENTS.mkdir(parents=True, exist_ok=True)
            (DOCUMENTS / f"{self.name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def report(*documents: Document) -> None:
    """The command line of a benchmark: measures, prints its tables, and writes them.

    With `--only` or `--mesh` the tables are printed and not written.
    """
    parser = argparse.ArgumentParser(description=" ".join(document.introduction for document in documents))
    parser.add_argument("--only", nargs="+", choices=CASES, help="these cases; documents are left as they are")
    parser.add_argument("--mesh", nargs="+", choices=MESHES, help="these meshes; documents are left as they are")
    options = parser.parse_args()
    ways = tuple(dict.fromkeys(way for document in documents for way in document.ways))
    names, meshes = options.only or list(CASES), options.mesh or list(MESHES)
    measured = [measure_case(name, mesh, ways) for name in names for mesh in meshes]
    for document in documents:
        document.print_and_write(measured, write=not (options.only or options.mesh))
