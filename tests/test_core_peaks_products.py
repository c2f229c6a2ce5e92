"""Predicted peaks: products that XLA:GPU merges, what they read, and copies of it."""

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.memory.accumulation import merged_anywhere
from shardplan.memory.fusion import pointwise_operations
from shardplan.memory.graph import Graph
from shardplan.memory.hiding import hiding_order
from shardplan.memory.joining import join_kernels
from shardplan.memory.liveness import WORKSPACE_BYTES, Lifetimes
from shardplan.memory.lying import lying_of
from shardplan.memory.merging import merged_lifetimes, side_by_side, taken_out
from shardplan.memory.products import merged_products, product_operands
from shardplan.memory.recomputing import adding_products, kernels_in, kernels_of
from shardplan.memory.rows import row_results
from shardplan.memory.turning import turn_operands
from shardplan.tracing import trace_program


def _square(size):
    return jax.ShapeDtypeStruct((size, size), jnp.float32)


def test_products_of_one_operand_are_merged_where_neither_needs_the_other():
    def step(x, w, v):
        first, second = x @ w, x @ v
        return first, second, x @ (second * 2)

    program = trace_program(step, (_square(8),) * 3, {})
    products = [o for o in program.operations if o.primitive.name == "dot_general"]
    sizes = {o.index: 1.0 for o in products}
    assert merged_products(program, products, sizes) == [[o.index for o in products[:2]]]
    assert merged_products(program, products, dict.fromkeys(sizes, 2.0**30)) == []


def test_a_part_of_a_merged_product_that_leaves_keeps_all_of_it():
    def step(x, queries, values):
        left = jax.nn.softmax(x @ queries) @ x
        return left @ x, jnp.tanh(x @ values)

    def keeping(x, queries, values):
        return step(x, queries, values)[0], (x @ values).reshape(64, 32, 2)

    for function, kept in ((step, False), (keeping, True)):
        schedule = shardplan.plan(function, 1, *[_square(64)] * 3).schedule
        lifetimes = Lifetimes(schedule.problem, range(len(schedule.program.operations)))
        product = next(o for o in lifetimes.order if o.primitive.name == "dot_general")
        assert (merged_lifetimes(lifetimes, schedule)[product.results[0]].end == lifetimes.end) == kept


def test_products_are_merged_with_one_that_makes_a_carry_and_what_one_multiplies_by_itself_stays_for_both():
    def step(x, root):
        def improve(carry, _):
            x, root = carry
            made = jnp.tanh(x)
            return (made @ made, root @ made), None

        return jax.lax.scan(improve, (x, root), None, length=3)[0]

    schedule = shardplan.plan(step, 1, *[_square(64)] * 2).schedule
    lifetimes = Lifetimes(schedule.problem, range(len(schedule.program.operations)), kernels_in(schedule))
    made, first, second = (o for o in lifetimes.order if o.region and o.primitive.name in ("tanh", "dot_general"))
    spans = merged_lifetimes(lifetimes, schedule)
    assert {first.results[0], second.results[0]} <= spans.keys()
    assert [size for size, *_ in side_by_side(lifetimes, schedule)] == [2 * 64 * 64 * 4]
    kept = spans.get(made.results[0], lifetimes.held[made.results[0]])
    assert kept.end == lifetimes.place[second.index]


@pytest.mark.parametrize("taken", [True, False])
def test_a_part_of_a_merged_product_that_products_read_is_taken_out_of_it(taken):
    def step(x, wide, narrow):
        made, low = x @ wide, x @ narrow
        low = low if taken else jnp.sin(low)
        last = jnp.tanh(made) @ x
        return low.T @ last, last @ (low @ low.T)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 256), (256, 256), (256, 16))]
    schedule = shardplan.plan(step, 1, *shapes).schedule
    lifetimes = Lifetimes(schedule.problem, range(len(schedule.program.operations)))
    first, second = [o for o in lifetimes.order if o.primitive.name == "dot_general"][:2]
    merged = merged_lifetimes(lifetimes, schedule)
    ends = [merged[product.results[0]].end for product in (first, second)]
    assert merged[first.results[0]].start == merged[second.results[0]].start and (ends[0] < ends[1]) == taken
    assert [size for size, *_ in taken_out(lifetimes, schedule)] == []  # nothing reads the other one behind the copy


@pytest.mark.parametrize(("own", "other", "times"), [("bfloat16", "float32", 2), ("float32", "bfloat16", None)])
def test_a_product_reads_a_copy_in_the_wider_type(own, other, times):
    def step(x, w):
        return jax.lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    program = trace_program(step, (jax.ShapeDtypeStruct((64, 64), own), jax.ShapeDtypeStruct((64, 64), other)), {})
    read = product_operands(program)[0, 0]
    assert read.copied == (times is not None) and read.padding == (times or 1)


@pytest.mark.parametrize(("words", "copies"), [(8009, 2), (8000, 0)])
def test_products_that_sum_over_what_is_split_unevenly_read_copies_with_zeros(words, copies):
    def step(hidden, table):
        scores = jnp.exp(hidden @ table.T)
        return scores @ table, jnp.tanh(scores.T @ hidden).sum(axis=0)

    shapes = [jax.ShapeDtypeStruct((rows, 256), jnp.float32) for rows in (64, words)]
    schedule = shardplan.plan(step, jax.sharding.AbstractMesh((8,), ("x",)), *shapes).schedule
    kernels, order = kernels_in(schedule), range(len(schedule.program.operations))
    products = [o.index for o in schedule.program.operations if o.primitive.name == "dot_general"]
    assert kernels.masked == {(products[1], position) for position in range(copies)}  # the others keep the words
    assert len(Lifetimes(schedule.problem, order, kernels).copies) == copies


def test_what_may_be_merged_with_several_is_merged_with_those_that_share_what_is_made_first():
    def step(x, y, w, v, u):
        return x @ w, y @ w, u @ w, x @ v

    program = trace_program(step, (_square(8),) * 5, {})
    first, second, third, fourth = program.operations
    pairs = merged_products(program, program.operations, {o.index: 1.0 for o in program.operations})
    assert pairs == [[first.index, fourth.index], [second.index, third.index]]


def _backwards(formula, *read):
    """Timesteps of a recurrent net, backwards: each goes on by one weight, and gives something by another. ``read``:
    the shape in which each reads what it goes on from, but for the batch."""

    def step(w, v, x):
        given = []
        for _ in range(3):
            x = jnp.cos(x).reshape(x.shape[0], *read)
            given.append(jnp.einsum(formula, x, v))
            x = jnp.einsum(formula, x, w)
        return x, [jnp.sin(g) for g in given]

    return step


def test_a_weight_that_is_turned_or_flattened_is_made_for_its_first_product():
    n, found = 8, []
    gates = (2, n // 2)
    for formula, read, shape in (
        ("bgh,igh->bi", gates, (n, *gates)),
        ("bgh,ghi->bi", gates, (*gates, n)),
        ("bi,io->bo", (n,), (n, n)),
    ):
        weight = jax.ShapeDtypeStruct(shape, "float32")
        program = trace_program(_backwards(formula, *read), (weight, weight, _square(n)), {})
        products = [o.index for o in program.operations if o.primitive.name == "dot_general"]
        groups = merged_products(program, program.operations, dict.fromkeys(products, 1.0))
        found.append([[products.index(index) for index in group] for group in groups])
    # as compiled; what is read as it is stored is there before
    pairs = [[0, 1], [2, 3], [4, 5]]
    assert found == [pairs, pairs, [[0, 2, 4]]]


def test_what_several_merged_products_put_side_by_side_is_in_memory_once():
    n = 512
    weight = jax.ShapeDtypeStruct((n, 2, n // 2), "float32")
    schedule = shardplan.plan(_backwards("bgh,igh->bi", 2, n // 2), 1, weight, weight, _square(n)).schedule
    kernels = adding_products(schedule, kernels_of(schedule.problem))
    order, sending = hiding_order(schedule, kernels)
    lifetimes = Lifetimes(schedule.problem, order, kernels, sending)
    assert [len(group) for group in merged_anywhere(schedule)] == [2, 2, 2]
    [(size, first, last)] = side_by_side(lifetimes, schedule)
    products = [lifetimes.place[o.index] for o in schedule.program.operations if o.primitive.name == "dot_general"]
    assert size == 2 * 4 * n * n and first <= min(products) and last >= max(products) - 1


def test_products_that_read_what_they_share_in_other_layouts_stay_apart():
    def step(x, w, v):
        return w @ x, v @ x

    program = trace_program(step, (_square(8),) * 3, {})
    first, second = (o.index for o in program.operations)
    whole, rows = ((), ()), (("x",), ())
    for layout, merged in ((whole, [[first, second]]), (rows, [])):
        layouts = {first: (rows, whole), second: (rows, layout)}
        assert merged_products(program, program.operations, {first: 1.0, second: 1.0}, layouts) == merged


def test_merged_products_run_together_behind_what_puts_their_operands_side_by_side():
    def step(w, x, y, z):
        first, second = jnp.sin(x @ y), jnp.cos(x @ z)
        return (first @ w) @ jnp.exp(x), (second @ w) @ y  # which leave no operand of theirs in memory

    schedule = shardplan.plan(step, 1, *[_square(64)] * 4).schedule
    kernels = adding_products(schedule, kernels_of(schedule.problem))
    lifetimes = Lifetimes(schedule.problem, hiding_order(schedule, kernels)[0], kernels)
    products = [o for o in schedule.program.operations if o.primitive.name == "dot_general"]
    merged = [o for o in products if o.operands[1] == schedule.program.inputs[0]]
    places = sorted(lifetimes.place[o.index] for o in merged)
    assert places[1] == places[0] + 1
    assert (2 * 64 * 64 * 4, *places) in list(side_by_side(lifetimes, schedule))
    spans = lifetimes.held | merged_lifetimes(lifetimes, schedule)
    assert [spans[o.operands[0]].end for o in merged] == [places[0]] * 2
    assert [spans[o.results[0]].start for o in merged] == [places[1]] * 2


def test_a_bias_of_columns_is_added_by_the_product_and_its_result_is_not_overwritten():
    def step(x, w, b):
        return jnp.sort(x @ w + b, axis=0)

    def masked(x, w, b):
        wide = x @ w + b
        return jnp.where(wide > 0, wide, x) @ w

    own, inputs = 4 * 4096 * 512, 4 * (4096 * 512 + 512 * 512 + 512)
    args = jax.ShapeDtypeStruct((4096, 512), "float32"), _square(512), jax.ShapeDtypeStruct((512,), "float32")
    # the workspace, and one of three, lie in the memory of the result, which is made last: compiled, too
    assert shardplan.plan(step, 1, *args).peak_bytes == inputs + 2 * own
    assert shardplan.plan(masked, 1, *args).peak_bytes == inputs + 2 * own + WORKSPACE_BYTES


@pytest.mark.parametrize(("contracted", "groups"), [(0, [[0, 1, 2, 3]]), (1, [[0, 3], [1, 2]])])
def test_products_are_merged_that_read_what_they_share_in_one_order(contracted, groups):
    def step(w, x, y):
        rows = (((1,), (contracted,)), ((), ()))
        batches = (((2,), (contracted,)), ((), ()))
        some = [jax.lax.dot_general(x, w, rows), jax.lax.dot_general(y, w, batches)]
        return *some, jax.lax.dot_general(2 * y, w, batches), jax.lax.dot_general(2 * x, w, rows)

    y = jax.ShapeDtypeStruct((4, 16, 64), "float32")
    program = trace_program(step, (_square(64), _square(64), y), {})
    products = [o.index for o in program.operations if o.primitive.name == "dot_general"]
    found = merged_products(program, program.operations, dict.fromkeys(products, 1.0))
    assert found == [[products[number] for number in group] for group in groups]


def test_what_is_computed_twice_is_read_as_one_by_products_that_are_merged():
    def step(x, w, v):
        return jnp.tan(jnp.sin(x) @ w), jnp.sin(x) @ v, jnp.tanh(jnp.sin(x) @ w)

    schedule = shardplan.plan(step, 1, *[_square(64)] * 3).schedule
    products = [o.index for o in schedule.program.operations if o.primitive.name == "dot_general"]
    assert merged_anywhere(schedule) == [products[:2]]
    graph = Graph(schedule, kernels_of(schedule.problem), [], [])
    assert graph.reads.keys() & {*products} == {*products[:2]}


def test_a_sum_of_what_is_computed_from_a_reductions_result_is_no_part_of_that_reduction():
    def step(x, y):
        hot = jax.nn.one_hot(jnp.argmin(x, axis=1), 512)
        return jnp.sum(hot, axis=0), (2 * hot).T @ y

    args = jax.ShapeDtypeStruct((8192, 512), "float32"), jax.ShapeDtypeStruct((8192, 64), "float32")
    schedule = shardplan.plan(step, 1, *args).schedule
    kernels = kernels_of(schedule.problem)
    graph = Graph(schedule, kernels, [], [])
    join_kernels(graph, kernels)
    names = {index: schedule.program.operations[index].primitive.name for index in graph.reads}
    joined = [sorted(names[part] for part in (node, *parts)) for node, parts in graph.joined.items()]
    assert joined == [["mul", "reduce_sum"]]


@pytest.mark.parametrize("length", [256, 8192])
def test_probabilities_of_heads_that_share_their_keys_are_copied_where_each_copy_is_read(length):
    heads = jax.ShapeDtypeStruct((2, length, 2, 4, 128), "bfloat16")
    shared = jax.ShapeDtypeStruct((2, length, 2, 128), "bfloat16")

    def step(queries, keys, values):
        probabilities = jax.nn.softmax(jnp.einsum("bqkgd,btkd->bkgqt", queries, keys).astype("float32"), axis=-1)
        probabilities = probabilities.astype("bfloat16")
        mixed = jnp.einsum("bkgqt,btkd->bqkgd", probabilities, values)
        return mixed, jnp.einsum("bkgqt,bqkgd->btkd", probabilities, mixed)

    problem = shardplan.plan(step, 1, heads, shared, shared).schedule.problem
    program, kernels = problem.program, kernels_of(problem)
    lifetimes = Lifetimes(problem, range(len(program.operations)), kernels)
    spans = [
        (copy.first, copy.last)
        for operand, copy in lifetimes.copies.items()
        if program.values[operand.value].shape == (2, 2, 4, length, length)
    ]
    later, first = sorted(
        (lifetimes.place[o.index] for o in program.operations if o.primitive.name == "dot_general"), reverse=True
    )[:2]
    assert spans == [(first, first), (later, later)]
    # keys lie innermost nowhere: no kernel goes through rows of them, and none stores what both copies are made from
    assert not row_results(program, pointwise_operations(problem))
    assert all(program.values[value].shape != (2, 2, 4, length, length) for value in kernels.stored)


def test_scores_lie_as_their_product_made_them_beside_a_bias_from_a_product_without_batch_dimensions():
    pairs, heads = jax.ShapeDtypeStruct((2, 16, 16, 8), "float32"), jax.ShapeDtypeStruct((2, 16, 4, 8), "float32")

    def step(pairs, weights, queries, keys):
        bias = jnp.moveaxis(pairs @ weights, -1, 1)
        return jax.nn.softmax(jnp.einsum("bnhd,bmhd->bhnm", queries, keys) + bias)

    problem = shardplan.plan(step, 1, pairs, jax.ShapeDtypeStruct((8, 4), "float32"), heads, heads).schedule.problem
    assert not lying_of(problem.program, pointwise_operations(problem)).orders
    assert row_results(problem.program, pointwise_operations(problem))


@pytest.mark.parametrize(("compute", "together"), [(lambda x, b: x + b, False), (lambda x, b: x * jnp.sin(x), True)])
def test_keys_with_a_bias_are_copied_where_each_order_is_read(compute, together):
    heads, bias = jax.ShapeDtypeStruct((2, 64, 4, 8), "float32"), jax.ShapeDtypeStruct((4, 8), "float32")

    def step(keys, bias, queries):
        keys = compute(keys, bias)
        scores = jnp.einsum("bnhd,bmhd->bhnm", queries, keys)
        return scores, jax.lax.dot_general(jnp.tanh(scores), keys, (((3,), (1,)), ((0, 1), (0, 2))))

    problem = shardplan.plan(step, 1, heads, bias, heads).schedule.problem
    lifetimes = Lifetimes(problem, range(len(problem.program.operations)))
    first, second = [o for o in problem.program.operations if o.primitive.name == "dot_general"]
    orders = {copy.reader.index: copy for operand, copy in lifetimes.copies.items() if copy.position}
    assert lifetimes.place[first.index] == orders[first.index].first == orders[first.index].last
    made = first if together else second
    assert orders[second.index].first == lifetimes.place[made.index]


def test_what_a_product_adds_itself_is_fused_into_no_kernel_and_stored_by_none():
    def step(x, w, b):
        biased = x @ w + b
        return jnp.sum(biased, axis=0), jnp.sum(jnp.square(biased), axis=0)

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((4096, 64), (64, 256), (256,))]
    schedule = shardplan.plan(step, 1, *shapes).schedule
    addition = next(o for o in schedule.program.operations if o.primitive.name == "add")
    stored = addition.results[0] in kernels_of(schedule.problem).stored
    assert stored  # where no product is known to add it
    assert addition.results[0] not in kernels_in(schedule).stored


@pytest.mark.parametrize("each", [True, False])
def test_what_makes_operands_of_products_stands_in_the_order_by_itself(each):
    def weigh(x, grads, weights):
        made = jnp.swapaxes(jnp.einsum("bi,bj->bij", x, grads) if each else jnp.sin(x), 1, 2)
        return jnp.einsum("bij,b->ij", made, jnp.cos(weights) / jnp.sum(weights))

    rows, weights = jax.ShapeDtypeStruct((64, 512), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.float32)
    x = rows if each else jax.ShapeDtypeStruct((64, 512, 512), jnp.float32)
    schedule = shardplan.plan(weigh, 1, x, rows, weights).schedule
    kernels = kernels_of(schedule.problem)
    product = [o.index for o in schedule.program.operations if o.primitive.name == "dot_general"][-1]
    graph = Graph(schedule, kernels, [], [])
    before = graph.needs[product]
    turn_operands(graph, kernels)
    assert len(graph.further) == 1 and graph.needs[product] == before | graph.further
    order, sending = hiding_order(schedule, kernels)
    assert sorted(order) == list(range(len(order)))
    assert [index for index, _ in sending.beside] == [product]


def test_what_makes_an_operand_of_a_product_may_read_what_is_made_from_nothing():
    def step(forces, x):  # from each particle to the cells around it
        cells = jnp.stack(jnp.meshgrid(jnp.arange(3), jnp.arange(3), indexing="ij"), -1).reshape(9, 2)
        return jnp.einsum("bnij,bknj->bkni", forces, cells[:, None] - x[:, None])

    forces, x = (jax.ShapeDtypeStruct((16, 8192, *dimensions), jnp.float32) for dimensions in [(2, 2), (2,)])
    schedule = shardplan.plan(step, 1, forces, x).schedule
    kernels = kernels_of(schedule.problem)
    graph = Graph(schedule, kernels, [], [])
    turn_operands(graph, kernels)
    assert len(graph.further) == 1 and schedule.assignment.generated


def _taken_out_of_merged(step, *shapes):
    """Lifetimes of a step in its own order, where some of one merged product's parts end, and where products are added
    to these."""
    schedule = shardplan.plan(step, 1, *shapes).schedule
    kernels = adding_products(schedule, kernels_of(schedule.problem))
    order, sending = hiding_order(schedule, kernels)
    lifetimes = Lifetimes(schedule.problem, order, kernels, sending)
    [group] = merged_anywhere(schedule)
    results = [schedule.program.operations[index].results[0] for index in group]
    assert {found.onto for found in kernels.adding.values()} == {*results}
    spans = merged_lifetimes(lifetimes, schedule)
    adding = sorted(lifetimes.place[index] for index in kernels.adding)
    return [*taken_out(lifetimes, schedule)], [spans[result].end for result in results], adding


@pytest.mark.parametrize("n", [512, 2048])
def test_rows_of_a_merged_product_that_products_add_themselves_to_are_taken_out_together(n):
    def step(x, y, z, w, v):  # two products of one weight, to each of which another product is added, one after another
        first = x @ w + z @ v
        return first, jnp.tanh(first) @ v + y @ w

    parts, ends, adding = _taken_out_of_merged(step, *[_square(n)] * 5)
    # while the second part is taken out with the first, whose sum is in its copy's place by then, both are there
    [(size, first, last)] = parts
    assert size == 4 * n * n and first == last == adding[0]
    assert sorted(end == first for end in ends) == [False, True]


@pytest.mark.parametrize(("rows", "together"), [(4096, True), (8192, False)])
def test_columns_of_a_merged_product_are_taken_out_where_they_are_read_if_that_takes_long(rows, together):
    def step(x, weights, square, y):
        for w in weights:
            y = jnp.tanh(y @ square + x @ w)
        return y

    x, weight, y = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((rows, 80), (80, 256), (rows, 256)))
    _, ends, adding = _taken_out_of_merged(step, x, [weight] * 4, _square(256), y)
    assert len(adding) == 4 and min(ends) == (adding[0] if together else adding[-1])
