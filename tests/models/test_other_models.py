"""Models other than transformers: published sizes, and values by reference implementations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardplan.models import darknet, dcgan, dlrm, gnn, inception, mamba, unet3d, vgg


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "parameters"),
    [
        (vgg, "vgg-11", 132_863_336),
        (vgg, "vgg-16", 138_357_544),
        (vgg, "vgg-19", 143_667_240),
        (vgg, "vgg-16-10k", 14_714_688),
        (vgg, "vgg-19-10k", 20_024_384),
        # The weights of Darknet; those of convolutions alone, with a bias per channel.
        (darknet, "darknet-19", 20_842_376),
        (darknet, "darknet-19-10k", 20_842_376 - 1_025_000 - 7_200),
        (dcgan, "dcgan-tutorial", 3_576_704 + 2_765_568),
        pytest.param(inception, "inception-v3", 27_161_264, marks=pytest.mark.long),
        pytest.param(inception, "inception-v3-single", 23_834_568, marks=pytest.mark.long),
        (mamba, "mamba-130m", 129_135_360),
        pytest.param(mamba, "mamba-370m", 371_516_416, marks=pytest.mark.long),
        pytest.param(mamba, "mamba-790m", 793_204_224, marks=pytest.mark.long),
        pytest.param(mamba, "mamba-1.4b", 1_372_178_432, marks=pytest.mark.long),
        pytest.param(mamba, "mamba-2.8b", 2_768_345_600, marks=pytest.mark.long),
        # The published count leaves out the scale and bias of each normalised channel.
        (unet3d, "unet3d", 19_069_955 + 2 * 2336),
        # 33,762,577 rows of 16 numbers, and the two MLPs.
        (dlrm, "dlrm-kaggle", 33_762_577 * 16 + 155_984 + 320_001),
    ],
)
def test_number_of_parameters(module, name: str, parameters: int):
    assert module.training(module.CONFIGS[name]).parameters == parameters


@pytest.mark.slow
def test_graphcast_has_about_as_many_parameters_as_published():
    assert gnn.training(gnn.CONFIGS["graphcast"]).parameters == pytest.approx(36.7e6, rel=0.04)


def test_the_u_net_gives_the_published_volume():
    labels = unet3d.training(unet3d.CONFIGS["unet3d"]).batch["labels"]
    assert labels.shape == (1, 44, 44, 28)


@pytest.mark.long
def test_checkpointed_stages_of_an_odd_size():
    """They train as others, and drop the last row of an odd size."""
    losses = []
    for remat in (False, True):
        training = vgg.training(vgg.Config(stages=((2, 4), (1, 4)), classifier=False, image=14, batch=2, remat=remat))
        assert training.batch["targets"].shape == (2, 3, 3, 4)
        state, _ = jax.jit(training.train_step)(training.init(), training.example())
        losses.append(jax.jit(training.train_step)(state, training.example())[1])
    np.testing.assert_allclose(*losses, rtol=1e-6)


@pytest.mark.long
def test_checkpointed_stages_of_darknet():
    """They train as others."""
    losses = []
    for remat in (False, True):
        config = darknet.Config(((1, 4), (2, 8)), classifier=False, normalised=False, image=12, batch=2, remat=remat)
        training = darknet.training(config)
        assert training.batch["targets"].shape == (2, 6, 6, 8)
        state, _ = jax.jit(training.train_step)(training.init(), training.example())
        losses.append(jax.jit(training.train_step)(state, training.example())[1])
    np.testing.assert_allclose(*losses, rtol=1e-6)


@pytest.mark.long
def test_networks_against_each_other():
    """Each has the gradient of its own loss alone."""
    training = dcgan.training(dcgan.SMALL)
    state, batch = training.init(), training.example()
    params, others = state["params"], {"batch_stats": state["batch_stats"]}

    def losses(own, other):
        loss = lambda params: training.loss_function(params, others, batch)[0]  # noqa: E731
        return loss({"generator": own, "discriminator": other})

    def judged(generator, discriminator, sign):
        stats = others["batch_stats"]
        variables = {"params": generator, "batch_stats": stats["generator"]}
        made, _ = dcgan.Generator(dcgan.SMALL).apply(variables, batch["noise"], mutable=["batch_stats"])
        variables = {"params": discriminator, "batch_stats": stats["discriminator"]}
        found = dcgan.Discriminator(dcgan.SMALL).apply(variables, made, mutable=["batch_stats"])[0]
        return jnp.mean(jax.nn.softplus(sign * found))

    def real(discriminator):
        variables = {"params": discriminator, "batch_stats": others["batch_stats"]["discriminator"]}
        found = dcgan.Discriminator(dcgan.SMALL).apply(variables, batch["images"], mutable=["batch_stats"])[0]
        return jnp.mean(jax.nn.softplus(-found))

    generator, discriminator = params["generator"], params["discriminator"]
    found = jax.jit(jax.grad(losses, (0, 1)))(generator, discriminator)
    expected = jax.jit(lambda g, d: (jax.grad(judged)(g, d, -1.0), jax.grad(lambda d: judged(g, d, 1.0) + real(d))(d)))(
        generator, discriminator
    )
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_the_scan_is_the_recurrence():
    x, step = (jax.random.normal(jax.random.key(n), (2, 7, 5)) for n in range(2))
    b, c = (jax.random.normal(jax.random.key(2 + n), (2, 7, 3)) for n in range(2))
    step = jax.nn.softplus(step)
    a = -jnp.exp(jax.random.normal(jax.random.key(4), (5, 3)))
    state, expected = np.zeros((2, 5, 3)), []
    for t in range(7):
        state = np.exp(step[:, t, :, None] * a) * state + (step * x)[:, t, :, None] * b[:, t, None]
        expected.append((state * c[:, t, None]).sum(-1))
    np.testing.assert_allclose(mamba.selective_scan(x, step, a, b, c), np.stack(expected, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_mamba_is_causal():
    """A position depends on earlier ones alone."""
    config = mamba.SMALL
    params = mamba.training(config).init()["params"]
    apply = jax.jit(lambda tokens: mamba.Mamba(config).apply({"params": params}, tokens))
    tokens = np.arange(16, dtype=np.int32)[None]
    changed = tokens.copy()
    changed[0, 9] = 63
    before, after = apply(tokens), apply(changed)
    np.testing.assert_allclose(before[0, :9], after[0, :9], atol=1e-6)
    assert not np.allclose(before[0, 9:], after[0, 9:])


@pytest.mark.long
def test_rows_are_changed_as_by_a_gradient_of_the_whole_tables():
    sizes = {"tables": (40, 7), "embedding": 8, "dense": 4, "bottom": (8,), "top": (16, 1), "batch": 32}
    trained = []
    for dense_gradients in (False, True):
        training = dlrm.training(dlrm.Config(**sizes, dense_gradients=dense_gradients))
        trained.append(jax.jit(training.train_step)(training.init(), training.example()))
    for one, other in zip(*map(jax.tree.leaves, trained), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_dlrm_refuses_rows_that_the_bottom_does_not_meet():
    with pytest.raises(ValueError, match="the bottom MLP ends in 16 features, and rows have 8"):
        dlrm.training(dlrm.Config(tables=(4,), embedding=8, bottom=(16,)))


@pytest.mark.long
def test_messages_reach_the_receivers_alone():
    config = gnn.Config(3, 2, 1, 1, 1, inputs=2, outputs=2, hidden=4, layers=1)
    training = gnn.training(config)
    graph = training.example()
    graph |= {name: jnp.zeros(1, jnp.int32) for name in ("from_in", "to_in", "from", "to", "from_out", "to_out")}
    params = training.init()["params"]
    apply = jax.jit(lambda graph: gnn.GraphNet(config).apply({"params": params}, graph))
    changed = graph | {"mesh": graph["mesh"].at[0].add(1.0)}
    moved = np.abs(np.asarray(apply(changed) - apply(graph))).max(1) > 1e-7
    assert moved.tolist() == [True, False, False]
