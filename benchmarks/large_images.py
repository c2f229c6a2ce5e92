"""Images larger than a device's memory: `python -m benchmarks.large_images`.

The convolutions of VGG-16 are trained on one image of 10,000 x 10,000 pixels in float32. The activations of a step are
118 GiB (the case of Xu et al., CC 2022). The image is split over 8 devices of 40 GB, and over 16 of 11 GB, where stages
are checkpointed. Each is planned within the memory of a device, compiled for as many H100, and read back.
"""

from dataclasses import dataclass, replace

import shardplan
from benchmarks.documents import Document
from benchmarks.processes import in_own_process, timed
from shardplan.audits.audit import audit
from shardplan.compiled.target import gpu_mesh
from shardplan.models import vgg

REDUCING = ("all-reduce", "reduce-scatter", "all-gather")


@dataclass(frozen=True, slots=True)
class Case:
    """A mesh of devices with so many gigabytes each; `remat`: whether stages are checkpointed."""

    mesh: tuple[int, ...]
    gigabytes: int
    remat: bool


CASES = (
    Case((8,), 40, False),
    Case((2, 4), 40, False),
    Case((8,), 40, True),
    Case((16,), 11, True),
    Case((4, 4), 11, True),
)


def row(case: Case) -> list[str]:
    """Plans, compiles and reads back one case."""
    training = vgg.training(replace(vgg.CONFIGS["vgg-16-10k"], remat=case.remat))
    mesh = gpu_mesh("h100", case.mesh, ("rows", "columns")[: len(case.mesh)])
    options = {"memory_limit": case.gigabytes * 10**9, "donate_argnums": 0}
    plan, seconds, _ = timed(
        lambda: shardplan.plan(training.train_step, mesh, training.state, training.batch, **options)
    )
    found = audit(plan)
    traffic = found.compiled.traffic()
    weights = sum(sent.bytes_sent for (kind, _), sent in traffic.items() if kind in REDUCING)
    halos = sum(sent.bytes_sent for (kind, _), sent in traffic.items() if kind == "collective-permute")
    total = found.compiled.communication_bytes
    return [
        "x".join(map(str, case.mesh)),
        f"{case.gigabytes} GB",
        "yes" if case.remat else "no",
        f"{plan.communication_bytes / 1e6:.1f}",
        f"{total / 1e6:.1f}",
        f"{halos / 1e6:.1f}",
        f"{weights / 1e6:.1f}",
        f"{(total - halos - weights) / 1e6:.1f}",
        f"{plan.peak_bytes / 1e9:.1f}",
        f"{found.compiled.memory.peak / 1e9:.1f}",
        f"{100 * plan.gap:.2f} %",
        f"{seconds:.1f}",
    ]


HEADER = (
    "mesh",
    "memory of a device",
    "checkpoints",
    "predicted MB sent",
    "compiled MB sent",
    "halos",
    "weights and their gradients",
    "other",
    "predicted peak GB",
    "compiled peak GB",
    "gap",
    "s to plan",
)


def main() -> None:
    introduction = (
        "VGG-16 without its classifier, mean squared error, one image of 10,000 x 10,000 pixels, float32: planned "
        "within the memory of a device, compiled for H100 without one, and read back. Per device and step."
    )
    document = Document("large_images", "Large images", introduction, "large_images")
    table = document.table(HEADER)
    for case in CASES:
        table.add(in_own_process(row, case))
    document.print()


if __name__ == "__main__":
    main()
