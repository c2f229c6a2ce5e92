"""Windows that pad what they read with different values: XLA alone pads it once for all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardplan
from tests.helpers.random_programs import assert_equal_trees, mesh_of
from tests.helpers.slow_devices import SLOW_DEVICES

IMAGE = jnp.asarray(np.random.default_rng(0).normal(size=(2, 32, 16, 4)), jnp.float32) - 2  # maxima are below 0
KERNEL = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3, 4, 4)), jnp.float32)
BARRIER = "optimization_barrier"


def convolved(x, groups=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    kernel = KERNEL[:, :, : 4 // groups]
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups)


def pooled(x, start, reducer, stride=1):
    return lax.reduce_window(x, start, reducer, (1, 3, 3, 1), (1, stride, stride, 1), "SAME")


def greatest(x, stride=1):
    return pooled(x, -jnp.inf, lax.max, stride)


def summed(x, stride=1):
    return pooled(x, 0.0, lax.add, stride)


def product_of_both(x, y):
    return x * y


PADDINGS = {
    "convolution and maximum": lambda x: (convolved(x), greatest(x)),
    "maximum and depthwise convolution": lambda x: (greatest(x), convolved(x, 4)),
    "strides": lambda x: (summed(x, 2), greatest(x, 2)),
    "three": lambda x: (greatest(x), summed(x), pooled(x, jnp.inf, lax.min)),
    "gradient": jax.grad(lambda x: jnp.sum(greatest(x, 2) ** 2) + jnp.sum(summed(x, 2) ** 2)),
    "of the user": lambda x: (summed(x), pooled(x, jnp.float32(1), product_of_both)),
    "cumulative": lambda x: [cumulative(x) for cumulative in (lax.cumsum, lax.cumprod, lax.cummin)],
    "in a loop": lambda x: lax.scan(lambda h, _: (greatest(h) + 0.1 * convolved(h), None), x, None, length=2)[0],
}


@pytest.mark.parametrize("name", PADDINGS)
def test_readers_with_different_padding(name, tmp_path):
    """Each one gets its own padding value."""
    profile = tmp_path / "slow.toml"
    profile.write_text(SLOW_DEVICES)
    fn, mesh = PADDINGS[name], mesh_of((8,))
    rows = P(None, "x")
    image, pin, spec = (IMAGE[0, :, :, 0], P(), P("x")) if name == "cumulative" else (IMAGE, rows, rows)

    def by_rows(x):
        return jax.tree.map(lambda y: lax.with_sharding_constraint(y, jax.NamedSharding(mesh, spec)), fn(x))

    step = shardplan.auto(by_rows, mesh, hardware=profile, pins={"0": pin})
    assert BARRIER in step.lower(image).as_text()
    assert_equal_trees(step(image), jax.jit(fn)(image))


@pytest.mark.parametrize(
    ("fn", "spec"),
    [
        (lambda x: (convolved(x), greatest(x)), P("x")),
        (lambda x: (convolved(x), summed(x)), P(None, "x")),
        (lambda x: (convolved(x), greatest(x, 2)), P(None, "x")),
        (lambda x: (greatest(x), greatest(x)), P(None, "x")),
    ],
    ids=["split along no window", "padded equally", "other windows", "the same"],
)
def test_readers_that_need_no_barrier(fn, spec):
    """No operand of theirs is behind a barrier."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    assert BARRIER not in shardplan.plan(fn, mesh, IMAGE, pins={"0": spec}).lower().as_text()
