"""All models: the small one trains planned as unplanned, the benchmark's can be traced, names leave no trace."""

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shardplan
from shardplan.models import NAMES, load
from shardplan.models.logical import logical, logical_axes
from tests.helpers.slow_devices import SLOW_DEVICES

MESHES = {"8": {"data": 8}, "2x4": {"data": 2, "model": 4}, "2x2x2": {"data": 2, "model": 2, "more": 2}}
STEPS = 2
TOLERANCE = 1e-4
SLOW_TO_TRACE = {"darknet", "dcgan", "inception"}
CASES = [pytest.param(name, mesh, marks=pytest.mark.long) for name in NAMES for mesh in MESHES]


def run(step, training):
    """The losses of some steps, and the parameters after them."""
    state, losses = training.init(), []
    for number in range(STEPS):
        state, loss = step(state, training.example(number))
        losses.append(float(loss))
    return losses, jax.device_get(state["params"])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh_name"), CASES)
def test_planned_equals_unplanned(name: str, mesh_name: str, tmp_path: Path):
    module = load(name)
    training = module.training(module.SMALL)
    axes = MESHES[mesh_name]
    profile = tmp_path / "slow.toml"
    profile.write_text(SLOW_DEVICES)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes))
    step = shardplan.auto(training.train_step, mesh, hardware=profile)
    plan = step.plan(training.state, training.batch)
    assert {axis for collective in plan.collectives for axis in collective.axes} == set(axes)
    losses, params = run(step, training)
    expected_losses, expected_params = run(jax.jit(training.train_step), training)
    np.testing.assert_allclose(losses, expected_losses, rtol=TOLERANCE)
    # An optimiser that divides by the size of a gradient makes much of gradients that are nothing but rounding, so the
    # parameters are compared as a whole: one wrong split moves them all.
    difference = [np.linalg.norm(a - b) for a, b in zip(*map(jax.tree.leaves, (params, expected_params)), strict=True)]
    size = [np.linalg.norm(leaf) for leaf in jax.tree.leaves(expected_params)]
    assert np.linalg.norm(difference) <= 1e-3 * np.linalg.norm(size)


@pytest.mark.parametrize("config", ["SMALL", pytest.param("BENCHMARK", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n in SLOW_TO_TRACE)) for n in NAMES])
def test_configurations_are_there(name: str, config: str):
    module = load(name)
    assert module.CONFIGS
    training = module.training(getattr(module, config))
    state, loss = jax.eval_shape(training.train_step, training.state, training.batch)
    assert loss.shape == ()
    assert jax.tree.map(lambda leaf: leaf.shape, state) == jax.tree.map(lambda leaf: leaf.shape, training.state)


@pytest.mark.slow
def test_names_of_activations():
    """They leave no trace, and are constraints under `logical_axes`."""
    x = jax.ShapeDtypeStruct((16, 6, 4), np.float32)
    trace = lambda: jax.make_jaxpr(lambda x: logical(x, "batch", None, "embed"))(x)  # noqa: E731
    assert not trace().eqns
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    with logical_axes(mesh, {"batch": ("data", "model"), "embed": "model"}):
        (constraint,) = trace().eqns
    # The axis `model` is taken by the first dimension.
    assert constraint.params["sharding"] == NamedSharding(mesh, PartitionSpec(("data", "model"), None, None))
    traced = jax.jit(lambda x: logical(x, "batch", None, "embed"))
    with logical_axes(mesh, {"batch": "model"}):
        traced.trace(x)
    assert not traced.trace(x).jaxpr.eqns, "what was traced under names is not taken without them"
    with logical_axes(mesh, {"batch": "data", "embed": "model"}), pytest.raises(ValueError, match="a name per dim"):
        logical(np.zeros((2, 2)), "batch")


def test_an_unknown_model_is_named():
    with pytest.raises(ValueError, match="there is no model `gtp`; there are "):
        load("gtp")
