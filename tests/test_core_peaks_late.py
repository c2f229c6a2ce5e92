"""Predicted peaks where loops send after they are over, fill stacks that begin early, or have one iteration alone."""

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardplan
from shardplan.audit import measure
from shardplan.memory.graph import Graph
from shardplan.memory.hiding import hiding_order
from shardplan.memory.liveness import Lifetimes, memory_held
from shardplan.memory.pipelining import peeled_loops, sent_late
from shardplan.memory.recomputing import kernels_in, kernels_of
from shardplan.memory.sizes import bytes_in
from shardplan.plan import Plan
from shardplan.target import gpu_mesh

compiles_for_gpus = pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")

ROWS, COLUMNS = jax.P(("x", "y")), jax.P(None, None, ("x", "y"))


def _shape(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def _compiled(plan: Plan, mesh: Any) -> int:
    return measure(plan.lower(mesh)).memory.peak


@compiles_for_gpus
def test_a_stack_begins_once_what_its_loop_reads_is_there_also_while_another_loop_runs() -> None:
    """1.05 times what was counted before."""

    def step(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        def layer(carry: jax.Array, w: jax.Array) -> Any:
            carry = jnp.tanh(carry @ w)
            return carry, carry

        first = jnp.sum(x[0]) + jnp.sum(y[0])
        a, b = (jax.lax.scan(layer, z * first, w)[1] for z in (x, y))
        return jnp.sum(a, 0).sum() * jnp.sum(b**2)

    mesh = gpu_mesh("h100", (2, 4), ("x", "y"))
    shapes = _shape(8, 512, 512), _shape(65536, 512), _shape(65536, 512)
    plan = shardplan.plan(step, mesh, *shapes, pins={"0": jax.P(), "1": ROWS, "2": ROWS})
    assert _compiled(plan, mesh) == pytest.approx(plan.peak_bytes, rel=0.01)


@compiles_for_gpus
def test_copies_of_what_is_gathered_at_the_end_are_made_while_the_last_is_gathered() -> None:
    """What is gathered before is there until then: 1.12 times what was counted before."""

    def tower(weights: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> Any:
            return x + jax.nn.gelu(x @ w["a"]) @ w["b"], None

        mean = jax.lax.scan(jax.checkpoint(layer), x, weights)[0].mean(1)
        return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)

    def loss(weights: Any, xs: Any) -> jax.Array:
        first, second = map(tower, weights, xs)
        return -jnp.sum(jax.nn.log_sigmoid(first @ second.T))

    def step(weights: Any, *xs: jax.Array) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, xs))

    mesh, pins = gpu_mesh("h100", (2, 4), ("x", "y")), {"0/*": jax.P(), "1": ROWS, "2": ROWS}
    weights = [{"a": _shape(8, 512, 2048), "b": _shape(8, 2048, 512)}] * 2
    shapes = _shape(256, 64, 512), _shape(256, 16, 512)
    plan = shardplan.plan(step, mesh, weights, *shapes, pins=pins, donate_argnums=0)
    assert _compiled(plan, mesh) == pytest.approx(plan.peak_bytes, rel=0.05)


def _of_layers(stages: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: Any) -> Any:
        return jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]), None

    for stage in stages:
        x = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, stage)[0]
    return jnp.sum(x**2)


def _descend(stages: Any, x: jax.Array) -> Any:
    return jax.tree.map(lambda w, g: w - 0.1 * g, stages, jax.grad(_of_layers)(stages, x))


@compiles_for_gpus
def test_what_a_scan_of_one_iteration_computes_again_is_computed_once() -> None:
    """1.44 times what was counted before, when such a scan was a loop to the planner alone."""
    mesh = gpu_mesh("h100", (2, 4), ("x", "y"))
    stages = [{"a": _shape(1, 256, 2048), "b": _shape(1, 2048, 256)}] * 3
    pins = {"0/*": jax.P(), "1": ROWS}
    plan = shardplan.plan(_descend, mesh, stages, _shape(65536, 256), pins=pins, donate_argnums=0)
    names = [operation.primitive.name for operation in plan.program.operations]
    assert "scan" not in names and names.count("tanh") == 6
    assert _compiled(plan, mesh) == pytest.approx(plan.peak_bytes, rel=0.01)


def test_a_scan_of_one_iteration_gives_what_it_gives_unplanned() -> None:
    def step(x: jax.Array, w: jax.Array) -> Any:
        def body(carry: Any, each: Any) -> Any:
            total, key = carry
            key, own = jax.random.split(key)
            total = jnp.tanh(total @ each[0]) + each[1]
            return (total, key), (total * 2, jax.random.bits(own, (4,)))

        found = jax.lax.scan(body, (x, jax.random.key(3)), (w, jnp.ones((1, 16))), reverse=True)
        return found[0][0], found[1]

    mesh = jax.make_mesh((2, 4), ("x", "y"))
    args = np.linspace(-1, 1, 8 * 16).reshape(8, 16).astype("float32"), np.ones((1, 16, 16), "float32")
    wanted, found = jax.jit(step)(*args), shardplan.auto(step, mesh)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6), wanted, found)


def test_what_a_scan_of_one_iteration_reads_leads_to_the_line_of_the_scan() -> None:
    def step(x: jax.Array) -> Any:
        return jax.lax.scan(lambda carry, one: (carry + one, None), x[0], x)[0]

    program = shardplan.plan(step, 1, _shape(1, 8)).program
    assert all("test_core_peaks_late.py" in operation.source for operation in program.operations)


def test_a_sum_that_a_product_passes_on_is_sent_beside_the_next_iteration_and_after_the_last() -> None:
    """The gradient of what positions are projected with is a product of a sum over the batch that devices have parts
    of: the product's result is scattered."""

    def loss(weights: jax.Array, x: jax.Array, places: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> Any:
            return jnp.tanh(x * (places @ w)), None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)

    def step(weights: jax.Array, x: jax.Array, places: jax.Array) -> jax.Array:
        return weights - 0.1 * jax.grad(loss)(weights, x, places)

    mesh = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
    shapes = _shape(8, 64, 64), _shape(512, 2048, 64), _shape(2048, 64)
    plan = shardplan.plan(step, mesh, *shapes, pins={"0": COLUMNS, "1": ROWS, "2": jax.P()})
    [(loop, stacks)] = sent_late(plan.schedule).items()
    assert peeled_loops(plan.schedule) == {loop}
    assert [(step.kind, size) for step, size in stacks.values()] == [("reduce-scatter", 64 * 64 * 4)]
    graph = Graph(plan.schedule, kernels_of(plan.schedule.problem), [], [])
    [last] = [end for end, start in graph.starts.items() if loop in graph.needs[start]]
    [reader] = [node for node, needs in graph.needs.items() if last in needs]
    assert plan.program.operations[reader].primitive.name == "sub"


def test_zeros_for_a_loop_are_those_that_an_iteration_which_runs_apart_scatters_into() -> None:
    def loss(weights: jax.Array, x: jax.Array, order: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> Any:
            places = jnp.argsort(x[:, 0]) + order
            slots = jnp.zeros((5120, 1024)).at[places].set(x, mode="drop")  # whose gradient scatters integers as well
            return x + jnp.tanh(slots @ w).at[places].get(mode="fill", fill_value=0.0), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2)

    def step(weights: jax.Array, x: jax.Array, order: jax.Array) -> jax.Array:
        return weights - 0.1 * jax.grad(loss)(weights, x, order)

    mesh = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
    shapes = _shape(4, 1024, 1024), _shape(4096, 1024), _shape(4096, dtype="int32")
    plan = shardplan.plan(step, mesh, *shapes, pins={"0": COLUMNS, "1": jax.P(("y", "x")), "2": jax.P()})
    program, schedule = plan.program, plan.schedule
    bodies = {body for loop in peeled_loops(schedule) for body in program.operations[loop].bodies}
    [scatter] = [o for o in program.operations if o.region in bodies and o.primitive.name == "scatter"]
    kernels = kernels_in(schedule)
    order, sending = hiding_order(schedule, kernels)
    lifetimes = Lifetimes(schedule.problem, order, kernels, sending)
    before = lifetimes.place[scatter.index] - 1
    whole = bytes_in(schedule, scatter.results[0], schedule.assignment.values[scatter.results[0]])
    integers = {None, *(value for value, tensor in enumerate(program.values) if tensor.dtype == "uint32")}
    held = [one for one in memory_held(lifetimes, schedule, frozenset(), sending) if one.size == whole]
    there = [one for one in held if one.value in integers and one.lifetime.start <= before <= one.lifetime.end]
    assert len(there) == 1, there
