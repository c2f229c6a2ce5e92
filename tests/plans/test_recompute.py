"""Steps that do not fit: values that are computed again, their plans, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardplan
from shardplan.models import load

MESHES = [1, "x=8", "x=2,y=4"]


def _training(name="gpt"):
    module = load(name)
    return module.training(module.SMALL)


def _perceptron(layers=8, width=64, batch=4096):
    """A step whose residuals are most of its memory."""

    def step(weights, x):
        def loss(weights):
            y = x
            for w in weights:
                y = y + jnp.tanh(jax.nn.gelu(y @ w) @ w.T)
            return jnp.mean(y**2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    return (
        step,
        [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers,
        jax.ShapeDtypeStruct((batch, width), "f4"),
    )


def _limit(step, mesh, arguments, share, **options):
    """The bytes of the state, and a share of what the free plan holds above it."""
    free = shardplan.plan(step, mesh, *arguments, memory_limit="80GB", **options)
    state = sum(b.nbytes for b in free.program_state) if hasattr(free, "program_state") else 0.0
    return state + share * (free.peak_bytes - state), free


def _values(shapes, seed=0):
    keys = iter(jax.random.split(jax.random.key(seed), 1000))

    def value(shape):
        if jnp.issubdtype(shape.dtype, jnp.floating):
            return 0.1 * jax.random.normal(next(keys), shape.shape, shape.dtype)
        return jax.random.randint(next(keys), shape.shape, 0, 2).astype(shape.dtype)

    return jax.tree.map(value, shapes)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("share", [0.7, 0.5])
def test_values_of_a_recomputed_step(mesh, share):
    """A step that computes values again gives what the plain step gives, in less memory."""
    step, *arguments = _perceptron()
    limit, free = _limit(step, mesh, arguments, share)
    planned = shardplan.auto(step, mesh, memory_limit=limit)
    plan = planned.plan(*arguments)
    assert plan.peak_bytes <= limit < free.peak_bytes
    assert plan.recipe.recomputed or share > 0.5  # layouts come first
    values = _values(tuple(arguments))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), planned(*values), jax.jit(step)(*values)
    )
