"""The kernels of a schedule: fused and materialised values, and the operand copies of library calls."""

import jax
import jax.numpy as jnp
import pytest

from shardplan.memory.convolutions import convolution_copies
from shardplan.memory.kernels import kernels_of
from shardplan.memory.operations import merged_scatters, row_fusion_values
from shardplan.memory.products import partial_sums, product_operands
from tests.helpers.memory_programs import MESH, graph_of, planned, shape, stored

SQUARE = shape(256, 256)


def test_elementwise_chains_fuse_between_products():
    """What kernels compute for a product alone is stored as its operand, and nothing else of the chain is."""
    plan = planned(lambda x, w: jnp.exp(jnp.tanh(x @ w) * 2.0) @ w, SQUARE, SQUARE)
    assert stored(plan) == ["dot_general", "exp", "dot_general"]


def test_a_value_is_stored_where_recomputing_costs_more():
    """Parts that many readers compute again cost more than the store: XLA's estimate decides, by sizes."""

    def scaled(x, w):
        row = jnp.log1p(jnp.expm1(w))
        return [jnp.cos(x * row + n) for n in range(2)]

    assert stored(planned(scaled, shape(4096, 4096), shape(4096))) == ["log1p", "cos", "cos"]


def test_reductions_end_kernels_and_short_ones_do_not():
    """Threads add three numbers up wherever the sum is read; 512 are reduced by a kernel."""
    assert stored(planned(lambda x: jnp.tanh(x.sum(-1)), shape(64, 3))) == ["tanh"]
    assert stored(planned(lambda x: jnp.tanh(x.sum(-1)), shape(64, 512))) == ["reduce_sum", "tanh"]


def test_a_softmax_stores_no_exponentials():
    """One kernel goes through whole rows, so that what the row's sum reads is stored nowhere."""

    def attention(q, k, v):
        return jax.nn.softmax(q @ k.T) @ v

    plan = planned(attention, SQUARE, SQUARE, SQUARE)
    assert "exp" not in stored(plan)
    exponentials = [o.results[0] for o in plan.program.operations if o.primitive.name == "exp"]
    assert row_fusion_values(plan.schedule.problem).issuperset(exponentials)


def test_a_scatter_into_zeros_and_an_addition():
    """The scatter of a picked logit's gradient writes into the other addend."""

    def loss(x, w, labels):
        logits = x @ w
        return (jax.nn.logsumexp(logits, 1) - jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]).sum()

    plan = planned(jax.grad(loss), SQUARE, SQUARE, shape(256, dtype="int32"))
    [(scatter, addition)] = merged_scatters(plan.schedule.problem).items()
    names = [plan.program.operations[index].primitive.name for index in (scatter, addition)]
    assert names == ["scatter-add", "add_any"]
    assert scatter in kernels_of(plan.schedule).fused


def test_equal_values_are_computed_once():
    """In one layout, XLA's common subexpression elimination finds them."""
    plan = planned(lambda x, w: jnp.sin(x @ w) @ w + jnp.cos(x @ w), SQUARE, SQUARE)
    assert len(kernels_of(plan.schedule).same) == 1
    assert sum(node.library for node in graph_of(plan).nodes) == 2


def test_batched_products_read_transposed_copies():
    """Heads behind the sequence are copied; without a batch a transposition is part of the product."""
    heads = shape(2, 64, 4, 32)
    batched = planned(lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), heads, heads).program
    assert [read.copied for read in product_operands(batched).values()] == [True, True]
    plain = planned(lambda x, w: x.T @ w.T, SQUARE, SQUARE).program
    assert [read.copied for read in product_operands(plain).values()] == [False, False]


def test_transposed_results_of_kernels():
    """A kernel writes its result in the dimension order of the product that reads it."""
    plan = planned(lambda x, w: jnp.einsum("bhk,bkd->bhd", jnp.exp(x).swapaxes(1, 2), w), *[shape(8, 64, 64)] * 2)
    assert not any(read.copied for read in product_operands(plan.program).values())


def test_odd_sizes_in_16_bits_are_padded():
    """Tensor cores need multiples of 8."""
    plan = planned(jnp.matmul, shape(64, 50, dtype="bfloat16"), shape(50, 64, dtype="bfloat16"))
    read = product_operands(plan.program)[0, 0]
    assert read.copied
    assert read.times == pytest.approx(56 / 50)


@pytest.mark.parametrize(
    ("rows", "length", "parts"), [(512, 2048, 8), (2048, 2048, 2), (2048, 512, 0), (4096, 2048, 0)]
)
def test_long_contractions_are_cut_into_parts(rows, length, parts):
    """Where the result has too few tiles for the device: partial sums in float32."""
    plan = planned(jnp.matmul, shape(rows, length), shape(length, 512))
    [product] = plan.program.operations
    problem = plan.schedule.problem
    chosen = problem.choices[0].strategies.index(plan.schedule.assignment.strategies[0])
    assert partial_sums(problem, product)[chosen] == 4 * parts * rows * 512


def test_convolutions_copy_filters_and_uneven_images():
    """cuDNN reads filters with what they sum over innermost, and pads both ends equally."""

    def convolved(image, kernel):
        return jax.lax.conv_general_dilated(image, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    plan = planned(convolved, shape(8, 32, 32, 16), shape(3, 3, 16, 16))
    copies = convolution_copies(plan.program)
    assert copies[0, 1].order == (3, 0, 1, 2)
    assert copies[0, 0].times == pytest.approx((33 / 32) ** 2)
    even = planned(lambda x, k: jax.lax.conv(x, k, (1, 1), "SAME"), shape(8, 16, 32, 32), shape(16, 16, 3, 3))
    assert all(copy.times == 1.0 for copy in convolution_copies(even.program).values())


def test_rows_of_neighbours_are_copied():
    """An image that is split along its windows is copied with the rows of its neighbours."""
    image, kernel = shape(1, 64, 64, 8), shape(3, 3, 8, 8)

    def convolved(image, kernel):
        return jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    from tests.helpers.memory_programs import profile

    pins = {"0": jax.P(None, "x"), "1": jax.P()}
    peak = profile(planned(convolved, image, kernel, mesh=MESH, pins=pins)).max()
    block = 4 * 64 * 64 * 8 / 8
    assert peak >= 2 * block + block * 10 / 8
