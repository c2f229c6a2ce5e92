"""Predicted peaks: what collectives move and reduce together, and zeros that are made where that fills a wait."""

import functools
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.memory.combining import ending_at_reductions, read_otherwise
from shardplan.memory.flattened import flattened
from shardplan.memory.fusion import scatters_as_one
from shardplan.memory.graph import Graph
from shardplan.memory.hiding import hiding_order
from shardplan.memory.joining import join_kernels
from shardplan.memory.leaving import copy_at_the_end
from shardplan.memory.liveness import WORKSPACE_BYTES, Lifetimes, memory_held, memory_profile
from shardplan.memory.merging import cut_for_reductions, side_by_side
from shardplan.memory.recomputing import adding_products, kernels_in
from shardplan.memory.reductions import combined_reductions
from shardplan.memory.times import BYTES_MOVED
from shardplan.memory.usages import Usages
from shardplan.memory.zeros import _alike, fill_apart, fillings_of
from shardplan.target import compile_for, gpu_mesh

MESH = jax.sharding.AbstractMesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
ROWS, COLUMNS = jax.P("x", None), jax.P(None, "x")


def _shape(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_what_computes_with_zeros_behind_a_scatter_reads_them_from_the_kernel_that_makes_the_scatters():
    def step(table, ids, rows):
        added = jnp.zeros(table.shape).at[ids].add(rows)
        return table * jax.lax.select(added > 1, added, jnp.zeros(added.shape))

    schedule = shardplan.plan(step, 1, _shape(512, 512), _shape(4096, dtype="int32"), _shape(4096, 512)).schedule
    [filling] = fillings_of(schedule.problem)
    assert (len(filling.scatters), filling.readers) == (1, [])
    assert [operation.primitive.name for operation in filling.behind] == ["select_n"]
    _, sending = hiding_order(schedule, kernels_in(schedule))
    assert [*sending.filling] == [filling.scatters[0].index]


@pytest.mark.parametrize(("root", "read"), [(0.0, False), (1.0, False), ("compared", True)])
def test_what_adds_zero_behind_a_scatter_reads_no_zeros(root, read):
    """As optimizers do before they take a root, whatever of it they add."""

    def step(table, ids, rows):
        squares = jnp.zeros(table.shape).at[ids].add(rows) ** 2
        return table / (jnp.sqrt(squares + root) if not read else jnp.maximum(squares, 0.0))

    problem = shardplan.plan(step, 1, _shape(512, 512), _shape(4096, dtype="int32"), _shape(4096, 512)).schedule.problem
    [filling] = fillings_of(problem)
    assert [operation.primitive.name for operation in filling.behind] == (["max"] if read else [])


def _constrained(x, spec):
    return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(MESH, spec))


def test_what_collectives_move_is_stored_and_what_it_is_computed_from_is_not_held_for_its_readers():
    def step(x):
        return _constrained(jnp.tanh(x).astype("bfloat16"), ROWS) * 2

    schedule = shardplan.plan(step, MESH, _shape(4096, 4096), pins={"0": COLUMNS}).schedule
    kernels = kernels_in(schedule)
    [made] = [o.results[0] for o in schedule.program.operations if o.primitive.name == "convert_element_type"]
    assert made not in kernels.read and made in ending_at_reductions(schedule, kernels).read


def test_a_view_of_what_is_in_memory_is_not_stored_for_a_collective():
    def step(x, w):
        return _constrained(_constrained((x @ w).reshape(64, 64, 4096), jax.P(None, None, "x")), ROWS) * 2

    pins = {"0": jax.P(), "1": COLUMNS}
    schedule = shardplan.plan(step, MESH, _shape(4096, 4096), _shape(4096, 4096), pins=pins).schedule
    kernels = kernels_in(schedule)
    stored = ending_at_reductions(schedule, kernels).read - kernels.read
    assert stored == {schedule.program.operations[0].results[0]}  # which is in memory anyway


def test_all_reduces_over_the_same_axes_are_merged_in_whatever_order_they_are_named():
    def step(x, y):
        return jnp.sum(x), jnp.sum(y)

    mesh, square = jax.sharding.AbstractMesh((2, 4), ("x", "y")), _shape(512, 512)
    plan = shardplan.plan(step, mesh, square, square, pins={"0": jax.P("x", "y"), "1": jax.P("y", "x")})
    [group] = combined_reductions(plan.schedule)
    assert len(group) == 2


def test_what_is_gathered_alone_waits_where_other_collectives_end_before_it_is_read():
    def step(weights, x):
        for w in weights:
            x = x @ w
        return x

    pins = {f"0/{number}": (ROWS, COLUMNS)[number % 2] for number in range(4)} | {"1": ROWS}
    plan = shardplan.plan(step, MESH, [_shape(2048, 2048)] * 4, _shape(16384, 2048), pins=pins)
    _, sending = hiding_order(plan.schedule, kernels_in(plan.schedule))
    begins = {gather.value: index for gather, index in sending.begins.items()}
    first, second, third, _ = plan.program.inputs[:4]
    assert begins[first] == begins[second] == begins[third] == 0  # one product hides two of them


@pytest.mark.parametrize(("spec", "copied"), [(ROWS, False), (COLUMNS, True)])
def test_what_a_transposing_kernel_updates_lies_beside_the_old_state_until_the_end(spec, copied):
    def step(state, x):
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(state["w"])
        return {"w": state["w"] - gradient}

    pins = {"0/w": spec, "1": ROWS}
    schedule = shardplan.plan(step, MESH, {"w": _shape(512, 512)}, _shape(8192, 512), pins=pins).schedule
    kernels = adding_products(schedule, ending_at_reductions(schedule, kernels_in(schedule)))
    order, sending = hiding_order(schedule, kernels)
    profile = memory_profile(Lifetimes(schedule.problem, order, kernels, sending), schedule, frozenset({0}), sending)
    [new] = schedule.program.outputs
    assert (new in kernels.leaving) == copied
    assert profile[-1] == (512 * 512 * (1 + copied) + 8192 * 512) * 4 / 8


def test_parts_of_merged_products_that_are_reduced_lie_beside_these_for_a_moment():
    def step(x, y, z):
        return x.T @ y, x.T @ z

    rows, pins = _shape(8192, 2048), dict.fromkeys("012", ROWS)
    schedule = shardplan.plan(step, MESH, rows, rows, rows, pins=pins).schedule
    lifetimes = Lifetimes(schedule.problem, range(len(schedule.program.operations)), kernels_in(schedule))
    [(size, first, last)] = cut_for_reductions(lifetimes, schedule)
    assert first == last == schedule.program.operations[-1].index
    beside = sum(size for size, *_ in side_by_side(lifetimes, schedule))
    assert size == 2 * 2048 * 2048 * 4 - beside - WORKSPACE_BYTES > 0


@pytest.mark.parametrize("donated", [(), (0,)])
def test_a_carry_that_is_gathered_for_a_loop_is_held_whole_while_that_runs(donated):
    def step(weight, rows):
        def body(carry, some):
            return 0.99 * carry, jnp.sum(some @ carry)

        return jax.lax.scan(body, weight, rows)

    pins = {"0": ROWS, "1": jax.P(None, "x", None)}
    plan = shardplan.plan(step, MESH, _shape(512, 512), _shape(8, 4096, 512), pins=pins, donate_argnums=donated)
    schedule, [loop] = plan.schedule, [o for o in plan.program.operations if o.bodies]
    assert [sent.step.kind for sent in schedule.collectives() if sent.operation is loop] == ["all-gather"]
    lifetimes = Lifetimes(schedule.problem, range(len(plan.program.operations)))
    held = memory_held(lifetimes, schedule, frozenset(donated))
    [carry] = [h for h in held if h.value == plan.program.outputs[0] and h.layout == ((), ())]
    assert carry.size == 4 * 512 * 512
    assert carry.lifetime.start <= lifetimes.start(loop) and carry.lifetime.end >= lifetimes.place[loop.index]
    # the network that a search within a limit solves counts it too
    usages = Usages(lifetimes, schedule.problem, frozenset(donated))
    [pair] = usages._leaving_copies()
    domain = schedule.problem.domain(plan.program.outputs[0])
    whole, split = (domain.position[layout] for layout in (((), ()), ((0,), ())))
    assert pair.amounts[whole, split] == 4 * 512 * 512 and pair.amounts[split, split] == 0
    assert pair.start == carry.lifetime.start


def test_reductions_that_would_wait_for_each_other_are_apart():
    def step(x):
        total, largest = jnp.sum(x), jnp.max(x)
        return total, largest, jnp.max(x * total), jnp.sum(x * largest)

    plan = shardplan.plan(step, MESH, jax.ShapeDtypeStruct((4096, 64), "float32"), pins={"0": jax.P("x", None)})
    order = hiding_order(plan.schedule, kernels_in(plan.schedule))[0]
    assert sorted(order) == list(range(len(plan.program.operations)))


def test_parts_that_are_brought_to_another_layout_as_they_are_cut_out_have_their_collective_in_the_order():
    """Of the gradient of what was put together from two tables' rows, whose columns are split."""

    def loss(tables, weights, ids):
        rows = jnp.concatenate([table[ids] for table in tables], axis=1)
        return jnp.sum(jnp.tanh(jnp.tanh(rows @ weights[0]) @ weights[1]))

    shapes = [jax.ShapeDtypeStruct((65536, 64), "float32")] * 2, [jax.ShapeDtypeStruct((128, 512), "float32")] * 1
    shapes[1].append(jax.ShapeDtypeStruct((512, 512), "float32"))
    ids, pins = jax.ShapeDtypeStruct((8192,), "int32"), {"0/*": jax.P(None, "x"), "1/*": jax.P(), "2": jax.P()}
    schedule = shardplan.plan(jax.grad(loss), MESH, *shapes, ids, pins=pins).schedule
    [split] = [o for o in schedule.program.operations if o.primitive.name == "split"]
    assert all(schedule.result_steps(split, position)[0].kind == "all-to-all" for position in range(2))
    kernels = ending_at_reductions(schedule, kernels_in(schedule))
    graph = Graph(schedule, kernels, [], [])
    assert graph.cut.keys() == {*split.results} == graph.sent.keys() & {*split.results}
    assert all(graph.cut[part] in graph.needs[graph.starts[graph.sent[part]]] for part in split.results)
    order, sending = hiding_order(schedule, kernels)
    lifetimes = Lifetimes(schedule.problem, order, kernels, sending)
    held = [*memory_held(lifetimes, schedule, frozenset(), sending)]
    for part in split.results:
        [moved] = [one for one in held if one.value == part and one.layout == schedule.assignment.values[part]]
        [left] = [one for one in held if one.value == part and one.layout != schedule.assignment.values[part]]
        cut, sent, gone = (lifetimes.place[index] for index in sending.parts[part])
        assert left.lifetime == (cut, max(cut, gone)) and cut <= moved.lifetime.start == sent


def test_a_scatter_whose_result_is_brought_elsewhere_writes_into_zeros_and_not_into_what_that_is_added_to():
    def step(table, ids, rows):
        return (table + jnp.zeros_like(table).at[ids].add(rows)) @ jnp.ones((64, 64))

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((4096, 64), (4096, 64))]
    ids, pins = jax.ShapeDtypeStruct((4096,), "int32"), {"0": jax.P("x"), "1": jax.P(), "2": jax.P(None, "x")}
    for spec, apart in ((jax.P("x"), True), (jax.P(), False)):
        schedule = shardplan.plan(step, MESH, shapes[0], ids, shapes[1], pins=pins | {"0": spec}).schedule
        [scatter] = [o for o in schedule.program.operations if o.primitive.name == "scatter-add"]
        moved = any(scatter.results[0] == value for pairs in read_otherwise(schedule).values() for value, _ in pairs)
        fused = ending_at_reductions(schedule, kernels_in(schedule)).fused
        assert moved == apart and (scatter.index in fused) != moved


def test_kernels_read_the_zeros_that_scatters_write_into():
    """The scatter itself, which copies what it writes nothing to, and what compares with as many zeros after it."""

    def step(table, ids, rows):
        gradient = jnp.zeros_like(table).at[ids].add(rows)
        return jax.lax.select(gradient > 0, jnp.tanh(gradient), jnp.zeros(table.shape))

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((65536, 64), (256, 64))]
    schedule = shardplan.plan(step, 1, shapes[0], jax.ShapeDtypeStruct((256,), "int32"), shapes[1]).schedule
    kernels, whole = kernels_in(schedule), 4 * 65536 * 64 / BYTES_MOVED
    graph = Graph(schedule, kernels, [], [])
    [scatter] = [o.index for o in schedule.program.operations if o.primitive.name == "scatter-add"]
    [compares] = [node for node in graph.moves if node > scatter and scatter in graph.needs[node]]
    before = {node: graph.takes[node] for node in (scatter, compares)}
    fill_apart(graph, kernels.fused)
    assert graph.takes[scatter] - before[scatter] == pytest.approx(whole, rel=0.01)
    assert graph.takes[compares] > before[compares]


def test_all_turned_results_are_copied_at_the_end_also_those_that_one_kernel_makes():
    def step(state, x):
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(state["w"])
        moment = 0.9 * state["m"] + gradient
        return {"w": state["w"] - moment * gradient, "m": moment}

    w, x = (jax.ShapeDtypeStruct((rows, 64), "float32") for rows in (64, 4096))
    pins = {"0/*": jax.P(None, "x"), "1": jax.P("x")}
    schedule = shardplan.plan(step, MESH, {"w": w, "m": w}, x, pins=pins).schedule
    kernels = adding_products(schedule, ending_at_reductions(schedule, kernels_in(schedule)))
    graph = Graph(schedule, kernels, [], [])
    join_kernels(graph, kernels)
    before = {*graph.further}
    copy_at_the_end(graph, kernels)
    copies = graph.further - before
    assert len(kernels.leaving) == len(copies) == 2 and len({*map(frozenset, map(graph.needs.get, copies))}) == 1


@pytest.mark.long
def test_the_peak_of_tables_with_split_columns_is_what_is_compiled():
    """Zeros for the tables' gradients are made while the gradients of what is dense are reduced, since what follows
    that takes longer than the last sum over devices: scatters and updates that read them, and copies of results."""

    def loss(params, batch):
        rows = jax.vmap(lambda table, ids: table[ids], (0, 1), 1)(params["tables"], batch["ids"])
        first = x = jnp.concatenate([batch["x"] @ params["in"], rows.reshape(8192, -1)], axis=1)
        for w, b in params["crosses"]:
            x = first * (x @ w + b) + x
        for w, b in params["weights"]:
            x = jax.nn.relu(x @ w + b)
        return jnp.mean(jnp.square(x.sum(1) - batch["y"]))

    def step(state, batch):
        gradients = jax.grad(loss)(state["params"], batch)
        squares = jax.tree.map(lambda s, g: s + g * g, state["squares"], gradients)
        scales = jax.tree.map(lambda s: jnp.where(s > 0, jax.lax.rsqrt(s + 1e-7), 0.0), squares)
        update = jax.tree.map(lambda p, g, s: p - 0.1 * g * s, state["params"], gradients, scales)
        return {"params": update, "squares": squares}

    f32 = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
    layers = [[(f32((a, b)), f32((b,))) for a, b in sizes] for sizes in ([(416, 416)] * 3, [(416, 512), (512, 256)])]
    params = {"tables": f32((12, 50000, 32)), "in": f32((64, 32)), "crosses": layers[0], "weights": layers[1]}
    batch = {"x": f32((8192, 64)), "y": f32((8192,)), "ids": jax.ShapeDtypeStruct((8192, 12), "int32")}
    plan = shardplan.plan(step, MESH, {"params": params, "squares": params}, batch, donate_argnums=0)
    assert shardplan.audit(plan).compiled.memory.peak == pytest.approx(plan.peak_bytes, rel=0.05)


def test_parts_that_are_cut_out_in_a_loop_are_in_its_order_alone(monkeypatch):
    def step(x):
        def body(carry, _):
            first, second = jnp.split(jnp.tanh(carry @ carry), 2, axis=1)
            return jnp.concatenate([second, first], axis=1), None

        return jax.lax.scan(body, x, length=3)[0]

    schedule = shardplan.plan(step, MESH, _shape(512, 512)).schedule
    [split] = [o for o in schedule.program.operations if o.primitive.name == "split"]
    monkeypatch.setattr("shardplan.memory.ending.moved_parts", lambda *given: [split.results[0]])
    assert split.region and not Graph(schedule, kernels_in(schedule), [], []).cut


@pytest.mark.long
@pytest.mark.parametrize("reads", [1, 2, 3])
def test_the_peak_of_the_gradient_of_a_table_that_is_read_several_times_is_what_is_compiled(reads):
    """XLA makes one scatter of those that are added, whatever shape the indices have, as these are few."""

    def loss(table, *ids):
        return jnp.sum(jnp.sin(functools.reduce(jnp.multiply, [table[one].mean(1) for one in ids])))

    ids = [_shape(1024, number + 1, dtype="int32") for number in range(reads)]
    plan = shardplan.plan(jax.grad(loss), 1, _shape(65536, 64), *ids)
    assert shardplan.audit(plan).compiled.memory.peak == pytest.approx(plan.peak_bytes, rel=0.01)


def test_scatters_of_which_one_is_reduced_before_they_are_added_are_two():
    def step(table, ids, others, rows):
        first, second = (jnp.zeros_like(table).at[places].add(rows) for places in (ids, others))
        return (first + second) @ jnp.ones((64, 64))

    shapes = _shape(4096, 64), _shape(1024, dtype="int32"), _shape(1024, dtype="int32"), _shape(1024, 64)
    schedule = shardplan.plan(step, 1, *shapes).schedule
    problem, program = schedule.problem, schedule.program
    first, second = [o.index for o in program.operations if o.primitive.name == "scatter-add"]
    [(added, scatters)] = scatters_as_one(problem).items()
    assert scatters == [first, second] and program.operations[added].primitive.name in ("add", "add_any")
    [filling] = fillings_of(problem)
    fused = kernels_in(schedule).fused
    [(written, _, _)] = _alike(schedule, filling, fused).values()
    assert fused.issuperset(scatters) and written == [added]
    [(written, _, _)] = _alike(schedule, filling, fused - {second}).values()
    assert written == [second]  # the other one is scattered into what this makes


@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
@pytest.mark.parametrize(("edges", "merged"), [(512, True), (4096, False)])
def test_scatters_that_are_added_are_one_where_they_add_less_than_there_is_to_add_to(edges, merged):
    """Gradients of nodes from many more edges were counted as one, with two tensors of zeros less than XLA has."""

    def step(nodes, ids, others, rows):
        first, second = (jnp.zeros_like(nodes).at[places].add(rows) for places in (ids, others))
        return jnp.sin(first + second)

    shapes = _shape(2048, 64), _shape(edges, dtype="int32"), _shape(edges, dtype="int32"), _shape(edges, 64)
    plan = shardplan.plan(step, 1, *shapes)
    assert bool(scatters_as_one(plan.schedule.problem)) == merged
    compiled, _ = compile_for(plan.lower(gpu_mesh("h100", (1,), ("devices",))))
    assert compiled.as_text().count(" scatter(") == 2 - merged


def test_what_is_spread_from_a_view_is_no_view():
    """As keys that all prompts of an image share, to which each adds its own: that ended with a KeyError."""

    def attended(image, points):
        keys = image.reshape(4, 1, 64, 16)
        return jnp.tanh(jnp.broadcast_to(keys, (4, 3, 64, 16)) + 2 * points)

    shapes = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((4, 8, 8, 16), (4, 3, 64, 16)))
    problem = shardplan.plan(attended, 1, *shapes).schedule.problem
    [(view, shape)] = flattened(problem).items()
    assert problem.program.makers[view].primitive.name == "reshape" and shape == (4, 8, 8, 16)
