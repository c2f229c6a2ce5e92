"""Images larger than a device's memory: `python -m benchmarks.large_images`.

The convolutions of VGG-16 are trained on one image of 10,000 x 10,000 pixels in float32. The activations of a step are
118 GiB (the case of Xu et al., CC 2022). The image is split over 8 devices of 40 GB, and over 16 of 11 GB, where stages
are checkpointed. Within 5 GB each of 8 devices runs its part in blocks. Each is planned within the memory of a device,
compiled for as many H100, and read back.

On one device the image is in blocks (`benchmarks.image_blocks`). `--only VGG-16` measures one network of those.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import shardplan
from benchmarks import image_blocks
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
    Case((8,), 5, False),
    Case((2, 4), 5, False),
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
    tiles = "".join(f"{' x '.join(map(str, loop['count']))} blocks" for loop in plan.blocks)
    return [
        "x".join(map(str, case.mesh)),
        f"{case.gigabytes} GB",
        "checkpoints" if case.remat else tiles or "plain",
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


BLOCKS = """Pixels are those of a side of the image. Checkpoints are those by hand around every stage. Tiles are the
fewest squares that fit. Operations are those of convolutions, as a share of those of the plain step. What exceeds four
times 40 GB by its predicted peak is not compiled."""
HEADER = (
    "mesh",
    "memory of a device",
    "way",
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


def on_one_device(name: str, image: int) -> list[list[str]]:
    """The rows of a network on one device; without an image, those of images for one memory alone."""
    if image:
        return [*image_blocks.rows(name, image)]
    cases = [case for case in image_blocks.LARGEST if case[0] == name]
    return [row for case in cases for row in image_blocks.blocked(*case)]


def fill_blocks(document: Document, names: Sequence[str]) -> None:
    """The tables of images on one device."""
    table = document.table(image_blocks.HEADER, "One device, in blocks")
    for name in names:
        for image in (*image_blocks.SIZES, 0):
            for found in in_own_process(on_one_device, name, image):
                table.add(found)
    table.say([BLOCKS])
    largest = document.table(image_blocks.LARGEST_HEADER, "The largest image on one device")
    for name in names:
        for gigabytes in image_blocks.MEMORIES:
            largest.add(in_own_process(image_blocks.largest, name, gigabytes))
    largest.say(["Pixels of a side, multiples of 256, by predicted peaks."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=image_blocks.NAMES, help="on one device; the document stays")
    options = parser.parse_args()
    introduction = (
        "Convolutions without classifiers, mean squared error, one image in float32, compiled for H100 without one, "
        "and read back. Per device and step."
    )
    document = Document("large_images", "Large images", introduction, "large_images", writes=not options.only)
    fill_blocks(document, options.only or image_blocks.NAMES)
    if not options.only:
        table = document.table(HEADER, "VGG-16 on 10,000 x 10,000 pixels, split over devices")
        for case in CASES:
            table.add(in_own_process(row, case))
    document.print()


if __name__ == "__main__":
    main()
