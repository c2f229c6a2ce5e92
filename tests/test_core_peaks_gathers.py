"""What XLA gathers together, and from when to when what collectives bring is in memory."""

import re
from dataclasses import replace
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.memory.accumulation import merged_anywhere
from shardplan.memory.bringing import Sending
from shardplan.memory.combining import Gather, gather_for
from shardplan.memory.gathering import combined_gathers, gathered_at_the_end
from shardplan.memory.graph import Graph
from shardplan.memory.hiding import hiding_order
from shardplan.memory.liveness import Lifetimes, memory_held
from shardplan.memory.measured_collectives import collective_microseconds
from shardplan.memory.pipelining import peeled_loops
from shardplan.memory.recomputing import kernels_in, kernels_of
from shardplan.memory.reductions import reduced_together
from shardplan.memory.repeated import apart_in, padded_together
from shardplan.memory.usages import Usages
from shardplan.schedule import Schedule
from shardplan.target import compile_for, gpu_mesh

MESH = jax.sharding.AbstractMesh((2,), ("x",))


def _square(size, dtype="float32"):
    return jax.ShapeDtypeStruct((size, size), dtype)


def _loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


def _with_stored_parts(widths, specs):
    rows = jax.ShapeDtypeStruct((8192, widths[0].shape[0]), "float32")
    pins = {"1": jax.P("x", None)} | {f"0/{number}": spec for number, spec in enumerate(specs)}
    return shardplan.plan(_loss, MESH, widths, rows, pins=pins)


def _gathered(plan):
    return [[plan.program.values[gather.value].name for gather in group] for group in combined_gathers(plan.schedule)]


def _sizes(results):
    return [tuple(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", results)]


def test_gathers_are_merged_up_to_a_size_whatever_dimension_they_go_over():
    rows, columns = jax.P("x"), jax.P(None, "x")
    merged = _gathered(_with_stored_parts([_square(64)] * 4, [rows, columns, rows, columns]))
    assert merged == [["0/0", "0/1", "0/2", "0/3"]]
    assert _gathered(_with_stored_parts([_square(2048)] * 2, [rows, rows])) == []  # 16 MiB each


@pytest.mark.slow
@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
@pytest.mark.parametrize("shared", [False, True])
def test_gathers_are_merged_in_the_order_in_which_kernels_need_them_that_are_one(shared):
    """Activations that are as large, and read one vector, are computed by one kernel, which waits for both towers'
    first weights: XLA merges the gathers of these then, instead of those of either tower's two."""

    def towers(weights, rows, scales):
        def tower(number):
            (first, second), scale = weights[number], scales[0 if shared else number]
            return jnp.sum(jnp.tanh((jnp.tanh(rows[number] @ first) * scale) @ second))

        return tower(0), tower(1)

    def of(*shape):
        return jax.ShapeDtypeStruct(shape, "float32")

    weights = [[of(1792, 2048), of(2048, 1792)], [of(1536, 2048), of(2048, 1536)]]  # 26 MiB of the first, or the second
    rows, scales, mesh = [of(8192, 1792), of(8192, 1536)], [of(2048)] * 2, gpu_mesh("h100", (2,), ("x",))
    pins = {"0/*": jax.P("x"), "1/*": jax.P("x", None), "2/*": jax.P()}
    plan = shardplan.plan(towers, mesh, weights, rows, scales, pins=pins)
    _, sending = hiding_order(plan.schedule, kernels_in(plan.schedule))
    values, groups = plan.program.values, combined_gathers(plan.schedule, sending.joined)
    predicted = sorted(sorted(values[gather.value].shape for gather in group) for group in groups)
    text = compile_for(plan.lower(mesh))[0].as_text() or ""
    started = re.findall(r" = \(\(.*?\), \((.*?)\)\) all-gather-start\(", text)
    compiled = sorted(sorted(_sizes(results)) for results in started)
    first, second = [[(1536, 2048), (1792, 2048)], [(2048, 1536), (2048, 1792)]]
    apart = [[first[0], second[0]], [first[1], second[1]]]
    assert predicted == compiled == ([first, second] if shared else apart)


def test_a_gather_joins_none_on_whose_result_it_depends():
    def step(x):
        return jnp.cumsum(jnp.cumsum(x, axis=0).T @ x, axis=0)

    plan = shardplan.plan(step, MESH, _square(256), pins={"0": jax.P("x", None)})
    assert combined_gathers(plan.schedule) == []


def _held(plan, sending=None):
    """Per value that is there in a layout which it is not stored in: when."""
    schedule = plan.schedule
    lifetimes = Lifetimes(schedule.problem, range(len(plan.program.operations)))
    held = memory_held(lifetimes, schedule, frozenset(), sending)
    stored = schedule.assignment.values
    return {h.value: h.lifetime for h in held if h.value in stored and h.layout != stored[h.value]}


def test_what_is_gathered_together_is_there_from_its_first_reader_on():
    plan = _with_stored_parts([_square(64)] * 3, [jax.P("x")] * 3)
    copies = {plan.program.values[value].name: lifetime for value, lifetime in _held(plan).items()}
    assert [copies[f"0/{number}"].start for number in range(3)] == [copies["0/0"].start] * 3
    assert copies["0/0"].end < copies["0/1"].end < copies["0/2"].end


def test_what_is_gathered_stays_for_the_kernels_that_compute_on_the_way():
    def step(w, x):
        wide = w.T * 2
        return jnp.tanh(x @ wide) @ wide

    rows, pins = jax.ShapeDtypeStruct((8192, 64), "float32"), {"0": jax.P("x", None), "1": jax.P("x", None)}
    plan = shardplan.plan(step, MESH, _square(64), rows, pins=pins)
    problem, found, whole = plan.schedule.problem, plan.schedule.assignment, ((), ())
    moves = {}
    for operation in plan.program.operations[
        :2
    ]:  # the transposition reads the whole matrix, and gives it to the product
        choices = problem.choices[operation.index].strategies
        moves[operation.index] = next(strategy for strategy in choices if strategy.results[0] == whole)
    values = found.values | {operation.results[0]: whole for operation in plan.program.operations[:2]}
    schedule = Schedule(problem, replace(found, values=values, strategies={**found.strategies, **moves}))
    assert [o.primitive.name for o in plan.program.operations] == [
        "transpose",
        "mul",
        "dot_general",
        "tanh",
        "dot_general",
    ]
    lifetimes = Lifetimes(problem, range(len(plan.program.operations)))
    held = memory_held(lifetimes, schedule, frozenset())
    [copy] = [h.lifetime for h in held if h.value == plan.program.inputs[0] and h.layout == whole]
    assert copy.end == 1  # where the kernel runs that computes both


@pytest.mark.parametrize(("begins", "start"), [(0, 0), (1, 1)])
def test_a_copy_is_there_from_where_its_collective_begins(begins, start):
    plan = _with_stored_parts([_square(2048)] * 2, [jax.P("x")] * 2)  # too large to be gathered together
    value = plan.program.inputs[1]
    reader = next(o for o in plan.program.operations if value in o.operands)
    gather = gather_for(plan.schedule, reader, value, plan.schedule.assignment.strategies[reader.index].operands[1])
    assert _held(plan)[value].start == reader.index > 1
    assert _held(plan, Sending(begins={gather: begins}))[value].start == start


def test_a_partial_result_is_there_until_its_reduction_ends():
    def step(x, y):
        return jnp.tanh(jnp.tanh(x.T @ y))

    rows, pins = jax.ShapeDtypeStruct((8192, 64), "float32"), {"0": jax.P("x", None), "1": jax.P("x", None)}
    plan = shardplan.plan(step, MESH, rows, rows, pins=pins)
    [product] = [o for o in plan.program.operations if o.primitive.name == "dot_general"]
    assert plan.schedule.result_steps(product, 0)
    last = len(plan.program.operations) - 1
    sending = Sending(ends={product.index: last})
    lifetimes = Lifetimes(plan.schedule.problem, range(last + 1))
    ends = [
        max(h.lifetime.end for h in memory_held(lifetimes, plan.schedule, frozenset(), one) if h.size == 64 * 64 * 4)
        for one in (Sending(), sending)
    ]
    assert ends[1] == last > ends[0]


def test_a_gather_begins_as_many_kernels_before_its_reader_as_run_beside_it():
    def step(w, x, y):
        for _ in range(4):
            y = jnp.tanh(y @ y)
        return y, jnp.tanh(y @ x) @ w

    square, pins = _square(2048), {"0": jax.P("x", None), "1": jax.P(), "2": jax.P()}
    plan = shardplan.plan(step, jax.sharding.AbstractMesh((8,), ("x",)), square, square, square, pins=pins)
    _, sending = hiding_order(plan.schedule, kernels_of(plan.schedule.problem))
    reader = next(o for o in plan.program.operations if plan.program.inputs[0] in o.operands)
    begun = [index for gather, index in sending.begins.items() if gather.value == plan.program.inputs[0]]
    assert len(begun) == 1 and begun[0] < reader.index


def test_what_merged_products_do_not_share_is_held_once_until_it_is_put_side_by_side():
    few, wide = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, 512), (512, 8192)))
    pins = {"0": jax.P("x", None), "1": jax.P("x", None), "2": jax.P(None, "x")}
    step, mesh = lambda a, b, w: (a @ w, b @ w, jnp.cumsum(b, 0)), jax.sharding.AbstractMesh((8,), ("x",))
    schedule = shardplan.plan(step, mesh, few, few, wide, pins=pins).schedule
    order, sending = hiding_order(schedule, kernels_of(schedule.problem))
    lifetimes = Lifetimes(schedule.problem, order, kernels_of(schedule.problem), sending)
    for value in schedule.program.inputs[:2]:  # the latter is kept for the sums and the product, the former for this
        held = [held for held in memory_held(lifetimes, schedule, frozenset(), sending) if held.value == value]
        [gathered] = [one for one in held if one.size == 4 * 64 * 512]
        assert gathered.lifetime.end <= min(lifetimes.in_libraries)


def test_what_is_gathered_together_waits_where_other_collectives_end_before_it_is_read():
    def step(weights, x, y):
        for _ in range(10):
            x = jnp.tanh(x @ y)
        for w in weights:
            x = x @ w
        return x

    pins = {"0/*": jax.P("x"), "1": jax.P("x"), "2": jax.P()}
    x, square = jax.ShapeDtypeStruct((8192, 1792), "float32"), _square(1792)  # two of which are gathered together
    plan = shardplan.plan(step, MESH, [square] * 4, x, square, pins=pins)
    order, sending = hiding_order(plan.schedule, kernels_of(plan.schedule.problem))
    first, second = (
        order.index(next(index for gather, index in sending.begins.items() if gather.value == plan.program.inputs[n]))
        for n in (0, 2)
    )
    # beside either run as many kernels, and the second one ends before the third product reads it
    reader = next(o.index for o in plan.program.operations if plan.program.inputs[2] in o.operands)
    assert first <= second - (order.index(reader) - second)


def test_kernels_read_their_part_of_what_a_device_has_where_it_lies():
    def held(function):
        pins = {"0": jax.P(), "1": jax.P("x", None)}
        rows = jax.ShapeDtypeStruct((4096, 16), "float32")
        schedule = shardplan.plan(function, MESH, rows, rows, pins=pins).schedule
        lifetimes = Lifetimes(schedule.problem, range(len(schedule.program.operations)))
        return {held.layout for held in memory_held(lifetimes, schedule, frozenset()) if held.value == 0}

    assert held(lambda x, y: jnp.sum(x * y, axis=1)) == {((), ())}
    assert held(lambda x, y: jnp.einsum("bi,bj->ij", x, y)) == {((), ()), ((0,), ())}


def test_sums_that_wait_are_reduced_together_where_they_are_read():
    def step(weights, x):
        def loss(weights):
            y = x
            for w in (*weights, *weights):
                y = jnp.tanh(y @ w)
            return jnp.sum(y)

        return [w - 0.1 * gradient for w, gradient in zip(weights, jax.grad(loss)(weights), strict=True)]

    rows, pins = jax.ShapeDtypeStruct((8192, 64), "float32"), {"0/*": jax.P(), "1": jax.P("x", None)}
    schedule = shardplan.plan(step, MESH, [_square(64)] * 3, rows, pins=pins).schedule
    [together] = reduced_together(schedule)  # the gradients of three weights, each a sum of two that is not yet reduced
    assert len(together) == 3 and all(isinstance(one, Gather) for one in together)
    graph = Graph(schedule, kernels_of(schedule.problem), [together], [])
    assert len({graph.gathers[one] for one in together}) == 1
    apart = Graph(schedule, kernels_of(schedule.problem), [], [])
    assert len({apart.gathers[one] for one in together}) == 3


def test_all_reduces_are_merged_before_what_is_scattered():
    """Messages along edges: where the gradients of the biases are one all-reduce, what is scattered on the way to all
    of them comes before the last layer's weights, with which XLA:GPU was compiled to merge its last reduction."""
    mesh = jax.sharding.AbstractMesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.NamedSharding(mesh, jax.P("x", None))

    def step(layers, edges, x):
        def loss(layers):
            y = x
            for bias, weight in reversed(layers):
                messages = jnp.tanh(y @ weight + bias)
                y = edges @ jax.lax.with_sharding_constraint(edges.T @ messages, split)
            return jnp.sum(y * y)

        return jax.tree.map(lambda old, change: old - 0.1 * change, layers, jax.grad(loss)(layers))

    layers = [(jax.ShapeDtypeStruct((256,), jnp.float32), _square(256))] * 3
    edges, x = (jax.ShapeDtypeStruct((8192, size), jnp.float32) for size in (1024, 256))
    pins = {"0/*/0": jax.P(), "0/*/1": jax.P("x", None), "1": jax.P("x", None), "2": jax.P("x", None)}
    plan = shardplan.plan(step, mesh, layers, edges, x, pins=pins, donate_argnums=0)
    groups = [[plan.program.operations[one].results[0] for one in group] for group in reduced_together(plan.schedule)]
    shapes = [[plan.program.values[value].shape for value in group] for group in groups]
    nodes, weight = (1024, 256), (256, 256)
    assert shapes[0] == [(256,)] * 3
    assert shapes[1:] == [[nodes]] * 3 + [[nodes[::-1]]] * 2 + [[nodes[::-1], weight, weight], [weight]]


@pytest.mark.parametrize(("dimension", "copied"), [(1, True), (0, False)])
def test_what_is_gathered_at_the_end_is_copied_unless_its_first_dimension_is_gathered(dimension, copied):
    def step(weights, gradients):
        return [weights[0] - jnp.sum(jnp.tanh(gradients), 0)], jnp.sum(gradients)

    weights, gradients = [_square(512)], jax.ShapeDtypeStruct((8, 512, 512), jnp.float32)
    split = jax.P(None, "x", None) if dimension == 0 else jax.P(None, None, "x")
    plan = shardplan.plan(step, MESH, weights, gradients, pins={"0/*": jax.P(), "1": split}, donate_argnums=0)
    schedule = plan.schedule
    assert gathered_at_the_end(schedule) == {0: copied}
    lifetimes = Lifetimes(schedule.problem, range(len(plan.program.operations)))
    last = [h for h in memory_held(lifetimes, schedule, frozenset({0})) if h.lifetime.start == lifetimes.end]
    assert [h.size for h in last] == [4 * 512 * 512] * copied
    # the network that a search within a limit solves counts it too
    usages = Usages(lifetimes, schedule.problem, frozenset({0}))
    usages.follow(schedule)
    counted = [pair for pair in usages._leaving_copies() if pair.amounts.any()]
    assert [pair.amounts.max() for pair in counted] == [4 * 512 * 512] * copied


@pytest.mark.parametrize("compute", [jnp.cumsum, jnp.sum])
def test_what_is_empty_is_merged_with_nothing(compute):
    def step(rows):  # none, as an associative scan leaves at its ends
        return compute(rows, axis=0)

    plan = shardplan.plan(step, MESH, jax.ShapeDtypeStruct((8, 0), "float32"), pins={"0": jax.P("x")})
    assert combined_gathers(plan.schedule) == [] and plan.communication_bytes == 0


def test_an_iteration_runs_apart_whose_gradient_an_inner_loop_leaves_partial():
    def step(weights, x):
        def layer(x, w):
            return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=3)[0], None

        def loss(weights):
            return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)

        return weights - 0.1 * jax.grad(loss)(weights)

    stack, x = jax.ShapeDtypeStruct((8, 64, 64), jnp.float32), jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    plan = shardplan.plan(step, MESH, stack, x, pins={"0": jax.P(None, "x", None), "1": jax.P("x", None)})
    outer = [o.index for o in plan.program.operations if o.bodies and not o.region]
    assert peeled_loops(plan.schedule) == {outer[-1]}


def test_what_merged_products_read_is_gathered_with_the_first_of_them():
    def step(weights, x):
        first, second, third = weights
        return jnp.sum(jnp.tanh(x @ first) @ second) + jnp.sum(x @ third)

    rows, pins = jax.ShapeDtypeStruct((8192, 64), "float32"), {"0/*": jax.P("x"), "1": jax.P("x", None)}
    plan = shardplan.plan(step, MESH, [_square(64)] * 3, rows, pins=pins)
    assert len(merged_anywhere(plan.schedule)) == 1
    assert _gathered(plan) == [["0/0", "0/2", "0/1"]]


def test_images_of_convolutions_that_are_computed_twice_are_waited_for_together():
    def step(x, filters):
        made = [jax.lax.conv_transpose(jnp.sin(x), filters, (2, 2), "SAME") for _ in range(2)]
        return jnp.cos(made[0]), jnp.tanh(made[1])

    image, filters = jax.ShapeDtypeStruct((8, 4, 4, 16), "float32"), jax.ShapeDtypeStruct((4, 4, 16, 16), "float32")
    plan = shardplan.plan(step, MESH, image, filters, pins={"0": jax.P("x")})
    schedule, operations = plan.schedule, plan.program.operations
    first, twice = [o for o in operations if o.primitive.name == "conv_general_dilated"]
    assert padded_together(schedule) == {} and apart_in(schedule) == ()
    ways = schedule.problem.choices[twice.index].strategies
    strategies = dict(schedule.assignment.strategies)
    strategies[twice.index] = next(way for way in ways if way.results != strategies[first.index].results)
    schedule = Schedule(schedule.problem, replace(schedule.assignment, strategies=strategies))
    images = [o.operands[0] for o in (first, twice)]
    assert padded_together(schedule) == {o.index: [*images, o.operands[1]] for o in (first, twice)}


def test_what_several_collectives_bring_is_brought_by_one_after_another():
    mesh = jax.sharding.AbstractMesh((2, 4), ("a", "b"))

    def step(x, w):
        rows = jax.lax.with_sharding_constraint(jnp.tanh(x), jax.NamedSharding(mesh, jax.P(("b", "a"))))
        columns = jax.lax.with_sharding_constraint(rows, jax.NamedSharding(mesh, jax.P(None, "b")))
        return jnp.cumsum(columns, axis=0), jnp.sum(rows @ w)

    shapes = [jax.ShapeDtypeStruct((4096, columns), "float32") for columns in (4096, 64)]
    pins = {"0": jax.P(("b", "a")), "1": jax.P()}
    schedule = shardplan.plan(step, mesh, *shapes, pins=pins, memory_limit=float("inf")).schedule
    graph = Graph(schedule, kernels_of(schedule.problem), [], [])
    [(gather, end)] = graph.gathers.items()
    assert [one.kind for one in schedule.route(gather.value, gather.layout).steps] == ["all-to-all", "all-gather"]
    [first] = graph.needs[graph.starts[end]]
    assert graph.needs[graph.starts[first]] == {graph.maker(gather.value)}
    assert graph.takes[first] > 1


def test_what_is_scattered_twice_takes_less_time_the_second_time():
    """A sum that waits, scattered over one axis and then, half of it, over another one."""
    mesh = jax.sharding.AbstractMesh((2, 4), ("a", "b"))

    def step(w, x, y):
        return w - (x.T @ jnp.sin(x) + y.T @ jnp.sin(y))

    rows = jax.ShapeDtypeStruct((2**16, 2048), "float32")
    pins = {"0": jax.P("b", "a"), "1": jax.P(("a", "b")), "2": jax.P(("a", "b"))}
    schedule = shardplan.plan(step, mesh, _square(2048), rows, rows, pins=pins, donate_argnums=0).schedule
    graph = Graph(schedule, kernels_of(schedule.problem), [], [])
    [(gather, last)] = graph.gathers.items()
    assert [one.kind for one in schedule.route(gather.value, gather.layout).steps] == ["reduce-scatter"] * 2
    [first] = graph.needs[graph.starts[last]]
    whole = schedule.program.values[gather.value].total_bytes
    assert graph.takes[first] == collective_microseconds("reduce-scatter", whole, 2)
    assert graph.takes[last] == collective_microseconds("reduce-scatter", whole / 2, 4)
