"""Scaling: the same model on 8 to 4096 devices: `python -m benchmarks.scaling`.

The batch grows with the devices, as in practice. Every plan is compiled for its devices, which need not exist.
"""

from dataclasses import replace

import shardplan
from benchmarks.documents import Document, progress
from benchmarks.processes import in_own_process, timed
from shardplan.audits.audit import audit
from shardplan.common.tables import megabytes
from shardplan.compiled.target import gpu_mesh
from shardplan.models import gpt

INTRODUCTION = (
    "A GPT of 4 layers, 4096 wide, of two sequences per device: what one device sends per step, predicted and "
    "compiled, and seconds (of planning with tracing, and of lowering and compiling)."
)
HEADER = (
    *("devices", "mesh", "predicted MB", "compiled MB", "gap", "predicted peak GB", "compiled peak GB"),
    *("s to plan", "CPU s to plan", "s to compile"),
)
MESHES = ((2, 4), (8, 8), (16, 32), (64, 64))


def row(sizes: tuple[int, int]) -> tuple[str, ...]:
    """Plans and compiles for a mesh of two axes."""
    devices = sizes[0] * sizes[1]
    config = replace(gpt.BENCHMARK, layers=4, width=4096, heads=64, batch=2 * devices)
    training = gpt.training(config)
    mesh = gpu_mesh("h100", sizes, ("data", "model"))
    state, batch = training.state, training.batch
    plan, seconds, work = timed(lambda: shardplan.plan(training.train_step, mesh, state, batch, donate_argnums=0))
    found, compiling, _ = timed(lambda: audit(plan, mesh=mesh))
    return (
        str(devices),
        "x".join(map(str, sizes)),
        megabytes(plan.communication_bytes),
        megabytes(found.compiled.communication_bytes),
        f"{100 * plan.gap:.4f} %",
        f"{plan.peak_bytes / 1e9:.2f}",
        f"{found.compiled.memory.peak / 1e9:.2f}",
        *(f"{spent:.2f}" for spent in (seconds, work, compiling)),
    )


def main() -> None:
    document = Document("scaling", "Scaling", INTRODUCTION, "scaling")
    table = document.table(HEADER)
    with progress() as shown:
        for sizes in shown.track(MESHES, description="scaling"):
            table.add(in_own_process(row, sizes))
    document.print()


if __name__ == "__main__":
    main()
