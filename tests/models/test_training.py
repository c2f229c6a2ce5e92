"""Training steps of the models: published sizes, purity, constant shapes, and learning."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardplan.models import Training, gpt, mlp, resnet

SMALL = {
    "mlp": lambda dtype: mlp.training(mlp.Config(widths=(16, 32, 8), batch=16, compute_dtype=dtype)),
    "gpt": lambda dtype: gpt.training(
        gpt.Config(layers=1, width=32, heads=4, vocabulary=64, sequence=16, batch=4, compute_dtype=dtype)
    ),
    "resnet": lambda dtype: resnet.training(
        resnet.Config(blocks=(1,), width=8, classes=10, image=16, batch=8, compute_dtype=dtype, learning_rate=0.01)
    ),
}


def shapes(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


@pytest.mark.parametrize(
    ("training", "parameters"),
    [
        (mlp.training(mlp.Config()), 4 * (2 * 1024 * 4096 + 4096 + 1024)),
        # Embedding and head, positions, per layer 12 D^2 and its biases and norms, the last norm.
        (gpt.training(gpt.Config()), 2 * 32768 * 1024 + 1024**2 + 2 * (12 * 1024**2 + 13 * 1024) + 2 * 1024),
        (gpt.training(gpt.Config(tied_head=True)), 32768 * 1024 + 1024**2 + 2 * (12 * 1024**2 + 13 * 1024) + 2 * 1024),
        (resnet.training(resnet.Config()), 25_557_032),
    ],
    ids=["mlp", "gpt", "gpt-tied", "resnet50"],
)
def test_number_of_parameters(training: Training, parameters: int):
    assert training.parameters == parameters


@pytest.mark.long
def test_shapes_are_made_without_computing():
    state = gpt.training(gpt.Config(layers=48, width=8192, heads=64)).state
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", SMALL)
def test_step_keeps_the_state_and_computes_in_the_dtype(name: str, dtype):
    training = SMALL[name](dtype)
    state, loss = jax.eval_shape(training.train_step, training.state, training.batch)
    assert shapes(state) == shapes(training.state)
    assert (loss.shape, loss.dtype) == ((), jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(state["params"])} == {jnp.dtype("float32")}
    jaxpr = jax.make_jaxpr(training.train_step)(training.state, training.batch)
    contractions = [
        equation for equation in jaxpr.jaxpr.eqns if equation.primitive.name in ("dot_general", "conv_general_dilated")
    ]
    assert contractions
    assert {equation.outvars[0].aval.dtype for equation in contractions} == {jnp.dtype(dtype)}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name != "mlp")) for name in SMALL])
def test_arrays_have_the_shapes_and_the_step_learns(name: str):
    training = SMALL[name](jnp.float32)
    state, batch = training.init(), training.example()
    assert shapes(state) == shapes(training.state)
    assert shapes(batch) == shapes(training.batch)
    step = jax.jit(training.train_step)
    losses = []
    for _ in range(20):
        state, loss = step(state, batch)
        losses.append(float(loss))
    assert int(state["step"]) == 20
    assert losses[-1] < 0.9 * losses[0]
    if name == "gpt":
        assert losses[0] == pytest.approx(math.log(64), rel=0.15), "it should start at the entropy of a guess"
    if name == "resnet":
        assert not np.allclose(state["batch_stats"]["stem_norm"]["mean"], 0)


def test_same_seed_same_state():
    training = SMALL["mlp"](jnp.float32)
    first, same, other = (training.init(seed)["params"]["layer_0"]["kernel"] for seed in (3, 3, 4))
    assert (first == same).all()
    assert not (first == other).all()


@pytest.mark.long
def test_gpt_is_causal():
    """A position depends on earlier ones alone."""
    config = gpt.Config(layers=2, width=32, heads=4, vocabulary=64, sequence=16, batch=1)
    params = gpt.training(config).init()["params"]
    apply = jax.jit(lambda tokens: gpt.GPT(config).apply({"params": params}, tokens))
    tokens = np.arange(16, dtype=np.int32)[None]
    changed = tokens.copy()
    changed[0, 9] = 63
    before, after = apply(tokens), apply(changed)
    np.testing.assert_array_equal(before[0, :9], after[0, :9])
    assert not np.allclose(before[0, 9:], after[0, 9:])


@pytest.mark.long
def test_attention_agrees_with_jax():
    config = gpt.Config(width=32, heads=4)
    x = jax.random.normal(jax.random.key(0), (2, 16, 32))
    model = gpt.Attention(config)
    params = model.init(jax.random.key(1), x)["params"]

    def project(name: str, x: jax.Array) -> jax.Array:
        return x @ params[name]["kernel"] + params[name]["bias"]

    heads = [project(name, x).reshape(2, 16, 4, 8) for name in ("query", "key", "value")]
    mixed = jax.nn.dot_product_attention(*heads, is_causal=True)
    expected = project("out", mixed.reshape(2, 16, 32))
    np.testing.assert_allclose(model.apply({"params": params}, x), expected, atol=1e-5)


def test_gpt_refuses_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="got 3 heads and a width of 32"):
        gpt.training(gpt.Config(width=32, heads=3))
