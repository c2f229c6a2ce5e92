"""Dots, sums and convolutions of constants alone: planned and computed as those of arguments."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardplan
from tests.helpers.random_programs import assert_equal_trees, mesh_of, run

pytestmark = [pytest.mark.filterwarnings("ignore:no mesh axis"), pytest.mark.filterwarnings("ignore:the loop at")]


def cosines() -> jax.Array:
    return jnp.cos(jnp.arange(4.0)[:, None] * jnp.arange(4.0))


def linear_layer(x: Any) -> Any:
    """The gradient of a layer whose weights are constant, which is a product of constants."""
    return jax.grad(lambda w: jnp.sum(w @ jnp.ones((4, 3))))(x)


def in_a_scan(x: Any) -> Any:
    def turn(carry: Any, _: None) -> Any:
        return carry @ (jnp.ones((3, 3)) @ jnp.eye(3)), carry.sum()

    last, sums = jax.lax.scan(turn, jnp.ones((5, 3)), None, length=4)
    return x + last.sum() + sums.sum()


def in_a_while_loop(x: Any) -> Any:
    return jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] @ (cosines() @ cosines().T)), (0, x))[1]


def convolved(x: Any) -> Any:
    smooth = jax.lax.conv_general_dilated(jnp.ones((1, 1, 5, 5)), jnp.ones((1, 1, 3, 3)), (1, 1), "SAME")
    return x + jnp.sum(jnp.convolve(jnp.arange(8.0), jnp.ones(3))) + smooth[0, 0, 0, 0]


def ragged(x: Any) -> Any:
    return x + jax.lax.ragged_dot(jnp.ones((16, 3)), jnp.ones((2, 3, 5)), jnp.array([7, 9])).sum(1)[:, None]


def counted(x: Any) -> Any:
    rows, columns = (jax.lax.broadcasted_iota(jnp.float32, (size, 3), 0) for size in (16, 4))
    return x * jnp.einsum("ik,jk->ij", rows, columns)


def over_nothing(x: Any) -> Any:
    return x + (jnp.ones((4, 0)) @ jnp.ones((0, 4)))[0], jnp.ones((0, 4)) @ jnp.eye(4)


KINDS: dict[str, Callable[[Any], Any]] = {
    "a matrix": lambda x: x @ (jnp.ones((4, 4)) @ jnp.eye(4)),
    "cosines": lambda x: x @ (cosines() @ cosines().T),
    "a linear layer": linear_layer,
    "in a scan": in_a_scan,
    "in a while loop": in_a_while_loop,
    "convolved": convolved,
    "ragged": ragged,
    "counted": counted,
    "over nothing": over_nothing,
}


@pytest.mark.parametrize("kind", KINDS)
def test_constants_are_planned(kind: str) -> None:
    """A plan of the fewest bytes is found, is proven, and says what its peak is."""
    mesh, x = jax.sharding.AbstractMesh((2, 4), ("x", "y")), jax.ShapeDtypeStruct((16, 4), jnp.float32)
    plan = shardplan.plan(KINDS[kind], mesh, x)
    assert plan.gap < 1e-5 and plan.peak_bytes >= 16 * 4 * 4 / 8


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8,), (2, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_constants_compute_the_same(kind: str, shape: tuple[int, ...]) -> None:
    """Planned steps compute what the unplanned one does: of fewest bytes, of least time, and within a limit."""
    mesh, x = mesh_of(shape), jnp.asarray(np.random.default_rng(0).normal(size=(16, 4)), jnp.float32)
    plans = [shardplan.plan(KINDS[kind], mesh, x), shardplan.plan(KINDS[kind], mesh, x, objective="time")]
    with suppress(shardplan.InfeasibleError):  # which is all that a program with one layout may say
        plans.append(shardplan.plan(KINDS[kind], mesh, x, memory_limit=0.97 * plans[0].peak_bytes))
    for plan in plans:
        assert_equal_trees(run(plan, mesh, x), jax.jit(KINDS[kind])(x))


def test_product_of_constants_is_held() -> None:
    """A product of constants is a tensor with a layout of its own, what is spread for it is not."""
    mesh, x = jax.sharding.AbstractMesh((8,), ("x",)), jax.ShapeDtypeStruct((8, 3), jnp.float32)
    plan = shardplan.plan(lambda x: x @ (jnp.ones((3, 99)) @ jnp.ones((99, 3))), mesh, x)
    product = next(o for o in plan.program.operations if o.primitive.name == "dot_general")
    assert product.index in plan.schedule.assignment.strategies
    assert plan.schedule.problem.generated == frozenset(product.operands)
