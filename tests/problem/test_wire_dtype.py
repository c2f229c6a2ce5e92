"""Element types on the wire: converted values are sent in their narrower type, also gathered for each reader."""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.apply.wire_dtype import sent_dtype
from shardplan.audits.audit import measure
from shardplan.compiled.target import gpu_mesh
from shardplan.problem.schedule import Schedule
from shardplan.problem.wire_dtype import widened_from
from shardplan.program.tracing import trace_program
from tests.helpers.random_programs import assert_equal_trees, mesh_of, run, with_schedule

compiles_for_gpus = pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")

Widen = Callable[[jax.Array], jax.Array]

WAYS: list[tuple[Widen, int]] = [
    (lambda w: w.astype("float32"), 2),
    (lambda w: w.astype("float32").T.reshape(64, 64), 2),
    (lambda w: jnp.concatenate([w.astype("float32")[:32], w.astype("float32")[:32]]), 2),
    (lambda w: (w > 0).astype("float32"), 1),
    (lambda w: w.astype("float32") + 1, 4),
    (lambda w: w.astype("complex64"), 4),
    (lambda w: 3 * w.astype("float32"), 4),
    (lambda w: w.astype("float32") * w[0], 4),
]


@pytest.mark.parametrize(("widen", "width"), WAYS)
def test_operations_that_pass_on_a_narrow_type(widen: Widen, width: int) -> None:
    """Views, slices and concatenations of converted values have the type before the conversion."""
    program = trace_program(widen, (jax.ShapeDtypeStruct((64, 64), "bfloat16"),), {})
    [output] = program.outputs
    dtype = widened_from(program).get(output) if isinstance(output, int) else None
    assert (4 if dtype is None else jnp.dtype(dtype).itemsize) == width


def _planned(mesh: Mesh | AbstractMesh, widen: Widen) -> tuple[Callable[..., Any], shardplan.Plan]:
    """A step that gathers weights behind their conversion, and its plan."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            wide = jax.lax.with_sharding_constraint(widen(w), NamedSharding(mesh, P(None, "x")))
            return jnp.sum(jnp.tanh(x @ wide) @ wide)

        return jax.grad(loss)(w).astype("float32")

    shapes = jax.ShapeDtypeStruct((64, 64), "bfloat16"), jax.ShapeDtypeStruct((4096, 64), "float32")
    return step, shardplan.plan(step, mesh, *shapes, pins={"0": P(None, "x"), "1": P("x")}, memory_limit=float("inf"))


def _for_each_reader(plan: shardplan.Plan) -> shardplan.Plan:
    """The plan with everything that is gathered gathered for each reader."""
    assignment = plan.schedule.assignment
    stored = {value: assignment.values[value] for value in assignment.copies}
    return with_schedule(plan, Schedule(plan.schedule.problem, replace(assignment, copies=stored)))


@compiles_for_gpus
@pytest.mark.parametrize(("widen", "width"), [WAYS[0], WAYS[2], WAYS[4]])
def test_compiled_gathers_of_converted_values(widen: Widen, width: int) -> None:
    """XLA sends the type before the conversion."""
    mesh = gpu_mesh("h100", (8,), ("x",))
    _, plan = _planned(mesh, widen)
    gathered = [sent.bytes for sent in plan.collectives if sent.kind == "all-gather"]
    assert gathered == [64 * 64 * width * 7 / 8]
    assert measure(plan.lower(mesh)).communication_bytes == plan.communication_bytes


@compiles_for_gpus
def test_several_collectives_on_a_converted_value() -> None:
    """XLA saw no conversion behind an all-to-all, and gathered twice as many bytes."""
    mesh = gpu_mesh("h100", (2, 4), ("x", "y"))

    def step(w: jax.Array) -> jax.Array:
        rows = jax.lax.with_sharding_constraint(w.astype("float32"), NamedSharding(mesh, P(("x", "y"), None)))
        return jax.lax.with_sharding_constraint(rows, NamedSharding(mesh, P(None, "y")))

    plan = shardplan.plan(step, mesh, jax.ShapeDtypeStruct((64, 64), "bfloat16"), pins={"0": P(("x", "y"))})
    size = 64 * 64 * 2
    assert [sent.bytes for sent in plan.collectives] == [size / 8 * 3 / 4, size / 4 / 2]
    assert measure(plan.lower(mesh)).communication_bytes == plan.communication_bytes


@compiles_for_gpus
def test_converted_values_with_further_readers() -> None:
    """XLA moved no conversion behind a gather that a sum reads too: twice as many bytes (a gradient of embeddings)."""
    mesh = gpu_mesh("h100", (2, 4), ("x", "y"))

    def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        columns = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, None, ("y", "x"))))
        wide = columns.astype("float32")
        return jax.lax.with_sharding_constraint(wide, NamedSharding(mesh, P(None, None, "y"))), jnp.sum(wide, axis=0)

    plan = shardplan.plan(step, mesh, jax.ShapeDtypeStruct((16, 64, 64), "bfloat16"), pins={"0": P(("y", "x"))})
    size = 16 * 64 * 64 * 2
    assert [sent.bytes for sent in plan.collectives][:2] == [size / 8 * 7 / 8, size / 4 / 2]
    assert measure(plan.lower(mesh)).communication_bytes == plan.communication_bytes


@compiles_for_gpus
def test_compiled_gathers_for_each_reader() -> None:
    """XLA sends the type before the conversion."""
    mesh = gpu_mesh("h100", (8,), ("x",))
    plan = _for_each_reader(_planned(mesh, WAYS[0][0])[1])
    gathered = [sent.bytes for sent in plan.collectives if sent.kind == "all-gather"]
    assert len(gathered) > 1 and {*gathered} == {64 * 64 * 2 * 7 / 8}
    assert measure(plan.lower(mesh)).communication_bytes == plan.communication_bytes


@pytest.mark.long
@pytest.mark.parametrize("widen", [WAYS[0][0], WAYS[4][0]])
def test_values_of_gathers_for_each_reader(widen: Widen) -> None:
    """The values are those of the unplanned step."""
    mesh = mesh_of((8,))
    step, plan = _planned(mesh, widen)
    w, x = (jax.random.normal(jax.random.key(n), (64 * 64**n, 64)) / 8 for n in range(2))
    arguments = w.astype("bfloat16"), x
    assert_equal_trees(run(_for_each_reader(plan), mesh, *arguments), step(*arguments), 1e-2)


def test_sums_of_converted_values() -> None:
    """The sum of parts that were converted does not fit the type that they had."""

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return (x @ w).astype("float32") + (2 * x @ w).astype("float32")

    shapes = [jax.ShapeDtypeStruct((64, 64), "bfloat16")] * 2
    pins = {"0": P(None, "x"), "1": P("x", None)}
    schedule = shardplan.plan(step, AbstractMesh((8,), ("x",)), *shapes, pins=pins, memory_limit=float("inf")).schedule
    sums = schedule.problem.deferred.values & widened_from(schedule.program).keys()
    assert sums and all(sent_dtype(schedule, value) is None for value in sums)
    problem = schedule.problem
    assert all(problem.sent_bytes[value] * problem.domain(value).width == 64 * 64 * 4 for value in sums)
