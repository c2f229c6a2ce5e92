"""BERT (Devlin et al., 2018): post-LN transformer blocks over whole sentences, trained on both of its tasks with AdamW.

A head that shares the embedding of tokens predicts masked tokens, at `predictions` places per sequence. Another one
predicts from the first token whether the second segment follows the first. The loss is the sum of both.

>>> from shardplan.models import bert
>>> bert.training(bert.CONFIGS["bert-base"]).parameters // 10**6
110
"""

from dataclasses import dataclass
from functools import partial
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
    """Sizes. Parameters are float32; `compute_dtype` is that of the layers (lookup, softmax and losses: float32).

    `predictions` is how many tokens of a sequence are masked and predicted, `dropout` the part that is dropped.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    mlp: int = 3072
    vocabulary: int = 30522
    positions: int = 512
    segments: int = 2
    sequence: int = 512
    predictions: int = 76
    batch: int = 256
    dropout: float = 0.1
    compute_dtype: DTypeLike = jnp.float32
    learning_rate: float = 1e-4
    weight_decay: float = 0.01


CONFIGS = {
    "bert-base": Config(),
    "bert-large": Config(layers=24, width=1024, heads=16, mlp=4096),
}
SMALL = Config(layers=1, width=64, heads=8, mlp=256, vocabulary=256, positions=32, sequence=32, predictions=8, batch=16)
BENCHMARK = Config(layers=2, width=1024, heads=16, mlp=4096, batch=64, compute_dtype=jnp.bfloat16)

NAMES = ("batch", "sequence", "embed")
normal = nn.initializers.normal(0.02)


class Attention(nn.Module):
    """Self-attention over the present tokens: `[batch, sequence, width]` to the same.

    `present` is bool `[batch, sequence]`.
    """

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, present: jax.Array) -> jax.Array:
        config, per_head = self.config, (*x.shape[:2], self.config.heads, -1)
        names = ("batch", "sequence", "heads", "head_dim")
        dense = partial(nn.Dense, config.width, kernel_init=normal, dtype=config.compute_dtype)
        query = logical(dense(name="query")(x).reshape(per_head), *names)
        key = logical(dense(name="key")(x).reshape(per_head), *names)
        value = logical(dense(name="value")(x).reshape(per_head), *names)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) / query.shape[-1] ** 0.5
        scores = jnp.where(present[:, None, None, :], scores, jnp.finfo(jnp.float32).min)
        weights = nn.Dropout(config.dropout, deterministic=False)(jax.nn.softmax(scores))
        mixed = logical(jnp.einsum("bhqk,bkhd->bqhd", weights.astype(value.dtype), value), *names)
        return dense(name="out")(mixed.reshape(x.shape))


class Block(nn.Module):
    """Attention and MLP, each followed by a residual sum and a normalisation."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, present: jax.Array) -> jax.Array:
        config = self.config
        dense = partial(nn.Dense, kernel_init=normal, dtype=config.compute_dtype)
        norm = partial(nn.LayerNorm, epsilon=1e-12, dtype=config.compute_dtype)
        drop = nn.Dropout(config.dropout, deterministic=False)
        mixed = drop(Attention(config, name="attention")(x, present))
        x = logical(norm(name="attention_norm")(x + mixed), *NAMES)
        hidden = nn.gelu(dense(config.mlp, name="up")(x), approximate=False)
        hidden = dense(config.width, name="down")(logical(hidden, "batch", "sequence", "mlp"))
        return logical(norm(name="mlp_norm")(x + drop(hidden)), *NAMES)


class Bert(nn.Module):
    """Tokens to float32 logits: masked ones, `[batch, predictions, vocabulary]`, and the next sentence, `[batch, 2]`.

    `tokens`, `segments` int32 and `present` bool are `[batch, sequence]`, `places` int32 `[batch, predictions]`.
    """

    config: Config

    @nn.compact
    def __call__(
        self, tokens: jax.Array, segments: jax.Array, present: jax.Array, places: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        config = self.config
        dense = partial(nn.Dense, kernel_init=normal, dtype=config.compute_dtype)
        norm = partial(nn.LayerNorm, epsilon=1e-12, dtype=config.compute_dtype)
        # The lookups stay in float32, so that the gradient of a row is summed over its places in float32.
        embed = nn.Embed(config.vocabulary, config.width, embedding_init=normal, name="tokens")
        positions = self.param("positions", normal, (config.positions, config.width))
        x = embed(tokens) + positions[: tokens.shape[1]]
        x = x + nn.Embed(config.segments, config.width, embedding_init=normal, name="segments")(segments)
        x = norm(name="embed_norm")(x.astype(config.compute_dtype))
        x = logical(nn.Dropout(config.dropout, deterministic=False)(x), *NAMES)
        for number in range(config.layers):
            x = Block(config, name=f"layer_{number}")(x, present)
        pooled = jnp.tanh(dense(config.width, name="pooler")(x[:, 0]))
        follows = dense(2, name="follows")(pooled).astype(jnp.float32)
        masked = jnp.take_along_axis(x, places[:, :, None], axis=1)
        masked = nn.gelu(dense(config.width, name="transform")(masked), approximate=False)
        masked = logical(norm(name="transform_norm")(masked), *NAMES)
        logits = (masked @ embed.embedding.T.astype(config.compute_dtype)).astype(jnp.float32)
        bias = self.param("head_bias", nn.initializers.zeros_init(), (config.vocabulary,))
        return logical(logits + bias, "batch", "sequence", "vocabulary"), follows


def training(config: Config | None = None) -> Training:
    """The training step: mean cross-entropy of the masked tokens plus that of which segment follows, AdamW.

    The batch is `tokens`, `segments`, `present` (`[batch, sequence]`), `places` and `labels` (`[batch, predictions]`),
    and `follows` (`[batch]`). Raises `ValueError` where the heads do not divide the width, or a sequence is too long.
    """
    config = config or Config()
    if config.width % config.heads:
        raise ValueError(f"`heads` must divide `width`: got {config.heads} heads and a width of {config.width}")
    if not config.predictions <= config.sequence <= config.positions:
        raise ValueError(
            f"got {config.predictions} predictions, a sequence of {config.sequence} and {config.positions} positions: "
            "there must not be more predictions than tokens, nor more tokens than positions"
        )
    model = Bert(config)

    def make_batch(key: jax.Array) -> Batch:
        shape, predicted = (config.batch, config.sequence), (config.batch, config.predictions)
        keys = jax.random.split(key, 6)
        position = jnp.arange(config.sequence)
        ends = jax.random.randint(keys[0], (config.batch, 1), config.sequence // 2, config.sequence + 1)
        middles = jax.random.randint(keys[1], (config.batch, 1), 1, config.sequence // 2)
        return {
            "tokens": jax.random.randint(keys[2], shape, 0, config.vocabulary),
            "segments": (position >= middles).astype(jnp.int32),
            "present": position < ends,
            "places": jax.random.randint(keys[3], predicted, 0, config.sequence),
            "labels": jax.random.randint(keys[4], predicted, 0, config.vocabulary),
            "follows": jax.random.randint(keys[5], (config.batch,), 0, 2),
        }

    inputs = ("tokens", "segments", "present", "places")

    def init(key: jax.Array) -> State:
        batch = make_batch(key)
        return dict(model.init({"params": key, "dropout": key}, *(batch[name] for name in inputs)))

    def loss_function(params: Any, others: State, batch: Batch) -> tuple[jax.Array, State]:
        rngs = {"dropout": batch["key"]} if config.dropout else {}
        outputs: Any = model.apply({"params": params}, *(batch[name] for name in inputs), rngs=rngs)
        pairs = zip(outputs, (batch["labels"], batch["follows"]), strict=True)
        losses = [optax.softmax_cross_entropy_with_integer_labels(*pair).mean() for pair in pairs]
        return losses[0] + losses[1], others

    optimizer = optax.adamw(config.learning_rate, weight_decay=config.weight_decay)
    return make_training(init, make_batch, loss_function, optimizer, seed=0 if config.dropout else None)
