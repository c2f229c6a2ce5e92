"""Predicted peaks: copies that kernels make of what products read, and units that products apply."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.memory.activations import activated
from shardplan.memory.combining import Gather
from shardplan.memory.copying import copying_kernel
from shardplan.memory.liveness import WORKSPACE_BYTES
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
