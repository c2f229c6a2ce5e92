"""What plans report: reductions in other precisions, and the price of pins."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.plans.report import plan_record

ROWS = {"1": P("x", None)}
MESH = jax.sharding.AbstractMesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def _gradient(dtype):
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)

    return step, jax.ShapeDtypeStruct((256, 256), dtype), jax.ShapeDtypeStruct((4096, 256), dtype)


@pytest.mark.parametrize(("dtype", "own"), [(jnp.float32, "float32"), (jnp.bfloat16, "bfloat16")])
def test_reductions_are_counted_in_both_precisions(dtype, own):
    step, w, x = _gradient(dtype)
    found = shardplan.plan(step, MESH, w, x, pins=ROWS).statistics["reductions"]
    assert found["as planned"] == found[own] > 0
    assert found["float32"] == pytest.approx(2 * found["bfloat16"])


def test_reported_bytes_in_another_precision():
    """They are those of a plan with that type."""
    step, w, x = _gradient(jnp.float32)
    narrow = shardplan.plan(step, MESH, w, x, pins=ROWS, reduce_dtype="bfloat16")
    reported = shardplan.plan(step, MESH, w, x, pins=ROWS).statistics["reductions"]
    assert narrow.statistics["reductions"]["as planned"] == pytest.approx(reported["bfloat16"])


def test_pins_have_a_price():
    step, w, x = _gradient(jnp.float32)
    free = shardplan.plan(step, MESH, w, x)
    assert "pins" not in free.statistics
    pinned = shardplan.plan(step, MESH, w, x, pins=ROWS)
    price = pinned.statistics["pins"]
    assert price["objective"] == pytest.approx(pinned.objective - free.objective) and price["objective"] > 0
    assert price["communication_bytes"] == pinned.communication_bytes - free.communication_bytes
    more = f"{price['communication_bytes'] / 1e6:.1f} MB more are sent than without them"
    assert more in str(pinned) and more in pinned._repr_html_() and "pins cost" not in str(free)
    assert plan_record(pinned)["pins"] == price
    same = shardplan.plan(step, MESH, w, x, pins={"1": free.layouts["1"]})
    assert same.statistics["pins"]["objective"] == pytest.approx(0, abs=1e-6 * free.objective)


def test_a_gathered_batch_that_was_pinned():
    """The plan says which pinned arguments it gathers, with the bytes, and says nothing of those that stay split."""

    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

    w, few, many = (jax.ShapeDtypeStruct((rows, 1024), jnp.float32) for rows in (1024, 64, 65536))
    gathered = shardplan.plan(step, MESH, w, few, pins=ROWS)
    [sent] = [one for one in gathered.collectives if one.tensor == "1"]
    assert f"the step gathers `1` ({sent.bytes / 1e6:.1f} MB)" in str(gathered)
    assert "the step gathers" not in str(shardplan.plan(step, MESH, w, many, pins=ROWS))
