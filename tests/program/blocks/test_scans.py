"""Scans of a program inside of loops of blocks."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from shardplan.program.blocks import Blocks, in_blocks
from shardplan.program.recompute import recomputing
from shardplan.program.residuals import residuals
from shardplan.program.tracing import trace_program
from tests.helpers.run_program import run_program
from tests.program.blocks.test_equality import assert_equal, check, normal


def layers(weights, shared, x):
    """A layer of its own weights and shared ones, over a stack of weights."""

    def layer(x, weight):
        scale = lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1)
        return x + jnp.tanh((x * scale) @ weight) @ shared, x.sum()

    return lax.scan(layer, x, weights)


def step(weights, shared, x):
    def loss(weights, shared):
        y, sums = layers(weights, shared, x)
        return jnp.mean(jnp.square(y)) + 1e-3 * sums.sum()

    return jax.value_and_grad(loss, (0, 1))(weights, shared)


def arguments(batch: int):
    return normal(3, 6, 6), normal(6, 6, number=1), normal(batch, 4, 6, number=2)


@pytest.mark.long
@pytest.mark.parametrize(("batch", "count", "strided"), [(12, 4, True), (10, 4, False)])
def test_gradients_of_scanned_layers(batch: int, count: int, strided: bool):
    """One loop has the scans of both parts. Gradients that are stacked or carried are summed over blocks."""
    blocked = check(step, arguments(batch), (0,), (count,), strided=strided)
    assert len(blocked.loops) == 1
    assert sum(one.primitive.name == "scan" for one in blocked.program.operations if one.region) == 2


@pytest.mark.long
def test_scans_that_make_slices_again():
    """Bodies are those of the program, not those that were traced."""
    program = trace_program(step, arguments(8))
    again = recomputing(program, frozenset(residuals(program)))
    blocked = in_blocks(again, Blocks(((again.inputs[-1], 0),), (2,)))
    assert len(blocked.loops) == 1
    assert_equal(run_program(program, arguments(8)), run_program(blocked.program, arguments(8)))


def centred(x):
    return lax.scan(lambda x, _: (x - x.mean(0), None), x, None, length=3)[0]


def along_the_turns(x):
    return lax.scan(lambda total, row: (total + row, total), jnp.zeros(x.shape[1:]), x)[1]


def begun(x):
    return lax.scan(lambda total, _: (total + jnp.sin(x).sum(0), None), jnp.ones(x.shape[1:]), None, length=3)[0]


def swapped(x):
    return lax.scan(lambda x, _: (x.T, None), x, None, length=2)[0]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (centred, "comes back into the turn"),
        (along_the_turns, "the index of the turns"),
        (begun, "does not begin with zeros"),
        (swapped, "another dimension"),
    ],
)
def test_scans_that_need_the_whole_index(function, said: str):
    """The reason is said, and the scan runs whole."""
    program = trace_program(function, (normal(4, 4),))
    blocked = in_blocks(program, Blocks(((program.inputs[0], 0),), (2,)))
    assert any(said in reason for reason in blocked.cuts.values()), blocked.cuts
    assert_equal(run_program(program, (normal(4, 4),)), run_program(blocked.program, (normal(4, 4),)))
