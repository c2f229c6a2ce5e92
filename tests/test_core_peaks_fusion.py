"""Predicted peaks: what kernels compute on the way that looks like an operation of its own."""

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.memory.computing import computing_of
from shardplan.memory.convolutions import spread_operands
from shardplan.memory.fusing import Fusion
from shardplan.memory.liveness import Lifetimes
from shardplan.memory.priorities import stored_values
from shardplan.memory.products import merged_products, product_operands
from shardplan.memory.recomputing import _unfused, kernels_in, kernels_of
from shardplan.memory.reductions import combined_reductions
from shardplan.tracing import trace_program


def _shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def _stored(step, *args):
    problem = shardplan.plan(step, 1, *args).schedule.problem
    makers = {result: o.primitive.name for o in problem.program.operations for result in o.results}
    return [makers[value] for value in kernels_of(problem).stored]


@pytest.mark.parametrize("update", ["set", "add"])
def test_what_writes_to_one_place_is_part_of_the_kernel_that_computes_the_rest(update):
    def step(x, rows):
        cleared = jnp.exp(x)
        return jnp.sum(getattr(cleared.at[:, 3], update)(rows) ** 2, axis=1)

    sizes = 4 * (1024 * 1024 + 1024 + 1024)
    assert shardplan.plan(step, 1, _shape(1024, 1024), _shape(1024)).peak_bytes == sizes


@pytest.mark.parametrize(("size", "kept"), [(3, 0), (8, 1)])
def test_sums_of_few_are_computed_where_they_are_read(size, kept):
    def step(x, y):
        weights = jnp.prod(x, axis=2)
        return jnp.sum(weights[..., None] * y, axis=(0, 1))

    args = _shape(1024, 1024, size), _shape(1024, 1024, 4)
    inputs = sum(4 * 1024 * 1024 * arg.shape[-1] for arg in args) + 4 * 4
    assert shardplan.plan(step, 1, *args).peak_bytes == inputs + kept * 4 * 1024 * 1024


@pytest.mark.parametrize(("dtype", "stored"), [("float32", []), ("complex64", ["exp"])])
def test_an_exponential_of_complex_numbers_is_dear(dtype, stored):
    def step(x):
        rotated = jnp.exp(x)
        return jnp.sum(rotated, axis=0), jnp.sum(rotated * x, axis=1)

    assert _stored(step, _shape(4096, 4096, dtype=dtype)) == stored


@pytest.mark.parametrize(
    ("function", "stored"),
    [(jax.lax.erfc, ["erfc"]), (jax.lax.lgamma, ["lgamma"]), (jnp.atan, ["atan"]), (jax.lax.erf, []), (jnp.tan, [])],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_functions_that_are_made_of_many_operations_are_dear(function, stored):
    """What XLA has no time for, it takes for as quick as an addition."""

    def step(x):
        found = function(x)
        return jnp.sum(found, axis=0), jnp.sum(found * x, axis=1)

    assert _stored(step, _shape(4096, 4096)) == stored


@pytest.mark.parametrize(
    ("rows", "dtype", "stored"),
    [
        ((4096,), "bfloat16", {"erfc"}),
        ((8, 512), "bfloat16", {"erfc", "mul"}),  # 218 MB are compiled, where 185 hold no product with a number
        ((8, 512), "float32", {"erfc"}),
    ],
)
def test_what_an_expanded_function_reads_through_many_views_is_stored(rows, dtype, stored):
    """The Gaussian error unit, behind a bias: XLA multiplies a matrix, which it views as rows where it converts it."""

    def loss(w, out, x, bias):
        return jnp.sum((jax.nn.gelu(x @ w + bias, approximate=False) @ out).astype("float32") ** 2)

    shapes = [_shape(*sizes, dtype=dtype) for sizes in ((1024, 4096), (4096, 1024), (*rows, 1024), (4096,))]
    assert {*_stored(jax.grad(loss, (0, 1)), *shapes)} == stored


@pytest.mark.parametrize(("gated", "stored"), [(True, ["mul"]), (False, [])])
def test_what_a_gate_multiplies_is_stored_for_the_gates_gradient_where_it_is_dear(gated, stored):
    def loss(w, gate, out, x):
        activations = jax.nn.gelu(x @ w)
        return jnp.sum((activations * (x @ gate) if gated else activations) @ out)

    weights = _shape(512, 2048), _shape(512, 2048), _shape(2048, 512)
    assert _stored(jax.grad(loss, (0, 1, 2)), *weights, _shape(8192, 512)) == stored


@pytest.mark.parametrize(
    ("length", "dtype", "stored"),
    [(256, "bfloat16", False), (257, "bfloat16", True), (200, "bfloat16", False), (513, "float32", True)],
)
def test_rows_that_fill_tiles_badly_or_are_padded_for_products_are_stored(length, dtype, stored):
    def step(queries, keys, values):
        scores = jnp.einsum("bqd,bkd->bqk", queries, keys).astype("float32") / 8
        mixed = jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores).astype(dtype), values)
        return jnp.sum(mixed.astype("float32") ** 2)

    heads = _shape(2**25 // length**2, length, 64, dtype=dtype)
    assert ("sub" in _stored(jax.grad(step, (0, 1, 2)), heads, heads, heads)) == stored


@pytest.mark.parametrize(
    ("rows", "columns", "stored"),
    [(4096, 1024, ["mul"]), (2048, 256, ["mul"]), (4096, 2048, []), (8192, 64, [])],
)
def test_sums_down_few_columns_read_one_operand(rows, columns, stored):
    args = _shape(rows, columns), _shape(rows, columns)
    assert _stored(lambda x, y: jnp.sum(x * y, axis=0), *args) == stored


@pytest.mark.parametrize(
    ("shape", "spread", "stored"),
    [((16, 1024, 96), True, ["mul"]), ((16, 1024, 96), False, []), ((128, 1024, 96), True, [])],
)
def test_sums_that_keep_few_processors_busy_read_what_is_spread_as_slowly(shape, spread, stored):
    def step(x, y, first, second):
        if spread:
            x, y = x - first[:, None], y * second[:, None]
        return jnp.sum(x * y, axis=1)

    rows = _shape(shape[0], shape[2])
    assert _stored(step, _shape(*shape), _shape(*shape), rows, rows) == stored


@pytest.mark.parametrize(("batch", "stored"), [(4, ["mul"]), (32, [])])
def test_sums_over_dimensions_that_are_apart_go_down_the_columns_of_the_largest(batch, stored):
    images = _shape(batch, 1024, 16, 12)  # 12 blocks of 64 columns keep few processors busy, 96 all of them
    assert _stored(lambda x, y: jnp.sum(x * y, axis=(1, 3)), images, images) == stored


def test_sums_that_are_scattered_go_down_all_columns_before():
    mesh, rows = jax.sharding.AbstractMesh((8,), ("x",)), jax.P("x", None)
    pins = {"0": rows, "1": rows, "2": jax.P("x")}

    def step(x, y, bias):
        return bias - jnp.sum(x * y, axis=0)

    plan = shardplan.plan(step, mesh, *[_shape(2**15, 192)] * 2, _shape(192), pins=pins)
    assert "reduce-scatter" in {collective.kind for collective in plan.collectives}
    makers = {result: o.primitive.name for o in plan.program.operations for result in o.results}
    assert [makers[value] for value in kernels_in(plan.schedule).stored] == ["mul"]  # of 4096 rows, not of 32768


@pytest.mark.parametrize(("merged", "stored"), [(1, []), (4, ["mul"])])
def test_parts_of_merged_products_are_never_in_the_caches(merged, stored):
    def step(x, weights, first, second):
        doubled, *others = [x @ weight for weight in weights]
        doubled = 2 * doubled
        return jnp.sum(doubled[first], axis=0), jnp.sum(doubled[second], axis=0), others

    rows, weights = _shape(2**16, dtype="int32"), [_shape(256, 256)] * merged
    plan = shardplan.plan(step, 1, _shape(2**14, 256), weights, rows, rows)
    makers = {result: o.primitive.name for o in plan.program.operations for result in o.results}
    assert [makers[value] for value in kernels_in(plan.schedule).stored] == stored


def test_what_a_scatter_writes_into_goes_through_rows():
    def loss(scores, labels):  # its gradient is a sum of three, to one of which picked scores are scattered
        logarithms = jax.nn.log_softmax(scores)
        picked = jnp.take_along_axis(logarithms, labels[:, None], axis=1)
        return jnp.sum(picked) - jnp.sum(jnp.exp(logarithms) * logarithms)

    assert "sub" not in _stored(jax.grad(loss), _shape(1024, 16000), _shape(1024, dtype="int32"))


def test_what_gathers_takes_no_kernel_in_that_reduces_rows():
    def picked(scores, places):
        shifted = scores - jnp.max(scores, axis=1, keepdims=True)
        return jnp.take_along_axis(shifted, places, axis=1)

    args = _shape(4096, 2048), _shape(4096, 1, dtype="int32")
    assert _stored(picked, *args) == ["sub"]
    assert _stored(lambda scores, places: picked(scores, places) - jnp.max(scores), *args) == ["sub"]
    assert _stored(lambda scores, places: jnp.take_along_axis(jnp.exp(scores), places, axis=1), *args) == []


def test_a_product_reads_a_batch_dimension_between_the_others():
    def step(queries, keys):
        return jnp.einsum("tbd,sbd->bts", queries, keys), jnp.einsum("btd,sbd->bts", queries, keys)

    program = trace_program(step, (_shape(16, 16, 8),) * 2, {})
    copied = [operand.copied for operand in product_operands(program).values()]
    assert copied == [False] * 4


@pytest.mark.parametrize(
    ("padding", "times"), [([(1, 1)], {}), ([(0, 1)], 9 / 8), ([(2, 0)], 10 / 8), ([(-1, 0)], 7 / 8)]
)
def test_images_that_are_padded_more_at_one_end_are_read_from_a_copy(padding, times):
    numbers = ("NWC", "WIO", "NWC")

    def step(image, filters):
        made = jax.lax.conv_general_dilated(image, filters, (1,), padding, dimension_numbers=numbers)
        return jnp.sum(made**2)

    program = trace_program(step, (_shape(2, 8, 4), _shape(3, 4, 4)), {})
    [convolution] = [o.index for o in program.operations if o.primitive.name == "conv_general_dilated"]
    assert spread_operands(program, program.operations) == (times and {(convolution, 0): times})


def test_the_copy_for_the_gradient_of_filters_is_padded_by_the_difference():
    def step(image, filters):
        made = jax.lax.conv_general_dilated(image, filters, (2,), [(2, 3)], dimension_numbers=("NWC", "WIO", "NWC"))
        return jnp.sum(made**2)

    program = trace_program(jax.grad(step, argnums=1), (_shape(2, 32, 4), _shape(7, 4, 4)), {})
    assert [*spread_operands(program, program.operations).values()] == [37 / 32, 33 / 32]


def test_picked_logits_are_summed_together_with_the_exponentials_also_where_they_are_picked_in_two_steps():
    def loss(weights, x, labels):
        logits = x @ weights
        picked = jnp.take_along_axis(logits, labels[:, None], axis=1)
        return jnp.sum(jax.nn.logsumexp(logits, axis=1) - picked[..., 0])

    pins, mesh = {"0": jax.P(None, "x"), "1": jax.P(), "2": jax.P()}, jax.sharding.AbstractMesh((4,), ("x",))
    args = _shape(256, 4096), _shape(512, 256), _shape(512, dtype="int32")
    plan = shardplan.plan(jax.value_and_grad(loss), mesh, *args, pins=pins)
    groups = [{operation.primitive.name for operation in group} for group in combined_reductions(plan.schedule)]
    assert {"gather", "reduce_sum"} in groups


def test_an_image_lives_until_its_padded_copy_is_made():
    def step(image, filters):
        image = jnp.tanh(image)
        made = jax.lax.conv_general_dilated(image, filters, (2,), [(0, 1)], dimension_numbers=("NWC", "WIO", "NWC"))
        return jnp.sum(jnp.exp(made) ** 2), jnp.sum(jnp.cos(image))

    args = _shape(8, 4096, 64), _shape(3, 64, 64)
    schedule = shardplan.plan(jax.grad(lambda *args: step(*args)[0], argnums=1), 1, *args).schedule
    held = Lifetimes(schedule.problem, range(len(schedule.program.operations)))
    [(forward, position, times, first, last)] = held.spread
    assert (forward.primitive.name, position, times) == ("conv_general_dilated", 0, 4097 / 4096) and first < last
    assert held.reads[schedule.program.inputs[0]][1] <= first


def test_products_with_one_matrix_are_merged_whatever_the_other_operands_dimensions():
    def step(x, w):
        return x @ w, jnp.stack([x, x]) @ w

    program = trace_program(step, (_shape(16, 16),) * 2, {})
    products = [o for o in program.operations if o.primitive.name == "dot_general"]
    assert merged_products(program, products, {o.index: 1.0 for o in products}) == [[o.index for o in products]]


@pytest.mark.parametrize(("reorder", "beside"), [(True, 1), (False, 0)])
def test_what_is_put_in_another_order_cannot_be_written_over(reorder, beside):
    def step(cache, order):
        return {"k": cache["k"][order] * 2 if reorder else cache["k"].at[order[0]].set(2.0)}, order[0]

    cache, order = {"k": _shape(64, 4096)}, _shape(64, dtype="int32")
    pins, mesh = {"0/*": jax.P(None, "x"), "1": jax.P()}, jax.sharding.AbstractMesh((2,), ("x",))
    plan = shardplan.plan(step, mesh, cache, order, donate_argnums=0, pins=pins)
    assert plan.peak_bytes == 4 * (1 + beside) * 64 * 2048 + 4 * 64 + 4


def test_what_is_spread_along_dimensions_is_read_as_often():
    def step(x, rows):
        scaled = jnp.tanh(x) * rows
        return jnp.sum(scaled, axis=0), jnp.sum(jnp.sin(scaled), axis=1)

    problem = shardplan.plan(step, 1, _shape(512, 512), _shape(512, 1)).schedule.problem
    [product] = [o for o in problem.program.operations if o.primitive.name == "mul"]
    whole = dict.fromkeys(range(len(problem.program.values)), (1.0, 0.0))
    own = Fusion(problem, whole, product.results, computing_of(problem))._kernels[product.results[0]].reads
    assert {sum(times.values()) for times in own.values()} == {1.0, 512.0}


def test_of_an_associative_scan_pairs_are_stored_and_what_is_as_large_as_its_halves_is_not():
    def together(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    def loss(steps, rates, x):
        decays, added = jnp.exp(steps[:, :, None] * rates), steps[:, :, None] * x[:, None, :]
        return jnp.sum(jax.lax.associative_scan(together, (decays, added), axis=0)[1])

    operands = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 2**18), (2**18, 16), (8, 16))]
    program = (problem := shardplan.plan(jax.grad(loss), 1, *operands).schedule.problem).program
    makers = {result: operation.primitive.name for operation in program.operations for result in operation.results}
    stored = [(makers[value], program.values[value].shape[0]) for value in kernels_of(problem).stored]
    assert ("add", 2) in stored and ("slice", 2) in stored
    assert max(rows for _, rows in stored) == 2


def test_what_devices_repeat_is_stored_where_it_is_dear_to_compute():
    def step(x):
        seen = jnp.sin(x)
        return jnp.min(seen, axis=1), jnp.max(seen, axis=1)

    with pytest.warns(shardplan.ShardplanWarning, match="divides"):
        plan = shardplan.plan(step, jax.sharding.AbstractMesh((8,), ("x",)), _shape(8191, 61))
    makers = {result: o.primitive.name for o in plan.program.operations for result in o.results}
    kernels = kernels_of(plan.schedule.problem), kernels_in(plan.schedule)
    assert [[makers[value] for value in found.stored] for found in kernels] == [[], ["sin"]]


@pytest.mark.parametrize(("rows", "stored"), [(1, True), (4096, False)])
def test_sums_along_few_rows_read_and_compute_slowly(rows, stored):
    problem = shardplan.plan(lambda x: jnp.sum(jnp.sin(x), axis=1), 1, _shape(rows, 4096)).schedule.problem
    assert len(kernels_of(problem).stored) == stored


def test_a_loss_is_stored_row_by_row_with_what_its_gradient_reads_of_each_row():
    """What picks the logits of labels puts their places together; zeros that fill in are read once for each number."""

    def loss(table, hidden, labels):
        scores = hidden @ table
        picked = jnp.take_along_axis(scores, labels[..., None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - picked)

    shapes = _shape(512, 8192), _shape(2, 1024, 512), jax.ShapeDtypeStruct((2, 1024), "int32")
    problem = shardplan.plan(jax.grad(loss, (0, 1)), 1, *shapes).schedule.problem
    whole = shardplan.plan(jax.value_and_grad(loss, (0, 1)), 1, *shapes).schedule.problem
    found = []
    for one in (problem, whole):
        program = one.program
        rows = [value for value in kernels_of(one).stored if program.values[value].shape == (2, 1024)]
        found.append({program.makers[value].primitive.name for value in rows})
    assert found[1] - found[0] == {"sub"} and "add_any" in found[0]


@pytest.mark.parametrize("layers", [3, 9])
def test_what_is_alike_or_split_as_before_is_not_fused_again(monkeypatch, layers):
    def step(x, weights):
        for w in weights:
            x = jnp.tanh(x) * jnp.sum(jnp.sin(x), axis=1, keepdims=True) @ w
        return x

    problem = shardplan.plan(step, 1, _shape(512, 512), [_shape(512, 512)] * layers).schedule.problem
    values = problem.program.values
    found, looked_at = _unfused(problem, frozenset()), []
    fuse = Fusion.fuse
    monkeypatch.setattr(Fusion, "fuse", lambda fusion, able: looked_at.append(able) or fuse(fusion, able))
    problem.known.clear()
    degrees = [1.0] * len(values)
    before = stored_values(problem, found.fused, found.read, degrees, {})
    parts, looked_at[:] = len(looked_at), []
    assert parts == 3  # those of one layer
    [degree] = {value.index for value in values if value.name == "0"}
    degrees[degree] = 8.0
    after = stored_values(problem, found.fused, found.read, degrees, {})
    assert 0 < len(looked_at) < parts
    for stored, split in ((before, [1.0] * len(values)), (after, degrees)):
        apart = {value: (degree, 0.0) for value, degree in enumerate(split)}
        made = [r for o in problem.program.operations for r in o.results]
        whole = Fusion(problem, apart, made, computing_of(problem))
        whole.fuse(
            [r for o in problem.program.operations for r in o.results if o.index in found.fused and r not in found.read]
        )
        assert stored == whole.apart.keys()


@pytest.mark.parametrize(
    ("heads", "dtype", "shared"), [(4, "float32", True), (16, "float32", False), (4, "float16", False)]
)
def test_probabilities_of_few_heads_that_share_their_keys_are_copied_for_both_passes_at_once(heads, dtype, shared):
    def loss(q, k, v):
        scores = jnp.einsum("bqgrd,bkgd->bgrqk", q, k).astype("float32")
        return jnp.sum(jnp.einsum("bgrqk,bkgd->bqgrd", jax.nn.softmax(scores).astype(dtype), v).astype("float32") ** 2)

    shapes = (_shape(4, 128, 2, *of, 64, dtype=dtype) for of in ((heads,), (), ()))
    problem = shardplan.plan(jax.grad(loss, (0, 1, 2)), 1, *shapes).schedule.problem
    lifetimes = Lifetimes(problem, range(len(problem.program.operations)), kernels_of(problem))
    made = next(o.results[0] for o in problem.program.operations if o.primitive.name == "div")
    read = next((o.results[0] for o in problem.program.operations if dtype == "float16" and made in o.operands), made)
    forward, backward = (copy for operand, copy in lifetimes.copies.items() if operand.value == read)
    assert (forward.first == backward.first) == shared and forward.last < backward.last
