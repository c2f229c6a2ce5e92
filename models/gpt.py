"""A GPT: pre-LN transformer blocks, learned positions, causal attention, GELU MLP of four times the width, AdamW.

The published sizes are those of GPT-2 (Radford et al., 2019) and GPT-3 (Brown et al., 2020, table 2.1; dense attention
in every layer). `dropout` is that of GPT-2: of the embeddings, of the attention's weights, and of the residual of each
half of a block. `scan_layers` runs one block over the stacked parameters of all. `checkpoint` saves the activations of
the named policy, and recomputes all others in the backward pass. For policies that save by names, activations have the
names of MaxText.

>>> from shardplan.models import gpt
>>> gpt.training().parameters // 10**6
93
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from shardplan.models.logical import logical
from shardplan.models.training import Batch, State, Training, checkpoint_policy, next_token_training

_PROJECTIONS = ("query_proj", "key_proj", "value_proj")

SAVED_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "minimal": (*_PROJECTIONS, "out_proj", "mlpwi", "mlpwo"),
        "minimal_with_context": (*_PROJECTIONS, "context", "out_proj", "mlpwi", "mlpwo"),
        "save_dot_except_mlpwi": (*_PROJECTIONS, "out_proj", "mlpwo"),
        "save_dot_with_context_except_mlp": (*_PROJECTIONS, "context", "out_proj"),
        "save_dot_except_mlp": (*_PROJECTIONS, "out_proj"),
        "save_qkv_proj": _PROJECTIONS,
        "save_out_proj": ("out_proj",),
    }
)
"""The names that policies of MaxText save (its option `remat_policy`). Its policy `full` saves nothing."""


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes. Parameters are float32; `compute_dtype` is that of the layers (lookup, softmax and loss: float32).

    `dropout` is the part that is dropped. `checkpoint` names a policy of `jax.checkpoint_policies`, or a set of names
    of `SAVED_NAMES`; None keeps all.
    """

    layers: int = 2
    width: int = 1024
    heads: int = 16
    vocabulary: int = 32768
    sequence: int = 1024
    batch: int = 16
    tied_head: bool = False
    dropout: float = 0.0
    scan_layers: bool = False
    checkpoint: str | None = None
    compute_dtype: DTypeLike = jnp.float32
    learning_rate: float = 3e-4
    weight_decay: float = 0.1

    def named(self, activation: jax.Array, name: str) -> jax.Array:
        """An activation with its name for policies by names."""
        return checkpoint_name(activation, name) if self.checkpoint in SAVED_NAMES else activation


def _policy(name: str) -> Callable[..., Any]:
    """The policy of a set of names, or of `jax.checkpoint_policies`. Raises `ValueError` for an unknown name."""
    names = SAVED_NAMES.get(name)
    return checkpoint_policy(name) if names is None else jax.checkpoint_policies.save_only_these_names(*names)


CONFIGS = {
    "gpt2": Config(layers=12, width=768, heads=12, vocabulary=50257, tied_head=True),
    "gpt2-medium": Config(layers=24, width=1024, heads=16, vocabulary=50257, tied_head=True),
    "gpt2-large": Config(layers=36, width=1280, heads=20, vocabulary=50257, tied_head=True),
    "gpt2-xl": Config(layers=48, width=1600, heads=25, vocabulary=50257, tied_head=True),
    "gpt3-6.7b": Config(layers=32, width=4096, heads=32, vocabulary=50257, sequence=2048, tied_head=True),
    "gpt3-175b": Config(layers=96, width=12288, heads=96, vocabulary=50257, sequence=2048, tied_head=True),
}
SMALL = Config(layers=1, width=64, heads=8, vocabulary=256, sequence=32, batch=16)
BENCHMARK = Config()


class Attention(nn.Module):
    """Causal self-attention: `[batch, sequence, width]` to the same."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, sequence, width = x.shape
        per_head = (batch, sequence, self.config.heads, width // self.config.heads)
        dense = partial(nn.Dense, width, dtype=self.config.compute_dtype)
        names = ("batch", "sequence", "heads", "head_dim")
        query = logical(self.config.named(dense(name="query")(x), "query_proj").reshape(per_head), *names)
        key = logical(self.config.named(dense(name="key")(x), "key_proj").reshape(per_head), *names)
        value = logical(self.config.named(dense(name="value")(x), "value_proj").reshape(per_head), *names)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) / per_head[-1] ** 0.5
        causal = jnp.tril(jnp.ones((sequence, sequence), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(jnp.float32).min))
        weights = nn.Dropout(self.config.dropout, deterministic=False)(weights)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(value.dtype), value)
        mixed = self.config.named(logical(mixed, *names), "context").reshape(x.shape)
        return self.config.named(dense(name="out")(mixed), "out_proj")


class MLP(nn.Module):
    """Up to four times the width, GELU, and down again."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = partial(nn.Dense, dtype=self.config.compute_dtype)
        up = self.config.named(dense(4 * self.config.width, name="up")(x), "mlpwi")
        hidden = logical(nn.gelu(up), "batch", "sequence", "mlp")
        return self.config.named(dense(self.config.width, name="down")(hidden), "mlpwo")


class Block(nn.Module):
    """Attention and MLP, each with a normalisation before and a residual sum after."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = partial(nn.LayerNorm, dtype=self.config.compute_dtype)
        drop = nn.Dropout(self.config.dropout, deterministic=False)
        names = ("batch", "sequence", "embed")
        x = logical(x + drop(Attention(self.config, name="attention")(norm(name="attention_norm")(x))), *names)
        return logical(x + drop(MLP(self.config, name="mlp")(norm(name="mlp_norm")(x))), *names)


class GPT(nn.Module):
    """Tokens to logits: int32 `[batch, sequence]` to float32 `[batch, sequence, vocabulary]`."""

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config = self.config
        normal = nn.initializers.normal(0.02)
        # The lookup stays in float32, so that the gradient of a token's row is summed over its places in float32.
        embed = nn.Embed(config.vocabulary, config.width, embedding_init=normal, name="tokens")
        positions = self.param("positions", normal, (config.sequence, config.width))
        x = logical((embed(tokens) + positions).astype(config.compute_dtype), "batch", "sequence", "embed")
        x = nn.Dropout(config.dropout, deterministic=False)(x)
        block: Any = Block
        if config.checkpoint is not None:
            policy = _policy(config.checkpoint)
            block = nn.remat(Block, policy=policy, prevent_cse=not config.scan_layers)
        if config.scan_layers:
            split: dict[Any, bool] = {"params": True, "dropout": True}
            scan = nn.scan(lambda layer, x: (layer(x), None), {"params": 0}, split_rngs=split, length=config.layers)
            x, _ = scan(block(config, name="layers"), x)
        else:
            for number in range(config.layers):
                x = block(config, name=f"layer_{number}")(x)
        x = nn.LayerNorm(dtype=config.compute_dtype, name="norm")(x)
        if config.tied_head:
            logits = x @ embed.embedding.T.astype(config.compute_dtype)
        else:
            logits = nn.Dense(config.vocabulary, use_bias=False, dtype=config.compute_dtype, name="head")(x)
        return logical(logits.astype(jnp.float32), "batch", "sequence", "vocabulary")


def training(config: Config | None = None) -> Training:
    """The training step: mean cross-entropy of the next token, AdamW.

    The batch is `inputs` and `labels`, int32 `[batch, sequence]`. Raises `ValueError` where the heads do not divide the
    width, or where there is no such checkpoint policy.
    """
    config = config or Config()
    if config.width % config.heads:
        raise ValueError(f"`heads` must divide `width`: got {config.heads} heads and a width of {config.width}")
    if config.checkpoint is not None:
        _policy(config.checkpoint)
    model = GPT(config)
    shape = (config.batch, config.sequence)

    def init(key: jax.Array) -> State:
        return dict(model.init({"params": key, "dropout": key}, jnp.zeros(shape, jnp.int32)))

    def logits(params: Any, batch: Batch) -> jax.Array:
        rngs = {"dropout": batch["key"]} if config.dropout else {}
        found: Any = model.apply({"params": params}, batch["inputs"], rngs=rngs)
        return found

    optimizer = optax.adamw(config.learning_rate, weight_decay=config.weight_decay)
    sizes = (*shape, config.vocabulary)
    return next_token_training(init, logits, sizes, optimizer, seed=0 if config.dropout else None)
