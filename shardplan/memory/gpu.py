"""XLA:GPU's assumptions about its target GPU: the figures of ``h100.toml``, which explains each of them.

Another GPU, or another version of XLA, has other figures. Orders and peaks depend little on most of them, and the
compiled program judges a plan (`shardplan.plans.feedback`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True, slots=True)
class Reading:
    """The rates of memory reads."""

    bytes_per_microsecond: float
    caches: tuple[tuple[float, float], ...]
    busy_blocks: float
    long_row: int
    long_column: int
    warp: int


@dataclass(frozen=True, slots=True)
class Fusion:
    """The limits and times of fusions."""

    overlap: float
    cycles_per_byte: float
    launch_microseconds: float
    most_read: int
    most_operations: int
    merged_bytes: int


@dataclass(frozen=True, slots=True)
class Products:
    """The padding and the split-K parts of library calls for matrix products."""

    call_microseconds: float
    flops_per_microsecond: float
    flops_per_microsecond_narrow: float
    multiple: int
    summed_elements: float
    tile: int
    blocks: int
    most_parts: int
    least_contracted: int


@dataclass(frozen=True, slots=True)
class Collectives:
    """The times of collectives, and the sizes up to which XLA merges them."""

    latency_microseconds: float
    bytes_per_microsecond: float
    combined_bytes: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, as a version of XLA sees it. ``cycles`` are per element of a primitive."""

    gpu: str
    xla: str
    reading: Reading
    fusion: Fusion
    products: Products
    collectives: Collectives
    cycles: Mapping[str, int]


def _read(name: str) -> Gpu:
    text = resources.files("shardplan.memory").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    kinds = {"reading": Reading, "fusion": Fusion, "products": Products, "collectives": Collectives}
    figures: dict[str, Any] = tomllib.loads(text)
    return Gpu(**figures | {key: kind(**figures[key]) for key, kind in kinds.items()})


H100 = _read("h100")
