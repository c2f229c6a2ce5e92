"""Predicted peaks: copies that kernels make of what products read, and units that products apply."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.memory.accumulation import merged_anywhere
from shardplan.memory.activations import activated
from shardplan.memory.combining import Gather
from shardplan.memory.copying import copying_kernel, written_by
from shardplan.memory.fusion import pointwise_operations
from shardplan.memory.graph import Graph
from shardplan.memory.hiding import hiding_order
from shardplan.memory.liveness import WORKSPACE_BYTES, Lifetimes
from shardplan.memory.lying import lying_of
from shardplan.memory.products import product_operands
from shardplan.memory.recomputing import kernels_in, kernels_of
from shardplan.memory.rows import row_results
from shardplan.memory.times import UNKNOWN
from shardplan.memory.turning import turn_operands
from shardplan.tracing import trace_program


def _graph(gathers):
    """A graph of one product, 5, which reads value 1, an argument."""
    added = []
    graph = SimpleNamespace(
        sources=lambda value: frozenset((value,)),
        maker=lambda value: None,
        brought=lambda value: (),
        add=lambda *node: added.append(node) or 9,
        reduced={},
        gathers=gathers,
        needs={5: {2, 4}},
        values={5: {1}},
    )
    return graph, added


def test_a_copy_waits_for_what_its_reader_has_gathered_anew_and_not_for_a_later_copy():
    shared, layout = Gather(1, ((), ())), ((), ())
    for gathers, needed in (({shared: 4, Gather(1, layout, 5): 2}, {2}), ({shared: 4}, {4}), ({}, set())):
        graph, added = _graph(gathers)
        assert copying_kernel(graph, (5, SimpleNamespace(index=5)), shared, 1.5) == 9
        assert added == [(4.5, needed, {1}, 1.5)]


@pytest.mark.parametrize("summed", [True, False])
def test_one_kernel_writes_all_copies_of_what_it_computes_and_adds_it_up(summed):
    """A head whose words are split unevenly: one product reads zeros beside its words, the other one none."""

    def step(hidden, table):
        scores = jax.lax.dot_general(hidden, table, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        narrow = scores.astype("bfloat16")
        tables = jax.lax.dot_general(narrow, hidden, (((0,), (0,)), ((), ())))
        return narrow @ table, tables, jnp.sum(scores, axis=0) if summed else scores[0]

    shapes = [jax.ShapeDtypeStruct((rows, 256), "bfloat16") for rows in (1024, 8009)]
    schedule = shardplan.plan(step, jax.sharding.AbstractMesh((8,), ("x",)), *shapes).schedule
    operations, kernels = schedule.program.operations, kernels_in(schedule)
    first, *products = [o.index for o in operations if o.primitive.name == "dot_general"]
    assert kernels.masked == {(products[1], 0), (products[1], 1)}
    graph = Graph(schedule, kernels, [], [])
    turn_operands(graph, kernels)
    [copying] = {graph.beside[product, 0] for product in products}
    assert (copying in graph.further) != summed
    assert not summed or operations[copying].primitive.name == "reduce_sum"
    assert all(copying in graph.needs[p] and first not in graph.needs[p] for p in products)
    assert copying in graph.parts  # of several results


def _wide(x, w, bias):
    return x @ w + bias


def _gelu_by_hand(x):
    return x * (0.5 * (1 + jnp.tanh(0.8 * (x + 0.0447 * x**3))))


@pytest.mark.parametrize(
    ("step", "wide"),
    [
        (lambda x, w, bias, v: jax.nn.gelu(x @ w) @ v, 1),
        (lambda x, w, bias, v: _gelu_by_hand(_wide(x, w, bias)) @ v, 1),
        (lambda x, w, bias, v: jax.nn.relu(_wide(x, w, bias)) @ v, 1),
        (lambda x, w, bias, v: jnp.maximum((x @ w).reshape(-1, w.shape[1]), 0) @ v, 1),
        (lambda x, w, bias, v: jnp.maximum(x @ w, 1) @ v, 2),
        (lambda x, w, bias, v: jax.nn.gelu(x @ w, approximate=False) @ v, 2),
        (lambda x, w, bias, v: jax.nn.silu(x @ w) @ v, 2),
        (lambda x, w, bias, v: jax.nn.gelu((x @ w).astype(jnp.float32)).astype(x.dtype) @ v, 2),
        (lambda x, w, bias, v: (lambda y: (jax.nn.relu(y) @ v, jnp.min(y)))(x @ w), 2),
    ],
)
def test_a_product_applies_a_rectifier_or_a_gaussian_unit_that_alone_reads_it(step, wide):
    shapes = [(8, 4096, 64), (64, 512), (512,), (512, 64)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    peak = shardplan.plan(step, 1, *arguments).peak_bytes
    large = 2 * 8 * 4096 * 512
    # what is in memory besides: arguments and the result
    others = peak - wide * large - WORKSPACE_BYTES
    assert 0 < others < 0.5 * large


def test_complex_numbers_are_no_unit():
    program = trace_program(lambda x: x * (1j * (1 + jnp.tanh(x))), (jax.ShapeDtypeStruct((8,), jnp.complex64),), {})
    assert [activated(program, operation) for operation in program.operations] == [None] * len(program.operations)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn, jnp.bfloat16])
def test_products_of_numbers_of_8_bits_read_what_they_sum_over_innermost(dtype):
    n, rows = 1024, jax.ShapeDtypeStruct((64, 1024), dtype)

    def copied(contracted):
        def step(x, w):
            return jax.lax.dot_general(x, w, ((contracted), ((), ())))

        plan = shardplan.plan(step, 1, rows, jax.ShapeDtypeStruct((n, n), dtype))
        made = sum(plan.program.values[value].total_bytes for value in range(3))
        return plan.peak_bytes - made - WORKSPACE_BYTES

    assert copied(((1,), (1,))) == 0
    assert copied(((1,), (0,))) == (n * n if jnp.dtype(dtype).itemsize == 1 else 0)


def _attention_gradients(length=256):
    """The gradients of queries, keys and values of heads that share their keys, on one device."""
    heads, shared = (jax.ShapeDtypeStruct((2, length, n, 64), "float32") for n in (8, 2))

    def step(queries, keys, values):
        mixed = jax.nn.dot_product_attention(queries, keys, values, is_causal=True)
        return jnp.sum(mixed**2)

    schedule = shardplan.plan(jax.grad(step, argnums=(0, 1, 2)), 1, heads, shared, shared).schedule
    return schedule, kernels_in(schedule)


def test_what_goes_through_rows_writes_one_copy_in_the_shortest_time_and_its_other_orders_come_later():
    schedule, kernels = _attention_gradients()
    program, graph = schedule.program, Graph(schedule, kernels, [], [])
    turn_operands(graph, kernels)
    of_scores = [node for node in graph.further if any(program.values[v].elements == 2**20 for v in graph.values[node])]
    # the probabilities, computed for each of two products, and the scores' gradient, which is stored, in another order
    assert sorted(graph.takes[node] for node in of_scores)[:2] == [UNKNOWN] * 2 and len(of_scores) == 3
    lifetimes = Lifetimes(schedule.problem, range(len(program.operations)), kernels)
    copies = {read: copy for read, copy in lifetimes.copies.items() if program.values[read.value].elements == 2**20}
    assert all(copy.first == lifetimes.place[copy.reader.index] for copy in copies.values())


@pytest.mark.long
@pytest.mark.parametrize(("shared", "dtype"), [(4, "float32"), (16, "float32")])
def test_the_peak_of_attention_is_what_is_compiled(shared, dtype):
    def step(weights, x):
        def loss(weights):
            heads = [(x @ w).reshape(*x.shape[:2], -1, 64) for w in weights[:3]]
            mixed = jax.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape)
            return jnp.mean(jnp.square(mixed @ weights[3]))

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    weights = [jax.ShapeDtypeStruct((1024, 64 * heads), dtype) for heads in (16, shared, shared, 16)]
    plan = shardplan.plan(step, 8, weights, jax.ShapeDtypeStruct((16, 1024, 1024), dtype), donate_argnums=0)
    assert shardplan.audit(plan).compiled.memory.peak == pytest.approx(plan.peak_bytes, rel=0.03)


@pytest.mark.long
@pytest.mark.parametrize("together", [3, 4])
def test_odd_numbers_of_heads_that_share_their_keys_are_copied_for_the_backward_pass_in_the_forward_pass(together):
    """Numbers of 16 bits are packed in pairs where a kernel turns them in tiles, which three heads are not."""

    def attended(weights, x):
        heads = [(x @ w).reshape(*x.shape[:2], 4, -1, 64) for w in weights[:3]]
        scores = jnp.einsum("btgre,bsge->bgrts", heads[0], heads[1][:, :, :, 0]).astype("float32")
        shares = jax.nn.softmax(scores / 8, axis=-1).astype(x.dtype)
        return jnp.einsum("bgrts,bsge->btgre", shares, heads[2][:, :, :, 0]).reshape(*x.shape[:2], -1) @ weights[3]

    def loss(layers, x):
        for weights in layers:
            x = x + attended(weights, x)
        return jnp.sum(jnp.square(x.astype("float32")))

    widths = [256 * together, 256, 256]
    shapes = [*((512, width) for width in widths), (256 * together, 512)]
    layers = [[jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]] * 4
    x, pins = jax.ShapeDtypeStruct((32, 512, 512), "bfloat16"), {"0/*": jax.P(), "1": jax.P("x")}
    plan = shardplan.plan(jax.grad(loss), jax.sharding.AbstractMesh((8,), ("x",)), layers, x, pins=pins)
    assert shardplan.audit(plan).compiled.memory.peak == pytest.approx(plan.peak_bytes, rel=0.03)


def _masked_attention(together, layers):
    """The plan of gradients of attention with a mask, whose heads share their keys: probabilities, in 16 bits, that
    both products which read them copy in other orders. Batches are split over 8 devices."""
    heads, length, width = 16, 1024, 64

    def attended(weights, x):
        queries, keys, values = (jnp.einsum("btd,dhk->bthk", x, w) for w in weights[:3])
        queries = queries.reshape(*x.shape[:2], -1, together, width)
        scores = jnp.einsum("btkgd,bskd->bkgts", queries, keys, preferred_element_type="float32") / 8
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)
        shares = jax.nn.softmax(scores).astype(x.dtype)
        mixed = jnp.einsum("bkgts,bskd->btkgd", shares, values).reshape(*x.shape[:2], heads, width)
        return jnp.einsum("bthk,hkd->btd", mixed, weights[3])

    def loss(layers, x):
        for weights in layers:
            x = x + attended(weights, x)
        return jnp.sum(jnp.square(x.astype("float32")))

    of = [(heads * width, n, width) for n in (heads, heads // together, heads // together)]
    weights = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in (*of, (heads, width, heads * width))]
    x = jax.ShapeDtypeStruct((64, length, heads * width), "bfloat16")
    mesh, pins = jax.sharding.AbstractMesh((8,), ("x",)), {"0/*": jax.P(), "1": jax.P("x")}
    return shardplan.plan(jax.grad(loss), mesh, [weights] * layers, x, pins=pins)


@pytest.mark.parametrize(("together", "stored"), [(2, ["exp"]), (1, ["convert_element_type"])])
def test_probabilities_are_computed_anew_where_all_products_copy_them_in_other_orders(together, stored):
    """Reading the mask is what exponentials cost that each kernel would compute, until the mask is computed there."""
    schedule = _masked_attention(together, 1).schedule
    kernels, program = kernels_in(schedule), schedule.program
    scores = 64 * 16 * 1024 * 1024
    values = [v for v in kernels.stored | kernels.read if program.values[v].elements == scores and v in program.makers]
    first = min(o.index for o in program.operations if o.primitive.name == "reduce_sum")
    made = [program.makers[v] for v in values if program.makers[v].index < first + 20]
    assert [operation.primitive.name for operation in made] == stored


@pytest.mark.long
@pytest.mark.parametrize(("together", "near"), [(2, 1e-3), (4, 1e-3), (8, 0.1)])
def test_the_peak_of_masked_heads_that_share_their_keys_is_what_is_compiled(together, near):
    plan = _masked_attention(together, 3)
    assert shardplan.audit(plan).compiled.memory.peak == pytest.approx(plan.peak_bytes, rel=near)


@pytest.mark.parametrize("together", [4, 8])
def test_what_a_kernel_turns_in_tiles_is_not_stored(together):
    """The gradient of probabilities, which the sum in a softmax' gradient reads, and the scores' gradient. The kernel
    of the first stores what it is multiplied by, that of the second turns nothing else: its copy is written behind."""
    schedule = _masked_attention(together, 1).schedule
    kernels, program = kernels_in(schedule), schedule.program
    [(turned, _)] = lying_of(program, pointwise_operations(schedule.problem)).turned.items()
    [wide] = [o for o in program.operations if turned in o.operands]
    assert wide.primitive.name == "convert_element_type"
    tiled = together == 8
    assert (wide.results[0] in kernels.read) == (not tiled)
    multiplied = [o for o in program.operations if wide.results[0] in o.operands and o.primitive.name == "mul"]
    assert [o.results[0] in kernels.read for o in multiplied] == [tiled] * len(multiplied) != []
    order, sending = hiding_order(schedule, kernels)
    lifetimes = Lifetimes(schedule.problem, order, kernels, sending)
    size = program.values[turned].elements
    copies = [copy for read, copy in lifetimes.copies.items() if program.values[read.value].elements == size]
    late = [copy for copy in copies if copy.reader.index > wide.index]
    assert len(late) == 1 and (late[0].first == lifetimes.place[late[0].reader.index]) == tiled


@pytest.mark.parametrize("read_besides", [False, True])
def test_what_merged_products_alone_read_is_computed_where_it_is_put_side_by_side(read_besides):
    def step(x, first, second):
        made = jnp.tanh(first @ first.T), jnp.tanh(second @ second.T)
        return [x.T @ one for one in made], made[0] if read_besides else 0

    schedule = shardplan.plan(step, 1, *[jax.ShapeDtypeStruct((64, 64), "float32")] * 3).schedule
    [merged] = merged_anywhere(schedule)
    read = [schedule.program.operations[index].operands[1] for index in merged]
    assert len(read) == 2 and kernels_in(schedule).read.intersection(read) == {*read[: int(read_besides)]}


@pytest.mark.parametrize(("batch", "copies"), [((8, 16, 4), 1), ((8, 1, 4), 0), ((16, 16, 4), 0)])
def test_products_that_lose_one_of_several_batch_dimensions_read_each_operand_in_one_order(batch, copies):
    """One example on each device: the probabilities are copied for the product that sums over their keys."""

    def step(scores, values):
        return jnp.einsum("brhqk,brkhe->brqhe", jax.nn.softmax(scores), values)

    examples, rows, heads = batch
    shapes = [(*batch, 32, 32), (examples, rows, 32, heads, 8)]
    pins = {"*": jax.P("x", *[None] * 4)}
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    schedule = shardplan.plan(step, jax.sharding.AbstractMesh((8,), ("x",)), *shapes, pins=pins).schedule
    kernels = kernels_in(schedule)
    lifetimes = Lifetimes(schedule.problem, range(len(schedule.program.operations)), kernels)
    assert [read.order for read in lifetimes.copies].count((0, 1, 2, 4, 3)) == copies
    assert len(kernels.reshaped) == copies


@pytest.mark.parametrize("folded", [True, False])
def test_what_is_computed_with_a_softmax_of_numbers_goes_through_no_rows(folded):
    """XLA computes a softmax of zeros while it compiles: of what is computed with it, one kernel writes both copies."""

    def step(images, numbers, keys, values):
        weights = jax.nn.softmax(jnp.zeros_like(numbers) if folded else numbers)
        heads = jnp.tanh(images) * weights[..., None]
        return jnp.einsum("bqhd,bhdk->bhqk", heads, keys), jnp.einsum("bqhd,bhqe->bhde", heads, values)

    shapes = (2, 64, 4, 8), (2, 64, 4), (2, 4, 8, 16), (2, 4, 64, 16)
    problem = shardplan.plan(step, 1, *(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)).schedule.problem
    program, kernels = problem.program, kernels_of(problem)
    assert bool(row_results(program, pointwise_operations(problem))) is not folded
    copies = Lifetimes(problem, range(len(program.operations)), kernels).copies
    begins = [copy.first for read, copy in copies.items() if program.values[read.value].shape == (2, 64, 4, 8)]
    assert len({*begins}) == 1 if folded else len(begins) == 2


def test_what_a_checkpoint_passes_on_is_copied_by_a_kernel_of_its_own():
    """A frozen table of words in 16 bits, which the logits' gradients in 32 read widened: not where logits are made."""

    @jax.checkpoint
    def likelihoods(x, table, picked):
        logits = jnp.einsum("td,vd->tv", x, table, preferred_element_type=jnp.float32)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), picked[:, None], axis=1)

    def loss(x, table, picked):
        return -jnp.sum(jnp.tanh(likelihoods(x, table, picked)))

    shapes = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((64, 32), (256, 32))]
    problem = shardplan.plan(jax.grad(loss), 1, *shapes, jax.ShapeDtypeStruct((64,), "int32")).schedule.problem
    copied = {read: operand for read, operand in product_operands(problem.program).items() if operand.copied}
    written = written_by(problem, problem.program.operations, copied, kernels_of(problem))
    assert [*written.values()] == [None]
