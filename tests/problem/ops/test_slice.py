"""Slices at one place along a split dimension, at every place."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.audits.audit import measure
from shardplan.compiled.target import gpu_mesh
from shardplan.problem.ops.slice import reads_place
from tests.helpers.random_programs import assert_equal_trees, mesh_of, run, scrambled

Read = Callable[[Any, Any], Any]
READS: dict[str, Read] = {
    "row": lambda x, k: x[k],
    "row, filled": lambda x, k: x.at[k].get(mode="fill", fill_value=7),
    "row, clipped": lambda x, k: x.at[k].get(mode="clip"),
    "column": lambda x, k: jnp.take(x, k, axis=1),
    "element": lambda x, k: x.at[k, k // 2].get(mode="fill"),
    "rows across blocks": lambda x, k: jax.lax.dynamic_slice_in_dim(x, k, 2, 0),
    "constant place": lambda x, k: x[5, 1::2],
    "constant places": lambda x, k: x[:, 3:5],
    "integers": lambda x, k: jnp.take((x * 100).astype(jnp.int32), k, axis=0),
    "booleans": lambda x, k: (x > 0)[k],
    "gradient": lambda x, k: jax.grad(lambda x: jnp.sum(jnp.sin(x[k]) * x[2]))(x),
}
X = jax.random.normal(jax.random.key(0), (16, 16))


def read_some(x: Any, k: Any) -> list[Any]:
    return [READS[name](jnp.cos(x), k) for name in ("row, filled", "rows across blocks", "constant place")]


def test_values() -> None:
    mesh = mesh_of((2, 4))
    plan = shardplan.plan(read_some, mesh, X, jnp.int32(0), pins={"0": P("x", "y")})
    chosen, operations = plan.schedule.assignment.strategies, plan.schedule.program.operations
    shared = {o.primitive.name for o in operations if o.index in chosen and reads_place(o, chosen[o.index])}
    assert shared == {"slice", "dynamic_slice", "gather"}
    planned, expected = plan.jitted(mesh), jax.jit(read_some)
    x, k = (jax.device_put(a, s) for a, s in zip((X, jnp.int32(0)), plan.leaf_shardings(mesh), strict=True))
    for place in (-17, -1, 0, 3, 7, 15, 16):
        for found, wanted in zip(planned(x, k * 0 + place), expected(X, place), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_window_of_two_dimensions_in_a_program_of_64_bits() -> None:
    with jax.enable_x64(True):
        mesh, x, read = mesh_of((8,)), jnp.arange(256.0).reshape(16, 16), lambda x: jnp.cos(x)[2:4, 1:3] * 2
        plan = shardplan.plan(read, mesh, x, pins={"0": P("x")})
        strategies, operations = plan.schedule.assignment.strategies, plan.schedule.program.operations
        assert any(o.index in strategies and reads_place(o, strategies[o.index]) for o in operations)
        assert_equal_trees(run(plan, mesh, x), read(x))


@pytest.mark.long
@pytest.mark.parametrize("spec", [P("y"), P(None, ("x", "y")), P(("x", "y"))], ids=str)
@pytest.mark.parametrize("name", READS)
def test_drawn_layouts(name: str, spec: P) -> None:
    """Any layouts give the values of the whole tensor."""
    mesh, read = mesh_of((2, 4)), lambda x, k: READS[name](jnp.cos(x), k)
    plan = shardplan.plan(read, mesh, X, jnp.int32(0), pins={"0": spec})
    for seed, place in enumerate((-3, 15, 20)):
        assert_equal_trees(run(scrambled(plan, seed), mesh, X, jnp.int32(place)), read(X, jnp.int32(place)))


@pytest.mark.long
@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
@pytest.mark.parametrize("name", ["row", "row, filled", "row, clipped", "constant place"])
def test_bytes_of_a_slice(name: str) -> None:
    """The window is sent, and no other bytes."""
    mesh = gpu_mesh("h100", (2, 4), ("x", "y"))
    shapes = jax.ShapeDtypeStruct((64, 1024, 64), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    plan = shardplan.plan(READS[name], mesh, *shapes, pins={"0": P("x", "y")})
    found = plan.jitted(mesh).lower(*shapes)
    window = jax.eval_shape(READS[name], *shapes)
    assert measure(found).communication_bytes == pytest.approx(plan.communication_bytes, rel=0.01)
    assert 0 < plan.communication_bytes <= window.size * 4
