"""What is gathered once for each reader, within a memory limit: when XLA can begin it, and what that saves."""

import re
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from math import inf

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

import shardplan
from shardplan.apply.workarounds.regather_barriers import awaited
from shardplan.audits.audit import measure
from shardplan.compiled.target import compile_for, gpu_mesh
from shardplan.problem.schedule import Schedule
from tests.helpers.random_programs import assert_equal_trees, mesh_of, run, with_schedule

compiles_for_gpus = pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")


def _step(weights: list[jax.Array], x: jax.Array, heads: int = 1) -> list[jax.Array]:
    def loss(weights: list[jax.Array]) -> jax.Array:
        y = x if heads == 1 else x.reshape(16, -1, len(weights[0]))
        for w in weights:
            y = y @ w
            y = jnp.tanh(y) if heads == 1 else jnp.tanh(y.reshape(*y.shape[:-1], heads, -1)).reshape(y.shape)
        return jnp.sum(y)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def _in_heads(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
    return _step(weights, x, 8)


def _planned(
    layers: int, width: int, mesh: Mesh | AbstractMesh, step: Callable[..., list[jax.Array]] = _step
) -> tuple[shardplan.Plan, Schedule]:
    """A plan whose weights are stored in parts, and its schedule with each of them gathered for each reader."""
    square = jax.ShapeDtypeStruct((width, width), jnp.float32)
    pins = {"0/*": PartitionSpec(None, "x"), "1": PartitionSpec("x", None)}
    plan = shardplan.plan(step, mesh, [square] * layers, square, donate_argnums=0, pins=pins, memory_limit=inf)
    assignment = plan.schedule.assignment
    stored = {weight: assignment.values[weight] for weight in plan.program.inputs[:layers]}
    return plan, Schedule(plan.schedule.problem, replace(assignment, copies=assignment.copies | stored))


def test_gathers_for_the_backward_pass_wait_for_its_gradients() -> None:
    plan, schedule = _planned(4, 64, AbstractMesh((8,), ("x",)))
    program, weights = plan.program, plan.program.inputs[:4]
    for weight in weights[1:]:  # the first weight's product passes no gradient on
        forward, backward = (
            o for o in program.operations if o.primitive.name == "dot_general" and weight in o.operands
        )
        assert awaited(schedule, forward, weight) == ()
        [other] = awaited(schedule, backward, weight)
        assert {other.value, weight} == {*backward.operands}


def test_a_gather_waits_for_what_an_operand_shows_in_another_shape() -> None:
    """XLA takes the other shape out of the barrier: the product's own one shows the same value."""
    plan, schedule = _planned(4, 64, AbstractMesh((8,), ("x",)), _in_heads)
    for weight in plan.program.inputs[1:4]:
        backward = [o for o in plan.program.operations if o.primitive.name == "dot_general" and weight in o.operands][1]
        [other] = awaited(schedule, backward, weight)
        assert other.value not in backward.operands and plan.program.values[other.value].shape == (16, 4, 8, 8)


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


@compiles_for_gpus
@pytest.mark.parametrize("step", [_step, _in_heads])
def test_compiled_gathers_for_the_backward_pass_wait(step: Callable[..., list[jax.Array]]) -> None:
    """XLA keeps the barriers, as tuples, and in each both what is gathered and what that waits for."""
    mesh = gpu_mesh("h100", (8,), ("x",))
    plan, schedule = _planned(4, 64, mesh, step)
    text = compile_for(with_schedule(plan, schedule).lower(mesh))[0].as_text() or ""
    barriers = re.findall(r" tuple\(([^)]*)\)[^\n]*optimization_barrier", text)
    assert [barrier.count("%") for barrier in barriers] == [2] * 2 * 3
