"""Broadcasts that loops read are made inside of them, and mean the same there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardplan
from shardplan.program.tracing import trace_program

X, ROWS = jnp.linspace(-1.0, 1.0, 16), jnp.linspace(0.0, 2.0, 4 * 8).reshape(4, 8)


def masked(x, rows):
    """A derivative reads the mask and the zeros behind it in the backward loop as well."""

    def loss(x):
        mask = jnp.arange(16)[:, None] > jnp.arange(8)[None, :]

        def body(carry, row):
            return jnp.where(mask, jnp.sin(carry[:, None] * row), -1.0).sum(1), None

        return jnp.sum(jax.lax.scan(body, x, rows)[0] ** 2)

    return jax.value_and_grad(loss)(x)


def nested(x, rows):
    wide = jnp.broadcast_to(x[:8], (8, 8))

    def outer(carry, row):
        return jax.lax.scan(lambda inner, one: (inner + one @ wide, None), carry, rows * row)[0], None

    return jax.lax.scan(outer, jnp.zeros(8), rows)[0]


def handed_on(x, rows):
    """One body does nothing but return what is broadcast, another reads it twice and from two names."""
    wide = jnp.broadcast_to(x[:8], (8, 8))
    _, copies = jax.lax.scan(lambda carry, row: (carry, wide), 0.0, rows)
    twice, _ = jax.lax.scan(lambda carry, row: (carry + (wide + wide.T) @ row, None), jnp.zeros(8), rows)
    return copies, twice, wide


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [1, "x=8"])
@pytest.mark.parametrize("step", [masked, nested, handed_on])
def test_values(step, mesh):
    for found, wanted in zip(
        *map(jax.tree.leaves, (shardplan.auto(step, mesh)(X, ROWS), jax.jit(step)(X, ROWS))), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("step", [masked, nested, handed_on])
def test_constants_of_scans_are_no_broadcasts(step):
    program = trace_program(step, (X, ROWS))
    scans = [operation for operation in program.operations if operation.primitive.name == "scan"]
    constants = {o for scan in scans for o in scan.operands[: scan.params["num_consts"]] if isinstance(o, int)}
    made = {program.makers[value].primitive.name for value in constants if value in program.makers}
    assert "broadcast_in_dim" not in made
    inside = [o for o in program.operations if o.region and o.primitive.name == "broadcast_in_dim"]
    assert inside
