"""Predicted peaks of what adds up along a dimension, and of decompositions, against what is compiled."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.audit import measure
from shardplan.target import gpu_mesh

pytestmark = pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")

ROWS, MATRICES, SIDES = (64, 1024, 2048), (512, 512, 512), (512, 512, 64)


def _along(compute: Callable[[jax.Array], jax.Array], dimension: int = 1) -> Callable[[jax.Array], jax.Array]:
    return lambda x: jnp.sin(jnp.cumsum(compute(x), dimension))


def _triangular(matrix: jax.Array, side: jax.Array) -> jax.Array:
    return jax.scipy.linalg.solve_triangular(matrix, side, lower=True)


def _check(step: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], dtype: Any = jnp.float32) -> None:
    mesh = gpu_mesh("h100", (8,), ("x",))
    pins = {str(number): jax.P("x") for number in range(len(shapes))}
    plan = shardplan.plan(step, mesh, *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes), pins=pins)
    assert measure(plan.lower(mesh)).memory.peak == pytest.approx(plan.peak_bytes, rel=0.01)


@pytest.mark.parametrize("compute", [lambda x: 2 * x, lambda x: x * x + 1, jnp.tanh, jnp.exp, jax.nn.silu, jax.nn.relu])
def test_what_is_added_up_along_a_dimension_is_stored_where_it_is_dear_to_compute(compute: Any) -> None:
    """Sixteen times for each element, and once more for the blocks."""
    _check(_along(compute), (ROWS,))


@pytest.mark.parametrize(
    ("step", "shape", "dtype"),
    [
        (lambda x: jnp.cumsum(x, 1), ROWS, jnp.float32),
        (_along(jnp.tanh, 2), ROWS, jnp.bfloat16),
        (_along(jnp.tanh, 2), (64, 131072, 16), jnp.float32),
        (_along(jnp.tanh, 2), (64, 32768, 64), jnp.float32),
        (_along(lambda x: jnp.tanh(x)[:, ::-1]), ROWS, jnp.float32),
        (lambda x: jnp.sin(jax.lax.cummax(jnp.tanh(x), 1)), ROWS, jnp.float32),
        (lambda x: jnp.sin(jax.lax.cumlogsumexp(jnp.tanh(x), 1)), ROWS, jnp.float32),
        (jax.grad(lambda x: jnp.sum(jnp.tanh(jnp.cumsum(x, 1)) ** 2)), ROWS, jnp.float32),
    ],
)
def test_blocks_of_what_is_added_up_lie_beside_it(step: Any, shape: tuple[int, ...], dtype: Any) -> None:
    _check(step, (shape,), dtype)


@pytest.mark.parametrize(
    ("step", "shapes"),
    [
        (_triangular, (MATRICES, SIDES)),
        (lambda x, y: _triangular(jnp.tanh(x), jnp.tanh(y)), (MATRICES, MATRICES)),
        (lambda x, y: jnp.sin(_triangular(x, x @ y)), (MATRICES, SIDES)),
        (lambda x: jnp.linalg.cholesky(x @ jnp.swapaxes(x, 1, 2)), (MATRICES,)),
        (lambda x: jax.lax.linalg.lu(x)[0], (MATRICES,)),
        (lambda x: jnp.linalg.slogdet(x)[1], (MATRICES,)),
        (jnp.linalg.solve, (MATRICES, SIDES)),
        (jnp.linalg.inv, (MATRICES,)),
        (jnp.linalg.qr, (MATRICES,)),
        (jnp.linalg.svd, (MATRICES,)),
        (lambda x: jnp.linalg.svd(x, compute_uv=False), (MATRICES,)),
        (jnp.linalg.eigh, (MATRICES,)),
        (jax.grad(lambda x: jnp.sum(jnp.linalg.inv(x) ** 2)), (MATRICES,)),
        (jax.lax.linalg.householder_product, (MATRICES, MATRICES[:2])),
        (jax.lax.linalg.tridiagonal_solve, ((4096, 4096),) * 3 + ((4096, 4096, 8),)),
    ],
)
def test_decompositions_read_copies_that_lie_in_columns(step: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    _check(step, shapes)
