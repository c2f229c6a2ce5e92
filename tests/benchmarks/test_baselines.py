"""Layouts by hand: they are the model's own step, with the stated splits."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from benchmarks.baselines import AXES, Baseline, lower, specs_of
from benchmarks.recipes import baselines_of
from shardplan.models import NAMES, load, mlp

QUICK = {("mlp", "FSDP x Megatron 2 x 4")}
TITLED = lambda value: value.title if isinstance(value, Baseline) else value  # noqa: E731
CASES = [
    pytest.param(name, baseline, marks=[] if (name, baseline.title) in QUICK else [pytest.mark.long])
    for name in NAMES
    for baseline in baselines_of(name)
]


def mesh_of(baseline: Baseline):
    return jax.make_mesh((baseline.data, baseline.tensor), AXES, axis_types=(AxisType.Auto, AxisType.Auto))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "baseline"), CASES, ids=lambda value: value.title if isinstance(value, Baseline) else value
)
def test_a_layout_by_hand_trains_as_the_model_does(name: str, baseline: Baseline):
    module = load(name)
    training = module.training(module.SMALL)
    compiled = lower(baseline, training, mesh_of(baseline)).compile()
    state, batch = training.init(), training.example()
    placed = jax.device_put((state, batch), compiled.input_shardings[0])
    found, loss = compiled(*placed)
    expected, expected_loss = jax.jit(training.train_step)(training.init(), batch)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-4)
    pairs = list(zip(*map(jax.tree.leaves, (found["params"], expected["params"])), strict=True))
    difference = np.linalg.norm([np.linalg.norm(np.asarray(a) - np.asarray(b)) for a, b in pairs])
    assert difference <= 1e-3 * np.linalg.norm([np.linalg.norm(np.asarray(b)) for _, b in pairs])


def test_specs_follow_rules_and_stages():
    params = mlp.training(mlp.Config(widths=(64, 128, 64), batch=32)).state["params"]
    weights = (("layer_0/kernel", P(None, "tensor")), ("layer_1/kernel", P("tensor", None)))
    for stage, kept in ((0, P(None, "tensor")), (1, P(None, "tensor")), (3, P("data", "tensor"))):
        baseline = Baseline("by hand", 2, 4, stage, weights=weights)
        specs = specs_of(baseline, params, mesh_of(baseline))
        assert specs.computing["layer_0"]["kernel"] == P(None, "tensor")
        assert specs.kept["layer_0"]["kernel"] == kept
        assert specs.updating["layer_1"]["kernel"] == (P("tensor", "data") if stage else P("tensor", None))


def test_titles_are_unique_and_use_all_devices():
    for name in NAMES:
        titles = [baseline.title for baseline in baselines_of(name)]
        assert len(set(titles)) == len(titles)
        assert all(baseline.data * baseline.tensor == 8 for baseline in baselines_of(name))
