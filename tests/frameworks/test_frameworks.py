"""Steps with frameworks: objects of NNX, modules of Equinox, linen's states and boxes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from tests.helpers.random_programs import assert_equal_trees, mesh_of

MESH = mesh_of((2, 4))
X = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
Y = X.sum(1, keepdims=True)


# ---- Flax NNX

nnx = pytest.importorskip("flax.nnx")


class Net(nnx.Module):  # type: ignore[name-defined]
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.norm = nnx.Linear(16, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.tied, self.dropout = self.first, nnx.Dropout(0.5, rngs=rngs)
        self.layers, self.act = nnx.List([nnx.Linear(16, 1, rngs=rngs)]), jax.nn.relu

    def __call__(self, x: Any) -> Any:
        return self.layers[0](self.act(self.norm(self.dropout(self.tied(self.first(x))))))


def nnx_step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    model.train()
    value, gradient = nnx.value_and_grad(lambda m: ((m(x) - y) ** 2).mean())(model)
    optimizer.update(model, gradient)
    return value


def nnx_evaluate(model: Any, x: Any) -> Any:
    model.eval()
    return model(x).sum()


@functools.cache
def trained(wrap: Any) -> Any:
    """Losses of a loop with an evaluation in it, and the model."""
    model = Net()
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    step, evaluate = wrap(nnx_step), wrap(nnx_evaluate)
    losses = [float(step(model, optimizer, X, Y)) for _ in range(3)]
    losses += [float(evaluate(model, X)), model.dropout.deterministic, float(step(model, optimizer, X, Y))]
    return losses, model


def planned(fn: Any) -> Any:
    return shardplan.auto(fn, MESH)


def donating(fn: Any) -> Any:
    return shardplan.auto(fn, MESH, donate_argnums=0)


def over_jit(fn: Any) -> Any:
    return shardplan.auto(jax.jit(fn), MESH)


def over_nnx_jit(fn: Any) -> Any:
    return shardplan.auto(nnx.jit(fn), MESH)


@pytest.mark.long
@pytest.mark.parametrize(
    "wrap", [planned, *(pytest.param(wrap, marks=pytest.mark.long) for wrap in (donating, over_jit, over_nnx_jit))]
)
def test_objects_are_changed_in_place(wrap: Any) -> None:
    """Parameters, moments, statistics, counters and flags, as nnx.jit does it; what was shared is shared."""
    losses, model = trained(wrap)
    expected, other = trained(nnx.jit)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert_equal_trees(nnx.to_pure_dict(nnx.state(model, nnx.Param)), nnx.to_pure_dict(nnx.state(other, nnx.Param)))
    assert model.tied is model.first and model.norm.use_running_average is other.norm.use_running_average is False


def test_the_step_of_objects_is_planned_once() -> None:
    model = Net()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = planned(nnx_step)
    for _ in range(2):
        step(model, optimizer, X, Y)
    plan = step.first_plan
    assert len(step._planned) == 1 and "0/layers/0/kernel" in plan.layouts
    assert [one.fed_back for one in plan.arguments if one.path == "0/first/kernel"] == [True]


class Counter(nnx.Module):  # type: ignore[name-defined]
    def __init__(self) -> None:
        self.count, self.calls = nnx.Variable(jnp.zeros(8)), 0


def counting(counter: Any, x: Any) -> Any:
    counter.count[...] += x
    counter.last = nnx.Variable(2 * x)
    counter.calls = 3
    return counter, x.sum()


def test_attributes_that_a_function_adds() -> None:
    """New Variables and other attributes come out, and a returned argument is the object itself."""
    counter = Counter()
    for times in (1, 2):
        found, total = planned(counting)(counter, jnp.ones(8))
        assert found is counter and total == 8 and counter.calls == 3
        assert_equal_trees(counter.count[...], times * np.ones(8, np.float32))
        assert_equal_trees(counter.last[...], np.full(8, 2, np.float32))


def test_objects_in_trees_and_by_keyword() -> None:
    counter = Counter()
    nested = planned(lambda held, x: counting(held["counter"], x + held["more"])[1])
    assert nested({"counter": counter, "more": jnp.ones(8)}, jnp.ones(8)) == 16
    assert_equal_trees(counter.count[...], np.full(8, 2, np.float32))
    by_keyword = planned(lambda x, counter: counting(counter, x)[1])
    by_keyword(jnp.ones(8), counter=counter)
    assert_equal_trees(counter.count[...], np.full(8, 3, np.float32))


def test_shapes_of_results() -> None:
    """`eval_shape` changes no object."""
    counter = Counter()
    found, total = planned(counting).eval_shape(counter, jnp.ones(8))
    assert found is counter and total.shape == () and not hasattr(counter, "last")


# ---- Equinox

eqx = pytest.importorskip("equinox")


def eqx_step(model: Any, state: Any, x: Any) -> Any:
    value, gradient = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(x) - x.sum(1, keepdims=True)) ** 2))(
        model
    )
    updates, state = optax.adam(1e-2).update(gradient, state)
    return eqx.apply_updates(model, updates), state, value


@pytest.mark.parametrize(
    "inside", [pytest.param(lambda fn: fn, marks=pytest.mark.long), eqx.filter_jit], ids=["plain", "filter_jit"]
)
def test_modules_with_functions_among_their_leaves(inside: Any) -> None:
    """Leaves that jax.jit would refuse are compiled in, and come back in the results."""
    model = eqx.nn.MLP(16, 1, 32, 2, key=jax.random.key(0))
    state = optax.adam(1e-2).init(eqx.filter(model, eqx.is_array))
    step, expected = shardplan.auto(inside(eqx_step), MESH), eqx.filter_jit(eqx_step)
    found, other = (model, state), (model, state)
    for _ in range(2):
        *found, value = step(*found, X)
        *other, wanted = expected(*other, X)
        np.testing.assert_allclose(float(value), float(wanted), rtol=1e-5)
    assert found[0].activation is model.activation
    assert_equal_trees(eqx.filter(tuple(found), eqx.is_array), eqx.filter(tuple(other), eqx.is_array))
    assert len(step._planned) == 1


def test_numbers_in_modules_stay_numbers() -> None:
    """As by filter_jit: Python may branch on them."""

    class Scaled(eqx.Module):  # type: ignore[name-defined]
        w: Any
        factor: float
        twice: bool

    found = planned(lambda m, x: (m, m.w * x * (2 * m.factor if m.twice else 1)))(
        Scaled(jnp.ones(8), 3.0, True), jnp.ones(8)
    )
    assert type(found[0].factor) is float and found[0].twice is True and found[1][0] == 6


def test_other_leaves_that_are_no_arrays() -> None:
    """Without a module they are an error, as for jax.jit."""
    with pytest.raises(shardplan.CallError, match=r"`0/act` is .*list others in static_argnums"):
        planned(lambda tree, x: tree["act"](x))({"act": jnp.tanh}, X)


# ---- Flax linen

linen = pytest.importorskip("flax.linen")


def linen_state(**options: Any) -> Any:
    from flax.training.train_state import TrainState

    model = linen.Dense(1, **options)
    variables = model.init(jax.random.key(0), X)
    return TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optax.adam(1e-2))


def linen_step(state: Any, x: Any, y: Any) -> Any:
    value, gradient = jax.value_and_grad(lambda p: ((state.apply_fn({"params": p}, x) - y) ** 2).mean())(state.params)
    return state.apply_gradients(grads=gradient), value


def test_a_train_state() -> None:
    found, value = planned(linen_step)(linen_state(), X, Y)
    expected, wanted = jax.jit(linen_step)(linen_state(), X, Y)
    assert_equal_trees((found.params, value), (expected.params, wanted), 1e-5)


def test_boxes_that_name_mesh_axes_are_pins() -> None:
    """Logical names say nothing; pins that are given go before; trees of specs are in_shardings."""
    kernel = linen.with_partitioning(linen.initializers.ones, ("y", "embed"))
    state = linen_state(kernel_init=kernel)
    step = planned(linen_step)
    assert step.plan(state, X, Y).layouts["0/params/kernel/value"] == P("y")
    found, value = step(state, X, Y)
    assert value == pytest.approx(float(jax.jit(linen_step)(state, X, Y)[1]), rel=1e-5)
    assert found.params["kernel"].value.sharding.spec == P("y")
    pinned = shardplan.auto(linen_step, MESH, pins={"0/params/kernel/value": P("x")})
    assert pinned.plan(state, X, Y).layouts["0/params/kernel/value"] == P("x")
    specs, bare = linen.get_partition_spec(state), linen.unbox(state)
    given = shardplan.auto(linen_step, "y=4,embed=1", in_shardings=(specs, None, None))
    assert given.plan(bare, X, Y).layouts["0/params/kernel"] == P("y")
