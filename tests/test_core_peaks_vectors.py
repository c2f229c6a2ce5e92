"""Predicted peaks: products of matrices and vectors, which XLA:GPU multiplies and adds up in kernels of its own."""

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.memory.fusion import pointwise_operations
from shardplan.memory.liveness import WORKSPACE_BYTES
from shardplan.memory.products import is_sum
from shardplan.memory.rows import weighted_rows
from shardplan.memory.sums import waiting_for_blocks, waiting_for_rows
from shardplan.tracing import trace_program

MESH = jax.sharding.AbstractMesh((8,), ("x",))
ROWS = {"0": jax.P("x", None), "1": jax.P()}


def _shape(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


@pytest.mark.parametrize(
    ("shapes", "devices", "summed"),
    [
        (((65536, 1024), (1024,)), 1, False),
        (((65536, 1024), (1024,)), 8, True),  # a device has fewer than 10 million elements of the matrix
        (((2**27,), (2**27,)), 1, True),
        (((65536, 1024), (1024, 2)), 8, False),
    ],
)
def test_a_product_with_a_vector_is_a_sum_where_devices_have_few_elements_of_the_matrix(shapes, devices, summed):
    program = trace_program(jnp.dot, [_shape(*shape) for shape in shapes], {}).on(devices)
    [product] = [o for o in program.operations if o.primitive.name == "dot_general"]
    assert is_sum(program, product) == summed


def test_devices_split_the_batch_before_the_matrices():
    matrices, vectors = _shape(8, 8192, 2048), _shape(8, 2048)
    program = trace_program(lambda a, b: jnp.einsum("bij,bj->bi", a, b), (matrices, vectors), {}).on(8)
    [product] = [o for o in program.operations if o.primitive.name == "dot_general"]
    assert not is_sum(program, product)


@pytest.mark.parametrize(
    ("weight", "stored"),
    [
        (lambda sums, others: sums, True),
        (lambda sums, others: jnp.tanh(2 * sums), True),
        (lambda sums, others: sums - others, False),  # which is computed from another vector as well
        (lambda sums, others: sums / jnp.linalg.norm(sums), False),
    ],
)
def test_rows_that_are_weighted_by_what_they_are_reduced_to_are_stored(weight, stored):
    def step(matrix, vector, others):
        return matrix.T @ weight(matrix @ vector, others)

    pins = ROWS | {"2": jax.P("x")}
    plan = shardplan.plan(step, MESH, _shape(65536, 1024), _shape(1024), _shape(65536), pins=pins)
    size = 65536 * 1024 * 4 / 8
    assert bool(weighted_rows(plan.program, pointwise_operations(plan.schedule.problem))) == stored
    assert plan.peak_bytes // size == 1 + stored


@pytest.mark.parametrize("columns", [512, 2048])
def test_what_is_added_up_down_few_columns_is_multiplied_apart(columns):
    matrix = _shape(8 * 2048, columns)
    pins = {"0": jax.P("x"), "1": jax.P("x", None)}
    plan = shardplan.plan(lambda v, m: v @ m, MESH, _shape(8 * 2048), matrix, pins=pins)
    size = 2048 * columns * 4
    assert plan.peak_bytes // size == 1 + (columns == 512)
    assert plan.peak_bytes % size < WORKSPACE_BYTES


@pytest.mark.long
@pytest.mark.parametrize("solves", [True, False])
def test_what_products_with_vectors_take_is_what_is_compiled(solves):
    def step(matrix, vector):
        for _ in range(3):
            vector = matrix.T @ (matrix @ vector) if solves else (vector / jnp.sum(vector)) @ matrix[:1024]
        return vector

    plan = shardplan.plan(step, MESH, _shape(65536, 1024), _shape(1024), pins=ROWS)
    assert shardplan.audit(plan).compiled.memory.peak == pytest.approx(plan.peak_bytes, rel=0.02)


@pytest.mark.parametrize(
    ("exponent", "several", "beside"),
    [
        (lambda x, v: v[:, None] * x[:1], True, 1.5),
        (lambda x, v: x * x, True, 1),
        (lambda x, v: x, True, 0),
        (lambda x, v: x * x, False, 0),
    ],
)
def test_an_exponential_of_complex_numbers_for_several_kernels_is_made_of_real_arrays(exponent, several, beside):
    def step(x, v, y):
        turned = jnp.exp(exponent(x, v))
        return (jnp.sum(turned, axis=0), jnp.sum(turned * y, axis=1)) if several else jnp.fft.fft(turned)

    shapes = [jax.ShapeDtypeStruct(shape, "complex64") for shape in ((4096, 1024), (4096,), (1024,))]
    plan = shardplan.plan(step, 1, *shapes)
    rest = (4096 + 1024) * 8 * (1 + several)
    assert plan.peak_bytes == ((2 if several else 3) + beside) * 4096 * 1024 * 8 + rest


@pytest.mark.parametrize("made", [0.0, 64.0])
def test_sums_of_nothing_wait_for_nothing(made):
    """Slices that are empty at the first of several steps (an associative scan of two) are summed up, too."""
    assert waiting_for_rows(0.0, made) == waiting_for_blocks(64, 0.0, made, 4) == 0.0
