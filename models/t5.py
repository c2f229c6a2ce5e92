"""T5 (Raffel et al., 2019, sizes of section 3.7): an encoder and a decoder that attends to it, trained with Adafactor.

RMSNorm before each part of a block, no biases, learned biases of relative positions, which all layers of a stack share,
attention whose heads need not make up the width, ReLU, and one embedding for both stacks and the head.

>>> from shardplan.models import t5
>>> t5.training(t5.CONFIGS["t5-small"]).parameters // 10**6
60
"""

from dataclasses import dataclass
from functools import partial
from math import log
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from shardplan.models.logical import logical
from shardplan.models.training import Batch, State, Training, make_training


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes. Parameters are float32; `compute_dtype` is that of the layers (lookup, softmax and loss: float32).

    `layers` are those of each stack, `sequence` and `targets` the tokens of encoder and decoder. `buckets` is the
    number of distinct distances, up to `max_distance`. `dropout` is the part that is dropped.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    head_dim: int = 64
    mlp: int = 3072
    vocabulary: int = 32128
    buckets: int = 32
    max_distance: int = 128
    sequence: int = 512
    targets: int = 114
    batch: int = 128
    dropout: float = 0.1
    compute_dtype: DTypeLike = jnp.float32
    learning_rate: float = 1e-2


CONFIGS = {
    "t5-small": Config(layers=6, width=512, heads=8, mlp=2048),
    "t5-base": Config(),
    "t5-large": Config(layers=24, width=1024, heads=16, mlp=4096),
    "t5-3b": Config(layers=24, width=1024, heads=32, head_dim=128, mlp=16384),
}
SMALL = Config(layers=1, width=64, heads=8, head_dim=16, mlp=256, vocabulary=256, sequence=32, targets=16, batch=16)
BENCHMARK = Config(layers=1, width=1024, heads=32, head_dim=128, mlp=16384, batch=64, compute_dtype=jnp.bfloat16)

NAMES = ("batch", "sequence", "embed")


def buckets_of_distances(queries: int, keys: int, both_ways: bool, config: Config) -> jax.Array:
    """The bucket of each key's distance from each query, int32 `[queries, keys]`.

    Half of the buckets are for one distance each, the others for logarithmically growing ranges. If keys may be ahead
    of queries (`both_ways`), half of all are for those.
    """
    distance = jnp.arange(queries)[:, None] - jnp.arange(keys)
    buckets, ahead = config.buckets, jnp.zeros((), jnp.int32)
    if both_ways:
        buckets //= 2
        ahead = jnp.where(distance < 0, buckets, 0)
        distance = jnp.abs(distance)
    distance = jnp.maximum(distance, 0)
    exact = buckets // 2
    ratio = jnp.log(jnp.maximum(distance, 1) / exact) / log(config.max_distance / exact)
    far = exact + (ratio * (buckets - exact)).astype(jnp.int32)
    return ahead + jnp.where(distance < exact, distance, jnp.minimum(far, buckets - 1))


class RelativeBias(nn.Module):
    """The bias of the scores by distance: float32 `[heads, queries, keys]`."""

    config: Config
    both_ways: bool

    @nn.compact
    def __call__(self, queries: int, keys: int) -> jax.Array:
        config = self.config
        table = self.param("table", nn.initializers.normal(1.0), (config.buckets, config.heads))
        buckets = buckets_of_distances(queries, keys, self.both_ways, config)
        return jnp.transpose(table[buckets], (2, 0, 1))


class Attention(nn.Module):
    """Attention of `x` to `source`, both `[batch, sequence, width]`, with `bias` added to the unscaled scores."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, source: jax.Array, bias: jax.Array | None) -> jax.Array:
        config, inner = self.config, self.config.heads * self.config.head_dim
        names = ("batch", "sequence", "heads", "head_dim")
        dense = partial(nn.Dense, use_bias=False, dtype=config.compute_dtype)
        # The scores are not divided by the root of the heads' size: the initial queries are.
        small = nn.initializers.normal((config.width * config.head_dim) ** -0.5)
        query = dense(inner, kernel_init=small, name="query")(x)
        projected = (query, dense(inner, name="key")(source), dense(inner, name="value")(source))
        query, key, value = (logical(y.reshape(*y.shape[:2], config.heads, config.head_dim), *names) for y in projected)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32)
        if bias is not None:
            scores = scores + bias
        weights = nn.Dropout(config.dropout, deterministic=False)(jax.nn.softmax(scores))
        mixed = logical(jnp.einsum("bhqk,bkhd->bqhd", weights.astype(value.dtype), value), *names)
        return dense(config.width, name="out")(mixed.reshape(*x.shape[:2], inner))


class Block(nn.Module):
    """Self-attention, attention to the encoder's results where there are some, and an MLP."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array, encoded: jax.Array | None = None) -> jax.Array:
        config = self.config
        norm = partial(nn.RMSNorm, dtype=config.compute_dtype)
        dense = partial(nn.Dense, use_bias=False, dtype=config.compute_dtype)
        drop = nn.Dropout(config.dropout, deterministic=False)
        normed = norm(name="attention_norm")(x)
        x = logical(x + drop(Attention(config, name="attention")(normed, normed, bias)), *NAMES)
        if encoded is not None:
            normed = norm(name="cross_norm")(x)
            x = logical(x + drop(Attention(config, name="cross")(normed, encoded, None)), *NAMES)
        hidden = nn.relu(dense(config.mlp, name="up")(norm(name="mlp_norm")(x)))
        hidden = drop(logical(hidden, "batch", "sequence", "mlp"))
        return logical(x + drop(dense(config.width, name="down")(hidden)), *NAMES)


class T5(nn.Module):
    """The source and the target so far, both int32 `[batch, sequence]`, to float32 logits of the next target token."""

    config: Config

    @nn.compact
    def __call__(self, inputs: jax.Array, written: jax.Array) -> jax.Array:
        config = self.config
        # The lookup stays in float32, so that the gradient of a token's row is summed over its places in float32.
        embed = nn.Embed(config.vocabulary, config.width, embedding_init=nn.initializers.normal(1.0), name="tokens")
        norm = partial(nn.RMSNorm, dtype=config.compute_dtype)
        drop = nn.Dropout(config.dropout, deterministic=False)
        sequence, targets = inputs.shape[1], written.shape[1]
        x = drop(logical(embed(inputs).astype(config.compute_dtype), *NAMES))
        bias = RelativeBias(config, True, name="encoder_bias")(sequence, sequence)
        for number in range(config.layers):
            x = Block(config, name=f"encoder_{number}")(x, bias)
        encoded = drop(norm(name="encoder_norm")(x))
        x = drop(logical(embed(written).astype(config.compute_dtype), *NAMES))
        bias = RelativeBias(config, False, name="decoder_bias")(targets, targets)
        causal = jnp.tril(jnp.ones((targets, targets), bool))
        bias = jnp.where(causal, bias, jnp.finfo(jnp.float32).min)
        for number in range(config.layers):
            x = Block(config, name=f"decoder_{number}")(x, bias, encoded)
        x = drop(norm(name="decoder_norm")(x)) * config.width**-0.5
        logits = (x @ embed.embedding.T.astype(config.compute_dtype)).astype(jnp.float32)
        return logical(logits, "batch", "sequence", "vocabulary")


def training(config: Config | None = None) -> Training:
    """The training step: mean cross-entropy of the next target token, Adafactor.

    The batch is `inputs`, int32 `[batch, sequence]`, and `targets`, int32 `[batch, targets]`. The decoder reads the
    targets after a 0.
    """
    config = config or Config()
    model = T5(config)
    shapes = {"inputs": (config.batch, config.sequence), "targets": (config.batch, config.targets)}

    def make_batch(key: jax.Array) -> Batch:
        keys = zip(jax.random.split(key), shapes.items(), strict=True)
        return {name: jax.random.randint(key, shape, 0, config.vocabulary) for key, (name, shape) in keys}

    def init(key: jax.Array) -> State:
        return dict(model.init({"params": key, "dropout": key}, *make_batch(key).values()))

    def loss_function(params: Any, others: State, batch: Batch) -> tuple[jax.Array, State]:
        rngs = {"dropout": batch["key"]} if config.dropout else {}
        written = jnp.pad(batch["targets"][:, :-1], ((0, 0), (1, 0)))
        logits: Any = model.apply({"params": params}, batch["inputs"], written, rngs=rngs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean(), others

    optimizer = optax.adafactor(config.learning_rate)
    return make_training(init, make_batch, loss_function, optimizer, seed=0 if config.dropout else None)
