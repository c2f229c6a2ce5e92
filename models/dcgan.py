"""A DCGAN (Radford, Metz and Chintala, 2016): generator and discriminator, trained with Adam in one step.

The configuration `dcgan-tutorial` is that of the PyTorch tutorial: 3,576,704 and 2,765,568 parameters.

>>> from shardplan.models import dcgan
>>> dcgan.training(dcgan.CONFIGS["dcgan-tutorial"]).parameters == 3_576_704 + 2_765_568
True
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
    """Sizes: images of `image` x `image` x `channels`, which is 4 times a power of two.

    Both networks have `width` channels at half that size, twice as many at each half of it, and square kernels of
    `kernel`. The generator begins with `noise` numbers.
    """

    image: int = 64
    channels: int = 3
    width: int = 128
    noise: int = 100
    kernel: int = 5
    batch: int = 128
    compute_dtype: DTypeLike = jnp.float32
    learning_rate: float = 2e-4
    momentum: float = 0.5

    @property
    def widths(self) -> tuple[int, ...]:
        """The channels of the discriminator's stages, from the image on."""
        return tuple(self.width * 2**n for n in range((self.image // 4).bit_length() - 1))


CONFIGS = {"dcgan": Config(), "dcgan-tutorial": Config(width=64, kernel=4)}
SMALL = Config(image=16, width=8, noise=8, batch=16)
BENCHMARK = Config()
_FIRST = 4
_SLOPE = 0.2
_NORMAL = nn.initializers.normal(0.02)


class Generator(nn.Module):
    """Noise `[batch, noise]` to images `[batch, image, image, channels]` between -1 and 1."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=config.compute_dtype)
        transposed = partial(nn.ConvTranspose, strides=(2, 2), use_bias=False, kernel_init=_NORMAL)
        *rest, first = config.widths
        dense = nn.Dense(_FIRST**2 * first, use_bias=False, kernel_init=_NORMAL, dtype=config.compute_dtype)
        x = dense(x.astype(config.compute_dtype)).reshape(-1, _FIRST, _FIRST, first)
        size = (config.kernel, config.kernel)
        for number, channels in enumerate([*reversed(rest), config.channels]):
            x = nn.relu(norm(name=f"norm_{number}")(x))
            x = transposed(channels, size, dtype=config.compute_dtype, name=f"stage_{number}")(x)
            x = logical(x, "batch", "height", "width", "channels")
        return jnp.tanh(x)


class Discriminator(nn.Module):
    """Images to float32 logits `[batch]`: positive for what it takes for real."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=config.compute_dtype)
        convolution = partial(nn.Conv, strides=(2, 2), use_bias=False, kernel_init=_NORMAL)
        x = x.astype(config.compute_dtype)
        for number, channels in enumerate(config.widths):
            size = (config.kernel, config.kernel)
            x = convolution(channels, size, dtype=config.compute_dtype, name=f"stage_{number}")(x)
            x = norm(name=f"norm_{number}")(x) if number else x
            x = logical(nn.leaky_relu(x, _SLOPE), "batch", "height", "width", "channels")
        head = nn.Dense(1, use_bias=False, kernel_init=_NORMAL, dtype=config.compute_dtype, name="head")
        return head(x.reshape(x.shape[0], -1))[:, 0].astype(jnp.float32)


def training(config: Config | None = None) -> Training:
    """The training step; the state holds the `batch_stats` of both networks.

    The loss is that of the discriminator plus that of the generator, the probability of an image it takes for real
    (both cross-entropies). Each network has the gradient of its own loss alone, and both are updated at once.
    """
    config = config or Config()
    generator, discriminator = Generator(config), Discriminator(config)
    images = (config.batch, config.image, config.image, config.channels)

    def init(key: jax.Array) -> State:
        keys = jax.random.split(key)
        one = generator.init(keys[0], jnp.zeros((1, config.noise)))
        other = discriminator.init(keys[1], jnp.zeros((1, *images[1:])))
        return {part: {"generator": one[part], "discriminator": other[part]} for part in ("params", "batch_stats")}

    def make_batch(key: jax.Array) -> Batch:
        noise_key, key = jax.random.split(key)
        noise = jax.random.normal(noise_key, (config.batch, config.noise))
        return {"images": jax.random.uniform(key, images, minval=-1.0), "noise": noise}

    def loss_function(params: Any, others: State, batch: Batch) -> tuple[jax.Array, State]:
        stats = others["batch_stats"]

        def judged(params: Any, stats: Any, images: jax.Array) -> tuple[jax.Array, Any]:
            found = discriminator.apply({"params": params, "batch_stats": stats}, images, mutable=["batch_stats"])
            return found[0], found[1].get("batch_stats", {})

        variables = {"params": params["generator"], "batch_stats": stats["generator"]}
        made, new_generator = generator.apply(variables, batch["noise"], mutable=["batch_stats"])
        own, fixed = params["discriminator"], jax.lax.stop_gradient(params["discriminator"])
        real, new_discriminator = judged(own, stats["discriminator"], batch["images"])
        fake, new_discriminator = judged(own, new_discriminator, jax.lax.stop_gradient(made))
        taken, _ = judged(fixed, stats["discriminator"], made)
        loss = jnp.mean(jax.nn.softplus(-real) + jax.nn.softplus(fake)) + jnp.mean(jax.nn.softplus(-taken))
        new = {"generator": new_generator["batch_stats"], "discriminator": new_discriminator}
        return loss, {"batch_stats": new}

    return make_training(init, make_batch, loss_function, optax.adam(config.learning_rate, b1=config.momentum))
