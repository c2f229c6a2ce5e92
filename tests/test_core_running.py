"""Sums of products that are kept running within a memory limit: which they are, what they save, and what XLA makes."""

from importlib.util import find_spec
from math import inf

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import shardplan
from shardplan.memory.accumulation import accumulations, merged_anywhere, waiting_for_sums
from shardplan.memory.graph import Graph
from shardplan.memory.merging import merge_nodes
from shardplan.memory.recomputing import adding_products, kernels_in
from shardplan.memory.unshared import read_behind_sum
from shardplan.running import lying_until_scattered, running_sums, sums_of_products
from tests.core_programs import assert_equal_trees, mesh_of, run

compiles_for_gpus = pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")

_STEPS = 6


def _recurrent(weight, x):
    """A gradient step on a weight that every timestep reads: `[width, gates, width]`, `[batch, width]`."""

    def loss(weight):
        y = x
        for _ in range(_STEPS):
            y = jnp.tanh(jnp.einsum("bi,igh->bgh", y, weight)).sum(axis=1)
        return jnp.sum(y)

    return weight - 0.1 * jax.grad(loss)(weight)


def _gated(weights, x):
    """A gradient step on two weights that every timestep reads, whose products XLA merges."""

    def loss(weights):
        y = x
        for _ in range(_STEPS):
            y = jnp.tanh(y @ weights[0]) * jax.nn.sigmoid(y @ weights[1])
        return jnp.mean(y)

    return jax.tree.map(lambda weight, slope: weight - 0.1 * slope, weights, jax.grad(loss)(weights))


def _stacked(weights, x):
    """A gradient step on two layers: a state is read by its own layer, a timestep later, and by the layer above."""

    def loss(weights):
        below = above = x
        for _ in range(_STEPS):
            below = jnp.tanh(below @ weights[0])
            above = jnp.tanh(above @ weights[1] + below @ weights[2])
        return jnp.mean(above)

    return jax.tree.map(lambda weight, slope: weight - 0.1 * slope, weights, jax.grad(loss)(weights))


def _shapes(width, batch):
    return jax.ShapeDtypeStruct((width, 2, width), "float32"), jax.ShapeDtypeStruct((batch, width), "float32")


def _additions(program):
    """Those of the weight's gradients."""
    shape = program.values[program.inputs[0]].shape
    return [
        o for o in program.operations if o.primitive.name == "add_any" and program.values[o.results[0]].shape == shape
    ]


def _sums(step, *shapes):
    plan = shardplan.plan(step, 1, *shapes)
    return sums_of_products(plan.schedule.problem), plan.program


def test_sums_that_one_further_addition_reads_can_be_kept_running():
    sums, program = _sums(_recurrent, *_shapes(1024, 64))
    additions = _additions(program)
    assert len(additions) == _STEPS - 1
    assert {*sums.running} == {o.results[0] for o in additions[:-1]}  # the last one is what the update reads
    products = {o.results[0]: o for o in program.operations if o.primitive.name == "dot_general"}
    taken = [products[program.makers[o.operands[1]].operands[0]].index for o in additions[1:]]
    assert sums.before == {index: o.results[0] for index, o in zip(taken, additions, strict=False)}
    # the products have the weight's dimensions as gates, width (of the state), width (of what is read)
    assert {*sums.lying.values()} == {(1, 2, 0)} and additions[-1].results[0] in sums.lying


def test_a_residual_stream_three_products_and_small_sums_are_left_to_xla():
    def residual(x, *weights):
        for w in weights:
            x = x + jnp.tanh(x) @ w  # which the next layer reads twice
        return x

    def three(x, w, v, u):
        return jnp.tanh(jnp.cos(x) @ w + jnp.sin(x) @ v + x @ u)

    square = jax.ShapeDtypeStruct((1024, 1024), "float32")
    assert not _sums(residual, *[square] * 6)[0].running
    assert not _sums(three, *[square] * 4)[0].running
    assert not _sums(_recurrent, *_shapes(64, 64))[0].running


def test_a_step_that_fits_leaves_its_sums_to_xla_and_within_a_limit_they_are_kept_running(tmp_path):
    mesh, shapes = AbstractMesh((4, 2), ("x", "y")), _shapes(2048, 256)
    free = shardplan.plan(_recurrent, mesh, *shapes, donate_argnums=0, memory_limit=inf)
    assert not free.recipe.running and not running_sums(free.schedule)
    limited = shardplan.plan(_recurrent, mesh, *shapes, donate_argnums=0, memory_limit=0.9 * free.peak_bytes)
    assert limited.recipe.running and running_sums(limited.schedule)
    assert limited.peak_bytes <= 0.9 * free.peak_bytes
    assert limited.communication_bytes == free.communication_bytes  # the layouts need not change
    limited.save(tmp_path / "plan.json")
    again = shardplan.Plan.load(tmp_path / "plan.json", mesh).bind(_recurrent, *shapes)
    assert running_sums(again.schedule) == running_sums(limited.schedule)


def test_every_product_of_a_running_sum_is_added_up_in_place():
    def counted(limit):
        plan = shardplan.plan(_recurrent, 1, *_shapes(1024, 64), memory_limit=limit)
        sums = {operation.index for operation in _additions(plan.program)}
        return len(sums & accumulations(plan.schedule).keys()), plan.peak_bytes

    without, most = counted(inf)
    running, least = counted(0.75 * most)
    assert (without, running) == (_STEPS // 2, _STEPS - 1)
    assert least < 0.75 * most


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"x": 8}, {"x": 2, "y": 4}], ids=str)
def test_a_step_with_running_sums_computes_what_it_does_without_a_plan(sizes):
    mesh = mesh_of([*sizes.values()])
    weight, x = (jax.random.normal(jax.random.key(n), s.shape) / 32 for n, s in enumerate(_shapes(2048, 8)))
    free = shardplan.plan(_recurrent, mesh, weight, x, memory_limit=inf)
    plan = shardplan.plan(_recurrent, mesh, weight, x, memory_limit=0.8 * free.peak_bytes)
    assert plan.recipe.running and not waiting_for_sums(plan.schedule)  # each product adds itself to the sum in place
    assert_equal_trees(run(plan, mesh, weight, x), _recurrent(weight, x))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"x": 8}, {"x": 2, "y": 4}], ids=str)
def test_a_product_that_is_merged_waits_for_the_sum_that_takes_it_in(sizes):
    mesh, keys = mesh_of([*sizes.values()]), jax.random.split(jax.random.key(0), 3)
    square, batch = (2048, 2048), (64, 2048)
    *weights, x = (jax.random.normal(key, shape) / 32 for key, shape in zip(keys, (square, square, batch), strict=True))
    free = shardplan.plan(_gated, mesh, weights, x, memory_limit=inf)
    plan = shardplan.plan(_gated, mesh, weights, x, memory_limit=0.9 * free.peak_bytes)
    assert plan.recipe.running and not waiting_for_sums(free.schedule)
    waiting = waiting_for_sums(plan.schedule)
    assert len(waiting) == 2 * (_STEPS - 2)  # each product of both weights but the first two
    assert_equal_trees(run(plan, mesh, weights, x), _gated(weights, x))
    behind = [line for line in plan.lower(mesh).as_text().splitlines() if "optimization_barrier" in line]
    assert sum(line.count("tensor<") == 2 for line in behind) == len(waiting)
    graph = Graph(plan.schedule, adding_products(plan.schedule, kernels_in(plan.schedule)), [], [])
    for index, value in waiting.items():
        assert plan.program.makers[value].primitive.name == "add_any"
        assert plan.program.operations[index].primitive.name == "dot_general"
        assert graph.maker(value) in graph.needs[index]


def test_what_is_read_behind_a_sum_merges_no_products_and_is_put_side_by_side_behind_it():
    mesh, weight = AbstractMesh((8,), ("x",)), jax.ShapeDtypeStruct((2048, 2048), "float32")
    shapes = [weight] * 3, jax.ShapeDtypeStruct((64, 2048), "float32")
    free = shardplan.plan(_stacked, mesh, *shapes, memory_limit=inf)
    schedule = shardplan.plan(_stacked, mesh, *shapes, memory_limit=0.9 * free.peak_bytes).schedule
    operations, waiting = schedule.program.operations, waiting_for_sums(schedule)
    groups = [group for group in merged_anywhere(schedule) if waiting.keys() >= {*group}]
    behind = [[operations[i].operands[read_behind_sum(schedule.program, operations[i])] for i in g] for g in groups]
    assert groups and all(len(group) == 2 == len({*read}) for group, read in zip(groups, behind, strict=True))
    kernels = adding_products(schedule, kernels_in(schedule))
    assert not {index for group in groups for index in group} & {one.product for one in kernels.adding.values()}
    graph = Graph(schedule, kernels, [], [])
    merge_nodes(graph)
    for index in (index for group in groups for index in group):
        beside = graph.beside[index, read_behind_sum(schedule.program, operations[index])]
        assert graph.maker(waiting[index]) in graph.needs[beside]


@pytest.mark.slow
def test_a_sum_that_is_scattered_lies_as_its_products_until_then():
    mesh, shapes = mesh_of([4, 2]), _shapes(1024, 512)
    pins = {"0": PartitionSpec(None, None, ("y", "x")), "1": PartitionSpec("x", None)}
    free = shardplan.plan(_recurrent, mesh, *shapes, pins=pins, memory_limit=inf)
    plan = shardplan.plan(_recurrent, mesh, *shapes, pins=pins, memory_limit=0.9 * free.peak_bytes)
    scattered = [sent for sent in plan.schedule.collectives() if sent.step.kind == "reduce-scatter"]
    orders = [
        [lying_until_scattered(one.schedule, sent.tensor.index, [sent.step]) for sent in scattered]
        for one in (free, plan)
    ]
    assert not any(orders[0]) and (1, 2, 0) in orders[1]
    weight, x = (jax.random.normal(jax.random.key(n), s.shape) / 32 for n, s in enumerate(shapes))
    assert_equal_trees(run(plan, mesh, weight, x), _recurrent(weight, x))


@compiles_for_gpus
@pytest.mark.long
def test_xla_holds_one_sum_and_the_product_that_it_takes_in():
    mesh, shapes = AbstractMesh((2, 4), ("x", "y")), _shapes(4096, 2048)
    free = shardplan.plan(_recurrent, mesh, *shapes, memory_limit=inf)
    plan = shardplan.plan(_recurrent, mesh, *shapes, memory_limit=0.9 * free.peak_bytes)
    assert plan.recipe.running
    most, compiled = (shardplan.audit(one).compiled for one in (free, plan))
    assert compiled.communication_bytes == pytest.approx(plan.communication_bytes, rel=0.01)
    assert compiled.memory.peak <= 1.05 * 0.9 * free.peak_bytes
    assert compiled.memory.peak < 0.9 * most.memory.peak
    assert compiled.memory.peak == pytest.approx(plan.peak_bytes, rel=0.1)
