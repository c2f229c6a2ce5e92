"""Gradients of scores, against what is compiled: which sums become part of kernels in tiles of rows, and what is stored
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


def _ratio(step: Callable[..., Any], *arguments: Any) -> float:
    """Compiled peak by predicted peak, of one device."""
    mesh = gpu_mesh("h100", (1,), ("x",))
    plan = shardplan.plan(step, mesh, *arguments, memory_limit=float("inf"))
    report = audit(plan, mesh=mesh)
    assert report.compiled.communication_bytes == pytest.approx(plan.communication_bytes, rel=0.001)
    return float(report.compiled.memory.peak / plan.peak_bytes)


@pytest.mark.slow
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
    assert _ratio(step, scores, queries, bias, v) == pytest.approx(1, abs=0.02)


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
    assert _ratio(jax.grad(loss), weights, x, mask) == pytest.approx(1, abs=0.02)
