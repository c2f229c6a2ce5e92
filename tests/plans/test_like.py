"""Several functions and batch sizes over one state, which stays where it lies."""

from __future__ import annotations

import logging
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.plans.like import matched
from tests.helpers.random_programs import assert_equal_trees, mesh_of

MESH = mesh_of((2, 4))
LARGE = np.random.default_rng(0).normal(size=(8192, 64)).astype(np.float32)
SMALL = LARGE[:64]


def loss(params: Any, x: Any) -> Any:
    return (jnp.tanh(x @ params["a"]) @ params["b"]).var()


def train(state: Any, x: Any) -> Any:
    value, gradient = jax.value_and_grad(loss)(state["params"], x)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], gradient)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments)
    return {"params": params, "moments": moments}, value


def make_state() -> Any:
    params = {"a": 0.01 * jnp.ones((64, 256)), "b": 0.01 * jnp.ones((256, 16))}
    return {"params": params, "moments": jax.tree.map(jnp.zeros_like, params)}


def places(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


@pytest.fixture(scope="module")
def step() -> Any:
    planned = shardplan.auto(train, MESH)
    planned(make_state(), LARGE)
    return planned


# ---- like


@pytest.mark.parametrize("kind", ["step", "plan"])
def test_another_function_of_the_state(step: Any, kind: str) -> None:
    """Its parameters are those of the state, by their tree; the plan alone would have them elsewhere."""
    state, _ = step(make_state(), LARGE)
    plan = step.plan(make_state(), LARGE)
    planned = shardplan.auto(loss, MESH, like=step if kind == "step" else plan)
    found = planned.plan(state["params"], SMALL)
    assert found.in_shardings[0] == places(state["params"])
    assert found.layouts["0/a"] != shardplan.plan(loss, MESH, state["params"], SMALL).layouts["0/a"]
    assert_equal_trees(planned(state["params"], SMALL), loss(state["params"], SMALL), 1e-5)


def test_arguments_by_keyword_and_whole_states(step: Any) -> None:
    plan = step.plan(make_state(), LARGE)
    by_keyword = shardplan.auto(lambda x, params: loss(params, x), MESH, like=plan)
    assert by_keyword.plan(SMALL, params=make_state()["params"]).layouts["params/a"] == plan.layouts["0/params/a"]
    whole = shardplan.plan(lambda x, s: loss(s["params"], x), MESH, SMALL, make_state(), like=plan)
    assert whole.layouts["1/moments/b"] == plan.layouts["0/moments/b"]


def test_pins_go_before_it(step: Any) -> None:
    planned = shardplan.auto(loss, MESH, like=step, pins={"0/a": P("x")})
    assert planned.plan(make_state()["params"], SMALL).layouts["0/a"] == P("x")


def test_matches_of_paths() -> None:
    """The match has the most common components, then the shorter path, and always the same type."""
    state = {"0/params/l_0/w": "f8", "0/params/l_1/w": "f8", "0/opt/0/mu/l_1/w": "f8", "0/params/l_2/w": "f4"}
    assert matched(state, {"0/l_1/w": "f8"}) == {"0/l_1/w": "0/params/l_1/w"}
    assert matched(state, {"1/model/params/l_0/w": "f8"}) == {"1/model/params/l_0/w": "0/params/l_0/w"}
    assert matched(state, {"0/l_2/w": "f8", "2": "f8", "0/w/x": "f8"}) == {"0/l_2/w": "0/params/l_0/w"}


@pytest.mark.parametrize(
    ("like", "mesh", "message"),
    [
        ("step", mesh_of((8,)), "like is a plan over the mesh .'x': 2, 'y': 4., got .'x': 8.: use one mesh"),
        (7, MESH, "like is a planned step or a plan, got `7`"),
        ("new", MESH, "has no plan yet: call it first, or plan it by its .plan"),
    ],
)
def test_no_state_to_be_like(step: Any, like: Any, mesh: Any, message: str) -> None:
    given = {"step": step, "new": shardplan.auto(train, MESH)}.get(like, like)
    with pytest.raises(shardplan.ArgumentError, match=message):
        shardplan.auto(loss, mesh, like=given)(make_state()["params"], SMALL)


def test_a_state_of_another_kind(step: Any) -> None:
    """The error says what differs, by path."""
    larger = jax.tree.map(lambda leaf: jnp.ones((512, 16)) if leaf.shape[0] == 256 else leaf, make_state()["params"])
    with pytest.raises(shardplan.ArgumentError, match=r"`0/b` is float32\[512, 16\], and `0/params/b` is float32\[256"):
        shardplan.auto(loss, MESH, like=step)(larger, SMALL)
    with pytest.raises(shardplan.ArgumentError, match=r"`0` is float32\[8, 8\]\n  the state has `0/moments/a`"):
        shardplan.auto(lambda x: x, MESH, like=step)(jnp.ones((8, 8)))


# ---- the same function again


def test_another_batch_size() -> None:
    """The state keeps its layouts."""
    planned = shardplan.auto(train, MESH)
    state, _ = planned(make_state(), LARGE)
    before = places(state)
    alone = shardplan.plan(train, MESH, make_state(), SMALL[:40])
    assert jax.tree.leaves(alone.in_shardings[0]) != jax.tree.leaves(before)
    state, _ = planned(state, SMALL[:40])
    assert places(state) == before
    assert_equal_trees(planned(make_state(), SMALL[:40]), train(make_state(), SMALL[:40]), 1e-5)


def test_another_batch_size_of_an_evaluation() -> None:
    """What lies where the first plan has it stays so, although no result replaces it."""
    planned = shardplan.auto(loss, MESH, pins={"0/a": P("x")})
    params = jax.device_put(make_state()["params"], planned.plan(make_state()["params"], SMALL).in_shardings[0])
    assert planned.plan(params, SMALL[:40]).in_shardings[0] == places(params)


def test_a_state_that_does_not_fit_in_its_layouts(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    """It is resharded, with a log message."""
    monkeypatch.setattr(sys.modules["shardplan.auto"], "layouts_kept", lambda first, call: {"0/w": P()})
    w, few, more = (jax.ShapeDtypeStruct((n, 512), "float32") for n in (1024, 8, 16))
    planned = shardplan.auto(lambda state, x: {"w": state["w"] + x.sum()}, MESH, memory_limit=1.5e6)
    for batch in (few, more):
        assert planned.plan({"w": w}, batch).layouts["0/w"] != P()
    assert "the state does not fit where it lies with these arguments, and is moved" in caplog.text


def test_arguments_that_move_at_every_call(step: Any, caplog: pytest.LogCaptureFixture) -> None:
    """They are logged once."""
    state, _ = step(make_state(), LARGE)
    planned = shardplan.auto(loss, MESH)
    with caplog.at_level(logging.WARNING, logger="shardplan"):
        for _ in range(3):
            planned(state["params"], SMALL)
    assert caplog.text.count("loss moves 2 of 3 arguments at each call, up to") == 1


# ---- planned together


def programs(often: float, seldom: float, batch: Any = LARGE) -> Any:
    state = make_state()
    return {"train": (train, (state, batch), often), "eval": (loss, (state["params"], SMALL), seldom)}


def test_one_layout_for_two_programs() -> None:
    """Nothing moves between them, and training sends what it does alone where it runs often."""
    plans = shardplan.plan_together(programs(1000, 1), MESH)
    assert plans["eval"].in_shardings[0] == plans["train"].in_shardings[0]["params"]
    alone = shardplan.plan(train, MESH, make_state(), LARGE)
    assert plans["train"].communication_bytes <= 1.01 * alone.communication_bytes
    assert plans.gap < 1e-5 and plans.lower_bound <= plans.objective
    assert "program  times" in str(plans)
    state, _ = plans["train"].apply(train)(make_state(), LARGE)
    assert_equal_trees(plans["eval"].apply(loss)(state["params"], SMALL), loss(state["params"], SMALL), 1e-5)


def test_the_program_that_runs_most_decides() -> None:
    alone = shardplan.plan(loss, MESH, make_state()["params"], SMALL)
    plans = shardplan.plan_together(programs(1, 1000), MESH)
    assert plans["eval"].objective == pytest.approx(alone.objective)
    assert plans["train"].in_shardings[0]["params"] == plans["eval"].in_shardings[0]
    middle = shardplan.plan_together(programs(1, 1), MESH)
    assert middle.objective <= sum(plan.objective for plan in plans.values()) * (1 + 1e-9)


def test_together_within_a_limit_of_memory() -> None:
    """Where the best layout for all does not fit one of them, they lie as the one that costs most has them."""
    state = {"w": jax.ShapeDtypeStruct((1024, 512), "float32")}
    many, few = (jax.ShapeDtypeStruct((n, 512), "float32") for n in (1 << 15, 8))

    def step(state: Any, x: Any) -> Any:
        return {"w": state["w"] + x.sum()}

    def read(state: Any, x: Any) -> Any:
        return (state["w"] @ x.T).sum()

    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    plans = shardplan.plan_together(
        {"step": (step, (state, many), 1), "read": (read, (state, few), 1)}, mesh, memory_limit=1.3e7
    )
    assert max(plan.peak_bytes for plan in plans.values()) <= 1.3e7
    assert plans["step"].layouts["0/w"] == plans["read"].layouts["0/w"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "plan_together takes programs by name"),
        ({"train": train}, "the program `train` is .function, arguments as a tuple, times., got"),
        ({"train": (train, (make_state(), SMALL), 0)}, "the program `train` runs a number of times above 0, got `0`"),
        ({"train": (train, make_state(), 1)}, "the program `train` is .function, arguments as a tuple"),
    ],
)
def test_no_programs(given: Any, message: str) -> None:
    with pytest.raises(shardplan.ArgumentError, match=message):
        shardplan.plan_together(given, MESH)


def test_a_batch_with_the_names_of_parameters():
    """A leaf of the state that an argument has by its whole path is no match for a leaf of the batch."""

    def train(p, b):
        g = jax.grad(lambda p: ((b["x"] @ p["w"] - b["item"]) ** 2).mean() + (p["item"] ** 2).sum())(p)
        return jax.tree.map(lambda a, b: a - 0.1 * b, p, g)

    mesh = jax.sharding.AbstractMesh((8,), ("d",))
    p = {"w": jax.ShapeDtypeStruct((8, 16), "float32"), "item": jax.ShapeDtypeStruct((16,), "float32")}
    b = {"x": jax.ShapeDtypeStruct((64, 8), "float32"), "item": jax.ShapeDtypeStruct((64, 16), "float32")}
    plan = shardplan.plan(train, mesh, p, b)
    assert shardplan.plan(train, mesh, p, b, like=plan).layouts.keys() == plan.layouts.keys()
    same = {"x": jax.ShapeDtypeStruct((512, 512), "float32")}
    first = shardplan.plan(
        lambda p, b: {"x": p["x"] + b["y"]}, mesh, same, {"y": same["x"]}, pins={"0/x": P(None, "d")}
    )
    second = shardplan.plan(lambda p, b: (p["x"] @ b["x"]).sum(), mesh, same, same, like=first)
    assert [*second.recipe.options.pins] == ["0/x"]
