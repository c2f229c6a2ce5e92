"""Mamba (Gu and Dao, 2023): blocks of a gated causal convolution and a selective state space, AdamW.

The recurrence `h[t] = exp(dt[t] A) h[t-1] + dt[t] B[t] x[t]`, `y[t] = C[t] h[t]` is solved for all positions by
`jax.lax.associative_scan`.

>>> from shardplan.models import mamba
>>> mamba.training(mamba.CONFIGS["mamba-130m"]).parameters
129135360
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
from shardplan.models.training import Batch, State, Training, next_token_training


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes, named as in gpt; `state` numbers of state per channel, of which there are `expand` times the width.

    `remat`: the activations inside a block are computed again in the backward pass. The head shares the embedding.
    """

    layers: int = 24
    width: int = 768
    state: int = 16
    expand: int = 2
    window: int = 4
    vocabulary: int = 50280
    sequence: int = 2048
    batch: int = 8
    remat: bool = False
    compute_dtype: DTypeLike = jnp.float32
    learning_rate: float = 6e-4
    weight_decay: float = 0.1

    @property
    def inner(self) -> int:
        """Channels of a block."""
        return self.expand * self.width

    @property
    def step_rank(self) -> int:
        """The rank of the projection that gives the steps `dt`."""
        return -(-self.width // 16)


CONFIGS = {
    "mamba-130m": Config(),
    "mamba-370m": Config(layers=48, width=1024),
    "mamba-790m": Config(layers=48, width=1536),
    "mamba-1.4b": Config(layers=48, width=2048),
    "mamba-2.8b": Config(layers=64, width=2560),
}
SMALL = Config(layers=1, width=32, state=8, vocabulary=64, sequence=16, batch=8)
BENCHMARK = Config(layers=2, width=1024, sequence=1024)


def _decay_init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The logarithm of 1 to `state` in each channel, minus whose exponential is A."""
    return jnp.broadcast_to(jnp.log(jnp.arange(1, shape[1] + 1, dtype=jnp.float32)), shape)


def _step_bias_init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Biases whose softplus is spread between 0.001 and 0.1, evenly in the logarithm."""
    low, high = jnp.log(0.001), jnp.log(0.1)
    steps = jnp.exp(jax.random.uniform(key, shape, dtype) * (high - low) + low)
    return steps + jnp.log(-jnp.expm1(-steps))


def selective_scan(x: jax.Array, step: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """The state space over all positions, in float32.

    `x` and `step`: `[batch, sequence, channels]`; `a`: `[channels, state]`; `b` and `c`: `[batch, sequence, state]`.
    Gives `[batch, sequence, channels]`.
    """
    names = ("batch", "sequence", "mlp", "state")
    decay = logical(jnp.exp(step[..., None] * a), *names)
    push = logical((step * x)[..., None] * b[:, :, None], *names)

    def after(first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return first[0] * second[0], second[0] * first[1] + second[1]

    _, states = jax.lax.associative_scan(after, (decay, push), axis=1)
    return jnp.einsum("blcs,bls->blc", logical(states, *names), c)


class Block(nn.Module):
    """A mixing of the sequence with a normalisation before and a residual sum after: `[batch, sequence, width]` to the
    same."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        inner, names = config.inner, ("batch", "sequence", "mlp")
        dense = partial(nn.Dense, dtype=config.compute_dtype, use_bias=False)
        y = nn.RMSNorm(epsilon=1e-5, dtype=config.compute_dtype, name="norm")(x)
        y, gate = jnp.split(dense(2 * inner, name="in")(y), 2, axis=-1)
        convolution = partial(nn.Conv, inner, (config.window,), padding="CAUSAL", feature_group_count=inner)
        y = nn.silu(logical(convolution(dtype=config.compute_dtype, name="convolution")(y), *names))
        selected = dense(config.step_rank + 2 * config.state, name="select")(y).astype(jnp.float32)
        step, b, c = jnp.split(selected, (config.step_rank, config.step_rank + config.state), axis=-1)
        step = nn.softplus(nn.Dense(inner, bias_init=_step_bias_init, name="step")(step))
        a = -jnp.exp(self.param("decay", _decay_init, (inner, config.state)))
        skip = self.param("skip", nn.initializers.ones_init(), (inner,))
        inputs = y.astype(jnp.float32)
        y = selective_scan(inputs, logical(step, *names), a, b, c) + skip * inputs
        y = logical(y.astype(config.compute_dtype) * nn.silu(gate), *names)
        return logical(x + dense(config.width, name="out")(y), "batch", "sequence", "embed")


class Mamba(nn.Module):
    """Tokens to logits: int32 `[batch, sequence]` to float32 `[batch, sequence, vocabulary]`."""

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config = self.config
        block = nn.remat(Block) if config.remat else Block
        normal = nn.initializers.normal(0.02)
        embed = nn.Embed(config.vocabulary, config.width, embedding_init=normal, name="tokens")
        x = logical(embed(tokens).astype(config.compute_dtype), "batch", "sequence", "embed")
        for number in range(config.layers):
            x = block(config, name=f"layer_{number}")(x)
        x = nn.RMSNorm(epsilon=1e-5, dtype=config.compute_dtype, name="norm")(x)
        logits = x @ embed.embedding.T.astype(config.compute_dtype)
        return logical(logits.astype(jnp.float32), "batch", "sequence", "vocabulary")


def training(config: Config | None = None) -> Training:
    """The training step: mean cross-entropy of the next token, AdamW.

    The batch is `inputs` and `labels`, int32 `[batch, sequence]`.
    """
    config = config or Config()
    model = Mamba(config)
    shape = (config.batch, config.sequence)

    def init(key: jax.Array) -> State:
        return dict(model.init(key, jnp.zeros(shape, jnp.int32)))

    def logits(params: Any, batch: Batch) -> jax.Array:
        found: Any = model.apply({"params": params}, batch["inputs"])
        return found

    optimizer = optax.adamw(config.learning_rate, weight_decay=config.weight_decay)
    sizes = (config.batch, config.sequence, config.vocabulary)
    return next_token_training(init, logits, sizes, optimizer)
