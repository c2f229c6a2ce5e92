"""The order of XLA's last scheduler, on graphs by hand: which node stands last, and which before it."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.memory.accumulation import merged_anywhere, read_together
from shardplan.memory.bringing import Sending
from shardplan.memory.finishing import finish_reductions
from shardplan.memory.graph import Graph
from shardplan.memory.hiding import hiding_order
from shardplan.memory.joining import join_kernels
from shardplan.memory.liveness import Lifetimes
from shardplan.memory.measured import product_microseconds
from shardplan.memory.merging import merge_nodes, side_by_side
from shardplan.memory.placing import Placing
from shardplan.memory.recomputing import adding_products, kernels_in, kernels_of
from shardplan.memory.reductions import combined_reductions, reduced_together
from shardplan.memory.times import BYTES_MOVED, kernel_microseconds
from shardplan.memory.waiting import Waiting


def _placed(needs, takes, starts=None, merged=(), sends=None):
    """All nodes of a graph, the last one first: arguments, and results among several, have numbers below 0."""
    starts = starts or {}
    graph = SimpleNamespace(
        needs={node: set() for node in needs if node >= 0},
        takes=takes,
        place={node: float(node) for node in needs},
        starts=starts,
        merged={*merged},
        sends=sends or {},
        runs=lambda node: node < len(takes) - 2 * len(starts),
    )
    return Placing(graph, {node: set(found) for node, found in needs.items()}).run()


@pytest.mark.parametrize(
    ("reader", "needs", "order"),
    [
        (5.0, {2: [1]}, [2, 1, 0]),  # it ran longer than a microsecond: what it needs can start
        (0.2, {2: [1]}, [2, 0, 1]),  # what can start before is placed in between
        (5.0, {2: [-1], -1: [1]}, [2, 0, 1]),  # a library's result is taken from its workspace first
    ],
)
def test_what_waits_is_placed_behind_what_can_start(reader, needs, order):
    assert _placed({0: [], 1: [], **needs}, {0: 9.0, 1: 9.0, 2: reader}) == order


def test_what_fits_a_wait_is_placed_into_it():
    needs = {0: [], 1: [], 2: [], 3: [4], 4: [5], 5: []}
    takes = {0: 30.0, 1: 200.0, 2: 5.0, 3: 1.0, 4: 32.0, 5: 0.0}
    placed = _placed(needs, takes, starts={4: 5})
    assert placed[:3] == [3, 4, 0]


def test_a_collective_begins_behind_all_that_can_start_where_it_leads_to_no_other():
    needs = {0: [], 1: [], 2: [], 3: [4], 4: [5], 5: []}
    takes = {0: 90.0, 1: 200.0, 2: 5.0, 3: 1.0, 4: 32.0, 5: 0.0}
    assert _placed(needs, takes, starts={4: 5}) == [3, 4, 2, 0, 1, 5]
    needs |= {5: [6], 6: [7], 7: []}  # the start of one that another one leads to
    assert _placed(needs, takes | {6: 8.0, 7: 0.0}, starts={4: 5, 6: 7})[:5] == [3, 4, 2, 0, 5]


def test_what_leads_to_a_loop_of_which_an_iteration_runs_apart_leads_to_its_collectives():
    needs, takes = {0: [], 1: [], 2: [1], 3: [0], 4: [2, 3]}, dict.fromkeys(range(5), 1.0)
    assert _placed(needs, takes) == [4, 3, 2, 1, 0]
    assert _placed(needs, takes, sends={1: 20.0}) == [4, 2, 1, 3, 0]


def test_a_collective_begins_at_once_where_another_one_waits_for_it():
    needs = {0: [7], 1: [7], 2: [3, 5, 0, 1], 3: [4], 4: [], 5: [6], 6: [], 7: [8], 8: []}
    takes = {0: 40.0, 1: 40.0, 2: 5.0, 3: 32.0, 4: 0.0, 5: 8.0, 6: 0.0, 7: 20.0, 8: 0.0}
    assert _placed(needs, takes, starts={3: 4, 5: 6, 7: 8})[:5] == [2, 3, 1, 4, 5]


@pytest.mark.parametrize(("view", "order"), [(0.0, [2, 4, 3, 1, 0]), (1.0, [2, 4, 3, 0, 1])])
def test_what_can_run_is_placed_before_what_an_all_to_all_reads_a_view_of(view, order):
    needs = {0: [], 1: [6], 2: [4], 3: [1], 4: [3], 5: [], 6: [5]}
    takes = {0: 200.0, 1: 9.0, 2: 5.0, 3: view, 4: 1.0, 5: 0.0, 6: 8.0}
    assert [node for node in _placed(needs, takes, starts={4: 3, 6: 5}) if node < 5] == order


@pytest.mark.parametrize(
    ("sizes", "width", "microseconds"),  # as XLA says of a compiled product
    [
        ((1, 768, 768, 768), 2, 7.40225),  # between eight that were measured
        ((1, 1024, 1504, 1024), 2, 10.5265),
        ((32, 200, 304, 400), 2, 35.333),  # outside of them
        ((16, 128, 32768, 8192), 2, 1664.51),
        ((16, 8192, 32768, 128), 2, 1798.66),
        ((1, 4096, 4096, 4096), 4, 340.913),
    ],
)
def test_a_product_takes_as_long_as_xla_says(sizes, width, microseconds):
    assert product_microseconds(sizes, width) == pytest.approx(microseconds, rel=1e-4)


def test_an_all_to_all_reads_a_view_and_a_gather_does_not():
    pins = {"0": jax.P("x", None), "1": jax.P("x", None)}

    def step(x, y):
        return jnp.cumsum(jnp.sin(x), axis=0), jnp.sum(jnp.sin(y)) + y @ y

    square, mesh = jax.ShapeDtypeStruct((256, 256), "float32"), jax.sharding.AbstractMesh((2,), ("x",))
    schedule = shardplan.plan(step, mesh, square, square, pins=pins).schedule
    graph = Graph(schedule, kernels_of(schedule.problem), [], [])
    kinds = {end: schedule.route(gather.value, gather.layout).steps[-1].kind for gather, end in graph.gathers.items()}
    assert {(kind, graph.takes[graph.starts[end]]) for end, kind in kinds.items()} == {
        ("all-to-all", 1.0),
        ("all-gather", 0.0),
    }


@pytest.mark.parametrize(
    ("operands", "made", "precision", "least", "most"),
    [
        ("bfloat16", "bfloat16", None, 8, 11),  # 8.5 as XLA says
        ("bfloat16", "float32", None, 200, 230),  # 214.4
        ("float32", "float32", None, 12, 20),  # 18.4
        ("float32", "float32", jax.lax.DotAlgorithmPreset.BF16_BF16_F32, 200, 230),
    ],
)
def test_products_of_16_bit_numbers_into_float32_take_longer(operands, made, precision, least, most):
    def step(x, y):
        return jax.lax.dot(x, y, precision=precision, preferred_element_type=made)

    schedule = shardplan.plan(step, 1, *[jax.ShapeDtypeStruct((1024, 1024), operands)] * 2).schedule
    [product] = schedule.program.operations
    assert least < kernel_microseconds(schedule, product, ()) < most


@pytest.mark.parametrize("size", [256, 255])
def test_a_kernel_cuts_out_each_of_merged_products_that_is_reduced(size):
    """Scattered, or reduced to what both devices have, where that cannot be split."""

    def loss(weights, x):
        return sum(jnp.sum(jnp.tanh(x @ w)) for w in weights)

    def step(weights, x):
        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights, x))

    x, weight = (jax.ShapeDtypeStruct((n, size), "float32") for n in (4096, size))
    pins = {"0/*": jax.P(), "1": jax.P("x", None)}
    mesh = jax.sharding.AbstractMesh((2,), ("x",))
    schedule = shardplan.plan(step, mesh, [weight] * 2, x, pins=pins, donate_argnums=0).schedule
    graph = Graph(schedule, kernels_of(schedule.problem), [], [])
    sent = [index for group in merged_anywhere(schedule) for index in group if index in graph.reduced]
    assert len(sent) == 2
    merge_nodes(graph)
    cuts = [graph.needs[graph.starts[graph.reduced[index]]] for index in sent]
    assert cuts[0].isdisjoint(cuts[1])
    for needs, index in zip(cuts, sent, strict=True):
        [cut] = needs
        assert graph.needs[cut] == {min(sent)} and graph.values[cut] == {*schedule.program.operations[index].results}
        assert graph.takes[cut] == pytest.approx(2 * weight.size * 4 / BYTES_MOVED)


@pytest.mark.parametrize(("merged", "last"), [((), 0), ((4,), 2)])
def test_what_reads_what_a_collective_brings_alone_goes_before_what_does_not(merged, last):
    needs = {0: [4], 1: [4], 2: [1], 3: [], 4: [5], 5: []}
    takes = {0: 9.0, 1: 9.0, 2: 9.0, 3: 9.0, 4: 32.0, 5: 0.0}
    assert _placed(needs, takes, {4: 5}, merged)[0] == last


def test_an_argument_that_nothing_else_reads_counts_as_what_can_be_placed():
    takes = {0: 9.0, 1: 9.0}
    assert _placed({0: [], 1: []}, takes) == [1, 0]
    assert _placed({0: [-8], 1: [], -8: []}, takes) == [0, 1]


def test_what_is_computed_from_the_same_value_is_one_kernel():
    def step(x, w):
        y = x @ w
        return jnp.sin(jnp.tanh(y) @ w) @ w, jnp.exp(y) @ w

    rows, square = jax.ShapeDtypeStruct((512, 64), "float32"), jax.ShapeDtypeStruct((64, 64), "float32")
    plan = shardplan.plan(step, 1, rows, square)
    order = hiding_order(plan.schedule, kernels_of(plan.schedule.problem))[0]
    names = [plan.program.operations[index].primitive.name for index in order]
    assert abs(names.index("tanh") - names.index("exp")) == 1


def test_a_product_added_to_one_of_merged_ones_waits_for_the_kernel_that_reads_another():
    def step(x, w, v, y, z):
        first, second = x @ w, x @ v
        total = (second + y @ z) @ jnp.exp(z)
        return total, jnp.tanh(first * (jnp.sin(z) @ jnp.cos(y))) @ w

    square = jax.ShapeDtypeStruct((512, 512), "float32")
    schedule = shardplan.plan(step, 1, *[square] * 5).schedule
    kernels = adding_products(schedule, kernels_of(schedule.problem))
    order = hiding_order(schedule, kernels)[0]
    [tanh] = [o.index for o in schedule.program.operations if o.primitive.name == "tanh"]
    [addition] = [index for index in kernels.adding if schedule.program.operations[index].operands[0] == 6]
    assert order.index(addition) > order.index(tanh)


def test_a_sum_that_takes_in_another_one_joins_no_kernel_itself():
    def step(x, w):
        total, product = jnp.sum(x), x @ w
        return jnp.sum(x * product, axis=0), jnp.tanh(x + product @ w) @ w * total

    square = jax.ShapeDtypeStruct((512, 512), "float32")
    schedule = shardplan.plan(step, 1, square, square).schedule
    order = hiding_order(schedule, kernels_of(schedule.problem))[0]
    assert sorted(order) == list(range(len(schedule.program.operations)))


def test_products_that_are_merged_wait_for_what_any_of_them_reads_and_so_do_their_reductions():
    def step(x, u, v, w):
        later = jnp.tanh(u @ v)
        return x @ w, later @ w

    shapes = (64, 4096), (64, 8192), (8192, 4096), (4096, 64)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    columns, rows = jax.P(None, "x"), jax.P("x", None)
    pins = {"0": columns, "1": columns, "2": rows, "3": rows}
    schedule = shardplan.plan(step, jax.sharding.AbstractMesh((2,), ("x",)), *arguments, pins=pins).schedule
    first, *merged = [o.index for o in schedule.program.operations if o.primitive.name == "dot_general"]
    assert merged_anywhere(schedule) == [merged]
    # reduced together with the first product, the second one would wait for itself
    assert combined_reductions(schedule) == [
        [schedule.program.operations[index] for index in group] for group in ([first], merged)
    ]


def test_reductions_join_no_group_that_waits_for_them_through_another_one():
    """Preconditioners of weights, by chains of products, of which norms and partial products are reduced."""

    def loss(weights, x):
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.sum(x)

    def step(weights, x):
        new = []
        for weight, gradient in zip(weights, jax.grad(loss)(weights, x), strict=True):
            change = gradient
            for root in (gradient @ gradient.T, gradient.T @ gradient):
                root = root / jnp.linalg.norm(root)
                for _ in range(2):
                    root = root @ root
                change = root @ change if root.shape[0] == change.shape[0] else change @ root
            new.append(weight - change / jnp.linalg.norm(change))
        return new

    weights = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(1024, 4096), (4096, 1024)] * 3]
    x = jax.ShapeDtypeStruct((8192, 1024), jnp.float32)
    schedule = shardplan.plan(step, jax.sharding.AbstractMesh((2, 4), ("x", "y")), weights, x).schedule
    graph = Graph(schedule, kernels_of(schedule.problem), reduced_together(schedule), [])
    assert len(graph.in_order()) == len(graph.needs)


def test_a_group_waits_for_what_its_members_depend_on_and_for_what_full_groups_among_these_wait_for():
    waiting = Waiting()
    first, second, third = waiting.begin(-1), waiting.begin(-1), waiting.begin(-1)
    waiting.join(second, 1 << first)
    waiting.join(third, 1 << second)
    assert waiting.leads(first, 1 << third)
    assert not waiting.leads(third, 1 << first)
    fourth = waiting.begin(second)
    assert waiting.still_open(1 << second) == 1 << first
    assert waiting.leads(first, 1 << third)
    assert not waiting.leads(fourth, 1 << third)


def test_products_are_apart_that_would_wait_for_themselves():
    """Two pairs that are merged, where one of each needs one of the other."""

    def step(a, b, x, y):
        one, two = x @ a, y @ b
        return jnp.tanh(one) @ b, jnp.tanh(two) @ a

    square = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 4
    schedule = shardplan.plan(step, jax.sharding.AbstractMesh((1,), ("x",)), *square).schedule
    assert len(merged_anywhere(schedule)) == 2
    assert len(read_together(schedule)) == 2


def test_a_kernel_waits_for_all_that_is_gathered_of_one_value():
    mesh = jax.sharding.AbstractMesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def step(p):
        result = (2 * p)[:, :, None] * (p + 1)[None, :, :]
        return jax.lax.with_sharding_constraint(result, jax.NamedSharding(mesh, jax.P("x", None, "y")))

    argument = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    schedule = shardplan.plan(step, mesh, argument, pins={"0": jax.P("x", "y")}).schedule
    graph = Graph(schedule, kernels_of(schedule.problem), [], [])
    assert len(graph.starts) == 2
    assert any(graph.starts.keys() <= needs for needs in graph.needs.values())


@pytest.mark.parametrize("several", [True, False])
def test_zeros_for_scatters_are_made_where_their_kernel_fills_a_wait(several):
    def step(tables, ids, others, x, w):
        gradients = jax.grad(lambda tables: jnp.sum(jnp.sin(tables[0][ids] * tables[-1][others])))(tables)
        return gradients, x @ w

    shapes = (4096, 64), (4096, 64), (64, 64)
    table, x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    ids = [jax.ShapeDtypeStruct((16,), "int32")] * 2
    plan = shardplan.plan(step, 1, [table] * (1 + several), *ids, x, w)
    order, sending = hiding_order(plan.schedule, kernels_of(plan.schedule.problem))
    scatters = [o.index for o in plan.program.operations if o.primitive.name == "scatter-add"]
    if several:
        assert sending.filling.keys() == {*scatters}
    else:  # those of one table are one, where they are added
        [added] = sending.filling
        scatters = [added]
        assert plan.program.operations[added].primitive.name == "add_any"
    assert len({*sending.filling.values()}) == 1
    assert order.index(sending.filling[scatters[0]]) < min(map(order.index, scatters))


def test_what_merged_products_do_not_share_is_gone_once_it_is_put_side_by_side():
    def step(x, y, u, v):
        first, second = jnp.tanh(x @ v), jnp.sin(y @ v)
        return v @ v, first @ u, second @ u

    rows, square = jax.ShapeDtypeStruct((512, 256), "float32"), jax.ShapeDtypeStruct((256, 256), "float32")
    schedule = shardplan.plan(step, 1, rows, rows, square, square).schedule
    kernels, program = kernels_of(schedule.problem), schedule.program
    *_, between, one, other = (o for o in program.operations if o.primitive.name == "dot_general")
    sending = hiding_order(schedule, kernels)[1]
    assert {(one.index, 0), (other.index, 0)} <= sending.beside.keys()
    sending = Sending(beside={(one.index, 0): between.index, (other.index, 0): between.index})
    lifetimes = Lifetimes(schedule.problem, range(len(program.operations)), kernels, sending)
    place = lifetimes.place[between.index]
    assert [lifetimes.held[product.operands[0]].end for product in (one, other)] == [place, place]
    assert (2 * 4 * 512 * 256, place, lifetimes.place[other.index]) in side_by_side(lifetimes, schedule)


@pytest.mark.parametrize(
    ("shape", "axes", "several"),
    [
        ((4, 1024, 16, 12), (1, 3), True),  # neither what is reduced lies together nor what is kept
        ((4, 1024, 64), (1,), False),
        ((1, 65536, 64), (1,), True),  # more rows than are reduced at once
        ((64, 1024), (1,), False),
        ((4, 65536), (1,), True),  # and more numbers of a row
    ],
)
def test_what_reads_a_reduction_in_several_steps_waits_for_the_last_one(shape, axes, several):
    def step(x):
        return jnp.tanh(jnp.sum(x, axis=axes)), jnp.sum(jnp.sin(x), axis=axes)

    schedule = shardplan.plan(step, 1, jax.ShapeDtypeStruct(shape, "float32")).schedule
    kernels = kernels_in(schedule)
    graph = Graph(schedule, kernels, [], [])
    join_kernels(graph, kernels)
    finish_reductions(graph)
    first, *_ = [o for o in schedule.program.operations if o.primitive.name == "reduce_sum"]
    [reader] = [o for o in schedule.program.operations if o.primitive.name == "tanh"]
    owner = {part: node for node, parts in graph.joined.items() for part in parts}
    made = owner.get(first.index, first.index)
    assert (first.results[0] in graph.finished) == several and len(graph.finished) in (0, 2)
    assert graph.needs[reader.index] == {graph.finished.get(first.results[0], made)}
    assert not several or graph.needs[graph.finished[first.results[0]]] == {made}
