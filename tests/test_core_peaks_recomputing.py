"""What kernels compute anew instead of reading it, and how long that takes."""

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.memory.cycles import cycles_of
from shardplan.memory.recomputing import kernels_in
from shardplan.tracing import trace_program


@pytest.mark.parametrize("spec", [jax.P("a"), jax.P(("a", "b"))])
def test_what_reads_parts_computes_no_more_than_these_anew(spec):
    """A softplus of all rows of a device is stored where its gradient reads all of them, and computed anew where that
    reads a quarter."""
    mesh = jax.sharding.AbstractMesh((2, 4), ("a", "b"))

    def step(x, weights, gradient):
        x = jax.lax.with_sharding_constraint(x @ weights[0], jax.NamedSharding(mesh, jax.P("a")))
        soft, backward = jax.vjp(jax.nn.softplus, x)
        product = jax.lax.with_sharding_constraint((soft - 0.5) @ weights[1], jax.NamedSharding(mesh, jax.P("a")))
        part = jax.lax.with_sharding_constraint(backward(gradient)[0], jax.NamedSharding(mesh, spec))
        return product, jnp.sum(part, axis=0)

    rows, weights = jax.ShapeDtypeStruct((2**16, 1024), "float32"), [jax.ShapeDtypeStruct((1024, 1024), "float32")] * 2
    pins = {"0": jax.P("a"), "1/*": jax.P(), "2": spec}
    plan = shardplan.plan(step, mesh, rows, weights, rows, pins=pins, memory_limit=float("inf"))
    makers = {result: operation.primitive.name for operation in plan.program.operations for result in operation.results}
    assert [makers[value] for value in kernels_in(plan.schedule).stored] == ["select_n"] * (spec == jax.P("a"))


def test_what_adds_zero_or_multiplies_by_one_takes_no_time():
    def step(x):
        return ((x + 0.0) * 1.0 - 0.0) / 1.0, (x + 1.0) * 2.0

    program = trace_program(step, (jax.ShapeDtypeStruct((8,), "float32"),), {})
    assert [cycles_of(program, operation) for operation in program.operations] == [0, 0, 0, 0, 5, 5]
