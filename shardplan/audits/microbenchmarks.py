"""Microbenchmarks: time by size of products, memory traffic and collectives on the user's devices.

A curve is measured by hill climbing over the split degree. It starts with the whole size, then its half, its quarter
and so on, while further splits make it faster. Between measured points time is linear in size (Liu et al., IPDPS 2019,
section III.C). Further points in between are held out for the error of the interpolation.

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

from shardplan.layout.collectives import CollectiveKind

# A further split is measured while it saves this part of the time.
_MIN_SAVING = 0.05
# The timings of a point. Their minimum has the least noise of other work on the machine.
_REPEATS = 7
# About the longest run: 4096 rows of a large product take minutes on emulated devices.
_MAX_SECONDS = 0.1

# In longer programs the start time is negligible. For shorter ones, the difference of so many repetitions is measured.
_LONG_SECONDS = 5e-3
_REPETITIONS = 16

Run = Callable[[], Any]
Repeated = Callable[[int], Run]
"""Per number of repetitions, a run of one program with that many sequential repetitions."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Measured seconds by size, ascending. ``held_out`` are further points (size, seconds)."""

    sizes: tuple[int, ...]
    times: tuple[float, ...]
    held_out: tuple[tuple[int, float], ...]

    def seconds(self, size: float) -> float:
        """The interpolated seconds. Above the largest size, on the line through the two largest."""
        if size > self.sizes[-1] and len(self.sizes) > 1:
            slope = (self.times[-1] - self.times[-2]) / (self.sizes[-1] - self.sizes[-2])
            return self.times[-1] + slope * (size - self.sizes[-1])
        return float(np.interp(size, self.sizes, self.times))

    def error(self, predict: Callable[[int], float] | None = None) -> float:
        """The mean relative error at the held-out points, of the interpolation or of ``predict``."""
        predicted = predict or self.seconds
        return float(np.mean([abs(predicted(size) - found) / found for size, found in self.held_out]))


def measure_curve(
    make: Callable[[int], Repeated], largest: int, unit: int = 1, clock: Callable[[Repeated, int], float] | None = None
) -> Curve:
    """Times ``make(size)`` from ``largest`` downwards; all sizes are multiples of ``unit``, at least 8 units.

    ``largest`` is raised to at least 16 units, for two points, and lowered to a run of about a tenth of a second.
    """
    timed = clock or (lambda repeated, size: seconds_of_one(repeated))
    found: dict[int, float] = {}
    size = _affordable(make, max(largest // unit, 16) * unit, 16 * unit, clock) // unit * unit
    while True:
        found[size] = timed(make(size), size)
        half = size // 2 // unit * unit
        enough = len(found) > 2 and found[size] > (1 - _MIN_SAVING) * found[_above(found, size)]
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
    """``largest``, or a size of about a tenth of a second, by a search from ``least`` upwards.

    The search assumes time linear in size from a hundredth of that on. Below, the start of a program dominates.
    """
    size = least
    while True:
        once = clock(make(size), size) if clock else least_seconds(make(size)(1), repeats=1)
        if once > _MAX_SECONDS / 100:
            return max(least, min(largest, int(size * _MAX_SECONDS / once)))
        if size == largest:
            return largest
        size = min(largest, 16 * size)


def seconds_of_one(repeated: Repeated) -> float:
    """The time of one repetition on the devices, without the start of a program and the wait for it.

    On a GPU the start takes as long as a product, but a step starts only once.
    """
    once = least_seconds(repeated(1))
    if once >= _LONG_SECONDS:
        return once
    return max((least_seconds(repeated(1 + _REPETITIONS)) - once) / _REPETITIONS, 1e-9)


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
    """Per number of rows, a product of rows x side by side x side on the first device. A plan splits the rows.

    The operands are random numbers: a GPU multiplies zeros and ones with less power, and faster.
    """
    device = mesh.devices.flat[0]
    weights = _random((side, side), dtype, device) / side**0.5  # keeps the scale of repeated products
    return lambda rows: _on_results(jnp.matmul, _random((rows, side), dtype, device), weights)


def memory_traffic(mesh: Mesh) -> Callable[[int], Repeated]:
    """Per size in bytes, a read and a write of that much float32 on the first device.

    The operands are independent. XLA:CPU drops barriers early, and would fuse dependent repetitions into one kernel.
    """
    device = mesh.devices.flat[0]
    return lambda size: _one_by_one(lambda x: x * 2, _random((size // 4,), jnp.float32, device))


def collective(mesh: Mesh, kind: CollectiveKind, axes: tuple[str, ...]) -> Callable[[int], Repeated]:
    """Per size in bytes of float32, one collective. The size is that of an operand, or of an all-gather's result."""
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
    """Runs of ``body``, each on the result of the previous one, which has the type of its operand."""

    def repeated(times: int) -> Run:
        def chain(x: Any, *rest: Any) -> Any:
            for _ in range(times):
                x = jax.lax.optimization_barrier(body(x, *rest))
            return x

        program = jax.jit(chain)
        return lambda: program(operand, *others)

    return repeated


def _one_by_one(body: Callable[[Any], Any], operand: jax.Array) -> Repeated:
    """Sequential runs of ``body`` on operands of their own, since XLA merges equal ones.

    Every result is a result of the program. XLA would remove others, and the dependencies with them.
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
