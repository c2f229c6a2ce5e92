"""The steps that plans are judged on, and what is measured of each.

Every case runs in a process of its own, so that planning and compiling are timed cold. Nothing needs a GPU: programs
are compiled for H100 and read back.
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

import jax
import jax.numpy as jnp
from baselines import DATA_PARALLEL as DATA_PARALLEL
from baselines import FSDP as FSDP
from baselines import Baseline, lower
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardplan
from shardplan.audit import audit, measure
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


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes per device and step, and seconds. Reductions are by element type: at what precision they sum.

    Planning includes tracing, and compiling includes lowering. Their `work` is in seconds of all cores together, which
    a busy machine distorts less; `unconstrained` is what plain `jit` makes of the plan's input and output shardings.
    """

    case: str
    mesh: str
    predicted_bytes: float
    compiled_bytes: int
    predicted_peak: float
    compiled_peak: int
    gap: float
    seconds_to_plan: float
    plan_work: float
    seconds_to_compile: float
    compile_work: float
    unconstrained_work: float
    unconstrained_bytes: int
    reduced_bytes: dict[str, float]
    baseline_bytes: dict[str, int]
    baseline_peaks: dict[str, int]
    baseline_reduced: dict[str, dict[str, float]]
    baseline_work: dict[str, float]


def measure_case(name: str, mesh_name: str, baselines: Sequence[Baseline]) -> Measured:
    """Plans a case, compiles the plan and the baselines, and reads back what each sends."""
    case, mesh_axes = CASES[name], MESHES[mesh_name]
    training = case.training()
    state, batch = training.state, training.batch
    mesh = gpu_mesh(TARGET, tuple(mesh_axes.values()), tuple(mesh_axes))

    started = time.perf_counter()
    planning = partial(shardplan.plan, training.train_step, mesh, state, batch, donate_argnums=(0,), **case.options)
    plan, plan_work = _timed(planning)
    seconds_to_plan = time.perf_counter() - started

    _start_compiler(mesh)
    started = time.perf_counter()
    checked, compile_work = _timed(lambda: audit(plan, target=TARGET))
    seconds_to_compile = time.perf_counter() - started
    shardings = {"in_shardings": plan.in_shardings, "out_shardings": plan.out_shardings}
    plain = jax.jit(training.train_step, donate_argnums=0, **shardings)
    unconstrained, unconstrained_work = _timed(lambda: measure(plain.lower(state, batch)))

    reports, work = {}, {}
    for baseline in baselines:
        compiling = partial(lower, baseline, training.train_step, state, batch, mesh)
        reports[baseline.name], work[baseline.name] = _timed(lambda compiling=compiling: measure(compiling()))
    return Measured(
        case=name,
        mesh=mesh_name,
        predicted_bytes=plan.communication_bytes,
        compiled_bytes=checked.compiled.communication_bytes,
        predicted_peak=plan.peak_bytes,
        compiled_peak=checked.compiled.memory.peak,
        gap=plan.gap,
        seconds_to_plan=seconds_to_plan,
        plan_work=plan_work,
        seconds_to_compile=seconds_to_compile,
        compile_work=compile_work,
        unconstrained_work=unconstrained_work,
        unconstrained_bytes=unconstrained.communication_bytes,
        reduced_bytes=checked.compiled.reduced_bytes(),
        baseline_bytes={title: found.communication_bytes for title, found in reports.items()},
        baseline_peaks={title: found.memory.peak for title, found in reports.items()},
        baseline_reduced={title: found.reduced_bytes() for title, found in reports.items()},
        baseline_work=work,
    )


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """A result, and the seconds of all cores that it took."""
    before = time.process_time()
    result = work()
    return result, time.process_time() - before


def _start_compiler(mesh: Mesh) -> None:
    """Compiles a small program, so that what the compiler does once in a process is not counted as anyone's work."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    rows = jax.ShapeDtypeStruct((64 * mesh.size, 64), jnp.float32)
    measure(jax.jit(lambda x: jnp.sum(x @ x.T), in_shardings=sharding).lower(rows))


def measure_all(names: Sequence[str], meshes: Sequence[str], baselines: Sequence[Baseline]) -> list[Measured]:
    """Measures every case on every mesh, each in a fresh process, one after another."""
    found = []
    for name in names:
        for mesh in meshes:
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
                found.append(pool.submit(measure_case, name, mesh, baselines).result())
            print(f"measured {name} on {mesh}", file=sys.stderr, flush=True)
    return found


@dataclass(frozen=True, slots=True)
class Document:
    """A table under `docs/benchmarks/`: `columns` maps a heading to the text of a cell."""

    name: str
    introduction: str
    columns: dict[str, Callable[[Measured], str]]
    baselines: tuple[Baseline, ...]

    def print_and_write(self, measured: Sequence[Measured], write: bool) -> None:
        header = ["step", "mesh", *self.columns]
        rows = [[CASES[m.case].title, m.mesh, *(cell(m) for cell in self.columns.values())] for m in measured]
        print(text_table(header, rows, numbers=range(2, len(header))))
        if write:
            how = f"`python benchmarks/{self.name}.py`, JAX {jax.__version__}, compiled for H100 without one"
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
    baselines = tuple(dict.fromkeys(baseline for document in documents for baseline in document.baselines))
    measured = measure_all(options.only or list(CASES), options.mesh or list(MESHES), baselines)
    for document in documents:
        document.print_and_write(measured, write=not (options.only or options.mesh))
