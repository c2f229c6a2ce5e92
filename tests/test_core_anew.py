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
from shardplan.anew import awaited
from shardplan.audit import measure
from shardplan.memory.accumulation import merged_anywhere
from shardplan.memory.bringing import computed_until
from shardplan.memory.gathering import combined_gathers
from shardplan.memory.graph import Graph
from shardplan.memory.hiding import hiding_order
from shardplan.memory.liveness import Lifetimes
from shardplan.memory.placing import through_values
from shardplan.memory.recomputing import kernels_in
from shardplan.memory.usages import Usages
from shardplan.schedule import Schedule
from shardplan.target import compile_for, gpu_mesh
from tests.core_programs import assert_equal_trees, mesh_of, run, with_schedule

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
    groups = [[gather.value for gather in group] for group in combined_gathers(schedule)]
    [together] = groups  # those of the forward pass: the others depend on each other
    assert together[1:] == [*weights[1:]]


def test_what_waits_for_a_gradient_begins_behind_it() -> None:
    _, schedule = _planned(4, 64, AbstractMesh((8,), ("x",)))
    order, sending = hiding_order(schedule, kernels_in(schedule))
    place = {index: number for number, index in enumerate(order)}
    waiting = [gather for gather in sending.begins if gather.alone is not None]
    checked = 0
    for gather in waiting:
        for other in awaited(schedule, schedule.program.operations[gather.alone or 0], gather.value):
            assert place[sending.begins[gather]] > place[schedule.program.makers[other.value].index]
            checked += 1
    assert checked == 3


def test_a_gather_waits_for_what_an_operand_shows_in_another_shape() -> None:
    """XLA takes the other shape out of the barrier: the product's own one shows the same value."""
    plan, schedule = _planned(4, 64, AbstractMesh((8,), ("x",)), _in_heads)
    for weight in plan.program.inputs[1:4]:
        backward = [o for o in plan.program.operations if o.primitive.name == "dot_general" and weight in o.operands][1]
        [other] = awaited(schedule, backward, weight)
        assert other.value not in backward.operands and plan.program.values[other.value].shape == (16, 4, 8, 8)


@pytest.mark.parametrize("between", [jnp.tanh, lambda y: y @ y])
def test_a_gather_stands_behind_what_comes_out_of_two_barriers(between: Callable[[jax.Array], jax.Array]) -> None:
    def step(w: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
        return between(x @ w) @ w @ v

    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    pins = {"0": PartitionSpec(None, "x"), "1": PartitionSpec(), "2": PartitionSpec("x", None)}
    mesh = AbstractMesh((8,), ("x",))
    plan = shardplan.plan(step, mesh, square, square, square, pins=pins, memory_limit=inf)
    assignment, [w, *_] = plan.schedule.assignment, plan.program.inputs
    schedule = Schedule(
        plan.schedule.problem, replace(assignment, copies=assignment.copies | {w: assignment.values[w]})
    )
    graph = Graph(schedule, kernels_in(schedule), [], [])
    [further] = [gather for gather in graph.gathers if gather.alone == 2]
    [first] = [gather for gather in graph.gathers if gather.alone == 0]
    assert graph.needs[graph.starts[graph.gathers[first]]] == set()
    needs, found = graph.needs[graph.starts[graph.gathers[further]]], 0
    while needs & graph.barriers.keys():
        [barrier] = needs
        assert ~graph.barriers[barrier] in through_values(graph)  # what comes out of it is taken at once
        [read] = graph.needs[barrier]
        needs, found = graph.needs[read], found + 1
    assert found == 2
    assert needs == {1}  # what the gather waits for


def test_what_is_gathered_for_each_product_merges_none() -> None:
    square = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    pins = {"0": PartitionSpec("x", None), "1": PartitionSpec(None, "x"), "2": PartitionSpec(None, "x")}
    arguments = (jax.ShapeDtypeStruct((64, 512), jnp.float32), square, square)
    mesh = AbstractMesh((8,), ("x",))
    plan = shardplan.plan(lambda x, w, v: (x @ w, x @ v), mesh, *arguments, pins=pins, memory_limit=inf)
    assignment, [x, *_] = plan.schedule.assignment, plan.program.inputs
    assert merged_anywhere(plan.schedule) == [[0, 1]]
    kept = assignment.copies | {x: assignment.values[x]}
    assert merged_anywhere(Schedule(plan.schedule.problem, replace(assignment, copies=kept))) == []


@pytest.mark.slow
def test_gathers_for_further_readers_change_nothing_that_is_computed() -> None:
    mesh = mesh_of((8,))
    plan, schedule = _planned(4, 64, mesh)
    drawn = with_schedule(plan, schedule)
    keys = jax.random.split(jax.random.key(0), 5)
    *weights, x = (jax.random.normal(key, (64, 64)) / 8 for key in keys)
    assert_equal_trees(run(drawn, mesh, weights, x), _step(weights, x))


def test_what_is_brought_for_a_kernel_counts_as_long_as_that_may_compute_it() -> None:
    """What a kernel brings to another layout, which no schedule before has done: until the last kernel that computes on
    the way what is made of it."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        wide = w.T * 2
        return jnp.tanh(x @ wide) @ wide

    square, rows = (jax.ShapeDtypeStruct((n, 64), jnp.float32) for n in (64, 8192))
    pins = {"0": PartitionSpec("x", None), "1": PartitionSpec("x", None)}
    plan = shardplan.plan(step, AbstractMesh((2,), ("x",)), square, rows, pins=pins)
    problem, operations = plan.schedule.problem, plan.program.operations
    lifetimes = Lifetimes(problem, range(len(operations)))
    transposed, doubled = operations[:2]
    assert lifetimes.fused >= {transposed.index} and doubled.results[0] in lifetimes.held
    assert computed_until(lifetimes, transposed) == doubled.index
    assert computed_until(lifetimes, doubled) == doubled.index
    usages = Usages(lifetimes, problem, frozenset())
    weight = problem.variables.values[plan.program.inputs[0]]
    spans = [(usage.start, usage.end) for usage in usages._brought(range(3)) if usage.u == weight]
    assert (transposed.index, doubled.index + 1) in spans


def test_until_when_operations_are_computed_is_that_of_the_last_kernel_that_their_results_lead_to() -> None:
    plan, schedule = _planned(4, 64, AbstractMesh((8,), ("x",)), _in_heads)
    kernels = kernels_in(schedule)
    lifetimes = Lifetimes(plan.schedule.problem, hiding_order(schedule, kernels)[0], kernels)
    later = 0
    for operation in lifetimes.order:
        seen, stack = {operation.index}, [operation]
        while stack:
            made = stack.pop()
            if made.index in lifetimes.fused and lifetimes.held.keys().isdisjoint(made.results):
                readers = [o for result in made.results for o in lifetimes.readers.get(result, ())]
                stack += [o for o in readers if o.index not in seen]
                seen.update(o.index for o in readers)
        until = max(lifetimes.place[index] for index in seen)
        assert computed_until(lifetimes, operation) == until
        later += until > lifetimes.place[operation.index]
    assert later > 4


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
