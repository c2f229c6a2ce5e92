"""Large images on one device: convolutions run block by block, after Xu et al. (CC 2022).

VGG-16, VGG-19 and DarkNet-19 without classifiers are trained on one image by mean squared error in float32, within the
memory of a device: plain, with checkpoints by hand around every stage, and in blocks of rows and columns. Blocks are
square tiles, as few as fit.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import sqrt
from typing import Any

import shardplan
from benchmarks.recompute import products
from shardplan.audits.audit import measure
from shardplan.compiled.target import gpu_mesh, only_described
from shardplan.models import darknet, vgg

NAMES = ("VGG-16", "VGG-19", "DarkNet-19")
SIZES = (512, 2048, 5120, 10_000, 20_480)
MEMORIES = (11, 40)
LARGEST = (("VGG-16", 40_960, 80),)
"""Images for one memory alone."""

HEADER = ("network", "pixels", "way", "memory GB", "tiles", "compiled GB", "predicted GB", "operations", "fits")
LARGEST_HEADER = ("network", "memory GB", "plain", "checkpoints", "64 x 64 tiles")

_TILES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
_COMPILED_UP_TO = 4 * 40
"""Gigabytes up to which steps that do not fit are compiled as well."""

_STEP = 256
_SHARE = 0.99


@dataclass(frozen=True, slots=True)
class Case:
    """A network on an image of so many pixels squared; `remat`: stages with checkpoints; `tiles` in each direction."""

    name: str
    image: int
    remat: bool = False
    tiles: int = 1


@cache
def plan_of(case: Case) -> shardplan.Plan:
    """The plan of a case for one H100, without a limit."""
    module: Any = darknet if case.name.startswith("DarkNet") else vgg
    config = replace(module.CONFIGS[f"{case.name.lower()}-10k"], image=case.image, remat=case.remat)
    training = module.training(config)
    blocks = {f"1/images[{dim}]": case.tiles for dim in (1, 2)} if case.tiles > 1 else None
    return shardplan.plan(
        training.train_step,
        gpu_mesh("h100", (1,), ("rows",)),
        training.state,
        training.batch,
        donate_argnums=0,
        memory_limit=1e15,
        blocks=blocks,
    )


def compiled_gigabytes(case: Case) -> float:
    plan = plan_of(case)
    with only_described():
        return measure(plan.lower(gpu_mesh("h100", (1,), ("rows",))), plan.mesh_axes).memory.peak / 1e9


def rows(name: str, image: int) -> Iterator[list[str]]:
    """The step as it is, with checkpoints, and in blocks for each memory that it exceeds."""
    plain = Case(name, image)
    peak = yield from _measured(plain, "plain", None)
    yield from _measured(replace(plain, remat=True), "checkpoints", None)
    for gigabytes in MEMORIES:
        if peak > gigabytes:
            yield from blocked(name, image, gigabytes)


def blocked(name: str, image: int, gigabytes: int) -> Iterator[list[str]]:
    """The fewest square tiles whose compiled peak is within the memory. Those that are not are rows as well."""
    tiles = [n for n in _TILES if image // n >= 128]
    low, high = 0, len(tiles) - 1
    while low < high:
        middle = (low + high) // 2
        fits = plan_of(Case(name, image, tiles=tiles[middle])).peak_bytes <= _SHARE * gigabytes * 1e9
        low, high = (low, middle) if fits else (middle + 1, high)
    for number in tiles[low:]:
        if (yield from _measured(Case(name, image, tiles=number), "blocks", gigabytes)) <= gigabytes:
            return


def _measured(case: Case, way: str, gigabytes: int | None) -> Generator[list[str], None, float]:
    """The row of a case. Returns its peak in gigabytes."""
    plan = plan_of(case)
    predicted = plan.peak_bytes / 1e9
    compiles = case.tiles > 1 or predicted <= _COMPILED_UP_TO
    peak = compiled_gigabytes(case) if compiles else predicted
    memories = MEMORIES if gigabytes is None else (gigabytes,)
    yield [
        case.name,
        f"{case.image:,}",
        way,
        "" if gigabytes is None else str(gigabytes),
        f"{case.tiles} x {case.tiles}" if case.tiles > 1 else "",
        f"{peak:.2f}" if compiles else "",
        f"{predicted:.2f}",
        f"{products(plan.program) / products(plan_of(Case(case.name, case.image)).program):.3f}",
        ", ".join(f"{memory} GB" for memory in memories if peak <= memory),
    ]
    return peak


def largest(name: str, gigabytes: int) -> list[str]:
    """The largest images by predicted peaks."""
    ways = (Case(name, 0), Case(name, 0, remat=True), Case(name, 0, tiles=64))
    return [name, str(gigabytes), *(f"{_largest(way, gigabytes):,}" for way in ways)]


def _largest(way: Case, gigabytes: int) -> int:
    """The largest multiple of 256 whose peak is within the memory. Peaks grow with the pixels: the next guess."""
    low, high, guess = 2, 2**18 // _STEP, 10_240 // _STEP
    while high - low > 1:
        middle = min(max(guess, low + 1), high - 1)
        peak = plan_of(replace(way, image=middle * _STEP)).peak_bytes
        low, high = (middle, high) if peak <= gigabytes * 1e9 else (low, middle)
        guess = int(middle * sqrt(gigabytes * 1e9 / peak))
    return low * _STEP
