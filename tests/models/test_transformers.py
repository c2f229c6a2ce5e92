"""The transformers: published sizes, and options that change the computation but not its results."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import shardplan
from shardplan.models import bert, dit, gpt, llama, load, t5, vit
from shardplan.program.tracing import trace_program
from tests.helpers.slow_devices import SLOW_DEVICES

# As stated with the weights or in the papers that the modules name; in millions, as precisely as stated.
PUBLISHED = {
    ("bert", "bert-base"): (110.1, 0.1),
    ("bert", "bert-large"): (336.2, 0.1),
    ("gpt", "gpt2"): (124, 1),
    ("gpt", "gpt2-medium"): (355, 1),
    ("gpt", "gpt2-large"): (774, 1),
    ("gpt", "gpt2-xl"): (1558, 1),
    ("gpt", "gpt3-6.7b"): (6660, 5),
    ("gpt", "gpt3-175b"): (174_600, 50),
    ("t5", "t5-small"): (60.51, 0.01),
    ("t5", "t5-base"): (222.9, 0.1),
    ("t5", "t5-large"): (737.7, 0.1),
    ("t5", "t5-3b"): (2851.6, 0.1),
    ("vit", "vit-b16"): (86.57, 0.01),
    ("vit", "vit-l16"): (304.33, 0.01),
    ("vit", "vit-h14"): (632.05, 0.01),
    ("dit", "dit-s-2"): (33, 1),
    ("dit", "dit-b-2"): (130, 1),
    ("dit", "dit-xl-2"): (675, 1),
    ("llama", "llama3-8b"): (8030, 1),
    ("llama", "llama3-70b"): (70554, 1),
}


QUICK = {"gpt2", "bert-base", "t5-small", "vit-b16", "dit-s-2", "llama3-8b"}


@pytest.mark.parametrize(
    ("name", "config"),
    [pytest.param(*case, marks=[] if case[1] in QUICK else [pytest.mark.long]) for case in PUBLISHED],
)
def test_number_of_parameters_is_the_published_one(name: str, config: str):
    millions, precision = PUBLISHED[name, config]
    module = load(name)
    assert module.training(module.CONFIGS[config]).parameters / 1e6 == pytest.approx(millions, abs=precision)


def losses(training, steps=2):
    """The losses of some steps."""
    step, state, found = jax.jit(training.train_step), training.init(), []
    for number in range(steps):
        state, loss = step(state, training.example(number))
        found.append(float(loss))
    return found


@pytest.mark.long
@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("checkpoint", [None, "dots_with_no_batch_dims_saveable"])
def test_llama_scanned_and_recomputed_is_the_same_step(scan_layers: bool, checkpoint: str | None):
    expected = llama.training(llama.SMALL)
    training = llama.training(replace(llama.SMALL, scan_layers=scan_layers, checkpoint=checkpoint))
    np.testing.assert_allclose(losses(training), losses(expected), rtol=1e-5)
    primitives = {
        equation.primitive.name for equation in jax.make_jaxpr(training.train_step)(training.state, training.batch).eqns
    }
    assert ("scan" in primitives) == scan_layers


def stacked(params):
    """The parameters of a GPT's layers, stacked as `scan_layers` has them."""
    names = sorted(name for name in params if name.startswith("layer_"))
    layers = jax.tree.map(lambda *leaves: np.stack(leaves), *(params[name] for name in names))
    return {"layers": layers, **{name: value for name, value in params.items() if name not in names}}


@pytest.mark.long
@pytest.mark.parametrize("checkpoint", [None, "nothing_saveable"])
def test_gpt_scanned_and_recomputed_is_the_same_step(checkpoint: str | None):
    config = replace(gpt.SMALL, layers=2, checkpoint=checkpoint)
    unrolled, scanned = gpt.training(config), gpt.training(replace(config, scan_layers=True))
    state = unrolled.init()
    new, loss = jax.jit(unrolled.train_step)(state, unrolled.example())
    arguments = {**scanned.init(), "params": stacked(state["params"])}, scanned.example()
    new_scanned, loss_scanned = jax.jit(scanned.train_step)(*arguments)
    np.testing.assert_allclose(loss, loss_scanned, rtol=1e-6)
    # As a whole: the gradient of a key's bias is nothing but rounding, which Adam makes as large as the others.
    changed = [jax.tree.leaves(params) for params in (stacked(new["params"]), new_scanned["params"])]
    difference = np.linalg.norm([np.linalg.norm(first - second) for first, second in zip(*changed, strict=True)])
    assert difference <= 1e-4 * np.linalg.norm([np.linalg.norm(leaf) for leaf in changed[0]])


@pytest.mark.long
def test_what_gpt_saves_by_names():
    """The products of a layer that are made again are those without a saved name."""
    saved = [
        None,
        "minimal_with_context",
        "minimal",
        "save_dot_with_context_except_mlp",
        "save_qkv_proj",
        "save_out_proj",
    ]
    found = []
    for name in saved:
        training = gpt.training(replace(gpt.SMALL, checkpoint=name))
        program = trace_program(training.train_step, (training.state, training.batch))
        found.append(sum(o.primitive.name == "dot_general" for o in program.operations))
    # scores; the context as well; scores and up; scores, context, out, up; all but out, and down, which nothing reads
    assert [count - found[0] for count in found] == [0, 1, 2, 2, 4, 6]


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"scan_layers": True, "checkpoint": "nothing_saveable"}], ids=["", "scanned"])
def test_dropout_draws_by_the_step_and_the_same_when_planned(options, tmp_path: Path):
    """Two steps from one state differ by their number alone, and a plan changes none of the numbers drawn."""
    training = gpt.training(replace(gpt.SMALL, layers=2, dropout=0.5, **options))
    state, batch = training.init(), training.example()
    step = jax.jit(training.train_step)
    first, again, later = (step({**state, "step": state["step"] + n}, batch)[1] for n in (0, 0, 1))
    assert first == again
    assert abs(first - later) > 1e-4
    profile = tmp_path / "slow.toml"
    profile.write_text(SLOW_DEVICES)
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    planned = shardplan.auto(training.train_step, mesh, hardware=profile)
    np.testing.assert_allclose(planned(state, batch)[1], first, rtol=1e-5)


@pytest.mark.long
def test_llama_attention_agrees_with_jax():
    """Grouped queries and rotary positions, against `jax.nn` and against a rotation of complex numbers."""
    config = replace(llama.SMALL, width=64, heads=8, kv_heads=2)
    attention = llama.Attention(config, llama.nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 16, 64))

    def turned(projection, heads: int) -> jax.Array:
        pairs = np.asarray(projection(x), np.complex64).reshape(2, 16, heads, 2, 4)
        numbers = pairs[..., 0, :] + 1j * pairs[..., 1, :]
        speeds = config.rope_theta ** (-np.arange(4) / 4)
        numbers = numbers * np.exp(1j * np.arange(16)[:, None, None] * speeds)
        return jax.numpy.asarray(np.concatenate([numbers.real, numbers.imag], axis=-1), jax.numpy.float32)

    value = attention.value(x).reshape(2, 16, 2, 8)
    mixed = jax.nn.dot_product_attention(turned(attention.query, 8), turned(attention.key, 2), value, is_causal=True)
    np.testing.assert_allclose(attention(x), attention.out(mixed.reshape(2, 16, 64)), atol=1e-5)


@pytest.mark.slow
def test_t5_tells_near_distances_apart_and_far_ones_roughly():
    config = t5.Config()
    ahead_and_behind = np.asarray(t5.buckets_of_distances(300, 300, True, config))
    # A query at 150 and keys before it: 8 distances by themselves, then ranges that grow, up to 128.
    assert list(ahead_and_behind[150, [150, 149, 143, 142, 139, 138, 100, 22, 0]]) == [0, 1, 7, 8, 8, 9, 13, 15, 15]
    assert list(ahead_and_behind[150, [151, 157, 158, 299]]) == [17, 23, 24, 31]
    behind = np.asarray(t5.buckets_of_distances(300, 300, False, config))
    assert list(behind[200, [200, 185, 184, 72, 0, 201, 299]]) == [0, 15, 16, 31, 31, 0, 0]


@pytest.mark.long
def test_t5_writes_looking_back_and_reads_everything():
    config = replace(t5.SMALL, dropout=0.0)
    training = t5.training(config)
    params, batch = training.init()["params"], training.example()
    apply = jax.jit(lambda inputs, written: t5.T5(config).apply({"params": params}, inputs, written))
    before = apply(batch["inputs"], batch["targets"])
    after = apply(batch["inputs"], batch["targets"].at[:, 9].add(1))
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert not np.allclose(before[:, 9:], after[:, 9:])
    assert not np.allclose(before[:, 0], apply(batch["inputs"].at[:, -1].add(1), batch["targets"])[:, 0])


@pytest.mark.long
def test_bert_with_absent_tokens():
    """Absent tokens have no influence."""
    config = replace(bert.SMALL, dropout=0.0)
    training = bert.training(config)
    params, batch = training.init()["params"], training.example()
    present = np.arange(config.sequence) < np.full((config.batch, 1), 20)
    rest = batch["segments"], present, batch["places"] % 20
    apply = jax.jit(lambda tokens: bert.Bert(config).apply({"params": params}, tokens, *rest))
    before, hidden = apply(batch["tokens"]), apply(batch["tokens"].at[:, 20:].set(0))
    np.testing.assert_array_equal(before[0], hidden[0])
    assert not np.allclose(before[0], apply(batch["tokens"].at[:, 5].set(0))[0])


@pytest.mark.long
def test_dit_begins_with_no_noise_and_draws_by_the_step():
    """Gates and head begin with zero, so that the first loss is the square of the noise, which each step draws."""
    training = dit.training(dit.SMALL)
    state, batch = training.init(), training.example()
    step = jax.jit(training.train_step)
    (_, first), (_, again), (_, later) = (step({**state, "step": state["step"] + n}, batch) for n in (0, 0, 1))
    assert first == again != later
    assert first == pytest.approx(1, abs=0.1)


@pytest.mark.long
def test_vit_in_equinox_learns_and_keeps_its_type():
    training = vit.training(replace(vit.SMALL, dropout=0.0))
    state, batch, losses = training.init(), training.example(), []
    step = jax.jit(training.train_step)
    for _ in range(5):
        state, loss = step(state, batch)
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)
    assert isinstance(state["params"], vit.ViT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "got a width of 128, 3 heads"),
        ({"kv_heads": 3}, "16 heads and 3 key and value heads"),
        ({"checkpoint": "everything"}, "no checkpoint policy `everything`; there are .*dots_saveable"),
    ],
)
def test_llama_with_wrong_sizes(change, message: str):
    """Its errors name the sizes."""
    with pytest.raises(ValueError, match=message):
        llama.training(replace(llama.SMALL, **change))
