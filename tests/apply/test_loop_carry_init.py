"""What is made from nothing for loops: carries that they begin with, and what they read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardplan
from shardplan.apply.workarounds.loop_carry_init import filled_late


def _recurrent(params, x):
    """Layers that read their weights at each timestep, and a classifier of what all give."""
    for weight in params["layers"]:

        def cell(hidden, one, weight=weight):
            hidden = jnp.tanh(one + hidden @ weight)
            return hidden, hidden

        _, x = jax.lax.scan(cell, jnp.zeros(x.shape[1:]), x)
    return jax.nn.logsumexp(x @ params["words"], axis=-1).mean()


def _params(width, words, layers=3):
    keys = jax.random.split(jax.random.key(0), layers + 1)
    weights = [jax.random.normal(key, (width, width)) / width for key in keys[1:]]
    return {"layers": weights, "words": jax.random.normal(keys[0], (width, words)) / 8}


@pytest.mark.long
@pytest.mark.parametrize("pins", [pytest.param(None, marks=pytest.mark.long), {"1": jax.P(None, "x", None)}])
def test_sums_of_loops_from_zeros(pins):
    """They are those of the unplanned step."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    params, x, step = _params(32, 64), jnp.linspace(-1.0, 1.0, 5 * 16 * 32).reshape(5, 16, 32), jax.grad(_recurrent)
    planned = shardplan.auto(step, mesh, pins=pins)
    assert len(filled_late(planned.plan(params, x).schedule)) >= 3
    for one, other in zip(jax.tree.leaves(planned(params, x)), jax.tree.leaves(step(params, x)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("number", [0.0, 2.0, jnp.inf, jnp.nan])
def test_initial_carries_and_the_value_they_depend_on(number):
    """The carries start with their own number for any value of the dependency."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def subtract(carry, one):
        return carry - jnp.where(one == 2.0, one, 0.5), None

    def step(x):
        made = x * number
        counted = jax.lax.fori_loop(0, 3, lambda i, c: c + (made > i), jnp.full(x.shape, 7))
        summed, _ = jax.lax.scan(
            lambda c, one: (c - jnp.where(one == 2.0, one, 0.5), None), jnp.ones(x.shape[1:]), made
        )
        return counted, summed

    planned = shardplan.auto(step, mesh)
    x = jnp.ones((8, 16))
    assert len(filled_late(planned.plan(x).schedule)) == 2
    for one, other in zip(planned(x), step(x), strict=True):
        np.testing.assert_array_equal(one, other)


def test_carries_of_loops_that_only_read_arguments():
    """They are filled without a dependency."""

    def step(x):
        return jax.lax.scan(lambda c, one: (c + one, None), jnp.zeros(x.shape[1:]), x)[0]

    assert not filled_late(shardplan.plan(step, 1, jax.ShapeDtypeStruct((8, 64), "float32")).schedule)


@pytest.mark.long
def test_sums_of_weight_gradients_before_their_loops(monkeypatch):
    """They are not live yet."""
    params = jax.eval_shape(lambda: _params(1024, 4096))
    x = jax.ShapeDtypeStruct((16, 512, 1024), "float32")
    plan = shardplan.plan(jax.grad(_recurrent), jax.sharding.AbstractMesh((8,), ("x",)), params, x)
    late = shardplan.audit(plan, "h100").compiled.memory.peak
    monkeypatch.setattr("shardplan.apply.workarounds.loop_carry_init.filled_late", lambda schedule: {})
    assert late < 0.95 * shardplan.audit(plan, "h100").compiled.memory.peak
