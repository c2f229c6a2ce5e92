"""Llama 3 in Flax NNX (Grattafiori et al., "The Llama 3 Herd of Models", 2024, table 3), trained with AdamW.

RMSNorm before each half of a block, rotary positions, attention whose query heads share fewer key and value heads
(grouped queries), an MLP gated by SiLU, and a head of its own. `scan_layers` runs one block over the stacked parameters
of all. `checkpoint` saves the activations of the named policy, and recomputes all others in the backward pass.

>>> from shardplan.models import llama
>>> llama.training(llama.CONFIGS["llama3-8b"]).parameters
8030261248
>>> llama.training(llama.Config(layers=2, scan_layers=True)).state["params"]["layers"]["mlp"]["up"]["kernel"]
ShapeDtypeStruct(shape=(2, 4096, 14336), dtype=float32)
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike

from shardplan.models.logical import logical
from shardplan.models.stacked import separate_layers, stacked_layers
from shardplan.models.training import Batch, State, Training, checkpoint_policy, next_token_training


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes. Parameters are float32; `compute_dtype` is that of the layers (lookup, norms, softmax and loss: float32).

    `checkpoint` names a policy of `jax.checkpoint_policies`, such as `nothing_saveable`; None keeps everything.
    """

    layers: int = 32
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    mlp: int = 14336
    vocabulary: int = 128256
    rope_theta: float = 500000.0
    norm_epsilon: float = 1e-5
    sequence: int = 8192
    batch: int = 16
    scan_layers: bool = False
    checkpoint: str | None = None
    compute_dtype: DTypeLike = jnp.bfloat16
    learning_rate: float = 3e-4
    weight_decay: float = 0.1

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


CONFIGS = {
    "llama3-8b": Config(),
    "llama3-70b": Config(layers=80, width=8192, heads=64, mlp=28672, learning_rate=1.5e-4),
}
SMALL = Config(
    layers=2,
    width=128,
    heads=16,
    mlp=256,
    vocabulary=256,
    sequence=32,
    compute_dtype=jnp.float32,
)
BENCHMARK = Config(layers=2, sequence=2048)

NAMES = ("batch", "sequence", "embed")


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary positions (Su et al., 2021): `[batch, sequence, heads, head_dim]` to the same, rotated in float32.

    The numbers `i` and `i + head_dim / 2` of a head make a pair, rotated by `position * theta ** (-2 i / head_dim)`.
    """
    half = x.shape[-1] // 2
    speeds = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * speeds
    sine, cosine = jnp.sin(angles), jnp.cos(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return rotated.astype(x.dtype)


class Attention(nnx.Module):
    """Causal self-attention with grouped queries: `[batch, sequence, width]` to the same."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.config = config
        dense = partial(nnx.Linear, use_bias=False, dtype=config.compute_dtype, rngs=rngs)
        self.query = dense(config.width, config.heads * config.head_dim)
        self.key = dense(config.width, config.kv_heads * config.head_dim)
        self.value = dense(config.width, config.kv_heads * config.head_dim)
        self.out = dense(config.heads * config.head_dim, config.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        config, (batch, sequence, _) = self.config, x.shape
        kv_names = ("batch", "sequence", "kv_heads", "head_dim")
        query = self.query(x).reshape(batch, sequence, config.heads, config.head_dim)
        query = rotate(logical(query, "batch", "sequence", "heads", "head_dim"), config.rope_theta)
        kv_shape = (batch, sequence, config.kv_heads, config.head_dim)
        key = rotate(logical(self.key(x).reshape(kv_shape), *kv_names), config.rope_theta)
        value = logical(self.value(x).reshape(kv_shape), *kv_names)
        groups = config.heads // config.kv_heads
        query = query.reshape(batch, sequence, config.kv_heads, groups, config.head_dim)
        scores = jnp.einsum("bqkgd,btkd->bkgqt", query, key).astype(jnp.float32) / config.head_dim**0.5
        causal = jnp.tril(jnp.ones((sequence, sequence), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(jnp.float32).min))
        mixed = jnp.einsum("bkgqt,btkd->bqkgd", weights.astype(value.dtype), value)
        mixed = logical(mixed, "batch", "sequence", "kv_heads", None, "head_dim")
        return self.out(mixed.reshape(batch, sequence, config.heads * config.head_dim))


class MLP(nnx.Module):
    """Two projections up, one through SiLU, multiplied, and down again (SwiGLU; Shazeer, 2020)."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        dense = partial(nnx.Linear, use_bias=False, dtype=config.compute_dtype, rngs=rngs)
        self.gate = dense(config.width, config.mlp)
        self.up = dense(config.width, config.mlp)
        self.down = dense(config.mlp, config.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(logical(jax.nn.silu(self.gate(x)) * self.up(x), "batch", "sequence", "mlp"))


class Block(nnx.Module):
    """Attention and MLP, each with a normalisation before and a residual sum after."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        norm = partial(nnx.RMSNorm, config.width, epsilon=config.norm_epsilon, dtype=config.compute_dtype, rngs=rngs)
        self.attention_norm = norm()
        self.attention = Attention(config, rngs)
        self.mlp_norm = norm()
        self.mlp = MLP(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = logical(x + self.attention(self.attention_norm(x)), *NAMES)
        return logical(x + self.mlp(self.mlp_norm(x)), *NAMES)


class Llama(nnx.Module):
    """Tokens to logits: int32 `[batch, sequence]` to float32 `[batch, sequence, vocabulary]`."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.config = config
        normal = nnx.initializers.normal(0.02)
        # The lookup stays in float32, so that the gradient of a token's row is summed over its places in float32.
        self.tokens = nnx.Embed(config.vocabulary, config.width, embedding_init=normal, rngs=rngs)
        make_layers = stacked_layers if config.scan_layers else separate_layers
        self.layers: Any = make_layers(partial(Block, config), config.layers, rngs)
        dtype = config.compute_dtype
        self.norm = nnx.RMSNorm(config.width, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(config.width, config.vocabulary, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        config = self.config
        run = Block.__call__
        if config.checkpoint is not None:
            policy = checkpoint_policy(config.checkpoint)
            run = nnx.remat(run, policy=policy, prevent_cse=not config.scan_layers)
        x = logical(self.tokens(tokens).astype(config.compute_dtype), *NAMES)
        if config.scan_layers:
            scanned = nnx.scan(lambda x, block: run(block, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            x = scanned(x, self.layers)
        else:
            for block in self.layers:
                x = run(block, x)
        logits = self.head(self.norm(x)).astype(jnp.float32)
        return logical(logits, "batch", "sequence", "vocabulary")


def training(config: Config | None = None) -> Training:
    """The training step: mean cross-entropy of the next token, AdamW.

    The batch is `inputs` and `labels`, int32 `[batch, sequence]`. Raises `ValueError` where sizes do not divide, or
    where there is no such checkpoint policy.
    """
    config = config or Config()
    if config.width % config.heads or config.heads % config.kv_heads:
        raise ValueError(
            f"`heads` must divide `width`, and `kv_heads` must divide `heads`: got a width of {config.width}, "
            f"{config.heads} heads and {config.kv_heads} key and value heads"
        )
    if config.checkpoint is not None:
        checkpoint_policy(config.checkpoint)
    definition, abstract = nnx.split(nnx.eval_shape(lambda: Llama(config, nnx.Rngs(0))))

    def init(key: jax.Array) -> State:
        return {"params": nnx.to_pure_dict(nnx.state(Llama(config, nnx.Rngs(key)), nnx.Param))}

    def logits(params: Any, batch: Batch) -> jax.Array:
        state = jax.tree.map(lambda leaf: leaf, abstract)
        nnx.replace_by_pure_dict(state, params)
        found: Any = nnx.merge(definition, state)(batch["inputs"])
        return found

    optimizer = optax.adamw(config.learning_rate, b1=0.9, b2=0.95, weight_decay=config.weight_decay)
    sizes = (config.batch, config.sequence, config.vocabulary)
    return next_token_training(init, logits, sizes, optimizer)
