"""Filters that are gathered for the gradient of images: cuDNN reads them in reverse, as of filters that are whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardplan

PINS = {"0": P(None, None, None, "x"), "1": P("x")}


def image_gradient(w, g):
    def conv(x):
        return jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    return jax.vjp(conv, jnp.zeros((8, 64, 64, 16)))[1](g)[0]


@pytest.fixture
def planned():
    mesh = jax.sharding.AbstractMesh((8,), ("x",))
    w, g = jax.ShapeDtypeStruct((3, 3, 16, 64), jnp.float32), jax.ShapeDtypeStruct((8, 32, 32, 64), jnp.float32)
    plan = shardplan.plan(image_gradient, mesh, w, g, pins=PINS)
    reverse = next(o for o in plan.program.operations if o.primitive.name == "rev")
    assert plan.schedule.assignment.values[reverse.results[0]][3], "it is reversed before it is gathered"
    return plan


def test_no_zeros_are_written_between_the_elements_of_a_strided_convolutions_gradient(planned):
    zeros = 4 * 65 * 65 * 64
    compiled = shardplan.audit(planned, target="h100").compiled
    assert compiled.memory.peak < planned.peak_bytes + zeros / 2
    assert compiled.communication_bytes == planned.communication_bytes


@pytest.mark.slow
def test_the_gradient_is_that_of_the_unplanned_step():
    keys = jax.random.split(jax.random.key(0))
    w, g = jax.random.normal(keys[0], (3, 3, 16, 64)), jax.random.normal(keys[1], (8, 32, 32, 64))
    planned = shardplan.auto(image_gradient, jax.make_mesh((8,), ("x",)), pins=PINS)
    np.testing.assert_allclose(planned(w, g), jax.jit(image_gradient)(w, g), rtol=1e-4, atol=1e-4)
