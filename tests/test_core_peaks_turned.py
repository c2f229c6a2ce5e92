"""Loops whose weights lie along another dimension than the first, against what is compiled."""

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.audit import audit
from shardplan.memory.pipelining import _is_formatting
from shardplan.target import gpu_mesh
from shardplan.tracing import trace_program

compiles_for_gpus = pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")

_SHAPE = jax.ShapeDtypeStruct


@compiles_for_gpus
def test_weights_that_are_turned_for_a_loop_stay_as_they_were_gathered_for_an_iteration_that_runs_apart() -> None:
    """That takes its slices from what is not turned (1.27 times what was counted before)."""
    mesh = gpu_mesh("h100", (2, 4), ("x", "y"))

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, each: Any) -> Any:
            weight, gain = each
            return jnp.tanh((x * gain) @ weight), None

        whole = jax.lax.with_sharding_constraint(weights, jax.NamedSharding(mesh, jax.P()))
        turned = jax.tree.map(lambda w: jnp.swapaxes(w, 0, 1), whole)
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, turned)[0] ** 2)

    def step(weights: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

    weights, x = (_SHAPE((1024, 8, 1024), "float32"), _SHAPE((1024, 8), "float32")), _SHAPE((64, 64, 1024), "float32")
    pins = {"0/0": jax.P(None, None, ("x", "y")), "0/1": jax.P(("x", "y")), "1": jax.P(("y", "x"))}
    plan = shardplan.plan(step, mesh, weights, x, pins=pins, donate_argnums=0)
    assert audit(plan, mesh=mesh).compiled.memory.peak == pytest.approx(plan.peak_bytes, rel=0.03)


def test_a_sum_along_what_has_one_element_changes_but_the_form_of_a_gradient() -> None:
    """It brings the gradient of a gain to its own rank, behind the sum that is scattered: XLA runs the first iteration
    of such a loop apart as well."""
    gradient = jax.grad(lambda gain, x: jnp.sum(jnp.tanh(x * gain)))
    program = trace_program(gradient, (_SHAPE((64,), "float32"), _SHAPE((8, 16, 64), "float32")), {})
    sums = [o for o in program.operations if o.primitive.name == "reduce_sum"]
    assert [_is_formatting(program, operation) for operation in sums] == [False, True]
