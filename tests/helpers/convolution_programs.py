"""Random convolutions and poolings, random plans of them, and reference values by NumPy.

    python -m tests.helpers.convolution_programs groups 0 24

plans, runs and compiles cases for H100, each in a process of its own: XLA ends the process if a check of its own fails.
Each failure prints a line.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.compiled.target import compile_for, gpu_mesh
from tests.helpers.random_programs import mesh_of, run, scrambled

MESHES = ((8,), (2, 4), (4, 2), (2, 2), (4,), (2,), (3,), (2, 2, 2))
MOST_WORK = 3e6
REDUCERS = {"max": (-np.inf, np.maximum), "min": (np.inf, np.minimum), "sum": (0.0, np.add)}

T = TypeVar("T")


@dataclass(frozen=True)
class Drawn:
    """One case: a convolution, a pooling or a pad over images of ``sizes``, channels last, and its plan."""

    what: str
    mesh: tuple[int, ...]
    image: tuple[int, ...]
    kernel: tuple[int, ...]
    outs: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    base: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: tuple[int, int]
    moved: bool
    """Whether the result's channels come first, and the kernel is transposed."""
    pads: bool
    """Whether a size elsewhere in the step is padded."""
    pin: tuple[tuple[int, ...], ...]
    islands: bool
    seed: int

    def spec(self) -> P:
        return P(*(tuple("xyz"[axis] for axis in axes) or None for axes in self.pin))

    def arrays(self) -> tuple[Any, ...]:
        draw = np.random.default_rng(self.seed)
        shapes = self.image, self.kernel, (8, 16), (16, 125)
        return tuple(draw.normal(size=shape).astype(np.float32) for shape in shapes)

    # ---- as a user writes it

    def step(self, x: Any, kernel: Any, a: Any, b: Any) -> Any:
        """The result, the gradients of image and kernel if it is linear, and a product of sizes that pad."""
        if self.what in ("max", "min"):
            found = (self._result(x, kernel),)
        else:
            out, back = jax.vjp(self._result, x, kernel)
            found = (out, *back(jnp.cos(out)))
        return (*found, jnp.sum(a @ b)) if self.pads else found

    def _result(self, x: Any, kernel: Any) -> Any:
        rank = len(self.strides)
        if self.what == "convolution":
            space = "ABD"[:rank]
            numbers: Any = (f"N{space}C", f"{space}IO", f"N{space}C")
            if self.moved:
                kernel, numbers = jnp.moveaxis(kernel, (-1, -2), (0, 1)), (f"N{space}C", f"OI{space}", f"NC{space}")
            own = (self.strides, self.padding, self.base, self.dilation, numbers, *self.groups)
            return lax.conv_general_dilated(x, kernel, *own)
        if self.what == "pad":
            config = [(*p, between - 1) for p, between in zip(self.padding, self.base, strict=True)]
            return lax.pad(x, np.float32(0.5), [(0, 0, 0), *config, (0, 0, 0)]) * kernel[0, 0]
        reducer = {"max": lax.max, "min": lax.min, "sum": lax.add}[self.what]
        window, stride, base, dilation = (
            (1, *one, 1) for one in (self.kernel[:rank], self.strides, self.base, self.dilation)
        )
        start = np.float32(REDUCERS[self.what][0])
        padding = [(0, 0), *self.padding, (0, 0)]
        pooled = lax.reduce_window(x, start, reducer, window, stride, padding, base, dilation)
        return jnp.where(jnp.isfinite(pooled), pooled, 0.25) * kernel.ravel()[0]

    # ---- by NumPy, in float64

    def expected(self, x: Any, kernel: Any, a: Any, b: Any) -> tuple[Any, ...]:
        x, kernel = np.float64(x), np.float64(kernel)
        places = self._places(x)

        def read(filled: float) -> Any:
            return np.where(places > 0, x.ravel()[places - 1], filled)

        if self.what == "convolution":
            found = self._convolved(read(0.0), kernel)
        else:
            found = self._pooled(read(0.5 if self.what == "pad" else REDUCERS[self.what][0]), kernel)
        if len(found) > 1:  # each element collects from where it is read
            collected = np.bincount(places.ravel(), found[1].ravel(), x.size + 1)[1:].reshape(x.shape)
            found = (found[0], collected, found[2])
        return (*found, np.sum(np.asarray(a, np.float64) @ np.asarray(b, np.float64))) if self.pads else found

    def _places(self, x: Any) -> Any:
        """Per element of the dilated, cropped and padded image, the position of its source, counted from 1."""
        places = np.arange(1, x.size + 1).reshape(x.shape)
        for dim, (step, (low, high)) in enumerate(zip(self.base, self.padding, strict=True), 1):
            rows = (places.shape[dim] - 1) * step + 1
            wide = np.zeros((*places.shape[:dim], rows, *places.shape[dim + 1 :]), int)
            before = (slice(None),) * dim
            wide[(*before, slice(None, None, step))] = places
            cropped = wide[(*before, slice(max(0, -low), rows - max(0, -high)))]
            places = np.pad(cropped, [(max(0, low), max(0, high)) if d == dim else (0, 0) for d in range(cropped.ndim)])
        return places

    def _windows(self) -> list[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """Places within the window, each with what all windows read there."""
        found = []
        for place in product(*map(range, self.kernel[: len(self.strides)])):
            each = zip(place, self.dilation, self.strides, self.outs, strict=True)
            rows = (slice(p * d, p * d + (count - 1) * s + 1, s) for p, d, s, count in each)
            found.append((place, (slice(None), *rows)))
        return found

    def _convolved(self, image: Any, kernel: Any) -> tuple[Any, ...]:
        features, batches = self.groups
        groups, (inner, outer), batch = max(self.groups), kernel.shape[-2:], len(image) // batches
        own = [slice(g * outer // groups, (g + 1) * outer // groups) for g in range(groups)]

        def part(rows: Any, group: int) -> Any:
            if batches > 1:
                return rows[group * batch : (group + 1) * batch]
            return rows[..., group * inner : (group + 1) * inner] if features > 1 else rows

        out = np.zeros((batch, *self.outs, outer))
        gradients = np.zeros(image.shape), np.zeros(kernel.shape)
        for place, rows in self._windows():
            for group in range(groups):
                out[..., own[group]] += part(image[rows], group) @ kernel[place][:, own[group]]
        given, summed = np.cos(out), list(range(out.ndim - 1))
        for place, rows in self._windows():
            for group in range(groups):
                one = given[..., own[group]]
                gradients[1][place][:, own[group]] = np.tensordot(part(image[rows], group), one, (summed, summed))
                part(gradients[0][rows], group)[...] += one @ kernel[place][:, own[group]].T
        return np.moveaxis(out, -1, 1) if self.moved else out, *gradients

    def _pooled(self, image: Any, kernel: Any) -> tuple[Any, ...]:
        scale, windows = kernel.ravel()[0], self._windows()
        start, reducer = REDUCERS.get(self.what, REDUCERS["sum"])
        out = np.full((len(image), *self.outs, image.shape[-1]), start)
        for _, rows in windows:
            out = reducer(out, image[rows])
        if self.what in ("max", "min"):
            return (np.where(np.isfinite(out), out, 0.25) * scale,)
        given, gradients = np.cos(out * scale), (np.zeros(image.shape), np.zeros(kernel.shape))
        gradients[1].flat[0] = (given * out).sum()
        for _, rows in windows:
            gradients[0][rows] += given * scale
        return out * scale, *gradients


# ---- drawing


def drawn(kind: str, seed: int) -> Drawn:
    """A case of a ``kind``: "negative" low paddings, or "groups"."""
    draw = np.random.default_rng([len(kind), seed])

    def pick(items: Sequence[T]) -> T:
        return items[int(draw.integers(len(items)))]

    mesh = pick(MESHES)
    rank, devices = pick((1, 2, 2, 3)), prod(mesh)
    what = pick(("convolution", "convolution", "max", "min", "sum", "pad")) if kind == "negative" else "convolution"
    sizes = [pick((devices, 2 * devices, 5, 7, 12)) for _ in range(rank)]
    if rank < 3 and draw.random() < 0.4:  # many rows on each device, which do not divide
        sizes = [pick((4, 6, 8)) for _ in range(rank)]
        sizes[pick(range(rank))] = 17 * devices + pick(range(-devices // 2, devices))
    lows = (-3, -2, -1, 0, 1) if kind == "negative" else (0, 0, 1, 2)
    while True:
        windows, strides = ([pick(of) for _ in range(rank)] for of in ((1, 2, 3, 3), (1, 1, 2, 3)))
        base, dilation = ([pick((1, 1, 1, n)) for _ in range(rank)] for n in (2, 2))
        if what in ("max", "min"):
            base = [1] * rank
        windows = [1] * rank if what == "pad" else windows
        strides, dilation = ([1] * rank, [1] * rank) if what == "pad" else (strides, dilation)
        padding = [(pick(lows), pick((-2, -1, 0, 0, 1, 2))) for _ in range(rank)]
        if kind == "negative" and draw.random() < 0.6:  # where XLA:CPU reads past the end of rows
            padding = [(0, 0)] * rank
            padding[pick(range(rank))] = (pick((-3, -2, -1)), pick((1, 2)))
        each = list(zip(sizes, base, padding, windows, dilation, strides, strict=True))
        spans = [(n - 1) * b + 1 + low + high - (w - 1) * d for n, b, (low, high), w, d, _ in each]
        left = [(n - 1) * b + 1 + min(low, 0) + min(high, 0) for n, b, (low, high), *_ in each]
        if min(*spans, *left) > 0 and (kind == "groups" or min(low for low, _ in padding) < 0):
            break
    outs = [(span - 1) // stride + 1 for span, stride in zip(spans, strides, strict=True)]
    many = pick((2, 3, 4, 6, 8, devices)) if kind == "groups" else pick((1, 1, 1, 2))
    groups = (1, many) if kind == "groups" and draw.random() < 0.25 else (many, 1)
    inner, outer, batch = pick((1, 1, 2, 3)), pick((1, 1, 2)), pick((1, 2, 3, 8))
    batch = batch if batch * many**2 * inner * outer * max(prod(sizes), prod(outs)) * prod(windows) < MOST_WORK else 1
    image = (batch * groups[1], *sizes, inner * groups[0])
    pin = _pin(draw, mesh, image, kind)
    flags = [bool(draw.random() < share) for share in (0.3, 0.6, 0.5)]
    moved = flags[0] and what == "convolution"
    kernel = (*windows, inner, outer * many) if what == "convolution" else (*windows, 1, 1)
    each_dimension: Any = map(tuple, (outs, strides, padding, base, dilation))
    planned: Any = (groups, moved, flags[1], pin, flags[2], seed)
    return Drawn(what, mesh, image, kernel, *each_dimension, *planned)


def _pin(draw: Any, mesh: tuple[int, ...], image: tuple[int, ...], kind: str) -> tuple[tuple[int, ...], ...]:
    """Dimensions of the image for the mesh axes, which they divide: of channels for groups, else of space."""
    pin: list[tuple[int, ...]] = [()] * len(image)
    for axis, size in enumerate(mesh):
        able = [dim for dim, n in enumerate(image) if n % (size * prod(mesh[a] for a in pin[dim])) == 0]
        wanted = [dim for dim in able if (dim == len(image) - 1) == (kind == "groups") and dim]
        able = wanted if wanted and draw.random() < 0.7 else able
        if able and draw.random() < 0.9:
            pin[able[int(draw.integers(len(able)))]] += (axis,)
    return tuple(pin)


# ---- planning and running


def plans_of(case: Drawn, profile: Any = "h100") -> dict[str, shardplan.Plan]:
    """The plan of a case, and one of random layouts and strategies."""
    pins = {"0": case.spec()} if any(case.pin) else None
    given: dict[str, Any] = {"pins": pins, "islands": case.islands, "hardware": profile}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", shardplan.ShardplanWarning)  # of sizes that do not divide
        plan = shardplan.plan(case.step, mesh_of(case.mesh), *case.arrays(), **given)
    return {"plan": plan, "scrambled": scrambled(plan, case.seed)}


def compares(case: Drawn, plan: shardplan.Plan) -> float:
    """The largest difference to the expected result, relative to its largest element."""
    worst = 0.0
    arrays = case.arrays()
    for one, other in zip(run(plan, mesh_of(case.mesh), *arrays), case.expected(*arrays), strict=True):
        assert one.shape == np.shape(other)
        difference = np.abs(np.float64(one) - other) / max(1e-3, np.abs(other).max(initial=0.0))
        worst = max(worst, float(np.nan_to_num(difference, nan=np.inf).max(initial=0.0)))
    return worst


def compiles(case: Drawn, plan: shardplan.Plan) -> None:
    """Compiles a plan for H100."""
    names = ("x", "y", "z")[: len(case.mesh)]
    compile_for(plan.lower(gpu_mesh("h100", case.mesh, names)))


def _try(kind: str, seed: int, profile: str) -> None:
    case = drawn(kind, seed)
    for how, plan in plans_of(case, profile).items():
        worst = compares(case, plan)
        if not worst < 2e-4:
            print(f"{kind} {seed}: {how} is off by {worst:.2g}", flush=True)
        compiles(case, plan)


def main(kind: str, first: str, count: str, profile: str = "h100") -> None:
    for seed in range(int(first), int(first) + int(count)):
        child = os.fork()  # JAX is imported, and has no backend yet
        if child == 0:
            _try(kind, seed, profile)
            sys.stdout.flush()
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            print(f"{kind} {seed}: the process ended with {code}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
