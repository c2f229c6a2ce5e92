"""Images whose rows the mesh does not divide: they are split, with the neighbours' rows that windows need."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.compiled.target import gpu_mesh
from tests.helpers.slow_devices import SLOW_DEVICES

NUMBERS = ("NHWC", "HWIO", "NHWC")


def pool(x: jax.Array, window: int = 2) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, window, 2, 1), (1, 2, 2, 1), "VALID")


def step(weights: Any, images: jax.Array) -> Any:
    """Gradients of two convolutions, with a pooling behind each."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for kernel in weights:
            x = pool(jnp.sin(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS)))
        return jnp.mean(x**2)

    return jax.grad(loss, argnums=(0, 1))(weights, images)


def arguments(rows: int, columns: int, channels: int, window: int = 3) -> Any:
    shape = jax.ShapeDtypeStruct
    weights = tuple(shape((window, 3, channels, channels), jnp.float32) for _ in range(2))
    return weights, shape((1, rows, columns, channels), jnp.float32)


def profile(folder: Path) -> Path:
    found = folder / "slow.toml"
    found.write_text(SLOW_DEVICES)
    return found


@pytest.mark.slow
# 296 rows are 37 on each of 8 devices; pooled they are 148, 19 each and 15 on the last.
@pytest.mark.parametrize(
    ("rows", "window", "sizes"),
    [
        (296, 3, (8,)),
        pytest.param(328, 5, (8,), marks=pytest.mark.long),
        pytest.param(296, 3, (2, 4), marks=pytest.mark.long),
        pytest.param(136, 3, (4, 2), marks=pytest.mark.long),
    ],
)
def test_gradients_are_those_of_the_unplanned_step(rows: int, window: int, sizes: tuple[int, ...], tmp_path: Path):
    axes = ("x", "y")[: len(sizes)]
    shapes = arguments(rows, 10, 4, window)
    arrays = jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(leaf.size), leaf.shape), shapes)
    devices = jax.devices()[: int(np.prod(sizes))]
    mesh = jax.make_mesh(sizes, axes, devices=devices)
    planned = shardplan.auto(step, mesh, hardware=profile(tmp_path), pins={"1": P(None, axes)})
    plan = planned.plan(*arrays)
    halos = [c for c in plan.collectives if c.kind == "collective-permute"]
    assert any("reduce_window" in c.operation for c in halos) or len(sizes) > 1
    for one, other in zip(*map(jax.tree.leaves, (planned(*arrays), jax.jit(step)(*arrays))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_only_neighbours_rows_are_sent():
    shapes = arguments(2504, 2504, 16)  # 313 rows each, pooled to 1252: 157 each, then to 626: 79 each
    even = arguments(2560, 2504, 16)
    sent = [
        shardplan.plan(step, AbstractMesh((8,), ("x",)), *given, pins={"1": P(None, "x")}).communication_bytes
        for given in (shapes, even)
    ]
    row = 2504 * 16 * 4
    assert sent[1] < sent[0] < sent[1] + 20 * row


@pytest.mark.long
@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
@pytest.mark.parametrize(("rows", "sizes"), [(2504, (8,)), (2504, (2, 4)), (1000, (4, 2)), (5040, (16,))], ids=str)
def test_compiled_bytes_are_the_planned_ones(rows: int, sizes: tuple[int, ...]):
    axes = ("x", "y")[: len(sizes)]
    shapes = arguments(rows, rows, 8)
    plan = shardplan.plan(step, gpu_mesh("h100", sizes, axes), *shapes, pins={"1": P(None, *axes)})
    audit = shardplan.audit(plan)
    assert audit.predicted_bytes > 0
    assert audit.ok()
    assert audit.unexplained_bytes < 0.02 * audit.predicted_bytes
