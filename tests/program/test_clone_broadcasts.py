"""Clones of broadcasts: one reader may have the whole result, and the collective is on the small operand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.audits.audit import measure
from shardplan.compiled.target import gpu_mesh
from shardplan.program.tracing import trace_program

PINS = {"0": P("x"), "1": P(None, None, None, "x"), "2": P("x")}


def spread_step(means, images, others):
    spread = jnp.broadcast_to(means[:, None, None], (64, 8, 8, 256)) / 64
    return jnp.einsum("bhwc,bhwd->cd", spread, images), jnp.sin(spread + others)


def shapes():
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 256), (64, 8, 8, 64), (64, 8, 8, 256))]


def test_xla_gathers_before_it_spreads():
    mesh = gpu_mesh("h100", (8,), ("x",))

    def step(means, images):
        spread = jnp.broadcast_to(means[:, None, None], (64, 8, 8, 256))
        split = jax.lax.with_sharding_constraint(spread, NamedSharding(mesh, P("x")))
        whole = jax.lax.with_sharding_constraint(split, NamedSharding(mesh, P()))
        return jnp.einsum("bhwc,bhwd->cd", whole, images)

    lowered = jax.jit(step, in_shardings=[NamedSharding(mesh, PINS[n]) for n in "01"]).lower(*shapes()[:2])
    assert measure(lowered).communication_bytes == 7 / 8 * 4 * 64 * 256


def test_broadcast_with_several_readers():
    """Each reader has a broadcast of its own."""
    program = trace_program(spread_step, shapes())
    assert [o.primitive.name for o in program.operations].count("div") == 2
    readers = [o for o in program.operations if o.primitive.name in {"add", "dot_general"}]
    spread = [operand for o in readers for operand in o.operands if program.makers.get(operand) is not None]
    assert len(spread) == len({*spread}) == 2


@pytest.mark.parametrize("compiled", [False, True])
def test_all_gather_of_a_broadcast(compiled):
    """The operand is all-gathered before the broadcast."""
    mesh = jax.sharding.AbstractMesh((8,), ("x",))
    plan = shardplan.plan(spread_step, mesh, *shapes(), pins=PINS)
    gathered = 7 / 8 * 4 * 64 * 256
    sent = shardplan.audit(plan, target="h100").compiled.communication_bytes if compiled else plan.communication_bytes
    assert sent == gathered


def test_each_reader_finds_the_same():
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(key, shape.shape) for key, shape in zip(keys, shapes(), strict=True)]
    planned = shardplan.auto(spread_step, jax.make_mesh((8,), ("x",)), pins=PINS)
    for found, expected in zip(planned(*arrays), jax.jit(spread_step)(*arrays), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
