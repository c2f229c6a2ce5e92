"""Predicted order: kernels that XLA:GPU makes one, with several results."""

from importlib.util import find_spec

import jax
import jax.numpy as jnp
import optax
import pytest

import shardplan
from shardplan.audit import audit
from shardplan.memory.graph import Graph
from shardplan.memory.joining import join_kernels
from shardplan.memory.recomputing import kernels_of
from shardplan.target import gpu_mesh


def _joined(step, *shapes):
    """The kernels of a step on one device, each as a set of operations, and the operations by their names."""
    plan = shardplan.plan(step, 1, *(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes))
    kernels = kernels_of(plan.schedule.problem)
    graph = Graph(plan.schedule, kernels, [], [])
    join_kernels(graph, kernels)
    assert len(graph.in_order()) == len(graph.needs)  # none waits for itself
    named = {}
    for operation in plan.program.operations:
        named.setdefault(operation.primitive.name, []).append(operation.index)
    return [{node, *graph.joined.get(node, ())} for node in graph.needs], named


@pytest.mark.parametrize(("scale", "alike"), [((512,), True), ((), False)])
def test_kernels_as_large_that_read_one_vector_are_one(scale, alike):
    def step(scale, x, y, a, b, c, d):
        x, y = x @ a, y @ b
        return jnp.tanh(x * scale) @ c, jnp.tanh(y * scale) @ d

    joined, named = _joined(step, scale, *[(4096, 512)] * 2, *[(512, 512)] * 4)
    assert ({*named["tanh"]} in joined) == alike


@pytest.mark.parametrize(("starts", "one"), [((0, 512), False), ((0, 256), True)])
def test_kernels_that_read_parts_of_one_value_are_one_where_these_overlap(starts, one):
    """As of the layers' weights, stacked, that a step which is written out reads one after another."""

    def step(stacked, x):
        for start in starts:
            x = x @ jnp.sin(stacked[start : start + 512])
        return x

    joined, named = _joined(step, (1024, 512), (4096, 512))
    assert ({*named["sin"]} in joined) == one


def test_what_two_sums_and_a_product_read_is_made_with_the_first_sum():
    def step(x, y, a, b):
        x, y = x @ a, y @ b
        doubled = 2 * jnp.tanh(x)
        return jnp.sum(doubled * y, axis=0), jnp.sum(doubled), doubled @ a

    joined, named = _joined(step, *[(8192, 512)] * 2, *[(512, 512)] * 2)
    columns, total = named["reduce_sum"]
    assert {named["mul"][0], columns} in joined and {total} in joined  # which reduces other dimensions


@pytest.mark.parametrize("needed", [False, True])
def test_a_sum_is_part_of_the_next_kernel_that_does_not_need_it(needed):
    def step(x, w, v):
        h = x @ w
        rows = jnp.sum(jnp.exp(h), axis=1, keepdims=True)
        total = jnp.sum(jnp.sqrt(rows))  # which stands before the next kernel
        k = x @ v  # behind the sum, so that what reads this is no part of the sum's kernel
        return total, jnp.tanh(h * k * (total if needed else 2)) @ v

    joined, named = _joined(step, *[(512, 512)] * 3)
    assert ({named["tanh"][0], named["reduce_sum"][0]} in joined) != needed


@pytest.mark.parametrize("rows", [4096, 8192])
def test_a_sum_for_a_bias_is_part_of_the_kernel_that_makes_it_where_it_keeps_the_device_busy(rows):
    def loss(layers, x):
        for w, bias in layers:
            x = jnp.tanh(x @ w + bias)
        return jnp.sum(x)

    weights, bias, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((256, 256), (256,), (rows, 256)))
    schedule = shardplan.plan(jax.grad(loss), 1, [(weights, bias)] * 3, x).schedule
    kernels = kernels_of(schedule.problem)
    graph = Graph(schedule, kernels, [], [])
    join_kernels(graph, kernels)
    assert len(graph.joined) == (3 if rows == 8192 else 0)


@pytest.mark.parametrize("unit", [jax.nn.relu, jax.nn.elu])
def test_what_takes_long_to_compute_is_computed_once_for_each_of_two_results_no_more(unit):
    def pair(x, y, w):
        left = unit(x @ w) - unit(y @ w)
        slope = jnp.where(x @ w > 0, left, left * 0.5)
        return jnp.sum(left**2), jnp.sum(slope, axis=0), slope @ w, left

    joined, named = _joined(pair, (16384, 512), (16384, 512), (512, 512))
    sub, slope = named["sub"][0], named["select_n"][-1]
    assert any({sub, slope} <= parts for parts in joined) == (unit is jax.nn.relu)


@pytest.mark.parametrize("rows", [False, True])
def test_kernels_that_go_through_rows_are_one_with_no_other(rows):
    def step(x, w):
        h = x @ w
        left = h - jnp.max(h, axis=1, keepdims=True) if rows else 2 * h
        return jnp.sum(left * h, axis=0), jnp.exp(left) @ w

    joined, _ = _joined(step, *[(512, 512)] * 2)
    assert any(len(parts) > 1 for parts in joined) != rows


def test_a_view_is_no_kernel():
    def step(x, w, v, u):
        h = x @ w
        return jnp.tanh(h) @ v, jax.lax.stop_gradient(h).T @ u

    joined, named = _joined(step, *[(512, 512)] * 4)
    [view] = named["stop_gradient"]
    assert all(view not in parts for parts in joined)


def test_a_kernel_ends_with_another_shape_of_what_it_computes():
    def step(x, w, v):
        return jnp.tanh(x @ w).reshape(256, 1024) @ v

    joined, named = _joined(step, *[(512, 512)] * 2, (1024, 512))
    assert {named["reshape"][0]} in joined and {named["tanh"][0]} not in joined


def test_new_moments_come_with_the_update_that_reads_them_and_bias_corrections_with_that_of_one_number():
    def step(count, w, bias, moment, least, x, y):
        gradient, change = x.T @ y, jnp.sum(y, keepdims=True)[0]
        moment, least, scale = 0.9 * moment + gradient, 0.9 * least + change, jnp.sqrt(count + 1)
        return w - moment / scale, bias - least / scale, moment, least, scale

    shapes = (), (64, 64), (1,), (64, 64), (1,), (4096, 64), (4096, 64)
    plan = shardplan.plan(step, 1, *(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes))
    kernels, operations = kernels_of(plan.schedule.problem), plan.program.operations
    graph = Graph(plan.schedule, kernels, [], [])
    join_kernels(graph, kernels)
    makers = {result: operation.index for operation in operations for result in operation.results}
    w, bias, moment, least, scale = (makers[output] for output in plan.program.outputs)
    kernels = [{node, *parts} for node, parts in graph.joined.items()]
    assert {w, moment} in kernels and any({bias, least, scale} <= parts for parts in kernels)


@pytest.mark.parametrize(("rows", "together"), [(8192, True), (2048, False)])
def test_a_product_of_rows_and_a_vector_is_added_up_by_the_kernel_that_makes_what_else_reads_the_rows(rows, together):
    """The gradients of a layer of one number for each row, and of the layer before: their sums go down the columns.
    Of fewer rows, a kernel multiplies first."""

    def step(weights, x, bias, gradients):
        made = x @ weights
        before = jnp.tanh(made) * gradients[:, None]
        return jnp.einsum("nd,n->d", made, gradients), jnp.sum(before, axis=0), before @ weights.T + bias

    joined, named = _joined(step, (512, 512), (rows, 512), (512,), (rows,))
    [alone] = named["reduce_sum"]
    assert any({alone, product} <= kernel for kernel in joined for product in named["dot_general"]) == together


@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
@pytest.mark.parametrize("classes", [1024, 8192])
def test_the_largest_logits_are_found_with_the_sum_of_their_exponentials(classes):
    """How often the largest is the right one keeps no logits in memory: .78 and .76 of what was predicted before."""

    def step(w, x, labels):
        def loss(w):
            logits = (x @ w).astype("float32")
            right = jnp.mean(jnp.argmax(logits, axis=-1) == labels)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), right

        return jax.grad(loss, has_aux=True)(w)

    shapes, dtypes = ((512, classes), (16, 1024, 512), (16, 1024)), ("bfloat16", "bfloat16", "int32")
    mesh = gpu_mesh("h100", (1,), ("x",))
    plan = shardplan.plan(step, mesh, *map(jax.ShapeDtypeStruct, shapes, dtypes))
    assert audit(plan, mesh=mesh).compiled.memory.peak / plan.peak_bytes == pytest.approx(1, abs=0.02)
