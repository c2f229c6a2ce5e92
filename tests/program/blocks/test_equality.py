"""Programs in blocks, run against the whole: values and gradients, tensor by tensor."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from jax import lax

from shardplan.program.blocks import Blocked, Blocks, in_blocks
from shardplan.program.recompute import recomputing
from shardplan.program.residuals import residuals
from shardplan.program.tracing import trace_program
from tests.helpers import random_compute_ops, random_index_ops
from tests.helpers.random_chains import IMAGE, SEQUENCE, chain
from tests.helpers.run_program import run_program

FAMILIES = random_compute_ops.FAMILIES | random_index_ops.FAMILIES
TOLERANCE = 1e-5


def as_numbers(array) -> np.ndarray:
    """An array, that of a random key as its bits."""
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array)


def assert_equal(expected, found, tolerance: float = TOLERANCE):
    for one, other in zip(map(as_numbers, expected), map(as_numbers, found), strict=True):
        assert one.dtype == other.dtype
        if one.dtype.kind in "biu":
            np.testing.assert_array_equal(other, one)
        else:
            wide = np.complex128 if one.dtype.kind == "c" else np.float64
            one, other = (np.asarray(array, wide) for array in (one, other))
            np.testing.assert_allclose(other, one, rtol=tolerance, atol=tolerance * max(1e-3, np.abs(one).max()))


def check(function, arguments, dims, counts, tolerance: float = TOLERANCE, **options) -> Blocked:
    """Runs a function in blocks along dimensions of its last argument, and compares it with the whole."""
    program = trace_program(function, arguments)
    blocks = Blocks(tuple((program.inputs[-1], dim) for dim in dims), counts, **options)
    blocked = in_blocks(program, blocks)
    assert_equal(run_program(program, arguments), run_program(blocked.program, arguments), tolerance)
    return blocked


@st.composite
def chains(draw):
    """A chain of layers, the shape of its input, the dimensions that are an index, and the number of their blocks."""
    kinds, shapes, dims = draw(
        st.sampled_from(
            [
                (
                    IMAGE,
                    st.tuples(st.sampled_from([2, 3]), st.sampled_from([8, 13, 16]), st.just(9), st.just(2)),
                    (1, 2),
                ),
                (SEQUENCE, st.tuples(st.sampled_from([2, 4]), st.sampled_from([8, 10]), st.just(4)), (0, 1)),
            ]
        )
    )
    names = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=5))
    index = draw(st.sampled_from([(0,), (1,), dims]))
    counts = tuple(draw(st.sampled_from([2, 3, 4])) for _ in index)
    return names, draw(st.integers(0, 1000)), draw(shapes), index, counts


def compare(examples: int, number: int) -> int:
    """Compares so many drawn chains. Returns how many have a loop."""
    loops = 0

    @seed(number)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(chains(), st.booleans(), st.sampled_from([0.0, 1000.0]))
    def run(drawn, strided: bool, least_bytes: float):
        nonlocal loops
        names, number, shape, dims, counts = drawn
        blocked = check(*chain(names, number, shape), dims, counts, strided=strided, least_bytes=least_bytes)
        loops += bool(blocked.loops)

    run()
    return loops


@pytest.mark.long
def test_drawn_chains():
    """They are equal, and most of them have loops."""
    assert compare(15, 1) >= 9


@pytest.mark.slow
@pytest.mark.parametrize("family", ["reduction", "windows", "gather", "scatter"])
def test_every_dimension_of_operations(family: str):
    """Each drawn operation is equal in blocks of each dimension of each operand, or it is left out with a reason."""
    _each_dimension(family, 2)


@pytest.mark.long
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_dimension_of_many_operations(family: str):
    _each_dimension(family, 5)


def _each_dimension(family: str, examples: int) -> None:
    @seed(3)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(FAMILIES[family](), st.sampled_from([(2, False), (3, False), (2, True)]))
    def run(case, blocks):
        function, operands = case
        program = trace_program(function, operands)
        expected = run_program(program, operands)
        places = [(v, dim) for v in program.inputs for dim, size in enumerate(program.values[v].shape) if size > 1]
        for place in places:
            blocked = in_blocks(program, Blocks((place,), blocks[:1], strided=blocks[1]))
            if blocked.loops:
                assert_equal(expected, run_program(blocked.program, operands), 1e-4)
            else:
                assert blocked.cuts or not program.operations

    run()


def normal(*shape: int, number: int = 0):
    return jax.random.normal(jax.random.key(number), shape)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(1,), (1, 2)])
def test_convolutions_and_pooling_at_uneven_last_blocks(dims):
    """Rows of 13 in 3 blocks: halos at both ends, windows that overlap, and one loop forward and backward."""

    def loss(kernel, x):
        x = jax.nn.relu(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        return jnp.sum(jnp.square(x))

    blocked = check(
        jax.grad(loss, (0, 1)), (normal(3, 3, 2, 4), normal(1, 13, 13, 2, number=1)), dims, (3, 2)[: len(dims)]
    )
    assert len(blocked.loops) == 1
    inside = {operation.primitive.name for operation in blocked.program.operations if operation.region}
    assert {"conv_general_dilated", "select_and_scatter_add"} <= inside


@pytest.mark.slow
@pytest.mark.parametrize("start", [0.0, 2.0])
@pytest.mark.parametrize("operation", ["add", "multiply", "max", "subtract"])
def test_scatters_over_blocks_of_updates(operation: str, start: float):
    """What they write into enters once, zero or not."""

    def scattered(x):
        rows = jnp.arange(10) % 4
        return getattr(jnp.full((4, 3), start).at[rows], operation)(x)

    blocked = check(scattered, (normal(10, 3),), (0,), (3,))
    assert blocked.loops


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_, jnp.uint8])
@pytest.mark.parametrize("reduce", [jnp.sum, jnp.max, jnp.min, jnp.any, jnp.all])
def test_reductions_of_other_types(reduce, dtype):
    x = jnp.asarray(np.random.default_rng(0).integers(0, 2, (7, 3)), dtype)
    assert check(lambda x: reduce(x, 0), (x,), (0,), (3,)).loops


@pytest.mark.parametrize("reducer", [lax.bitwise_and, lax.bitwise_or])
@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_bitwise_reductions(reducer, dtype):
    x = np.random.default_rng(0).integers(0, 2**31, (7, 3)).astype(dtype)
    start = dtype(0) if reducer is lax.bitwise_or else ~dtype(0)
    assert check(lambda x: lax.reduce(x, start, reducer, (0,)), (x,), (0,), (3,)).loops


@pytest.mark.long
@pytest.mark.parametrize(
    "function",
    [lambda x: x.sum(0), lambda x: x.T @ x, lambda x: jnp.zeros((2, 4), x.dtype).at[jnp.arange(512) % 2].add(x)],
)
def test_sums_in_bfloat16(function):
    """Parts are added up in float32: in bfloat16, 512 times one would stop at 256."""
    x = jnp.ones((512, 4), jnp.bfloat16)
    program = trace_program(function, (x,))
    blocked = in_blocks(program, Blocks(((program.inputs[0], 0),), (512,)))
    assert blocked.loops
    (found,) = run_program(blocked.program, (x,))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(found, np.float32), 256.0 if found.shape == (2, 4) else 512.0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.cumsum(x, 0),
        lambda x: lax.cummax(x, 0),
        lambda x: x + jax.random.uniform(jax.random.key(0, impl="rbg"), x.shape),
        lambda x: jnp.argmax(x, 0),
        lambda x: jnp.sort(x, 0),
        lambda x: lax.rev(x, (0,)),
    ],
)
def test_what_needs_the_whole_index(function):
    """It is left out, with a reason."""
    program = trace_program(function, (normal(8, 3),))
    blocked = in_blocks(program, Blocks(((program.inputs[0], 0),), (2,)))
    assert blocked.cuts
    assert all(blocked.cuts.values())
    names = {operation.primitive.name for operation in blocked.program.operations if operation.region}
    assert names.isdisjoint({"cumsum", "cummax", "argmax", "sort", "rev", "random_bits"})


def small_bits(key, shape):
    return jax.random.bits(key, shape, dtype="uint8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "count", "strided"),
    [
        (jax.random.bits, 4, True),
        pytest.param(jax.random.normal, 3, False, marks=pytest.mark.long),
        pytest.param(small_bits, 4, False, marks=pytest.mark.long),
    ],
)
def test_random_numbers_of_blocks(draw, count: int, strided: bool):
    """They are equal to the bit: those of the elements' numbers."""

    def drawn(x):
        return x + draw(jax.random.key(3), (8, 3, 5)).astype(x.dtype)

    x = jnp.zeros((8, 3, 5))
    program = trace_program(drawn, (x,))
    for dims in ((0,), (2, 0)):
        seeds = tuple((program.inputs[0], dim) for dim in dims)
        blocked = in_blocks(program, Blocks(seeds, (count,) * len(dims), strided=strided))
        assert {o.primitive.name for o in blocked.program.operations if o.region} >= {"threefry2x32"}
        np.testing.assert_array_equal(*run_program(blocked.program, (x,)), *run_program(program, (x,)))


def test_statistics_of_the_batch():
    """They cut: what they are made of is in one loop, what reads them in another."""

    def normed(x):
        x = jnp.sin(x)
        return jnp.square((x - x.mean(0)) * lax.rsqrt(jnp.square(x).mean(0) + 1))

    assert len(check(normed, (normal(8, 3),), (0,), (4,)).loops) == 2


@pytest.mark.slow
def test_values_computed_again():
    """Barriers and clones of a recomputation are in the loops."""

    def loss(weights, x):
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.mean(jnp.square(x))

    arguments = [normal(6, 6, number=n) for n in range(3)], normal(12, 6, number=9)
    program = trace_program(jax.grad(loss), arguments)
    again = recomputing(program, frozenset(random.Random(0).sample(residuals(program), 2)))
    blocked = in_blocks(again, Blocks(((again.inputs[-1], 0),), (3,)))
    assert len(blocked.loops) == 1
    assert_equal(run_program(program, arguments), run_program(blocked.program, arguments))


@pytest.mark.slow
def test_a_barrier_whose_operand_has_more_rows_than_its_result():
    """A reader of the operand has a halo, and the barrier's result has none."""

    def function(x):
        y = jnp.sin(x)
        window = lax.reduce_window(y, 0.0, lax.add, (3, 1), (1, 1), "SAME")
        return lax.optimization_barrier((y, window))[0].sum(0) + window.sum(0)

    assert check(function, (normal(9, 2),), (0,), (3,)).loops


@pytest.mark.slow
def test_padding_with_a_value():
    """Rows of padding in the first and last block have the value, negative padding takes rows away."""
    for low, high in ((2, 1), (-1, 2), (0, -3)):
        assert check(
            lambda x, c=((low, high, 0), (0, 0, 0)): lax.pad(x, jnp.float32(0.5), c), (normal(9, 2),), (0,), (3,)
        ).loops
