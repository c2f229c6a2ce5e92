"""Random programs with ``shard_map``s over some axes of a mesh, whose bodies are random collectives."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

MESHES = ((2, 4), (4, 2), (2, 2, 2), (2, 1, 4))
SHAPES = ((16, 32), (8, 16, 8), (32, 8)), ((16, 16), (8, 4, 8))
WRAPS = ("plain", "scan", "cond", "checkpoint", "vmap", "jit")
COLLECTIVES = ("psum", "pmean", "all_gather", "all_to_all", "ppermute", "psum_scatter", "axis_index")


class Drawn:
    """A function of two arrays, with a mesh to plan it over, and pins of its arguments."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.sizes = draw.choice(MESHES)
        self.names = ("x", "y", "z")[: len(self.sizes)]
        self.axes = dict(zip(self.names, self.sizes, strict=True))
        self.shapes = [draw.choice(shapes) for shapes in SHAPES]
        self.gradient = draw.random() < 0.5
        self.regions = [self._region(draw) for _ in range(draw.choice((1, 1, 2)))]
        self.pins = {name: draw_spec(draw, self.axes, self.names, self.shapes[n]) for n, name in enumerate("01")}
        values = np.random.default_rng(seed)
        self.arrays = [jnp.asarray(values.normal(size=shape), jnp.float32) for shape in self.shapes]

    def _region(self, draw: random.Random) -> tuple[int, tuple[str, ...], str]:
        over = tuple(sorted(draw.sample(self.names, draw.randint(1, len(self.names) - 1))))
        return draw.randrange(1 << 30), over, draw.choice(WRAPS)

    def function(self, mesh: Mesh | AbstractMesh, over_all: bool = False) -> Callable[..., Any]:
        """The function; with ``over_all`` its regions name all axes of the mesh: it computes the same."""

        def value(x: Any, w: Any) -> Any:
            for seed, over, wrap in self.regions:
                x = wrapped(wrap, Region(seed, over, self.axes, mesh, self.names if over_all else over), x, w)
            return x

        def loss(x: Any, w: Any) -> Any:
            return (value(x, w) ** 2).mean()

        def step(x: Any, w: Any) -> Any:
            found, (dx, dw) = jax.value_and_grad(loss, (0, 1))(x, w)
            return x - 0.1 * dx, w - 0.1 * dw, found

        return step if self.gradient else value


def draw_spec(draw: random.Random, sizes: dict[str, int], over: Iterable[str], shape: Sequence[int]) -> P:
    """A spec that splits some dimensions over some of the axes, in the order in which these are given."""
    entries: list[tuple[str, ...]] = [() for _ in shape]
    left = list(shape)
    for axis in over:
        dims = [dim for dim, size in enumerate(left) if size % sizes[axis] == 0]
        if dims and draw.random() < 0.7:
            dim = draw.choice(dims)
            entries[dim], left[dim] = (*entries[dim], axis), left[dim] // sizes[axis]
    return P(*(axes or None for axes in entries))


def wrapped(wrap: str, region: Region, x: Any, w: Any) -> Any:
    """A region inside of the control flow or calls of a program."""

    def carried(x: Any) -> Any:
        found = region(x, w)
        spread = jnp.cos(jnp.arange(found.size, dtype=x.dtype)).reshape(found.shape)
        return jnp.tanh(x * 0.5 + (found if found.shape == x.shape else (jnp.sin(found) * spread).mean()))

    if wrap == "scan":
        return lax.scan(lambda c, _: (carried(c), None), x, None, length=2)[0]
    if wrap == "cond":
        return lax.cond(x.sum() > w.sum(), carried, jnp.cos, x)
    if wrap == "vmap":
        return jax.vmap(region, in_axes=(0, None))(jnp.stack([x, x * 2]), w).sum(0)
    run: Any = {"checkpoint": jax.checkpoint, "jit": jax.jit}.get(wrap)
    return (run(region) if run else region)(jnp.sin(x), w)


class Region:
    """A ``shard_map`` over the axes ``over``, or manual over more. Its specs follow from its seed and operands."""

    def __init__(
        self, seed: int, over: Sequence[str], sizes: dict[str, int], mesh: Mesh | AbstractMesh, by_hand: Sequence[str]
    ) -> None:
        self.seed, self.over, self.sizes, self.mesh, self.by_hand = seed, over, sizes, mesh, by_hand

    def __call__(self, x: Any, w: Any) -> Any:
        draw = random.Random(self.seed)
        order = draw.sample(self.over, len(self.over))
        specs = tuple(draw_spec(draw, self.sizes, order, array.shape) for array in (x, w))
        seen: dict[str, Any] = {}

        def body(x: Any, w: Any) -> Any:
            inside, varying = random.Random(self.seed), {a for spec in specs for axes in spec if axes for a in axes}
            x = x + jnp.sin(w).mean()
            for _ in range(inside.randint(1, 4)):
                x = jnp.tanh(self._one(inside, x, varying)) * 1.5
            seen.update(shape=x.shape, varying=varying)
            return x

        settings: Any = {"mesh": self.mesh, "axis_names": set(self.by_hand), "in_specs": specs, "check_vma": False}
        jax.eval_shape(jax.shard_map(lambda x, w: body(x, w)[None], out_specs=P(tuple(self.over)), **settings), x, w)
        entries: list[tuple[str, ...]] = [() for _ in seen["shape"]]
        for axis in order:
            if axis in seen["varying"]:
                dim = draw.randrange(len(entries))
                entries[dim] = (*entries[dim], axis)
        return jax.shard_map(body, out_specs=P(*(axes or None for axes in entries)), **settings)(x, w)

    def _one(self, draw: random.Random, x: Any, varying: set[str]) -> Any:
        """One random collective, or two in a loop. It keeps the mesh axes over which the devices' blocks vary."""
        over = tuple(draw.sample(self.over, draw.randint(1, len(self.over))))
        count = int(np.prod([self.sizes[axis] for axis in over]))
        dims = [dim for dim, size in enumerate(x.shape) if size % count == 0]
        name = draw.choice(COLLECTIVES)
        if name == "axis_index":
            varying.add(over[0])
            return x * (1 + lax.axis_index(over[0])).astype(x.dtype)
        if name in ("psum", "pmean"):
            varying.difference_update(over)
            return lax.pmean(x, over) if name == "pmean" else lax.psum(x, over) / count
        if name == "all_gather" and x.size * count < 1 << 13:
            varying.difference_update(over)
            return lax.all_gather(x, over, axis=draw.randrange(x.ndim), tiled=True)
        varying.update(over)
        if name == "ppermute" or not dims or name == "all_gather":
            moved = [(place, (place + 1) % count) for place in range(count)]
            return lax.scan(lambda c, _: (lax.ppermute(jnp.sin(c), over, moved), None), x, None, length=2)[0]
        dim = draw.choice(dims)
        if name == "psum_scatter":
            return lax.psum_scatter(x, over, scatter_dimension=dim, tiled=True) / count
        return lax.all_to_all(x, over, dim, draw.randrange(x.ndim), tiled=True)
