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

from shardplan.collectives import CollectiveKind

# A further split is worth measuring while it saves this part of the time.
_WORTHWHILE = 0.05
# Each point is the least of so many timings, which other work on the machine disturbs least.
_REPEATS = 7
# So long may one run take about: 4096 rows of a large product take minutes on emulated devices.
_MOST_SECONDS = 0.1

# What takes a program longer is not blurred by the time to start it, else so many more repetitions tell what one takes.
_LONG_SECONDS = 5e-3
_MORE = 16

Run = Callable[[], Any]
Repeated = Callable[[int], Run]
"""Per number of repetitions, a run of one program that does as much, one after another."""


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
    make: Callable[[int], Repeated], largest: int, unit: int = 1, clock: Callable[[Repeated, int], float] | None = None
) -> Curve:
    """Times ``make(size)`` from ``largest`` downwards; all sizes are multiples of ``unit``, at least 8 units.

    ``largest`` is raised to 16 units where it is less, so that there are two points, and lowered to what takes about a
    tenth of a second.
    """
    timed = clock or (lambda repeated, size: seconds_of_one(repeated))
    found: dict[int, float] = {}
    size = _affordable(make, max(largest // unit, 16) * unit, 16 * unit, clock) // unit * unit
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


def _affordable(
    make: Callable[[int], Repeated], largest: int, least: int, clock: Callable[[Repeated, int], float] | None
) -> int:
    """``largest``, or what takes about a tenth of a second, found from ``least`` upwards.

    Time is taken to be linear in size only from where it is a hundredth of that: to start a program takes as long as
    many a small size.
    """
    size = least
    while True:
        once = clock(make(size), size) if clock else least_seconds(make(size)(1), repeats=1)
        if once > _MOST_SECONDS / 100:
            return max(least, min(largest, int(size * _MOST_SECONDS / once)))
        if size == largest:
            return largest
        size = min(largest, 16 * size)


def seconds_of_one(repeated: Repeated) -> float:
    """What one repetition takes on the devices, without what it takes to start a program there and to wait for it.

    On a GPU that is as long as many a product: a step starts once, and its kernels follow one another.
    """
    once = least_seconds(repeated(1))
    if once >= _LONG_SECONDS:
        return once
    return max((least_seconds(repeated(1 + _MORE)) - once) / _MORE, 1e-9)


def least_seconds(run: Run, repeats: int = _REPEATS) -> float:
    """The least wall-clock seconds of several runs, after one that compiles and warms up."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - started)
    return min(times)


def matrix_product(mesh: Mesh, dtype: Any, side: int) -> Callable[[int], Repeated]:
    """Per number of rows, which a plan splits: rows x side by side x side on the first device.

    Of random numbers: a GPU multiplies zeros and ones by less power, and faster.
    """
    device = mesh.devices.flat[0]
    weights = _random((side, side), dtype, device) / side**0.5  # so that products of products stay as large
    return lambda rows: _on_results(jnp.matmul, _random((rows, side), dtype, device), weights)


def memory_traffic(mesh: Mesh) -> Callable[[int], Repeated]:
    """Per size in bytes: reading and writing that much float32 on the first device.

    Not on the result before: XLA:CPU, which leaves barriers out early, would make one kernel of all.
    """
    device = mesh.devices.flat[0]
    return lambda size: _one_by_one(lambda x: x * 2, _random((size // 4,), jnp.float32, device))


def collective(mesh: Mesh, kind: CollectiveKind, axes: tuple[str, ...]) -> Callable[[int], Repeated]:
    """Per size b in bytes of float32 (a device's operand; of an all-gather, its result): one collective."""
    count = int(np.prod([mesh.shape[axis] for axis in axes]))
    rotated = [(place, (place + 1) % count) for place in range(count)]
    bodies: dict[CollectiveKind, Callable[[Any], Any]] = {
        CollectiveKind.ALL_REDUCE: lambda x: jax.lax.psum(x, axes),
        CollectiveKind.ALL_GATHER: lambda x: jax.lax.all_gather(x, axes, tiled=True),
        CollectiveKind.REDUCE_SCATTER: lambda x: jax.lax.psum_scatter(x, axes, tiled=True),
        CollectiveKind.ALL_TO_ALL: lambda x: jax.lax.all_to_all(x, axes, 0, 0, tiled=True),
        CollectiveKind.PERMUTE: lambda x: jax.lax.ppermute(x, axes, rotated),
    }
    whole = PartitionSpec(tuple(mesh.axis_names))
    body = jax.shard_map(bodies[kind], mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)

    def make(size: int) -> Repeated:
        local = size // 4 // (count if kind == CollectiveKind.ALL_GATHER else 1)
        operand = _random((local * mesh.size,), jnp.float32, NamedSharding(mesh, whole))
        if kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER):
            return _one_by_one(body, operand)
        return _on_results(body, operand)

    return make


def _on_results(body: Callable[..., Any], operand: jax.Array, *others: jax.Array) -> Repeated:
    """Runs of ``body``, whose result is like its operand, each on the result of the one before."""

    def repeated(times: int) -> Run:
        def chain(x: Any, *rest: Any) -> Any:
            for _ in range(times):
                x = jax.lax.optimization_barrier(body(x, *rest))
            return x

        program = jax.jit(chain)
        return lambda: program(operand, *others)

    return repeated


def _one_by_one(body: Callable[[Any], Any], operand: jax.Array) -> Repeated:
    """Runs of ``body``, each of which waits for the one before, on operands of their own: of equals XLA makes one.

    Every result is one of the program: what is none is left out, and with it the wait.
    """

    def repeated(times: int) -> Run:
        def chain(operands: list[Any]) -> list[Any]:
            results = [body(operands[0])]
            for x in operands[1:]:
                x, results[-1] = jax.lax.optimization_barrier((x, results[-1]))
                results.append(body(x))
            return results

        program, operands = jax.jit(chain), [operand, *(jnp.copy(operand) for _ in range(times - 1))]
        return lambda: program(operands)

    return repeated


def _random(shape: tuple[int, ...], dtype: Any, place: Any) -> jax.Array:
    return jax.device_put(jax.random.normal(jax.random.key(0), shape, dtype), place)


def _above(found: dict[int, float], size: int) -> int:
    return min(other for other in found if other > size)
