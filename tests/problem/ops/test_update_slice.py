"""Updates at one place, along a split dimension or not, at every place."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.compiled.target import gpu_mesh
from tests.helpers.random_programs import mesh_of, run, scrambled

Update = Callable[[Any, Any, Any], Any]
UPDATES: dict[str, Update] = {
    "set": lambda x, row, k: x.at[k].set(row),
    "add, clipped": lambda x, row, k: x.at[k].add(row, mode="clip"),
    "max of a promised place": lambda x, row, k: x.at[k % 8].max(row, mode="promise_in_bounds"),
    "multiply one element": lambda x, row, k: x.at[k, k // 2].mul(row[0]),
    "slice": lambda x, row, k: jax.lax.dynamic_update_slice(x, row[None], (k, 0)),
    "element": lambda x, row, k: jax.lax.dynamic_update_slice(x, row[None, :1], (k, k + 1)),
    "slice of several rows": lambda x, row, k: jax.lax.dynamic_update_slice(x, jnp.stack([row, 2 * row]), (k, 0)),
    "several rows": lambda x, row, k: x.at[jnp.stack([k, k + 3])].set(row),
}
X, ROW = jax.random.normal(jax.random.key(0), (8, 8)), jnp.arange(1.0, 9.0)


@pytest.mark.parametrize("spec", [P("y"), P("x", "y"), P(("x", "y"))], ids=str)
@pytest.mark.parametrize("name", UPDATES)
def test_values(name: str, spec: P) -> None:
    mesh = mesh_of((2, 4))

    def step(x: jax.Array, row: jax.Array, k: jax.Array) -> jax.Array:
        blocks = jax.lax.with_sharding_constraint(jnp.cos(x), NamedSharding(mesh, spec))  # slices of the whole
        return jax.lax.with_sharding_constraint(UPDATES[name](blocks, row, k), NamedSharding(mesh, spec))

    planned = shardplan.auto(step, mesh, pins={"0": P()})
    for k in (-9, -1, 0, 3, 5, 7, 8, 20):
        expected = UPDATES[name](jnp.cos(X), ROW, jnp.int32(k))
        np.testing.assert_allclose(planned(X, ROW, jnp.int32(k)), expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["set", "slice"])
def test_uneven_sizes_in_drawn_layouts(name: str) -> None:
    """Any layouts give the values of the unplanned step."""
    mesh, x, row = mesh_of((2, 4)), jnp.sin(jnp.arange(160.0)).reshape(16, 10), jnp.arange(10.0)
    step = lambda x, row, k: jnp.tanh(UPDATES[name](jnp.cos(x), row, k))  # noqa: E731
    plan = shardplan.plan(step, mesh, x, row, jnp.int32(0))
    for seed in range(3):
        found = run(scrambled(plan, seed), mesh, x, row, jnp.int32(9))
        np.testing.assert_allclose(found, step(x, row, jnp.int32(9)), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("update", ["add", "multiply"])
def test_updates_of_split_rows(update: str) -> None:
    """The place says where the first of the rows goes; a device that has others must not write them there."""
    mesh, x, rows = mesh_of((2, 4)), jnp.cos(jnp.arange(128.0)).reshape(16, 8), jnp.sin(jnp.arange(64.0)).reshape(8, 8)

    def step(x: jax.Array, rows: jax.Array) -> jax.Array:
        places = (x * 1).at[3:11]
        return getattr(places, update)(rows * 2)

    plan = shardplan.plan(step, mesh, x, rows, pins={"0": P(), "1": P("y")})
    for seed in range(6):
        np.testing.assert_allclose(run(scrambled(plan, seed), mesh, x, rows), step(x, rows), rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
@pytest.mark.parametrize("spec", [P("x"), P("x", "y"), P(("x", "y"))], ids=str)
@pytest.mark.parametrize("name", ["set", "add, clipped", "slice", "several rows"])
def test_bytes_of_an_update(name: str, spec: P) -> None:
    """No bytes are sent."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 1024), (1024,))]
    mesh, k = gpu_mesh("h100", (2, 4), ("x", "y")), jax.ShapeDtypeStruct((), jnp.int32)
    plan = shardplan.plan(UPDATES[name], mesh, *shapes, k, pins={"0": spec, "1": P()})
    assert plan.communication_bytes == shardplan.audit(plan).compiled.communication_bytes == 0
