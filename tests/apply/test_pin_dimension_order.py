"""Orders in memory to which values are held (`shardplan.apply.workarounds.pin_dimension_order`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.apply.workarounds.loop_stack_init import begun_apart
from shardplan.models import load

SCALE, X = jnp.linspace(0.0, 1.0, 16 * 64).reshape(16, 64), jnp.linspace(-1.0, 1.0, 16 * 64 * 8).reshape(16, 64, 8)


@pytest.mark.parametrize(("spec", "held"), [(P(None, "x"), True), (P("x"), False)])
def test_a_broadcast_after_an_all_gather(spec, held):
    """The all-gathered value is held to its dimension order."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def scaled(scale, x):
        return x * scale[:, :, None]

    planned = shardplan.auto(scaled, mesh, pins={"0": spec, "1": P(None, None, "x")})
    assert ("LayoutConstraint" in planned.lower(SCALE, X).as_text()) == held
    np.testing.assert_allclose(planned(SCALE, X), scaled(SCALE, X), rtol=1e-6)


@pytest.mark.parametrize(
    ("spec", "axis", "held"), [(P(None, "x"), 2, True), (P("x"), 2, False), (P(None, "x"), 0, False)]
)
def test_a_scattered_sum_over_the_last_dimension(spec, axis, held):
    """The sum is held to its dimension order."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def shares(x):
        total = jnp.sum(jnp.exp(x), axis)
        return jax.lax.with_sharding_constraint(total, jax.sharding.NamedSharding(mesh, spec))

    x = jnp.tile(X, (1, 1, 8))
    planned = shardplan.auto(shares, mesh, pins={"0": P(*(None,) * axis, "x")})
    assert ("LayoutConstraint" in planned.lower(x).as_text()) == held
    np.testing.assert_allclose(planned(x), shares(x), rtol=1e-6)


@pytest.mark.parametrize(("numbers", "held"), [(("NHWC", "HWIO", "NHWC"), True), (("NCHW", "HWIO", "NCHW"), False)])
def test_an_image_with_all_gathered_channels(numbers, held):
    """The image, with channels innermost, is held to its dimension order."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    image, kernel = jnp.linspace(-1.0, 1.0, 2 * 6 * 6 * 8), jnp.linspace(0.0, 1.0, 3 * 3 * 8 * 512)
    image, kernel = image.reshape((2, 6, 6, 8) if held else (2, 8, 6, 6)), kernel.reshape(3, 3, 8, 512)
    pins = {"0": P(None, None, None, "x") if held else P(None, "x"), "1": P(None, None, None, "x")}

    def convolved(image, kernel):
        return jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=numbers)

    planned = shardplan.auto(convolved, mesh, pins=pins)
    assert ("LayoutConstraint" in planned.lower(image, kernel).as_text()) == held
    np.testing.assert_allclose(planned(image, kernel), convolved(image, kernel), rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_gradients_of_logits_and_all_gathered_maxima():
    """No transpose copies of the gradients raise the compiled peak."""
    model = load("gpt")
    training = model.training(model.BENCHMARK)
    mesh = jax.sharding.AbstractMesh((8,), ("x",))
    plan = shardplan.plan(training.train_step, mesh, training.state, training.batch, donate_argnums=0)
    # transposed copies of the logits' gradients took 4 % more
    assert plan.peak_bytes == pytest.approx(shardplan.audit(plan, "h100").compiled.memory.peak, rel=0.2)


def _layers(number, reverse):
    def step(w, x):
        @jax.checkpoint
        def layer(x, w):
            total, stack = jax.lax.scan(
                lambda c, one: (c + jnp.sin(one @ w), jnp.cos(c) * one), x[0], x, reverse=reverse
            )
            return stack + total

        def loss(w):
            y = x
            for index in range(number):
                y = layer(y, w[index])
            return jnp.sum(y)

        return jax.value_and_grad(loss)(w)

    return step


@pytest.mark.long
@pytest.mark.parametrize("reverse", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize(
    "spec",
    [pytest.param(P(), marks=pytest.mark.long), P(None, "x"), pytest.param(P(None, None, "x"), marks=pytest.mark.long)],
)
def test_initial_stacks_of_loops(reverse, spec):
    """They depend on the operands of their loop, and end with its stacked results."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    w, x = (
        jnp.linspace(-0.2, 0.2, 2 * 16 * 16).reshape(2, 16, 16),
        jnp.linspace(-1.0, 1.0, 5 * 8 * 16).reshape(5, 8, 16),
    )
    step = _layers(2, reverse)
    planned = shardplan.auto(step, mesh, pins={"1": spec})
    for one, other in zip(jax.tree.leaves(planned(w, x)), jax.tree.leaves(step(w, x)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    assert len(begun_apart(planned.plan(w, x).schedule)) >= 3


def test_initial_stacks_of_keys():
    """Stacks of keys, and of loops that only read arguments, start with zeros."""

    def step(x, keys):
        def split(keys):
            return jax.lax.scan(lambda c, one: (c, jax.random.fold_in(one, 1)), 0, keys)[1]

        return jax.lax.scan(lambda c, one: (c, one + 1.0), 0.0, x)[1], split(split(keys))

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 4))
    plan = shardplan.plan(step, 1, jax.ShapeDtypeStruct((8, 64), "float32"), keys)
    assert not begun_apart(plan.schedule)


@pytest.mark.long
def test_stacks_of_later_loops():
    """They are not live while the first loop runs: the compiled peak is near the predicted one."""
    w, x = jax.ShapeDtypeStruct((4, 256, 256), "float32"), jax.ShapeDtypeStruct((64, 256, 256), "float32")
    plan = shardplan.plan(_layers(4, False), jax.sharding.AbstractMesh((1,), ("x",)), w, x)
    assert shardplan.audit(plan, "h100").compiled.memory.peak == pytest.approx(plan.peak_bytes, rel=0.2)


def _lstm(params, x):
    for own in params["layers"]:

        def cell(carry, one, own=own):
            hidden, state = carry
            into, forget, value, out = jnp.split(one @ own["x"] + hidden @ own["h"], 4, -1)
            state = jax.nn.sigmoid(forget) * state + jax.nn.sigmoid(into) * jnp.tanh(value)
            hidden = jax.nn.sigmoid(out) * jnp.tanh(state)
            return (hidden, state), hidden

        zeros = jnp.zeros((x.shape[1], own["h"].shape[0]))
        _, x = jax.lax.scan(cell, (zeros, zeros), x)
    return jnp.mean(jax.nn.logsumexp(x @ params["words"], axis=-1))


@pytest.mark.long
def test_initial_stacks_and_partial_sums():
    """The stacks depend on the partial sums that their loop reads."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    keys, width = jax.random.split(jax.random.key(0), 4), 256
    layer = {"x": jax.random.normal(keys[0], (width, 4 * width)) / 16, "h": jnp.eye(width, 4 * width) / 4}
    params = {"layers": [layer, layer], "words": jax.random.normal(keys[1], (width, 4000)) / 16}
    x, step = jax.random.normal(keys[2], (4, 8, width)), jax.value_and_grad(_lstm)
    planned = shardplan.auto(step, mesh)
    schedule = planned.plan(params, x).schedule
    links = [schedule.problem.links[index].enter[place] for index, place in begun_apart(schedule).items()]
    assert any(link.stacked and schedule.is_partial(link.source, schedule.link_layout(link)) for link in links)
    for one, other in zip(jax.tree.leaves(planned(params, x)), jax.tree.leaves(step(params, x)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
