"""Weights that are gathered once for each reader, within a memory limit: values, bytes and the peak."""

from dataclasses import replace
from importlib.util import find_spec
from math import inf

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, PartitionSpec

import shardplan
from shardplan.audits.audit import measure
from shardplan.compiled.target import gpu_mesh
from shardplan.problem.schedule import Schedule
from tests.helpers.random_programs import assert_equal_trees, mesh_of, run, with_schedule

compiles_for_gpus = pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")


def _step(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
    def loss(weights: list[jax.Array]) -> jax.Array:
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return jnp.sum(y)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def _planned(layers: int, width: int, mesh: Mesh) -> tuple[shardplan.Plan, Schedule]:
    """A plan whose weights are stored in parts, and its schedule with each of them gathered for each reader."""
    square = jax.ShapeDtypeStruct((width, width), jnp.float32)
    pins = {"0/*": PartitionSpec(None, "x"), "1": PartitionSpec("x", None)}
    plan = shardplan.plan(_step, mesh, [square] * layers, square, donate_argnums=0, pins=pins, memory_limit=inf)
    assignment = plan.schedule.assignment
    stored = {weight: assignment.values[weight] for weight in plan.program.inputs[:layers]}
    return plan, Schedule(plan.schedule.problem, replace(assignment, copies=assignment.copies | stored))


@pytest.mark.slow
def test_gathers_for_further_readers_change_nothing_that_is_computed() -> None:
    mesh = mesh_of((8,))
    plan, schedule = _planned(4, 64, mesh)
    drawn = with_schedule(plan, schedule)
    keys = jax.random.split(jax.random.key(0), 5)
    *weights, x = (jax.random.normal(key, (64, 64)) / 8 for key in keys)
    assert_equal_trees(run(drawn, mesh, weights, x), _step(weights, x))


@pytest.mark.slow
@compiles_for_gpus
def test_weights_gathered_for_each_pass_are_in_memory_for_each_alone() -> None:
    mesh = gpu_mesh("h100", (8,), ("x",))
    plan, schedule = _planned(16, 1024, mesh)
    compiled = measure(with_schedule(plan, schedule).lower(mesh))
    assert compiled.communication_bytes == pytest.approx(sum(sent.bytes for sent in schedule.collectives()), rel=0.01)
    assert compiled.memory.peak < 0.7 * measure(plan.lower(mesh)).memory.peak
