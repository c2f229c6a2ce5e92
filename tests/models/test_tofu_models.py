"""The models of the Tofu paper: the memory of its table, and values by reference implementations."""

from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardplan.models import lstm, wide_resnet

# Wang et al., EuroSys 2019, table 1: GiB of weights, gradients and momentum, by layers and width.
RECURRENT = {
    6: {"4k": 8.4, "6k": 18.6, "8k": 33.0},
    8: {"4k": 11.4, "6k": 28.5, "8k": 45.3},
    10: {"4k": 14.4, "6k": 32.1, "8k": 57.0},
}
CONVOLUTIONAL = {
    50: {"4": 4.2, "6": 9.6, "8": 17.1, "10": 26.7},
    101: {"4": 7.8, "6": 17.1, "8": 30.6, "10": 47.7},
    152: {"4": 10.5, "6": 23.4, "8": 41.7, "10": 65.1},
}
CASES = [
    pytest.param(
        module,
        f"{family}-{layers}-{width}",
        stated,
        id=f"{family}-{layers}-{width}",
        marks=[pytest.mark.long] if layers in (101, 152) else [],
    )
    for module, family, table in ((lstm, "rnn", RECURRENT), (wide_resnet, "wresnet", CONVOLUTIONAL))
    for layers, row in table.items()
    for width, stated in row.items()
]
# It does not fit the paper's own series: with 6 and 10 layers of this width it states 18.6 and 32.1.
EXCEPTION = "rnn-8-6k"


@pytest.mark.parametrize(("module", "name", "stated"), CASES)
def test_memory_is_that_of_the_table(module, name: str, stated: float):
    gibibytes = 12 * module.training(module.CONFIGS[name]).parameters / 2**30
    if name == EXCEPTION:
        assert gibibytes == pytest.approx((18.6 + 32.1) / 2, rel=0.03)
        assert gibibytes < 0.97 * stated
    else:
        assert gibibytes == pytest.approx(stated, rel=0.03)


def test_every_configuration_of_the_table_is_there():
    assert {case.values[1] for case in CASES} == {*lstm.CONFIGS, *wide_resnet.CONFIGS}


@pytest.mark.long
def test_scanned_and_unrolled_lstm_compute_the_same():
    config = replace(lstm.SMALL, layers=1, sequence=3)
    unrolled, scanned = lstm.training(config), lstm.training(replace(config, scanned=True))
    state, batch = unrolled.init(), unrolled.example()
    (first, loss), (other, other_loss) = (jax.jit(t.train_step)(state, batch) for t in (unrolled, scanned))
    np.testing.assert_allclose(loss, other_loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(first["params"]), jax.tree.leaves(other["params"]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_a_layer_agrees_with_flax():
    """Flax's cell has the gates in the order of its names, and no forget bias of its own."""
    config = lstm.Config(hidden=8)
    inputs = [jax.random.normal(jax.random.key(step), (3, 5)) for step in range(2)]
    layer = lstm.Layer(config)
    variables = layer.init(jax.random.key(9), inputs)
    params = variables["params"]
    cell = nn.OptimizedLSTMCell(8)
    renamed = {}
    for number, gate in enumerate("ifog"):
        bias = params["bias"][number] + (1.0 if gate == "f" else 0.0)
        renamed[f"i{gate}"] = {"kernel": params["input"][:, number]}
        renamed[f"h{gate}"] = {"kernel": params["state"][:, number], "bias": bias}
    carry = jnp.zeros((3, 8)), jnp.zeros((3, 8))
    for x, output in zip(inputs, layer.apply(variables, inputs), strict=True):
        carry, expected = cell.apply({"params": renamed}, carry, x)
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    "training",
    [lstm.training(replace(lstm.SMALL, learning_rate=1.0)), wide_resnet.training(wide_resnet.SMALL)],
    ids=["lstm", "wide_resnet"],
)
def test_the_step_learns(training):
    state, batch = training.init(), training.example()
    step = jax.jit(training.train_step)
    losses = []
    for _ in range(20):
        state, loss = step(state, batch)
        losses.append(float(loss))
    assert losses[-1] < 0.9 * losses[0]


def test_the_number_of_layers_must_be_known():
    with pytest.raises(ValueError, match="no ResNet of 51 layers; there are 50, 101, 152"):
        wide_resnet.training(wide_resnet.Config(layers=51))
