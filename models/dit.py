"""DiT (Peebles and Xie, 2022, table 1): a transformer that predicts the noise in images, in Flax NNX with AdamW.

Patches of latent images pass through blocks. A network of the time and the class shifts, scales and gates their
normalisations (adaLN-Zero: all gates begin with zero). A step draws its times and its noise from its own key. The head
predicts the noise alone. The published one predicts variances too, with 4 more channels.

>>> from shardplan.models import dit
>>> dit.training(dit.CONFIGS["dit-xl-2"]).parameters // 10**6
674
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
from shardplan.models.stacked import separate_layers
from shardplan.models.training import Batch, State, Training, make_training, random_images


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes, by default those of DiT-XL/2. Parameters are float32, `compute_dtype` is that of the layers.

    `latent` x `latent` x `channels` is the encoder's result for an image. `unlabelled` is the part of the classes that
    is hidden, for guidance without a classifier. The noise grows from `first_beta` to `last_beta` over `times` steps.
    """

    layers: int = 28
    width: int = 1152
    heads: int = 16
    patch: int = 2
    latent: int = 32
    channels: int = 4
    classes: int = 1000
    unlabelled: float = 0.1
    frequencies: int = 256
    times: int = 1000
    first_beta: float = 1e-4
    last_beta: float = 0.02
    batch: int = 256
    compute_dtype: DTypeLike = jnp.float32
    learning_rate: float = 1e-4

    @property
    def side(self) -> int:
        """Patches along one side of an image."""
        return self.latent // self.patch


CONFIGS = {
    "dit-s-2": Config(layers=12, width=384, heads=6),
    "dit-b-2": Config(layers=12, width=768, heads=12),
    "dit-l-2": Config(layers=24, width=1024, heads=16),
    "dit-xl-2": Config(),
}
SMALL = Config(layers=1, width=64, heads=8, latent=8, classes=16, frequencies=32, batch=16)
BENCHMARK = Config(layers=2, compute_dtype=jnp.bfloat16)

NAMES = ("batch", "sequence", "embed")
zeros = nnx.initializers.zeros_init()


def waves(positions: jax.Array, count: int) -> jax.Array:
    """Sines and cosines of positions at `count / 2` speeds from 1 to 1 / 10000: `[...]` to float32 `[..., count]`."""
    speeds = jnp.exp(-jnp.log(10000.0) * jnp.arange(count // 2) / (count // 2))
    angles = positions[..., None].astype(jnp.float32) * speeds
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def modulate(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    """`x`, `[batch, sequence, width]`, scaled and shifted by one vector per image."""
    return x * (1 + scale[:, None]) + shift[:, None]


class Attention(nnx.Module):
    """Self-attention: `[batch, sequence, width]` to the same."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.heads = config.heads
        dense = partial(nnx.Linear, config.width, config.width, dtype=config.compute_dtype, rngs=rngs)
        self.query, self.key, self.value, self.out = dense(), dense(), dense(), dense()

    def __call__(self, x: jax.Array) -> jax.Array:
        per_head = (*x.shape[:2], self.heads, -1)
        names = ("batch", "sequence", "heads", "head_dim")
        layers = (self.query, self.key, self.value)
        query, key, value = (logical(layer(x).reshape(per_head), *names) for layer in layers)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) / query.shape[-1] ** 0.5
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(value.dtype), value)
        return self.out(logical(mixed, *names).reshape(x.shape))


class Block(nnx.Module):
    """Attention and MLP, each normalised, modulated and gated by the conditions, `[batch, width]`."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        dense = partial(nnx.Linear, dtype=config.compute_dtype, rngs=rngs)
        self.norm = nnx.LayerNorm(
            config.width, epsilon=1e-6, use_bias=False, use_scale=False, dtype=config.compute_dtype, rngs=rngs
        )
        self.attention = Attention(config, rngs)
        self.up = dense(config.width, 4 * config.width)
        self.down = dense(4 * config.width, config.width)
        self.modulation = dense(config.width, 6 * config.width, kernel_init=zeros)

    def __call__(self, x: jax.Array, conditions: jax.Array) -> jax.Array:
        modulation = jnp.split(self.modulation(jax.nn.silu(conditions)), 6, axis=-1)
        mixed = self.attention(modulate(self.norm(x), *modulation[:2]))
        x = logical(x + modulation[2][:, None] * mixed, *NAMES)
        hidden = jax.nn.gelu(self.up(modulate(self.norm(x), *modulation[3:5])))
        hidden = self.down(logical(hidden, "batch", "sequence", "mlp"))
        return logical(x + modulation[5][:, None] * hidden, *NAMES)


class DiT(nnx.Module):
    """Noisy images, times and classes to the noise: float32 `[batch, latent, latent, channels]` to the same."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.config = config
        dense = partial(nnx.Linear, dtype=config.compute_dtype, rngs=rngs)
        window, pixels = (config.patch, config.patch), config.patch**2 * config.channels
        self.patches = nnx.Conv(
            config.channels, config.width, window, strides=window, dtype=config.compute_dtype, rngs=rngs
        )
        self.time_in = dense(config.frequencies, config.width)
        self.time_out = dense(config.width, config.width)
        normal = nnx.initializers.normal(0.02)
        # One more class, for unknown ones.
        self.labels = nnx.Embed(config.classes + 1, config.width, embedding_init=normal, rngs=rngs)
        self.blocks = separate_layers(partial(Block, config), config.layers, rngs)
        self.norm = nnx.LayerNorm(
            config.width, epsilon=1e-6, use_bias=False, use_scale=False, dtype=config.compute_dtype, rngs=rngs
        )
        self.modulation = dense(config.width, 2 * config.width, kernel_init=zeros)
        self.head = dense(config.width, pixels, kernel_init=zeros)

    def __call__(self, images: jax.Array, times: jax.Array, labels: jax.Array) -> jax.Array:
        config, batch, side = self.config, images.shape[0], self.config.side
        time = self.time_out(jax.nn.silu(self.time_in(waves(times, config.frequencies))))
        conditions = logical(time + self.labels(labels).astype(config.compute_dtype), "batch", "embed")
        along = waves(jnp.arange(side), config.width // 2)
        down, across = (jnp.broadcast_to(a, (side, side, config.width // 2)) for a in (along[:, None], along))
        positions = jnp.concatenate([down, across], axis=-1).astype(config.compute_dtype)
        x = (self.patches(images) + positions).reshape(batch, side * side, config.width)
        x = logical(x, *NAMES)
        for block in self.blocks:
            x = block(x, conditions)
        shift, scale = jnp.split(self.modulation(jax.nn.silu(conditions)), 2, axis=-1)
        x = self.head(modulate(self.norm(x), shift, scale)).astype(jnp.float32)
        x = x.reshape(batch, side, side, config.patch, config.patch, config.channels)
        return jnp.transpose(x, (0, 1, 3, 2, 4, 5)).reshape(images.shape)


def training(config: Config | None = None) -> Training:
    """The training step: mean squared error of the predicted noise, AdamW without decay.

    The batch is `images`, float32 `[batch, latent, latent, channels]`, and `labels`, int32 `[batch]`. Raises
    `ValueError` where sizes do not divide.
    """
    config = config or Config()
    if config.width % config.heads or config.width % 4 or config.latent % config.patch:
        raise ValueError(
            f"`heads` and 4 must divide `width`, and `patch` must divide `latent`: got {config.heads} heads, a width "
            f"of {config.width}, patches of {config.patch} and latent images of {config.latent}"
        )
    shape = (config.batch, config.latent, config.latent, config.channels)
    definition, abstract = nnx.split(nnx.eval_shape(lambda: DiT(config, nnx.Rngs(0))))

    def init(key: jax.Array) -> State:
        return {"params": nnx.to_pure_dict(nnx.state(DiT(config, nnx.Rngs(key)), nnx.Param))}

    def make_batch(key: jax.Array) -> Batch:
        return random_images(key, shape, config.classes)

    def loss_function(params: Any, others: State, batch: Batch) -> tuple[jax.Array, State]:
        state = jax.tree.map(lambda leaf: leaf, abstract)
        nnx.replace_by_pure_dict(state, params)
        time_key, noise_key, label_key = jax.random.split(batch["key"], 3)
        times = jax.random.randint(time_key, shape[:1], 0, config.times)
        noise = jax.random.normal(noise_key, shape)
        hidden = jax.random.bernoulli(label_key, config.unlabelled, shape[:1])
        labels = jnp.where(hidden, config.classes, batch["labels"])
        kept = jnp.cumprod(1 - jnp.linspace(config.first_beta, config.last_beta, config.times))[times]
        kept = kept[:, None, None, None]
        noisy = jnp.sqrt(kept) * batch["images"] + jnp.sqrt(1 - kept) * noise
        predicted = nnx.merge(definition, state)(noisy, times, labels)
        return jnp.mean(jnp.square(predicted - noise)), others

    optimizer = optax.adamw(config.learning_rate, weight_decay=0.0)
    return make_training(init, make_batch, loss_function, optimizer, seed=0)
