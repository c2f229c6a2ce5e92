"""Predicted peaks: parts of what is in memory, which products read as they are, moved or computed for them alone."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.memory.bringing import computed_in_parts
from shardplan.memory.hiding import hiding_order
from shardplan.memory.liveness import Lifetimes, memory_held
from shardplan.memory.recomputing import kernels_in
from shardplan.schedule import Schedule

MESH = jax.sharding.AbstractMesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.parametrize("sequence", [True, False])
def test_parts_of_one_product_are_copied_by_kernels_that_write_what_later_products_read_too(sequence):
    def step(x, weights):
        queries, keys, _ = (part.reshape(2, 64, 4, 32) for part in jnp.split(x @ weights, 3, axis=-1))
        scores = jnp.einsum("bnhd,bmhd->bhnm", queries, keys)
        return scores, jnp.einsum("bhnm,bmhd->bhnd", jnp.tanh(scores), keys)

    x = jax.ShapeDtypeStruct((2, 64, 128) if sequence else (128, 128), "float32")
    problem = shardplan.plan(step, 1, x, jax.ShapeDtypeStruct((128, 384), "float32")).schedule.problem
    lifetimes = Lifetimes(problem, range(len(problem.program.operations)))
    made, *places = [o.index for o in problem.program.operations if o.primitive.name == "dot_general"]
    found = {operand.order: (copy.first, copy.last) for operand, copy in lifetimes.copies.items() if copy.position}
    # queries are copied in the order in which the second product reads the keys
    assert found == {(0, 2, 3, 1): (places[0],) * 2, (0, 2, 1, 3): (places[0] if sequence else places[1], places[1])}
    assert lifetimes.held[problem.program.operations[made].results[0]].end == places[not sequence] - 1


@pytest.mark.parametrize(("groups", "together"), [(4, True), (16, False)])
def test_kernels_that_only_move_are_one_where_none_goes_in_tiles(groups, together):
    def step(x, weights, keys, gradients):
        queries = x @ weights
        scores = jnp.einsum("bnkgd,bmkd->bkgnm", queries, keys)
        return scores, jnp.einsum("bnkgd,bkgnm->bmkd", queries, gradients)

    shapes = (2, 64, 2, groups, 64), (64, 64), (2, 64, 2, 64), (2, 2, groups, 64, 64)
    arguments = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    problem = shardplan.plan(step, 1, *arguments).schedule.problem
    lifetimes = Lifetimes(problem, range(len(problem.program.operations)))
    queries = problem.program.operations[0].results[0]
    first, second = [copy for operand, copy in lifetimes.copies.items() if operand.value == queries]
    assert (first.first == second.first) == together and first.last < second.last


@pytest.mark.parametrize("whole", [True, False])
def test_a_part_of_what_a_kernel_computes_is_computed_for_the_library_that_reads_it(whole):
    rows = jax.sharding.NamedSharding(MESH, jax.P("x", None))

    def step(x, w):
        first = jax.lax.linalg.cholesky(x)
        y = jnp.tanh(first)
        second = jax.lax.linalg.cholesky(y, symmetrize_input=not whole)  # which is computed on the way, of all of y
        return second, jax.lax.with_sharding_constraint(y @ w, rows)

    square = jax.ShapeDtypeStruct((512, 512), "float32")
    schedule = shardplan.plan(step, MESH, square, square, pins={"0": jax.P(), "1": jax.P()}).schedule
    lifetimes = Lifetimes(schedule.problem, range(len(schedule.program.operations)))
    named = [("cholesky", 0), ("tanh", 0), ("dot_general", 0)]
    operations = schedule.program.operations
    source, made, product = ([o for o in operations if o.primitive.name == name][n] for name, n in named)
    [computed] = made.results
    in_parts = {computed: -1}, {source.results[0]: lifetimes.place[product.index]}
    # where the whole is in memory for longer than what it is computed from, the part is taken of it
    assert computed_in_parts(lifetimes, schedule) == (({}, {}) if whole else in_parts)
    held = {
        one.value: one.lifetime.end for one in memory_held(lifetimes, schedule, frozenset()) if one.layout == ((), ())
    }
    assert held.get(computed, -1) == (lifetimes.place[product.index] if whole else -1)


@pytest.mark.parametrize("columns", [32, 64])
def test_parts_are_cut_out_each_for_what_reads_it_first(columns):
    def step(x, w):
        made = x @ w
        first, second = jnp.split(made, [columns], axis=1)
        return jax.lax.sort(first), jax.lax.sort(jnp.tanh(x @ w.T[:, :64])), jax.lax.sort(second)

    shapes = [jax.ShapeDtypeStruct((128, 128), "float32")] * 2
    problem = shardplan.plan(step, 1, *shapes).schedule.problem
    lifetimes = Lifetimes(problem, range(len(problem.program.operations)))
    operations = problem.program.operations
    early, _, late = [lifetimes.place[o.index] for o in operations if o.primitive.name == "sort"]
    first, second = next(o.results for o in operations if o.primitive.name == "split")
    assert (lifetimes.held[first].start, lifetimes.held[second].start) == (early, late)
    assert lifetimes.held[operations[0].results[0]].end == late


def test_a_part_that_is_sent_is_there_beside_what_is_brought():
    def step(x, w):
        made = jnp.sin(x @ w)
        first, second = jnp.split(made, [96], axis=1)
        return jax.lax.sort(first, dimension=1), jax.lax.sort(jnp.sort(second, axis=0), dimension=0), jnp.sum(made)

    pins, square = {"0": jax.P("x", None), "1": jax.P()}, jax.ShapeDtypeStruct((128, 128), "float32")
    schedule = shardplan.plan(step, MESH, square, square, pins=pins).schedule
    operations, values = schedule.program.operations, dict(schedule.assignment.values)
    cut = next(o for o in operations if o.primitive.name == "split")
    values[cut.results[1]] = ((), (0,))  # stored as the columns that the sorts read
    schedule = Schedule(schedule.problem, replace(schedule.assignment, values=values))
    lifetimes = Lifetimes(schedule.problem, range(len(operations)), kernels_in(schedule))
    reader = next(o for o in operations if cut.results[1] in o.operands)
    spans = [one.lifetime for one in memory_held(lifetimes, schedule, frozenset()) if one.value == cut.results[1]]
    assert [(span.start, span.end) for span in spans] == [(lifetimes.place[reader.index],) * 2] * 2


def test_what_merged_products_read_side_by_side_has_no_copy_besides_and_later_ones_turn_it_anew():
    def loss(weights, x):
        gates, ups = (jnp.einsum("btd,edm->ebtm", x, jnp.sin(weight)) for weight in weights)
        return jnp.sum(jnp.tanh(gates) * ups)

    weights, x = [jax.ShapeDtypeStruct((4, 64, 64), "bfloat16")] * 2, jax.ShapeDtypeStruct((8, 64, 64), "bfloat16")
    schedule = shardplan.plan(jax.grad(loss, (0, 1)), 1, weights, x).schedule
    kernels = kernels_in(schedule)
    order, sending = hiding_order(schedule, kernels)
    lifetimes = Lifetimes(schedule.problem, order, kernels, sending)
    operations = schedule.program.operations
    side_by_side = {operations[index].operands[place] for index, place in sending.side_by_side}
    together = [lifetimes.place[index] for index, _ in sending.side_by_side]
    turned = [copy for operand, copy in lifetimes.copies.items() if operand.value in side_by_side]
    assert not sending.side_by_side & lifetimes.from_copies.keys()
    assert turned and all(copy.first > min(together) for copy in turned)


def test_a_kernel_that_goes_on_with_a_part_computes_that_part_alone():
    split = jax.sharding.NamedSharding(MESH, jax.P(None, "x", None))

    def step(x, places):
        rows = jax.lax.with_sharding_constraint(x[places].reshape(4, 256, 512), split)
        return jax.lax.scan(lambda carry, row: (carry + jnp.sum(jnp.sin(row)), None), 0.0, rows)[0]

    x, places = jax.ShapeDtypeStruct((1024, 512), jnp.float32), jax.ShapeDtypeStruct((1024,), jnp.int32)
    plan = shardplan.plan(step, MESH, x, places, pins={"0": jax.P(), "1": jax.P()})
    whole, stored = 4 * 1024 * 512, 4 * 256 * 512 / 8  # what is summed up to one number, in one block, is stored
    assert plan.peak_bytes == pytest.approx(whole * (1 + 1 / 8) + stored, rel=0.05)  # compiled: 2.43 MB
