"""The state of a plan: made split, placed, described, and taken to other meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from tests.helpers.random_programs import assert_equal_trees, mesh_of

ADAM = optax.adam(1e-2)
X = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
PINS = {"0/params/a": P("x", "y"), "0/opt/*/mu/a": P("x", "y"), "0/params/b": P(None, "y"), "1": P("x")}


def make_state(key: Any) -> Any:
    params = {"a": 0.1 * jax.random.normal(key, (64, 256)), "b": jnp.zeros((256, 64))}
    return {"params": params, "opt": ADAM.init(params)}


def step(state: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        return ((jnp.tanh(x @ params["a"]) @ params["b"] - x) ** 2).mean()

    value, gradient = jax.value_and_grad(loss)(state["params"])
    updates, opt = ADAM.update(gradient, state["opt"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value


KEY = jax.random.key(0)
SHAPES = jax.eval_shape(make_state, KEY)


def plan_over(mesh: Any) -> Any:
    return shardplan.plan(step, mesh, SHAPES, X, pins=PINS)


@pytest.fixture(scope="module")
def plan() -> Any:
    return plan_over(mesh_of((2, 4)))


def test_a_state_is_initialised_in_its_layouts(plan: Any) -> None:
    """Its leaves have the planned shardings."""
    state = plan.init(make_state, KEY)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == plan.shardings[0]
    assert_equal_trees(state, make_state(KEY), 1e-6)


def test_nothing_of_a_state_is_whole_while_it_is_made() -> None:
    """The compiled init holds parts alone: less than one of its tensors is."""
    wanted = NamedSharding(mesh_of((8,)), P("x"))
    made = shardplan.auto(lambda key: {"w": jax.random.normal(key, (1024, 1024))}, mesh_of((8,)), out_shardings=wanted)
    compiled: Any = made.lower(KEY).compile().memory_analysis()
    assert compiled.temp_size_in_bytes + compiled.output_size_in_bytes < 4 * 1024**2


@pytest.mark.long
def test_a_batch_is_placed(plan: Any) -> None:
    """NumPy arrays, arrays that lie elsewhere, and the state too."""
    assert plan.place(X).sharding == plan.shardings[1]
    assert plan.place(jax.device_put(X, jax.devices()[5])).sharding.spec == P("x")
    state, _ = plan.apply(step)(plan.place(make_state(KEY)), plan.place(X))
    assert_equal_trees(state, step(make_state(KEY), X)[0], 1e-4)


@pytest.mark.parametrize("given", [X[:5], X.astype(np.int32), {"x": X}], ids=["rows", "type", "structure"])
def test_a_tree_that_is_no_argument(plan: Any, given: Any) -> None:
    """The error has its structure, and the arguments of the step."""
    with pytest.raises(
        shardplan.ArgumentError, match=r"this is no argument of the planned step: it has .*\n.*`1`: float32"
    ):
        plan.place(given)


def test_an_init_of_another_state(plan: Any) -> None:
    with pytest.raises(shardplan.ArgumentError, match=r"init_fn makes what is no argument .* it has float32\[3\]"):
        plan.init(lambda: jnp.zeros(3))


def test_a_checkpoint_of_another_program(plan: Any) -> None:
    """What differs from the state is said by path: other shapes, what is not there, what is too much."""
    other = make_state(KEY)
    other["params"] = {"a": jnp.zeros((64, 128)), "c": jnp.zeros(3)}
    for read in (plan.place, plan.moving_bytes):
        with pytest.raises(shardplan.ArgumentError) as raised:
            read(other)
        said = str(raised.value)
        assert "`params/a` is float32[64, 128], and float32[64, 256] in argument `0`" in said
        assert "`params/b` is not there, and float32[256, 64] in argument `0`" in said
        assert "`params/c` is float32[3], and not there in argument `0`" in said and "opt" not in said


def test_a_plan_without_devices() -> None:
    """The first devices here are taken where there are enough."""
    of_shapes = AxisType.Auto, AxisType.Auto
    plan = plan_over(AbstractMesh((2, 4), ("x", "y"), axis_types=of_shapes))
    assert plan.place(X).sharding.device_set == {*jax.devices()}
    large = plan_over(AbstractMesh((4, 4), ("x", "y"), axis_types=of_shapes))
    with pytest.raises(shardplan.PlanMismatchError, match="takes 16 devices, and 8 are here"):
        large.place(X)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [(2, 2), pytest.param((4, 2), marks=pytest.mark.long), pytest.param((1, 8), marks=pytest.mark.long)],
    ids=str,
)
def test_a_checkpoint_is_restored_elsewhere(plan: Any, sizes: Any, tmp_path: Path) -> None:
    """Training goes on with the same losses on other meshes of fewer devices and as many."""
    checkpoint = pytest.importorskip("orbax.checkpoint")
    run, state = plan.apply(step), plan.init(make_state, KEY)
    state, _ = run(state, X)
    saver = checkpoint.StandardCheckpointer()
    saver.save(tmp_path / "state", state)
    saver.wait_until_finished()
    other = plan_over(mesh_of(sizes))
    restored = saver.restore(tmp_path / "state", other.abstract[0])
    assert jax.tree.map(lambda leaf: leaf.sharding, restored) == other.shardings[0]
    resumed = other.apply(step)
    for _ in range(3):
        state, expected = run(state, X)
        restored, value = resumed(restored, X)
        assert float(value) == pytest.approx(float(expected), rel=1e-5)


def test_bytes_that_move_between_plans() -> None:
    """They are the elements of each device's block that it does not hold already."""
    plan, other = (
        shardplan.plan(lambda x: x * 2, mesh_of((2, 4)), X, pins={"0": spec}) for spec in (P("x"), P(None, "y"))
    )
    x = plan.place(X)
    assert plan.moving_bytes(x) == 0
    assert other.moving_bytes(x) == X.nbytes  # 8 quarters are wanted, of which half is at hand
    assert plan.moving_bytes(X) == 4 * X.nbytes


@pytest.mark.parametrize("limit", [None, 1e9])
def test_zeros_are_split_where_results_are(limit: Any) -> None:
    """Moments that an init makes lie as their parameter, at no bytes sent."""

    def init(seed: Any) -> Any:
        w = jax.random.normal(jax.random.wrap_key_data(seed), (65536, 8192)).astype(jnp.bfloat16)
        return {"w": w, "m": jnp.zeros(w.shape), "v": jnp.zeros(w.shape)}

    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    plan = shardplan.plan(init, mesh, jax.ShapeDtypeStruct((2,), "uint32"), memory_limit=limit)
    assert plan.peak_bytes < 0.7e9 and plan.communication_bytes == 0
    assert len({tuple(sharding.spec) for sharding in jax.tree.leaves(plan.out_shardings)}) == 1


@pytest.mark.parametrize("make", [jnp.zeros, lambda s: jax.lax.iota("int32", s[0]), lambda s: jnp.full(s, 3.0)])
def test_results_of_no_argument(make: Any) -> None:
    """They have the values of jit, and each device makes its part."""
    found = shardplan.auto(lambda: make((1 << 17,)), mesh_of((2, 4)))()
    assert_equal_trees(found, make((1 << 17,)))
    assert found.sharding.shard_shape(found.shape) == (1 << 14,)


def test_arguments_of_equal_shapes_in_different_layouts():
    """Which of parameters and moments is meant is asked for, and then placed, made and counted as that."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def train(p, m, x):
        g = jax.grad(lambda p: (jnp.tanh(x @ p["w"]) ** 2).mean())(p)
        m = {"w": 0.9 * m["w"] + g["w"]}
        return {"w": p["w"] - 0.1 * m["w"]}, m

    p, layouts = {"w": jnp.ones((64, 64))}, {"0/w": jax.P("data"), "1/w": jax.P(None, "model")}
    plan = shardplan.plan(train, mesh, p, p, jnp.ones((32, 64)), pins=layouts)
    for ask in (plan.place, plan.moving_bytes, lambda tree: plan.init(lambda: tree)):
        with pytest.raises(shardplan.ArgumentError, match="arguments 0, 1 have these shapes, in different layouts"):
            ask(p)
    assert plan.place(p, argument=1)["w"].sharding.spec == jax.P(None, "model")
    assert plan.init(lambda: p, argument=0)["w"].sharding.spec == jax.P("data")
    assert plan.moving_bytes(plan.place(p, argument=1), argument=1) == 0
    with pytest.raises(shardplan.ArgumentError, match="no argument `5`: the arguments are"):
        plan.place(p, argument=5)
    with pytest.raises(shardplan.ArgumentError, match="arrays were expected, got `'x'`"):
        plan.place("x")
