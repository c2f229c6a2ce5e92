"""Steps on the GPUs of this machine, measured and predicted: `python -m benchmarks.devices`.

This is the only table that needs GPUs. Each step runs in a process of its own, whose allocator reports the memory in
use.
"""

import os

os.environ["SHARDPLAN_CACHE_DIR"] = ""
os.environ["JAX_PLATFORMS"] = "cuda"
# Of a GPU's memory JAX takes three quarters by default; plans are made for all of it less `RESERVED_MEMORY`.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import shardplan
from benchmarks.documents import Document, progress
from benchmarks.processes import in_own_process
from shardplan.hardware import load as load_profile
from shardplan.models import load

MODELS = ("mlp", "gpt", "llama", "resnet", "bert", "vit", "vgg", "t5", "mamba", "moe", "wide_resnet", "lstm")
STEPS, ROUNDS = 5, 3

INTRODUCTION = (
    "Steps in their benchmark configuration, planned for the GPUs that are here as one axis, and run. *ms* is the "
    f"time of a step, the least mean of {ROUNDS} rounds of {STEPS} steps; *by the maker* is what is predicted of it by "
    "the rates of the built-in profile, *by calibrate* by those that `shardplan.calibrate` measured here just before. "
    "*GB* is the plan's predicted peak; *compiled* what XLA says of the program that ran, which it tuned for the GPU "
    "at hand; *in use* is the most that the allocator gave out, what XLA tried convolutions with included."
)
HEADER = ("step", "ms", "by the maker", "ratio", "by calibrate", "ratio", "GB", "compiled", "ratio", "in use", "ratio")


def mesh_here() -> Mesh:
    return Mesh(np.array(jax.devices()), ("device",))


def calibrated(path: str) -> tuple[str, str]:
    """Measures the GPUs into a profile at `path`. Returns the measurements, and the GPU type."""
    return str(shardplan.calibrate(mesh_here(), path=path)), jax.devices()[0].device_kind


def row(model: str, maker: str, ours: str) -> tuple[str, ...]:
    """Plans and runs a model's step in this process, which has run no other step."""
    module = load(model)
    training, mesh = module.training(module.BENCHMARK), mesh_here()
    plan = shardplan.plan(training.train_step, mesh, training.state, training.batch, donate_argnums=0, hardware=maker)
    step = plan.lower().compile()
    of_state, of_batch = plan.in_shardings
    state = jax.jit(training.make_state, out_shardings=of_state)(jax.random.key(0))
    batch = jax.jit(training.make_batch, out_shardings=of_batch)(jax.random.key(0))
    milliseconds = 1e3 * _seconds(step, state, batch)
    stats = jax.devices()[0].memory_stats()
    analysis: Any = step.memory_analysis()
    compiled, used = analysis.peak_memory_in_bytes, stats["peak_bytes_in_use"]
    cells = [model, f"{milliseconds:.2f}"]
    for hardware in (maker, ours):
        predicted = 1e3 * shardplan.simulate(plan, hardware).seconds
        cells += [f"{predicted:.2f}", f"{milliseconds / predicted:.2f}"]
    cells += [f"{plan.peak_bytes / 1e9:.2f}", f"{compiled / 1e9:.2f}", f"{compiled / plan.peak_bytes:.3f}"]
    cells += [f"{used / 1e9:.2f}", f"{used / compiled:.3f}"]
    return tuple(cells)


def _seconds(step: Any, state: Any, batch: Any) -> float:
    """Seconds of a step in a sequence: the host is ahead of the GPU."""
    state, _ = jax.block_until_ready(step(state, batch))
    rounds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(STEPS):
            state, loss = step(state, batch)
        jax.block_until_ready((state, loss))
        rounds.append((time.perf_counter() - started) / STEPS)
    return min(rounds)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=MODELS, help="these models; the document is left as it is")
    parser.add_argument("--hardware", default="h100", help="the built-in profile of what is here")
    options = parser.parse_args(arguments)
    load_profile(options.hardware)
    document = Document("devices", "Run on GPUs", INTRODUCTION, "devices", writes=not options.only)
    table = document.table(HEADER)
    with TemporaryDirectory() as folder, progress() as shown:
        ours = str(Path(folder) / "ours.toml")
        measured, kind = in_own_process(calibrated, ours)
        print(f"{kind}\n{measured}\n{Path(ours).read_text(encoding='utf-8')}", file=sys.stderr)
        for model in shown.track(options.only or MODELS, description="devices"):
            table.add(in_own_process(row, model, options.hardware, ours))
            print(table.rows[-1], file=sys.stderr, flush=True)
        table.say([f"On {kind}."])
    document.print()


if __name__ == "__main__":
    main()
