"""Predicted peaks of gathers and scatters over batch dimensions, and of sorts, against what is compiled."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardplan
from shardplan.audit import measure
from shardplan.target import gpu_mesh

pytestmark = pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")

ROWS, TABLE, PLACES, WORDS = (64, 32768), (64, 8, 64, 128), (64, 8, 64, 256), (65536, 512)
FIXED = np.random.default_rng(0).integers(0, 128, PLACES[2:]).astype(np.int32)


def _taken(x: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, jnp.broadcast_to(FIXED, PLACES), -1)


def _sum_of_taken(x: jax.Array, places: jax.Array) -> jax.Array:
    return jnp.sum(jnp.tanh(jnp.take_along_axis(x, places, -1)))


def _kept_and_sorted(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, jnp.sort(x)[:, :8]


def _largest(k: int) -> Callable[[jax.Array], Any]:
    return lambda x: jax.lax.top_k(x, k)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "shapes"),
    [
        (lambda x, places: jnp.take_along_axis(x, places, -1) * 2, (TABLE, PLACES)),
        (lambda x, y: _taken(x) + _taken(y), (TABLE, TABLE)),
        (jax.grad(_sum_of_taken), (TABLE, PLACES)),
        (jax.grad(_sum_of_taken), ((65536, 128), (65536, 256))),
        (
            lambda x, places: jax.grad(lambda z: jnp.sum(jnp.take_along_axis(z, places, -1) * x[..., :1]))(x),
            (TABLE, PLACES),
        ),
        (_largest(8), (ROWS,)),
        (_largest(64), (ROWS,)),
        (_largest(8), ((8192, 500),)),
        (lambda x: _largest(64)(jnp.tanh(x))[0], (ROWS,)),
        (jnp.sort, (ROWS,)),
        (jnp.argsort, (ROWS,)),
        (lambda x: jnp.sort(jnp.tanh(x)), (ROWS,)),
        (lambda x: _kept_and_sorted(jnp.tanh(x)), (ROWS,)),
        (lambda x, y: _largest(64)(x @ y.T), ((1024, 512), WORDS)),
        (lambda x, y: jnp.argsort(x @ y.T), ((1024, 512), WORDS)),
        (lambda x, y: jnp.sort(x @ y.T), ((1024, 512), WORDS)),
    ],
)
def test_places_and_sorts_need_what_is_predicted(step: Callable[..., Any], shapes: tuple[tuple[int, ...], ...]) -> None:
    mesh = gpu_mesh("h100", (8,), ("x",))
    dtypes = [jnp.int32 if n and shapes[1] not in (TABLE, WORDS) else jnp.float32 for n in range(len(shapes))]
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    pins = {str(n): jax.P() if shape == WORDS else jax.P("x") for n, shape in enumerate(shapes)}
    plan = shardplan.plan(step, mesh, *arguments, pins=pins)
    assert measure(plan.lower(mesh)).memory.peak == pytest.approx(plan.peak_bytes, rel=0.01)
