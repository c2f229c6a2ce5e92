"""Measuring: time against size, on the devices that are there.

A curve is measured by hill climbing over the split degree: the whole size first, then its half, its quarter and so on,
as long as splitting further still makes it faster. Between measured points time is linear in size (Liu et al., IPDPS
2019, section III.C). Points in between are measured too, but held out: they tell how wrong the interpolation is.

>>> curve = measure_curve(lambda size: (lambda: None), 1024, 16, clock=lambda run, size: 1e-6 + size * 1e-9)
>>> curve.sizes, round(curve.seconds(512) * 1e9)
((128, 256, 512, 1024), 1512)
>>> curve.error() < 1e-6
True
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# A further split is worth measuring while it saves this part of the time.
_WORTHWHILE = 0.05
# Each point is the least of so many timings, which other work on the machine disturbs least.
_REPEATS = 7
# So long may one run take about: 4096 rows of a large product take minutes on emulated devices.
_MOST_SECONDS = 0.1

Run = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Curve:
    """Measured seconds by size, ascending; ``held_out`` are (size, seconds) that the curve was not made of."""

    sizes: tuple[int, ...]
    times: tuple[float, ...]
    held_out: tuple[tuple[int, float], ...]

    def seconds(self, size: float) -> float:
        """Interpolated; beyond the largest size, on the line through the two largest."""
        if size > self.sizes[-1] and len(self.sizes) > 1:
            slope = (self.times[-1] - self.times[-2]) / (self.sizes[-1] - self.sizes[-2])
            return self.times[-1] + slope * (size - self.sizes[-1])
        return float(np.interp(size, self.sizes, self.times))

    def error(self, predict: Callable[[int], float] | None = None) -> float:
        """The mean relative error at the points held out, of the interpolation or of ``predict``."""
        predicted = predict or self.seconds
        return float(np.mean([abs(predicted(size) - found) / found for size, found in self.held_out]))


def measure_curve(
    make: Callable[[int], Run], largest: int, unit: int = 1, clock: Callable[[Run, int], float] | None = None
) -> Curve:
    """Times ``make(size)`` from ``largest`` downwards; all sizes are multiples of ``unit``, at least 8 units.

    ``largest`` is raised to 16 units where it is less, so that there are two points, and lowered to what takes about a
    tenth of a second.
    """
    timed = clock or (lambda run, size: least_seconds(run))
    found: dict[int, float] = {}
    least = 16 * unit
    once = clock(make(least), least) if clock else least_seconds(make(least), repeats=1)
    largest = min(largest, int(least * _MOST_SECONDS / once)) if once > 0 else largest
    size = max(largest // unit, 16) * unit
    while True:
        found[size] = timed(make(size), size)
        half = size // 2 // unit * unit
        enough = len(found) > 2 and found[size] > (1 - _WORTHWHILE) * found[_above(found, size)]
        if enough or half < 8 * unit:
            break
        size = half
    sizes = sorted(found)
    between = [(low + high) // 2 // unit * unit for low, high in pairwise(sizes)]
    held_out = tuple((middle, timed(make(middle), middle)) for middle in between)
    return Curve(tuple(sizes), tuple(found[size] for size in sizes), held_out)


def least_seconds(run: Run, repeats: int = _REPEATS) -> float:
    """The least wall-clock seconds of several runs, after one that compiles and warms up."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - started)
    return min(times)


def matrix_product(mesh: Mesh, dtype: Any, side: int) -> Callable[[int], Run]:
    """Per number of rows, which a plan splits: rows x side by side x side on the first device."""
    device = mesh.devices.flat[0]

    weights = jax.device_put(jnp.ones((side, side), dtype), device)
    product = jax.jit(jnp.matmul)

    def make(rows: int) -> Run:
        operand = jax.device_put(jnp.ones((rows, side), dtype), device)
        return lambda: product(operand, weights)

    return make


def memory_traffic(mesh: Mesh) -> Callable[[int], Run]:
    """Per size in bytes: reading and writing that much float32 on the first device."""
    device = mesh.devices.flat[0]

    def make(size: int) -> Run:
        operand = jax.device_put(jnp.ones(size // 4, jnp.float32), device)
        double = jax.jit(lambda x: x * 2)
        return lambda: double(operand)

    return make


def collective(mesh: Mesh, kind: str, axes: tuple[str, ...]) -> Callable[[int], Run]:
    """Per size b in bytes of float32 (a device's operand; of an all-gather, its result): one collective."""
    count = int(np.prod([mesh.shape[axis] for axis in axes]))
    rotated = [(place, (place + 1) % count) for place in range(count)]
    bodies: dict[str, Callable[[Any], Any]] = {
        "all-reduce": lambda x: jax.lax.psum(x, axes),
        "all-gather": lambda x: jax.lax.all_gather(x, axes, tiled=True),
        "reduce-scatter": lambda x: jax.lax.psum_scatter(x, axes, tiled=True),
        "all-to-all": lambda x: jax.lax.all_to_all(x, axes, 0, 0, tiled=True),
        "collective-permute": lambda x: jax.lax.ppermute(x, axes, rotated),
    }
    whole = PartitionSpec(tuple(mesh.axis_names))
    run = jax.jit(jax.shard_map(bodies[kind], mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False))

    def make(size: int) -> Run:
        local = size // 4 // (count if kind == "all-gather" else 1)
        operand = jax.device_put(jnp.ones(local * mesh.size, jnp.float32), NamedSharding(mesh, whole))
        return lambda: run(operand)

    return make


def _above(found: dict[int, float], size: int) -> int:
    return min(other for other in found if other > size)
