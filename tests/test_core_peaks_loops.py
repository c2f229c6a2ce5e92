"""Predicted peaks of loops and branches: carries updated in place, stacks, what is held while they run."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardplan
from shardplan.memory.bringing import brought_spans
from shardplan.memory.graph import Graph
from shardplan.memory.hiding import hiding_order
from shardplan.memory.liveness import WORKSPACE_BYTES, Lifetimes, memory_held
from shardplan.memory.pipelining import peeled_loops
from shardplan.memory.recomputing import kernels_in, kernels_of
from shardplan.memory.reductions import combined_reductions
from shardplan.memory.repeated import repeated_results
from shardplan.memory.slicing import is_sliced
from shardplan.memory.usages import Usages
from shardplan.schedule import Schedule
from shardplan.tracing import trace_program

MESH = jax.sharding.AbstractMesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def _square(size):
    return jax.ShapeDtypeStruct((size, size), jnp.float32)


def _peak_of(step, *arguments):
    """The predicted peak on one device, and the bytes of the first argument."""
    plan = shardplan.plan(step, jax.sharding.AbstractMesh((1,), ("x",)), *arguments)
    return plan.peak_bytes, plan.program.values[plan.program.inputs[0]].total_bytes


def test_a_copy_for_a_loop_is_held_while_the_loop_runs():
    n, mesh = 512, MESH
    rows = jax.ShapeDtypeStruct((8, 64 * n, n), jnp.float32)

    def step(w, xs):
        def body(total, x):
            return total + jnp.sum(jnp.tanh(x @ w) @ w), None

        return jax.lax.scan(body, 0.0, xs)[0]

    pins = {"0": jax.P("x", None), "1": jax.P(None, "x", None)}
    plan = shardplan.plan(step, mesh, _square(n), rows, pins=pins)
    assert [c.times for c in plan.collectives if c.kind == "all-gather"] == [1]
    size = 4 * n * n
    block = 64 * size // 8
    # w, its whole copy, the rows; a product with its operand
    assert plan.peak_bytes == pytest.approx(size / 8 + size + 8 * block + 2 * block + WORKSPACE_BYTES, rel=0.01)


@pytest.mark.parametrize("both", [False, True])
def test_what_a_loop_alone_reads_in_another_layout_is_gone_while_it_runs(both):
    n, rows = 512, jax.ShapeDtypeStruct((8192, 512), jnp.bfloat16)

    def step(w, x):
        halves = w.astype(jnp.bfloat16)
        x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ halves), None), x, None, length=3)
        return x @ halves if both else x

    plan = shardplan.plan(step, MESH, _square(n), rows, pins={"0": jax.P("x"), "1": jax.P("x")})
    [gather] = plan.collectives
    assert (gather.kind, gather.times) == ("all-gather", 1)
    half, block = 2 * n * n, 2 * 8192 * n // 8
    # the argument, what others read as well, what was gathered; the rows, the carry or result, and a product
    expected = (2 + both) * half / 8 + half + 3 * block + WORKSPACE_BYTES
    assert plan.peak_bytes == pytest.approx(expected, rel=0.001)
    lifetimes = Lifetimes(plan.schedule.problem, range(len(plan.program.operations)))
    assert len(lifetimes.handed) == (not both)
    tight = shardplan.plan(step, MESH, _square(n), rows, pins={"0": jax.P("x"), "1": jax.P("x")}, memory_limit=expected)
    assert tight.communication_bytes == plan.communication_bytes


def test_what_a_loop_reads_a_part_of_stays_while_it_runs():
    whole = jax.sharding.NamedSharding(MESH, jax.P())

    def step(w, x):
        made = jax.lax.with_sharding_constraint(w @ w, whole)
        return jax.lax.scan(lambda x, _: (jnp.tanh(x + made), None), x, None, length=3)[0]

    plan = shardplan.plan(step, MESH, _square(64), _square(64), pins={"0": jax.P(), "1": jax.P("x")})
    lifetimes = Lifetimes(plan.schedule.problem, range(len(plan.program.operations)))
    [(value, (link, before))] = lifetimes.handed.items()
    assert is_sliced(plan.schedule.assignment.values[value], plan.schedule.link_layout(link))
    spans = [held.lifetime for held in memory_held(lifetimes, plan.schedule, frozenset()) if held.value == value]
    assert all(span.end > before for span in spans)


def test_a_loop_updates_its_carry_in_place_and_the_carry_is_its_result():
    def step(cache, rows):
        def body(place, cache):
            return jax.lax.dynamic_update_slice(cache, rows * cache[:1, :1], (place, 0))

        return jax.lax.fori_loop(0, 8, body, cache)

    peak, cache = _peak_of(step, _square(512), jax.ShapeDtypeStruct((1, 512), jnp.float32))
    assert 2 * cache <= peak < 2.1 * cache  # the argument, which stays, and the result


def test_a_loop_that_reads_neighbours_of_its_carry_writes_the_new_one_elsewhere():
    def step(around, x):
        return jax.lax.fori_loop(0, 8, lambda _, carry: 0.5 * carry + (jnp.roll(carry, 1) if around else carry), x)

    for around, times in ((False, 2), (True, 3)):
        peak, x = _peak_of(functools.partial(step, around), _square(512))
        assert times * x <= peak < (times + 0.1) * x  # the argument, which stays, the carry, and the next one


def test_a_branch_brings_no_value_that_it_does_not_read():
    def step(which, x):
        return jax.lax.cond(which, lambda x: x @ x, lambda x: jnp.ones_like(x), x)

    plan = shardplan.plan(step, 1, jax.ShapeDtypeStruct((), jnp.bool_), _square(64))
    lifetimes = Lifetimes(plan.schedule.problem, range(len(plan.program.operations)))
    [branches] = [operation for operation in lifetimes.order if operation.bodies]
    assert [source for _, source in lifetimes.kept_around(branches)] == [plan.program.inputs[1]]


def test_what_a_loop_multiplies_lies_beside_its_carry_and_what_it_starts_from_becomes_the_carry():
    def step(x):
        return jnp.sum(
            jax.lax.while_loop(lambda c: c[1] < 8, lambda c: (c[0] @ c[0], c[1] + 1), (x @ x, np.int32(0)))[0]
        )

    peak, x = _peak_of(step, _square(2048))
    assert 3 * x <= peak < 3.1 * x + WORKSPACE_BYTES  # the argument, a carry, and the next one


def test_the_results_of_all_branches_lie_in_one_memory():
    def step(x, which):
        return jax.lax.switch(which, [lambda x: x @ x, lambda x: x @ (x + 1), lambda x: (2 * x) @ x], x).sum()

    peak, x = _peak_of(step, _square(2048), jax.ShapeDtypeStruct((), jnp.int32))
    assert 3 * x <= peak < 3.1 * x + WORKSPACE_BYTES  # the argument, an operand made for a product, the result


def test_what_a_loop_stacks_twice_is_stacked_and_read_once():
    def step(x):
        stacks = jax.lax.scan(lambda carry, _: (jnp.sin(carry), (jnp.cos(carry), jnp.cos(carry))), x, length=4)[1]
        return jax.lax.scan(lambda carry, slices: (carry + slices[0] * slices[1], None), x, stacks)[0]

    program = trace_program(step, (_square(8),), {})
    first, second = (operation for operation in program.operations if operation.bodies)
    same = repeated_results(program, program.operations)
    assert same[first.results[2]] == first.results[1]
    _, one, other = program.regions[second.bodies[0]].inputs
    assert same[other] == one


def test_equal_stacks_in_two_layouts_are_both_held():
    def step(x):
        stacks = jax.lax.scan(lambda carry, _: (jnp.sin(carry), (carry, carry)), x, length=4)[1]
        return jax.lax.scan(lambda carry, slices: (carry + slices[0] @ slices[1], None), x, stacks)[0]

    plan = shardplan.plan(step, MESH, _square(64))
    assignment = plan.schedule.assignment
    stacks = next(operation for operation in plan.program.operations if operation.bodies).results[1:]
    for layouts, held in ((((), (0,), ()),) * 2, 1), ((((), (0,), ()), ((), (), ())), 2):
        values = {**assignment.values, **dict(zip(stacks, layouts, strict=True))}
        schedule = Schedule(plan.schedule.problem, dataclasses.replace(assignment, values=values))
        lifetimes = Lifetimes(schedule.problem, range(len(plan.program.operations)), kernels_in(schedule))
        assert len(lifetimes.held.keys() & {*stacks}) == held


def test_what_a_loop_reads_is_stored_where_the_program_makes_it_from_nothing():
    def step(x):
        table = jax.lax.broadcasted_iota(jnp.float32, (512, 512), 0)
        return jax.lax.scan(lambda carry, _: (jnp.tanh(carry + table), None), x, length=4)[0]

    peak, x = _peak_of(step, _square(512))
    assert peak == 3 * x  # the argument, the carry that becomes the result, the table


def test_what_a_scan_reads_and_stacks_lies_beside_the_argument_that_it_replaces_and_a_carry_does_not():
    def stacked(caches, x):
        def layer(x, cache):
            cache = jax.lax.dynamic_update_slice(cache, x[None], (3, 0))
            return x + jnp.max(cache, axis=0), cache

        x, caches = jax.lax.scan(layer, x, caches)
        return caches, x

    def carried(caches, x):
        def layer(carry, number):
            caches, x = carry
            caches = jax.lax.dynamic_update_slice(caches, x[None, None], (number, 3, 0))
            cache = jax.lax.dynamic_index_in_dim(caches, number, keepdims=False)
            return (caches, x + jnp.max(cache, axis=0)), None

        return jax.lax.scan(layer, (caches, x), jnp.arange(8))[0]

    caches, x = jax.ShapeDtypeStruct((8, 1024, 64), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.float32)
    whole = 4 * 8 * 1024 * 64
    one = jax.sharding.AbstractMesh((1,), ("x",))
    peaks = [shardplan.plan(step, one, caches, x, donate_argnums=0).peak_bytes for step in (stacked, carried)]
    assert 2 * whole < peaks[0] < 3 * whole and peaks[1] < 2 * whole


def test_a_slice_that_only_repeated_operations_read_is_not_held():
    def step(xs, *slices):
        def body(carry, ab):
            return carry + jnp.sin(ab[0]) * jnp.sin(ab[-1]), None

        return jax.lax.scan(body, jnp.zeros(64), (xs, *(xs for _ in slices)))[0]

    xs, flag = jax.ShapeDtypeStruct((16, 64), jnp.float32), jax.ShapeDtypeStruct((), jnp.bool_)
    assert _peak_of(step, xs, flag)[0] == _peak_of(step, xs)[0] + 1


def test_bodies_are_put_in_order_and_their_reductions_merge_as_the_program_itself():
    def loss(weights, x, mixing):
        for w in weights:
            x = mixing @ (x @ w)
        return jnp.sum(x)

    def step(weights, xs, mixing):
        def micro(total, x):
            gradients = jax.grad(loss)(weights, x, mixing)
            return jax.tree.map(lambda t, g: t + jnp.tanh(g), total, gradients), None

        return jax.lax.scan(micro, jax.tree.map(jnp.zeros_like, weights), xs)[0]

    xs, mesh = jax.ShapeDtypeStruct((4, 4096, 64, 64), "float32"), jax.sharding.AbstractMesh((2,), ("x",))
    pins = {"0/*": jax.P(), "1": jax.P(None, "x", None, None), "2": jax.P()}
    schedule = shardplan.plan(step, mesh, [_square(64)] * 3, xs, _square(64), pins=pins).schedule
    [merged] = combined_reductions(schedule)
    assert len(merged) == 3 and {operation.region for operation in merged} == {1}
    order = hiding_order(schedule, kernels_of(schedule.problem))[0]
    gradients = [o.index for o in merged]
    last_read = max(
        o.index for o in schedule.program.operations if o.primitive.name == "dot_general" and o not in merged
    )
    # as outside of loops, weights' gradients run behind the products that all wait for
    assert order.index(gradients[0]) > order.index(last_read) > gradients[0]
    assert order[-1] == schedule.program.regions[0].operations[-1]


def test_stacks_stay_as_they_are_gathered_up_to_an_iteration_that_runs_apart():
    def step(weights, x):
        def loss(weights):
            return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0] ** 2)

        return weights - 0.1 * jax.grad(loss)(weights)

    stack, x = jax.ShapeDtypeStruct((8, 64, 64), jnp.float32), jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    for sizes, stored, rows, kept in (
        ((2, 4), jax.P(None, None, ("a", "b")), ("b", "a"), True),  # an island scatters what each iteration gives
        ((2, 4), jax.P(("a", "b"), None, None), ("b", "a"), False),
        ((8, 1), jax.P(None, None, "a"), "a", False),  # XLA makes the reduce-scatter itself, too late
    ):
        mesh = jax.sharding.AbstractMesh(sizes, ("a", "b"))
        pins = {"0": stored, "1": jax.P(rows, None)}
        plan = shardplan.plan(step, mesh, stack, x, pins=pins, donate_argnums=0)
        schedule, value = plan.schedule, plan.program.inputs[0]
        lifetimes = Lifetimes(schedule.problem, range(len(plan.program.operations)))
        copies = [h.lifetime for h in memory_held(lifetimes, schedule, frozenset({0})) if h.value == value]
        until = lifetimes.start([o for o in plan.program.operations if o.bodies][-1])
        assert [span.end for span in copies if span.start < until == span.end] == [until] * kept


@pytest.mark.parametrize(("split", "copied"), [(0, False), (1, True), (2, True)])
def test_a_stack_of_what_a_loop_gathers_is_copied_for_the_loop_that_reads_it(split, copied):
    rows = *[None] * split, "x"

    def held_as(x, *axes):
        return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(MESH, jax.P(*axes)))

    def body(x, w):
        hidden = held_as(held_as(jnp.tanh(held_as(x, *rows))) @ held_as(w, None, "x"), None, None, "x")
        return held_as(hidden @ held_as(w, None, "x").T, *rows), None

    def step(stack, x):
        return stack - jax.grad(lambda s: jnp.sum(jax.lax.scan(jax.checkpoint(body), x, s)[0] ** 2))(stack)

    stack, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 256, 1024), (16, 64, 256)))
    schedule = shardplan.plan(step, MESH, stack, x, pins={"0": jax.P(None, None, "x"), "1": jax.P(*rows)}).schedule
    lifetimes = Lifetimes(schedule.problem, range(len(schedule.program.operations)))
    before = lifetimes.start([operation for operation in lifetimes.order if operation.bodies][-1]) - 1
    held = [h for h in memory_held(lifetimes, schedule, frozenset()) if h.lifetime.start == h.lifetime.end == before]
    turned = [h.value for h in held if h.size == 4 * 4 * 16 * 64 * 256 / 8]
    assert len(turned) == copied
    # the network that a search within a limit solves counts it too
    usages = Usages(lifetimes, schedule.problem, frozenset())
    usages.follow(schedule)
    counted = [(usage.start, usage.end) for usage in usages._held_values(frozenset(turned))]
    assert counted.count((before, before + 1)) == copied


def test_an_iteration_runs_apart_whose_gradient_stays_partial_until_it_is_put_into_the_form_that_is_stacked():
    def step(weights, x):
        def body(x, w):
            narrow = w.astype(jnp.bfloat16)
            return jnp.tanh(jnp.tanh(x @ narrow) @ narrow), None

        def loss(weights):
            return jnp.sum(jax.lax.scan(body, x, weights)[0] ** 2)

        return weights - 0.1 * jax.grad(loss)(weights)

    stack, x = jax.ShapeDtypeStruct((8, 64, 64), jnp.float32), jax.ShapeDtypeStruct((4096, 64), jnp.bfloat16)
    plan = shardplan.plan(step, MESH, stack, x, pins={"0": jax.P(None, None, "x"), "1": jax.P("x", None)})
    schedule, operations = plan.schedule, plan.program.operations
    widened = [o for o in operations if o.region and o.primitive.name == "convert_element_type"][-1]
    assert schedule.assignment.values[widened.operands[0]] == ((0,), (), ())  # both products' parts, added up
    assert peeled_loops(schedule) == {[o.index for o in operations if o.bodies][-1]}


@pytest.mark.parametrize("transposed", [False, True])
def test_what_is_made_for_a_loop_is_kept_for_others_that_would_make_the_same(transposed):
    def step(x, w):
        floor = jnp.full((512, 512), -3.0)
        x = jax.lax.scan(lambda x, _: (jnp.maximum(x @ w, floor), None), x, length=4)[0]
        y = (jnp.tanh(x) @ w) * 2.0
        return jnp.maximum(y.T if transposed else y, jnp.full((512, 512), -3.0)) @ w

    schedule = shardplan.plan(step, 1, _square(512), _square(512)).schedule
    lifetimes = Lifetimes(schedule.problem, range(len(schedule.program.operations)))
    loop = next(operation for operation in lifetimes.order if operation.bodies)
    last = lifetimes.order[-2]
    [(first, *span)] = brought_spans(lifetimes, schedule, {}).values()
    # XLA transposes what a kernel computes behind it: so the other one is made in another order
    assert (first, span[1]) == (loop.index, lifetimes.place[(loop if transposed else last).index])


def test_what_loops_read_that_is_made_from_nothing_is_made_once_for_all():
    def step(x, w):
        for _ in range(2):
            floor = jnp.full((512, 512), -3.0)
            x = jax.lax.scan(lambda x, _, floor=floor: (jnp.maximum(x @ w, floor), None), x, length=4)[0]
        return x

    schedule = shardplan.plan(step, 1, _square(512), _square(512)).schedule
    lifetimes = Lifetimes(schedule.problem, range(len(schedule.program.operations)))
    first, second = (operation for operation in lifetimes.order if operation.bodies)
    assert [*brought_spans(lifetimes, schedule, {}).values()] == [
        (first.index, lifetimes.start(first), lifetimes.place[second.index])
    ]


def test_a_product_that_leaves_a_branch_transposed_lies_in_the_memory_of_the_result():
    def step(number, x, y):
        return jax.lax.switch(number, [lambda x, y: (x @ y).T, lambda x, y: y], x, y)

    problem = shardplan.plan(step, 1, jax.ShapeDtypeStruct((), jnp.int32), _square(64), _square(64)).schedule.problem
    lifetimes = Lifetimes(problem, range(len(problem.program.operations)))
    [product] = [o for o in lifetimes.order if o.primitive.name == "dot_general"]
    assert product.results[0] not in lifetimes.held


def test_a_loop_waits_for_what_is_gathered_for_its_body():
    def step(w, x):
        return jnp.sum(jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ w), None), x, None, length=4)[0])

    shapes = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((4096, 64), "float32")
    mesh, pins = jax.sharding.AbstractMesh((2,), ("x",)), {"0": jax.P("x", None), "1": jax.P("x", None)}
    schedule = shardplan.plan(step, mesh, *shapes, pins=pins).schedule
    kernels = kernels_in(schedule)
    loop = next(o for o in schedule.program.operations if o.bodies)
    graph = Graph(schedule, kernels, [], [])
    [(gather, end)] = graph.gathers.items()
    assert gather.value == schedule.program.inputs[0] and end in graph.needs[loop.index]
    assert gather in hiding_order(schedule, kernels)[1].begins


def test_an_argument_that_a_loop_reads_in_another_shape_is_in_memory_once():
    def step(x, w):
        flat = x.reshape(512, 512)
        return jax.lax.fori_loop(0, 8, lambda _, carry: flat @ jnp.sin(carry), w)

    x, w = jax.ShapeDtypeStruct((8, 64, 512), jnp.float32), jax.ShapeDtypeStruct((512, 64), jnp.float32)
    peak, argument = _peak_of(step, x, w)
    assert argument < peak - WORKSPACE_BYTES < 1.5 * argument  # compiled: 1.05 MB and 0.05


def test_stacks_as_large_that_loops_fill_are_made_one_after_another():
    def loop(x):
        return jnp.sum(jax.lax.scan(lambda carry, _: (jnp.sin(carry), jnp.cos(carry)), x, length=8)[1], axis=0)

    plan = shardplan.plan(lambda x: loop(loop(x)), jax.sharding.AbstractMesh((1,), ("x",)), _square(512))
    schedule = plan.schedule
    lifetimes = Lifetimes(schedule.problem, range(len(plan.program.operations)), kernels_in(schedule))
    stack = 8 * 4 * 512 * 512
    held = [one.lifetime for one in memory_held(lifetimes, schedule, frozenset()) if one.size == stack]
    first, second = sorted(held, key=lambda lifetime: lifetime.start)
    assert first.start < second.start
