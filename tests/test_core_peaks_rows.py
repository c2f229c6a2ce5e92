"""Kernels in tiles of rows, against what is compiled: which sums down columns they become part of, and what is stored
for others."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.audit import audit
from shardplan.target import gpu_mesh

compiles_for_gpus = pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")

_SHAPE = jax.ShapeDtypeStruct


def _ratio(step: Callable[..., Any], mesh_shape: tuple[int, ...], *arguments: Any, donated: bool = False) -> float:
    """Compiled peak by predicted peak."""
    mesh = gpu_mesh("h100", mesh_shape, ("x", "y")[: len(mesh_shape)])
    donate = (0,) if donated else ()
    plan = shardplan.plan(step, mesh, *arguments, donate_argnums=donate, memory_limit=float("inf"))
    report = audit(plan, mesh=mesh)
    assert report.compiled.communication_bytes == pytest.approx(plan.communication_bytes, rel=0.001)
    return float(report.compiled.memory.peak / plan.peak_bytes)


@compiles_for_gpus
@pytest.mark.parametrize(("batch", "length"), [(16, 512), (64, 512), (256, 128)])
def test_gradients_of_scores_are_stored_where_a_tile_of_all_rows_that_are_summed_is_too_large(
    batch: int, length: int
) -> None:
    """A bias that is added to all scores: its gradient adds these up over the batch, in tiles of whole rows up to
    16,384 numbers; of more, the gradient of the scores is stored in float32, for the bias and for what follows (1.27
    and 1.19 of what was predicted before, for the two larger ones)."""

    def step(scores: jax.Array, queries: jax.Array, bias: jax.Array, v: jax.Array) -> Any:
        def loss(scores: jax.Array, bias: jax.Array) -> jax.Array:
            weights = jax.nn.softmax(scores.astype(jnp.float32) + bias, axis=-1).astype(jnp.bfloat16)
            return jnp.sum(jnp.einsum("bhqk,bhkd->bhqd", weights, v).astype(jnp.float32) * queries)

        turned, added = jax.grad(loss, (0, 1))(scores, bias)
        return jnp.einsum("bhqk,bhqd->bhkd", turned, v), added

    scores, bias = _SHAPE((batch, 4, length, length), jnp.bfloat16), _SHAPE((4, length, length), jnp.float32)
    queries, v = _SHAPE((batch, 4, length, 64), jnp.float32), _SHAPE((batch, 4, length, 64), jnp.bfloat16)
    assert _ratio(step, (1,), scores, queries, bias, v) == pytest.approx(1, abs=0.02)


def _layer_norm(x: jax.Array, gain: jax.Array, bias: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)
    return (y * gain + bias).astype(x.dtype)


@compiles_for_gpus
@pytest.mark.parametrize(
    ("before", "convolve", "dtype", "expected"),
    [
        (True, False, jnp.bfloat16, 0.953),
        (False, False, jnp.bfloat16, 1.0),
        (True, True, jnp.bfloat16, 0.960),
        (False, True, jnp.bfloat16, 1.0),
        (True, True, jnp.float32, 1.0),
    ],
)
def test_norms_of_narrow_rows(before: bool, convolve: bool, dtype: Any, expected: float) -> None:
    """What the gradients of gains add up is computed in tiles, and stored for that: just before, while sums of parts
    are added up behind. Layers of products were .87 and .92 of what was predicted before, those of convolutions 1.12,
    1.18 and 1.07."""

    def linear(x: jax.Array, w: jax.Array) -> jax.Array:
        if not convolve:
            return x @ w.astype(dtype)
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w.astype(dtype), (1, 1), "SAME", dimension_numbers=numbers)

    def loss(layers: Any, x: jax.Array) -> jax.Array:
        x = x.astype(dtype)
        for w, gain, bias in layers:
            if before:
                x = x + linear(jax.nn.swish(_layer_norm(x, gain, bias)), w)
            else:
                x = jax.nn.relu(_layer_norm(linear(x, w), gain, bias))
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    def step(state: Any, x: jax.Array) -> Any:
        layers, momenta = state
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, jax.grad(loss)(layers, x))
        return jax.tree.map(lambda w, m: w - 0.1 * m, layers, momenta), momenta

    filters = (3, 3, 256, 256) if convolve else (256, 256)
    weights = [[_SHAPE(filters, jnp.float32), *[_SHAPE((256,), jnp.float32)] * 2]] * 6
    x = _SHAPE((64, 32, 32, 256) if convolve else (64, 1024, 256), jnp.float32)
    assert _ratio(step, (2, 4), (weights, weights), x, donated=True) == pytest.approx(expected, abs=0.03)


@compiles_for_gpus
def test_capped_scores_of_heads_that_share_keys_are_stored_as_masked() -> None:
    """A hyperbolic tangent caps scores, a mask takes some away, and both gradients read the scores that are left: of
    the product's result, which lies in another order, the tangent is computed as a matrix, and read through a view by
    each of those; a copy for a product would read the mask one element after another. Stored in float32 are both,
    that and what is left (1.19 of what was predicted before, with two layers in a loop)."""

    def loss(weights: Any, x: jax.Array, mask: jax.Array) -> jax.Array:
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, w) for w in weights)
        q = q.reshape(*q.shape[:2], 4, 2, 128)
        scores = jnp.einsum("btkgh,bskh->bkgts", q, k).astype(jnp.float32)
        scores = 50.0 * jnp.tanh(scores / 50.0)
        weighting = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -1e30)).astype(x.dtype)
        return jnp.sum(jnp.square(jnp.einsum("bkgts,bskh->btkgh", weighting, v).astype(jnp.float32)))

    weights = [_SHAPE((1024, heads, 128), jnp.bfloat16) for heads in (8, 4, 4)]
    x, mask = _SHAPE((2, 2048, 1024), jnp.bfloat16), _SHAPE((2, 2048, 2048), jnp.bool_)
    assert _ratio(jax.grad(loss), (1,), weights, x, mask) == pytest.approx(1, abs=0.02)
