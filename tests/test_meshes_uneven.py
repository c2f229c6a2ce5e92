"""Sizes that the mesh does not divide: planned, right, and said."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardplan
from shardplan.errors import ShardplanWarning
from tests.core_programs import assert_equal_trees, mesh_of, run, scrambled


def values(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.1, jnp.float32)


def language_step(params: Any, ids: Any) -> Any:
    """One attention layer between an embedding and logits that share their table."""

    def loss(p: Any) -> Any:
        h = p["table"][ids]
        q, k, v = (jnp.einsum("btd,dhe->bthe", h, w) for w in p["qkv"])
        scores = jax.nn.softmax(jnp.einsum("bqhe,bkhe->bhqk", q, k))
        h = h + jnp.einsum("bhqk,bkhe,hed->bqd", scores, v, p["out"])
        logits = jax.nn.log_softmax(h @ p["table"].T)
        return -jnp.take_along_axis(logits, ids[..., None], -1).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def arguments(vocabulary: int, heads: int, batch: int, width: int = 24) -> Any:
    params = {
        "table": values(vocabulary, width),
        "qkv": tuple(values(width, heads, 2, seed=n) for n in range(3)),
        "out": values(heads, 2, width, seed=3),
    }
    ids = jnp.asarray(np.random.default_rng(4).integers(0, vocabulary, (batch, 6)))
    return params, ids


CASES = {"vocabulary": (101, 8, 8), "heads": (64, 12, 8), "batch": (64, 8, 6), "all": (101, 3, 5)}


@pytest.mark.filterwarnings("ignore:no mesh axis")
def test_planned_equals_unplanned() -> None:
    args = arguments(*CASES["heads"])
    assert_equal_trees(shardplan.auto(language_step, mesh_of((8,)))(*args), jax.jit(language_step)(*args))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no mesh axis")
@pytest.mark.parametrize("sizes", [(8,), (2, 4)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_drawn_layouts_equal_unplanned(name: str, sizes: tuple[int, ...]) -> None:
    args, mesh = arguments(*CASES[name]), mesh_of(sizes)
    plan = scrambled(shardplan.plan(language_step, mesh, *args), 0)
    assert_equal_trees(run(plan, mesh, *args), jax.jit(language_step)(*args))


def test_an_undivided_vocabulary_is_said() -> None:
    args = jax.eval_shape(lambda: arguments(50257, 12, 16, 96))
    with pytest.warns(ShardplanWarning, match=r"divides 50257, dimension 0 of `0/table` .*: .*50264 would be"):
        plan = shardplan.plan(language_step, mesh_of((8,)), *args)
    assert plan.layouts["0/table"] in (jax.P(), jax.P(None, "x"))


def test_heads_that_one_axis_divides_are_not_worth_a_word() -> None:
    args = jax.eval_shape(lambda: arguments(50304, 12, 16, 96))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shardplan.plan(language_step, mesh_of((2, 4)), *args)


def test_an_undivided_batch_is_said() -> None:
    with pytest.warns(ShardplanWarning, match=r"divides dimension 0 of `1` \[6, 6\]: its 6 rows.*8 rows would be"):
        shardplan.plan(language_step, mesh_of((8,)), *arguments(64, 8, 6))
