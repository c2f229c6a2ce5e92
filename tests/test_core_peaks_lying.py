"""Predicted peaks: in which order the dimensions of values lie in memory, and what is copied because of it."""

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.memory.fusion import pointwise_operations
from shardplan.memory.lying import lying_of
from shardplan.memory.products import product_operands

WEIGHTS, STEPS = jax.ShapeDtypeStruct((16, 64), "float32"), jax.ShapeDtypeStruct((6, 4, 16), "float32")


def _loss(logits, labels):
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - picked).sum()


def _problem_of(step, *arguments):
    return shardplan.plan(step, 1, *arguments).schedule.problem


@pytest.mark.parametrize("transposed", [True, False])
def test_gradients_of_logits_lie_as_transposed_labels_do_and_products_copy_them(transposed):
    def step(weights, x, labels):
        return _loss(x @ weights, labels.T if transposed else labels)

    labels = jax.ShapeDtypeStruct((4, 6) if transposed else (6, 4), "int32")
    problem = _problem_of(jax.value_and_grad(step, argnums=(0, 1)), WEIGHTS, STEPS, labels)
    program = problem.program
    [gradient] = {o.operands[0] for o in program.operations if o.primitive.name == "dot_general"} - {*program.inputs}
    orders = lying_of(program, pointwise_operations(problem)).orders
    assert orders.get(gradient) == ((1, 0, 2) if transposed else None)
    read = [one for one in product_operands(program, pointwise_operations(problem)).values() if one.value == gradient]
    assert {(one.order, one.copied) for one in read if one.copied} == (
        {((0, 1, 2), True), ((2, 0, 1), True)} if transposed else set()
    )


def test_what_products_write_and_what_they_say_how_it_lies_does_not_lie_as_transposed_arguments_do():
    def step(x, y, weights):
        made, scores = y @ weights, jnp.einsum("bik,bjk->bij", y, y)
        return made + jnp.swapaxes(x, 0, 1), scores * jnp.swapaxes(x[:, :, :6], 0, 1)

    given, heads = jax.ShapeDtypeStruct((6, 4, 64), "float32"), jax.ShapeDtypeStruct((4, 6, 16), "float32")
    problem = _problem_of(step, given, heads, WEIGHTS)
    orders = lying_of(problem.program, pointwise_operations(problem)).orders
    names = sorted(problem.program.makers[value].primitive.name for value in orders)
    assert names == ["add", "transpose", "transpose"] and {*orders.values()} == {(1, 0, 2)}
