"""Operations whose blocks need nothing of each other, and whose operands XLA would gather all the same."""

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import shardplan
from shardplan.audits.audit import measure
from shardplan.compiled.target import gpu_mesh
from shardplan.problem.xla_limits import needs_shard_map
from tests.helpers.random_programs import assert_equal_trees, mesh_of, run, scrambled


def pooled(x: Any) -> Any:
    """Windows that overlap along the second dimension, and do not along the third."""
    return jax.lax.reduce_window(x, np.float16(-np.inf), jax.lax.max, (1, 3, 2), (1, 2, 2), "SAME")


def unpooled(x: Any, start: Any) -> Any:
    return jax.vjp(pooled, x.astype(jnp.float16))[1](jnp.full((16, 32, 16), start, jnp.float16))


PROGRAMS: dict[str, Any] = {
    "top_k": lambda x, start: jax.lax.top_k(x, 8),
    "dynamic_slice": lambda x, start: jax.lax.dynamic_slice_in_dim(x, start, 32, 1),
    "fft": lambda x, start: jnp.abs(jnp.fft.irfft2(jnp.fft.rfft2(x))),
    "select_and_scatter_add": unpooled,
}
SHAPES = jax.ShapeDtypeStruct((16, 64, 32), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)


@pytest.mark.parametrize("program", PROGRAMS)
def test_blocks_in_islands(program: str):
    """Their results are those of the whole."""
    mesh, function = mesh_of((2, 4)), PROGRAMS[program]
    plan = shardplan.plan(function, mesh, *SHAPES, pins={"0": PartitionSpec("x")})
    operations = [o for o in plan.schedule.program.operations if o.primitive.name == program]
    assert operations
    assert all(needs_shard_map(o, plan.schedule.assignment.strategies[o.index]) for o in operations)
    x = jax.random.normal(jax.random.key(0), SHAPES[0].shape)
    for start in (40, -5)[: 2 if program == "dynamic_slice" else 1]:
        assert_equal_trees(run(plan, mesh, x, jnp.int32(start)), function(x, jnp.int32(start)))


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS)
def test_results_in_arbitrary_layouts(program: str):
    """They are those of the whole."""
    mesh, function = mesh_of((2, 4)), PROGRAMS[program]
    plan = shardplan.plan(function, mesh, *SHAPES)
    x = jax.random.normal(jax.random.key(0), SHAPES[0].shape)
    for seed in range(8):
        assert_equal_trees(run(scrambled(plan, seed), mesh, x, jnp.int32(40)), function(x, jnp.int32(40)))


@pytest.mark.long
@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
@pytest.mark.parametrize("program", sorted(PROGRAMS.keys() - {"select_and_scatter_add"}))
def test_compiled_bytes_in_arbitrary_layouts(program: str):
    """They are the planned ones."""
    mesh = gpu_mesh("h100", (2, 4), ("x", "y"))
    plan = shardplan.plan(PROGRAMS[program], mesh, *SHAPES)
    for seed in range(6):
        drawn = scrambled(plan, seed)
        planned = sum(sent.bytes * sent.times for sent in drawn.schedule.collectives())
        sent = measure(drawn.jitted(mesh).lower(*SHAPES)).communication_bytes
        assert sent == pytest.approx(planned, rel=0.01, abs=64)


@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
def test_the_gradient_of_a_pooling_in_16_bits_sends_nothing():
    mesh = gpu_mesh("h100", (2, 4), ("x", "y"))
    plan = shardplan.plan(unpooled, mesh, *SHAPES, pins={"0": PartitionSpec("x", None, "y")})
    (pooling,) = (o.index for o in plan.schedule.program.operations if o.primitive.name == "select_and_scatter_add")
    assert plan.schedule.assignment.strategies[pooling].results == (((0,), (), (1,)),)
    assert measure(plan.jitted(mesh).lower(*SHAPES)).communication_bytes == plan.communication_bytes == 0
