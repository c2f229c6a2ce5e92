"""Predicted peaks: what XLA:GPU stores, computes anew, copies, merges and updates in place."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.memory.fusion import pointwise_operations, readers_of
from shardplan.memory.liveness import WORKSPACE_BYTES, Lifetimes, memory_held
from shardplan.memory.lying import lying_of
from shardplan.memory.products import is_sum, product_operands
from shardplan.memory.recomputing import kernels_in, kernels_of
from shardplan.memory.repeated import apart_in, repeated_in, repeated_results
from shardplan.memory.slicing import sliced_on_the_way
from shardplan.memory.zeros import filled_before
from shardplan.schedule import Schedule
from shardplan.tracing import trace_program

MESH = jax.sharding.AbstractMesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def _square(size):
    return jax.ShapeDtypeStruct((size, size), jnp.float32)


def _peak_on_one(step, *args):
    return shardplan.plan(step, jax.sharding.AbstractMesh((1,), ("x",)), *args).peak_bytes - WORKSPACE_BYTES


def test_a_scatter_into_zeros_and_its_sum_with_another_value_are_one_buffer():
    n = 1024

    def step(x, w, places):
        logits = (x @ w).astype(jnp.bfloat16)
        row = jnp.arange(n)
        ones = jnp.zeros((n, n)).at[row, places].add(1.0)
        return (ones + logits.astype(jnp.float32) * 2).astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)

    indices = jax.ShapeDtypeStruct((n,), jnp.int32)
    # x, w and the result; the sum in float32 and its operand, or its bfloat16 copy, with that of w
    assert _peak_on_one(step, _square(n), _square(n), indices) < (4 + 4 + 2 + 4 + 4 + 2.1) * n * n


def test_a_scatter_into_zeros_is_one_buffer_with_all_that_is_added_to_it():
    def step(x, places):
        ones = jnp.zeros(x.shape).at[jnp.arange(x.shape[0]), places].add(1.0)
        return (ones + jnp.exp(x)) + jnp.tanh(x)

    shapes = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32)
    problem = shardplan.plan(step, 1, *shapes).schedule.problem
    fused = kernels_of(problem).fused
    kernels = [o.primitive.name for o in problem.program.operations if o.index not in fused]
    assert kernels == ["add"]


def _stored_by(function):
    """The primitives of the values that are held while a function of two bfloat16 matrices runs."""
    half = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    problem = shardplan.plan(function, jax.sharding.AbstractMesh((1,), ("x",)), half, half).schedule.problem
    makers = {o.results[0]: o.primitive.name for o in problem.program.operations}
    return {makers.get(value) for value in Lifetimes(problem, range(len(problem.program.operations))).held}


def test_what_many_kernels_read_is_stored_where_computing_it_anew_reads_more():
    def sums(total, count):
        return [jnp.sum(jnp.abs(total * k), axis=0) for k in range(count)]

    assert "add" not in _stored_by(lambda a, b: sums(a @ b + b @ a, 2))
    assert "add" in _stored_by(lambda a, b: sums(a @ b + b @ a, 5))
    assert "convert_element_type" not in _stored_by(lambda a, b: sums((a @ b).astype(jnp.float32), 5))


def test_what_takes_longer_to_compute_than_to_read_is_stored_for_the_backward_pass():
    def stored(function, dtype=jnp.bfloat16):
        square = jax.ShapeDtypeStruct((4096, 4096), dtype)
        mesh = jax.sharding.AbstractMesh((1,), ("x",))
        problem = shardplan.plan(jax.grad(function), mesh, square, square).schedule.problem
        makers = {result: o.primitive.name for o in problem.program.operations for result in o.results}
        return {makers[value] for value in kernels_of(problem).stored if problem.program.values[value].shape}

    assert stored(lambda w, x: jnp.sum(jax.nn.relu(x @ w) @ w)) == set()
    assert stored(lambda w, x: jnp.sum(jax.nn.silu(x @ w) @ w)) == set()
    assert stored(lambda w, x: jnp.sum(jax.nn.gelu(x @ w) @ w)) == {"tanh"}
    assert stored(lambda w, x: jnp.sum(jax.nn.gelu(x @ w) @ w), jnp.float32) == set()  # twice as long to read

    def dropped(w, x):
        kept = jax.random.bernoulli(jax.random.key(x[0, 0].astype(int)), 0.9, w.shape)
        return jnp.sum(jnp.where(kept, x @ w, 0) @ w)

    assert stored(dropped) == {"lt"}  # one byte per element, not the random bits


def test_a_softmax_is_one_kernel_and_stores_nothing_in_between():
    rows = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    step = jax.grad(lambda w, x: jnp.sum(jax.nn.softmax((x @ w).astype(jnp.float32)).astype(jnp.bfloat16) @ w))
    problem = shardplan.plan(step, jax.sharding.AbstractMesh((1,), ("x",)), rows, rows).schedule.problem
    assert not {v for v in kernels_of(problem).stored if problem.program.values[v].shape == (512, 512)}


def test_an_associative_scan_stores_what_its_levels_read_and_not_what_these_are_taken_from():
    def loss(x):
        both = jax.lax.associative_scan(
            lambda old, new: (old[0] * new[0], new[0] * old[1] + new[1]), (jnp.exp(x), x), axis=1
        )
        return jnp.sum(both[1] ** 2)

    rows = jax.ShapeDtypeStruct((4096, 16, 64), jnp.float32)
    problem = shardplan.plan(jax.grad(loss), jax.sharding.AbstractMesh((1,), ("x",)), rows).schedule.problem
    makers = {result: o.primitive.name for o in problem.program.operations for result in o.results}
    whole = {makers[value] for value in kernels_of(problem).stored if problem.program.values[value].shape == rows.shape}
    assert "exp" not in whole
    assert {"concatenate", "slice"} <= {makers[value] for value in kernels_of(problem).stored}


def _heads(size, dtype=jnp.float32):
    return jax.ShapeDtypeStruct((4, size, 2, 64), dtype)


def test_a_product_over_batch_dimensions_that_lie_inside_reads_copies_and_forward_and_backward_share_them():
    def attended(q, k):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        return scores, jax.lax.dot_general(scores, q, (((2,), (1,)), ((0, 1), (0, 2))))  # its gradient for keys

    program = trace_program(attended, (_heads(32),) * 2, {})
    copied = [operand for operand in product_operands(program).values() if operand.copied]
    assert {(o.value, o.order) for o in copied} == {(0, (0, 2, 1, 3)), (1, (0, 2, 3, 1))}
    problem = shardplan.plan(attended, 1, _heads(32), _heads(32)).schedule.problem
    lifetimes = Lifetimes(problem, range(len(problem.program.operations)))
    products = [o.index for o in problem.program.operations if o.primitive.name == "dot_general"]
    assert {(operand.value, copy.first, copy.last) for operand, copy in lifetimes.copies.items()} == {
        (0, products[0], products[1]),
        (1, products[0], products[0]),
    }


def test_dimensions_of_size_one_need_no_copy_wherever_they_lie():
    shapes = jax.ShapeDtypeStruct((1, 4, 32, 32), jnp.float32), jax.ShapeDtypeStruct((4, 32, 1, 64), jnp.float32)
    numbers = (((3,), (1,)), ((1,), (0,)))
    program = trace_program(lambda scores, v: jax.lax.dot_general(scores, v, numbers), shapes, {})
    assert [o.copied for o in product_operands(program).values()] == [False, False]


@pytest.mark.parametrize("product", [True, False])
def test_a_kernel_overwrites_what_another_one_made_alone_but_no_librarys_result(product):
    n = 2048

    def step(x, w):
        made = x @ w if product else jnp.exp(x)
        return jnp.sum(jnp.tanh(made * (made @ w)) @ w)

    # x and w; a value, its product with w, and what becomes of both, over the value where that is allowed
    size = 4 * n * n
    peak = _peak_on_one(step, _square(n), _square(n)) + WORKSPACE_BYTES
    assert peak - (4 + product) * size in (4, 4 + WORKSPACE_BYTES)


def test_what_is_needed_meanwhile_lies_in_the_memory_of_a_result_until_that_is_made():
    n = 2048

    def step(x, w):
        made = x @ w
        return jnp.tanh(made * (made @ w)) @ w

    # x and w, the result, and two of a value, its product with w, and what becomes of both: compiled, too
    assert shardplan.plan(step, 1, _square(n), _square(n)).peak_bytes == 5 * 4 * n * n
    # that of x is the result's, and free once x is multiplied
    donated = shardplan.plan(lambda s, w: ({"x": step(s["x"], w)},), 1, {"x": _square(n)}, _square(n), donate_argnums=0)
    assert donated.peak_bytes == 4 * 4 * n * n


@pytest.mark.parametrize(
    ("size", "dtype", "times"), [(32, "bfloat16", 1), (33, "bfloat16", 40 / 33), (33, "float32", 1)]
)
def test_products_of_half_precision_pad_their_operands(size, dtype, times):
    matrix = jax.ShapeDtypeStruct((size, 64), dtype)
    program = trace_program(lambda x, y: x @ y.T, (matrix, matrix), {})
    operands = list(product_operands(program).values())
    assert [operand.padding for operand in operands] == pytest.approx([times] * 2)
    assert [operand.value for operand in operands] == [0, 1]  # the transposition is part of the product
    assert all(operand.copied == (times > 1) for operand in operands)


@pytest.mark.parametrize(("algorithm", "narrow"), [(jax.lax.DotAlgorithmPreset.BF16_BF16_F32, True), (None, False)])
def test_products_by_an_algorithm_read_operands_in_its_type(algorithm, narrow):
    wide, half = jax.ShapeDtypeStruct((33, 64), "float32"), jax.ShapeDtypeStruct((64, 32), "bfloat16")

    def product(x, y):
        return jax.lax.dot_general(
            x, y, (((1,), (0,)), ((), ())), precision=algorithm, preferred_element_type="float32"
        )

    left, right = product_operands(trace_program(product, (wide, half), {})).values()
    assert (left.padding, left.copied) == ((0.5, True) if narrow else (1, False))  # 33 rows, not 40
    assert (right.padding, right.copied) == ((1, False) if narrow else (2, True))  # converted beside a wider one
    assert (left.rounded, right.rounded) == (False, narrow)


def test_a_batched_product_that_joins_dimensions_reads_them_in_one_order():
    def copied(spec, left, right):
        shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in (left, right)]
        return [
            o.copied for o in product_operands(trace_program(lambda a, b: jnp.einsum(spec, a, b), shapes, {})).values()
        ]

    assert copied("bsg,bsd->bgd", (2, 8, 4), (2, 8, 3)) == [False, False]
    assert sorted(copied("bsqg,bsd->bqgd", (2, 8, 5, 4), (2, 8, 3))) == [False, True]  # queries of a group
    assert copied("bqgs,bsd->bqgd", (2, 5, 4, 8), (2, 8, 3)) == [False, False]


def _peak_of(step, *arguments):
    """The predicted peak on one device, and the bytes of the first argument."""
    plan = shardplan.plan(step, jax.sharding.AbstractMesh((1,), ("x",)), *arguments)
    return plan.peak_bytes, plan.program.values[plan.program.inputs[0]].total_bytes


def test_what_is_computed_from_a_transposed_product_lies_as_the_product_does():
    def step(q, k, v):  # one head of keys and values for all: scores are made with the heads innermost
        weights = jax.nn.sigmoid(jnp.einsum("bqhd,bkd->bhqk", q, k))
        return jax.lax.dot_general(weights, v, (((3,), (1,)), ((0,), (0,))))

    heads, one = jax.ShapeDtypeStruct((2, 8, 4, 16), jnp.float32), jax.ShapeDtypeStruct((2, 6, 16), jnp.float32)
    problem = shardplan.plan(step, 1, heads, one, one).schedule.problem
    program, pointwise = problem.program, pointwise_operations(problem)
    second = [operation for operation in program.operations if operation.primitive.name == "dot_general"][-1]
    for known, copied in ((frozenset(), False), (pointwise, True)):
        assert product_operands(program, known)[second.index, 0].copied == copied


def test_what_meets_an_earlier_product_that_lies_otherwise_is_moved_and_stored_where_several_kernels_read_it():
    def moved(scored, mixed, *heads):
        def loss(q, k, v):
            weights = jax.nn.softmax(jnp.einsum(scored, q, k).astype(jnp.float32)).astype(v.dtype)
            return jnp.sum(jnp.einsum(mixed, weights, v).astype(jnp.float32) ** 2)

        shapes = (jax.ShapeDtypeStruct((4, 128, *of, 64), jnp.bfloat16) for of in (heads, heads[:1], heads[:1]))
        problem = shardplan.plan(jax.grad(loss, (0, 1, 2)), 1, *shapes).schedule.problem
        lying, readers = (
            lying_of(problem.program, pointwise_operations(problem)),
            readers_of(problem.program.operations),
        )
        wide = [readers[value][0].results[0] for value in lying.turned]
        return [problem.program.values[value].dtype.name for value in wide if value in kernels_of(problem).read]

    # groups of heads share their keys: scores are made with a group's heads innermost, and the gradient of the weights,
    # which a sum and a product read, is not
    assert moved("bqgrd,bkgd->bgrqk", "bgrqk,bkgd->bqgrd", 2, 4) == ["float32"]
    assert moved("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd", 2) == []


def test_a_slice_of_what_a_device_holds_is_computed_by_what_reads_it():
    split = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec("x"))

    def step(x):
        return jnp.sum(jnp.sin(jax.lax.with_sharding_constraint(jnp.linalg.cholesky(x), split)))

    plan = shardplan.plan(step, MESH, _square(64))
    fused = kernels_of(plan.schedule.problem).fused
    sliced = sliced_on_the_way(plan.schedule, fused)
    assert [*sliced.values()] == [((), ())]


def test_scatters_into_zeros_that_are_added_are_one():
    def step(table, ids, others):
        return jnp.sum(jnp.sin(table[ids] * table[others]))

    ids = [jax.ShapeDtypeStruct((16,), jnp.int32)] * 2
    peak, table = _peak_of(jax.grad(step), _square(512), *ids)
    assert 2 * table <= peak < 2.1 * table  # the table, and its gradient


def test_zeros_that_rectifiers_read_are_held_up_to_the_last_kernel_that_computes_what_these_make():
    def step(x, w, places, rows):
        rectified = jax.nn.relu(x)
        scattered = jnp.zeros(x.shape).at[places].add(rows)
        return jnp.sum(rectified, axis=1), jnp.sum(((scattered @ w) @ w) * rectified, axis=0)

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((4096, 512), (512, 512), (8192, 512))]
    plan = shardplan.plan(step, 1, *shapes[:2], jax.ShapeDtypeStruct((8192,), "int32"), shapes[2])
    problem, kernels = plan.schedule.problem, kernels_of(plan.schedule.problem)
    lifetimes = Lifetimes(problem, range(len(plan.program.operations)), kernels)
    last = max(o.index for o in plan.program.operations if o.primitive.name == "mul")
    assert [until for _, _, _, until in filled_before(plan.schedule, lifetimes, {})][-1] == lifetimes.place[last]


def test_scatters_of_constants_alone_need_no_zeros():
    def step(x):
        return x + jnp.zeros((64, 64)).at[jnp.arange(64)].add(1.0) * jnp.zeros((64, 64)).at[jnp.arange(64)].add(2.0)

    assert shardplan.plan(step, MESH, _square(64)).peak_bytes < 8 * 4 * 64 * 64


def test_random_bits_of_many_keys_are_computed_by_what_reads_them():
    def step(x, keys):
        return jax.vmap(lambda key: jax.random.normal(jax.random.wrap_key_data(key), x.shape) @ x)(keys).sum()

    peak, x = _peak_of(step, _square(512), jax.ShapeDtypeStruct((16, 2), jnp.uint32))
    assert 33 * x <= peak < 33.1 * x + WORKSPACE_BYTES  # numbers and products, not the bits


def test_a_scatter_computes_its_updates_on_the_way():
    def step(nodes, edges, weights):
        return jax.ops.segment_sum(weights[:, None] * nodes[edges], edges, 512)

    edges = jax.ShapeDtypeStruct((4096,), jnp.int32), jax.ShapeDtypeStruct((4096,), jnp.float32)
    peak, nodes = _peak_of(step, _square(512), *edges)
    assert 2 * nodes <= peak < 2.2 * nodes  # not the eight times as many rows of the edges


def test_what_is_computed_twice_from_the_same_values_is_held_once():
    def step(x):
        first, second = x @ x, x @ x
        return jnp.sum(jnp.sin(first) @ jax.lax.optimization_barrier(x)) + jnp.sum(second @ x)

    program = trace_program(step, (_square(8),), {})
    assert sorted(repeated_results(program, program.operations)) == [program.operations[1].results[0]]
    lifetimes = Lifetimes(shardplan.plan(step, 1, _square(8)).schedule.problem, range(len(program.operations)))
    first, second = (operation.results[0] for operation in lifetimes.order[:2])
    products = [o for o in lifetimes.order if o.primitive.name == "dot_general"]
    assert second not in lifetimes.held
    assert lifetimes.held[first].end == lifetimes.place[products[-1].index]


def test_what_is_computed_twice_in_other_layouts_is_held_twice():
    def step(x, w):
        return jnp.sum(jnp.sin(x @ w)) + jnp.sum(jnp.cos(x @ w))

    plan = shardplan.plan(step, MESH, _square(64), _square(64), pins={"0": jax.P("x", None), "1": jax.P()})
    first, second = (o for o in plan.program.operations if o.primitive.name == "dot_general")
    assert apart_in(plan.schedule) == ()
    strategies = plan.schedule.assignment.strategies
    choices = plan.schedule.problem.choices[second.index].strategies
    another = next(strategy for strategy in choices if strategy.results != strategies[first.index].results)
    assignment = dataclasses.replace(plan.schedule.assignment, strategies={**strategies, second.index: another})
    schedule = Schedule(plan.schedule.problem, assignment)
    assert repeated_in(plan.program, apart_in(schedule)) == {}
    assert (
        second.results[0] in Lifetimes(schedule.problem, range(len(plan.program.operations)), kernels_in(schedule)).held
    )


def test_a_product_with_a_vector_is_a_sum_and_copies_no_operand():
    def attend(queries, keys):
        return jnp.einsum("bqhd,bkhd->bhqk", queries, keys)

    keys = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.float32)
    for queries, summed in ((1, True), (2, False)):
        shapes = jax.ShapeDtypeStruct((2, queries, 4, 64), jnp.float32), keys
        program = trace_program(attend, shapes, {})
        (product,) = (o for o in program.operations if o.primitive.name == "dot_general")
        assert is_sum(program, product) == summed and bool(product_operands(program)) != summed
        peak, size = _peak_on_one(attend, *shapes), 4 * 2 * 512 * 4 * 64
        assert (peak < 1.1 * size) == summed


def test_an_outer_product_is_multiplied_in_the_kernels_that_read_it():
    n = 512

    def norms(x, y):  # a gradient of one weight for each of 64 examples
        return jnp.sum(jax.vmap(jnp.outer)(x, y) ** 2, (1, 2))

    rows = jax.ShapeDtypeStruct((64, n), jnp.float32)
    assert _peak_on_one(norms, rows, rows) < 4 * 64 * n * n


def test_what_passes_a_barrier_stays_in_its_memory_until_its_own_last_reader():
    n = 1024

    def step(x, w):
        early, late = jax.lax.optimization_barrier((x @ w, w @ x))
        return jnp.sum(((early @ w) @ w) @ late)

    # x and w; `late`, and two products in a row; the sum
    assert _peak_on_one(step, _square(n), _square(n)) == 5 * 4 * n * n + 4


@pytest.mark.parametrize(("size", "together"), [(2048, True), (16384, False)])
def test_partial_results_that_are_scattered_together_stay_until_the_last_is_made(size, together):
    def step(weights, x):
        return [jnp.tanh(w) + x.T @ (x * n) for n, w in enumerate(weights)]

    x = jax.ShapeDtypeStruct((4 * size, size), jnp.float32)
    pins = {"0/*": jax.P("x", None), "1": jax.P("x", None)}
    plan = shardplan.plan(step, MESH, [_square(size)] * 3, x, pins=pins)
    operations = plan.program.operations
    lifetimes = Lifetimes(plan.schedule.problem, range(len(operations)))
    products = {o.results[0]: o.index for o in operations if o.primitive.name == "dot_general"}
    held = memory_held(lifetimes, plan.schedule, frozenset())
    ends = {h.value: h.lifetime.end for h in held if h.value in products and h.size == 4 * size * size}
    assert ends == (dict.fromkeys(products, max(products.values())) if together else products)
