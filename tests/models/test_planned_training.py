"""Planned training of the models: the losses and parameters of five unplanned steps."""

from pathlib import Path

import jax
import numpy as np
import pytest

import shardplan
from shardplan.models import Training, gpt, mlp, resnet
from tests.helpers.slow_devices import SLOW_DEVICES

STEPS = 5
MODELS = {
    "mlp": mlp.Config(widths=(32, 128, 64, 32), batch=64),
    "gpt": gpt.Config(layers=1, width=64, heads=8, vocabulary=256, sequence=32, batch=16),
    "resnet": resnet.Config(blocks=(1, 1), width=8, classes=16, image=32, batch=16, learning_rate=0.01),
}
CASES = [
    ("mlp", {"data": 8}),
    pytest.param("gpt", {"data": 8}, marks=pytest.mark.long),
    pytest.param("resnet", {"data": 8}, marks=pytest.mark.long),
    pytest.param("mlp", {"data": 2, "model": 4}, marks=pytest.mark.long),
    pytest.param("gpt", {"data": 2, "model": 4}, marks=pytest.mark.long),
    pytest.param("resnet", {"data": 2, "model": 4}, marks=pytest.mark.long),
]


def make(name: str) -> Training:
    return {"mlp": mlp, "gpt": gpt, "resnet": resnet}[name].training(MODELS[name])


def run(step, training: Training):
    """The parameters by path after some steps, and the losses."""
    state, losses = training.init(), []
    for number in range(STEPS):
        state, loss = step(state, training.example(number))
        losses.append(float(loss))
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(state["params"]))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}, losses


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axes"), CASES)
def test_same_losses_and_parameters(name: str, axes: dict[str, int], tmp_path: Path):
    training = make(name)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes))
    profile = tmp_path / "slow.toml"
    profile.write_text(SLOW_DEVICES)
    step = shardplan.auto(training.train_step, mesh, donate_argnums=(0,), hardware=profile)
    assert step.plan(training.state, training.batch).communication_bytes > 0
    planned, planned_losses = run(step, training)
    plain, plain_losses = run(jax.jit(training.train_step), training)
    np.testing.assert_allclose(planned_losses, plain_losses, rtol=1e-4)
    assert planned.keys() == plain.keys()
    for path, expected in plain.items():
        # A softmax over keys does not change with the keys' bias: its gradient is nothing but rounding errors, which
        # Adam scales up to its learning rate.
        if not path.endswith("key/bias"):
            assert np.linalg.norm(planned[path] - expected) <= 1e-3 * np.linalg.norm(expected), path
