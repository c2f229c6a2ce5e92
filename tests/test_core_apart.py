"""Operations whose blocks need nothing of each other, and whose operands XLA would gather all the same."""

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import shardplan
from shardplan.audit import measure
from shardplan.partitioner import runs_apart
from shardplan.target import gpu_mesh
from tests.core_programs import assert_equal_trees, mesh_of, run, scrambled

PROGRAMS: dict[str, Any] = {
    "top_k": lambda x, start: jax.lax.top_k(x, 8),
    "dynamic_slice": lambda x, start: jax.lax.dynamic_slice_in_dim(x, start, 32, 1),
    "fft": lambda x, start: jnp.abs(jnp.fft.irfft2(jnp.fft.rfft2(x))),
}
SHAPES = jax.ShapeDtypeStruct((16, 64, 32), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)


@pytest.mark.parametrize("program", PROGRAMS)
def test_blocks_give_what_the_whole_gives(program: str):
    mesh, function = mesh_of((2, 4)), PROGRAMS[program]
    plan = shardplan.plan(function, mesh, *SHAPES, pins={"0": PartitionSpec("x")})
    operations = [o for o in plan.schedule.program.operations if o.primitive.name == program]
    assert operations
    assert all(runs_apart(o, plan.schedule.assignment.strategies[o.index]) for o in operations)
    x = jax.random.normal(jax.random.key(0), SHAPES[0].shape)
    for start in (40, -5)[: 2 if program == "dynamic_slice" else 1]:
        assert_equal_trees(run(plan, mesh, x, jnp.int32(start)), function(x, jnp.int32(start)))


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_any_layouts_give_what_the_whole_gives(program: str):
    mesh, function = mesh_of((2, 4)), PROGRAMS[program]
    plan = shardplan.plan(function, mesh, *SHAPES)
    x = jax.random.normal(jax.random.key(0), SHAPES[0].shape)
    for seed in range(8):
        assert_equal_trees(run(scrambled(plan, seed), mesh, x, jnp.int32(40)), function(x, jnp.int32(40)))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
@pytest.mark.parametrize("program", PROGRAMS)
def test_any_layouts_send_what_was_planned(program: str):
    mesh = gpu_mesh("h100", (2, 4), ("x", "y"))
    plan = shardplan.plan(PROGRAMS[program], mesh, *SHAPES)
    for seed in range(6):
        drawn = scrambled(plan, seed)
        planned = sum(sent.bytes * sent.times for sent in drawn.schedule.collectives())
        sent = measure(drawn.jitted(mesh).lower(*SHAPES)).communication_bytes
        assert sent == pytest.approx(planned, rel=0.01, abs=64)
