"""Bytes of regions that are split by hand: the planned ones are those that XLA compiles for the GPU target."""

from __future__ import annotations

from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

import shardplan
from tests.helpers.random_programs import mesh_of
from tests.helpers.region_programs import Drawn

pytestmark = [
    pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`"),
    pytest.mark.filterwarnings("ignore:`shard_map`"),
]


def abstract(sizes: tuple[int, ...]) -> AbstractMesh:
    return AbstractMesh(sizes, ("x", "y", "z")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


def experts(mesh: Mesh | AbstractMesh):
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def local(x: jax.Array, w: jax.Array) -> jax.Array:
            return jnp.einsum("td,df->tf", lax.all_to_all(x, "y", 0, 0, tiled=True), w[0])

        y = jax.shard_map(local, mesh=mesh, in_specs=P("y"), out_specs=P("y"), axis_names={"y"})(x, w)
        return jnp.mean(y**2)

    return step


@pytest.mark.slow
@pytest.mark.parametrize("pins", [None, {"0": P(None, "x", "y")}, {"*": P("x")}], ids=str)
@pytest.mark.parametrize("gradient", [False, True])
def test_experts_over_one_axis_of_two(pins: dict[str, P] | None, gradient: bool) -> None:
    """Predicted bytes are compiled bytes, for every layout on the other axis before."""
    step = experts(abstract((2, 4)))
    shapes = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32), jax.ShapeDtypeStruct((512, 64), jnp.float32)
    plan = shardplan.plan(jax.grad(step) if gradient else step, abstract((2, 4)), *shapes, pins=pins)
    assert plan.communication_bytes > 1000 and shardplan.audit(plan).ok(0)


@pytest.mark.slow
def test_region_over_a_mesh_of_other_devices() -> None:
    """A region that names a mesh of CPUs compiles for the GPUs of an audit."""
    shapes = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32), jax.ShapeDtypeStruct((512, 64), jnp.float32)
    assert shardplan.audit(shardplan.plan(experts(mesh_of((2, 4))), abstract((2, 4)), *shapes)).ok(0)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_drawn_programs(seed: int) -> None:
    """Over drawn axes, with drawn specs and collectives, in loops, branches and gradients."""
    drawn = Drawn(seed)
    mesh = abstract(drawn.sizes)
    plan = shardplan.plan(drawn.function(mesh), mesh, *drawn.arrays, pins=drawn.pins)
    compiled = shardplan.audit(plan).compiled.communication_bytes
    assert compiled == pytest.approx(plan.communication_bytes, rel=0.02, abs=64)
