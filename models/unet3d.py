"""A 3-D U-Net (Cicek et al., 2016) for volumes, with batch or group normalisation and Adam.

The published count leaves out the scales and biases of the normalisations, two for each of 2336 channels:

>>> from shardplan.models import unet3d
>>> unet3d.training(unet3d.CONFIGS["unet3d"]).parameters - 2 * 2336
19069955
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

NAMES = ("batch", "depth", "height", "width", "channels")


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes: `levels` of resolution, the first convolution with `width` channels, volumes of `volume` voxels.

    `padding`: "VALID" as published, so that the outputs are smaller than the volume, or "SAME". `norm`: "batch" or
    "group" (of 8 channels). `remat`: the activations inside a level are computed again in the backward pass.
    """

    levels: int = 4
    width: int = 32
    inputs: int = 3
    classes: int = 3
    volume: tuple[int, int, int] = (128, 128, 128)
    batch: int = 2
    padding: str = "SAME"
    norm: str = "batch"
    remat: bool = False
    compute_dtype: DTypeLike = jnp.float32
    learning_rate: float = 1e-3


CONFIGS = {
    "unet3d": Config(volume=(132, 132, 116), batch=1, padding="VALID"),
    "unet3d-256": Config(volume=(256, 256, 256), batch=1),
    "unet3d-512": Config(volume=(512, 512, 512), batch=1, norm="group", remat=True),
}
# The gradients of biases before a normalisation are rounding errors, of which Adam makes full steps.
SMALL = Config(levels=2, width=8, volume=(32, 16, 16), batch=1, learning_rate=1e-4)
BENCHMARK = Config(volume=(256, 256, 256), batch=1)


class Convolutions(nn.Module):
    """Two convolutions of 3 x 3 x 3, each normalised and rectified: `[..., any]` to `[..., channels[1]]`."""

    config: Config
    channels: tuple[int, int]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        for number, channels in enumerate(self.channels):
            name = f"convolution_{number}"
            x = nn.Conv(channels, (3, 3, 3), padding=config.padding, dtype=config.compute_dtype, name=name)(x)
            if config.norm == "batch":
                norm: Any = nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=config.compute_dtype)
            else:
                norm = nn.GroupNorm(num_groups=None, group_size=8, dtype=config.compute_dtype)
            x = logical(nn.relu(norm(x)), *NAMES)
        return x


def crop(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The middle of `x`, of a shape: only the three dimensions of space differ."""
    start = [(size - wanted) // 2 for size, wanted in zip(x.shape[1:4], shape[1:4], strict=True)]
    region = tuple(slice(first, first + size) for first, size in zip(start, shape[1:4], strict=True))
    return x[:, *region]


class UNet3D(nn.Module):
    """Volumes `[batch, depth, height, width, inputs]` to float32 logits `[batch, ..., classes]`."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        convolutions = partial(nn.remat(Convolutions) if config.remat else Convolutions, config)
        x = x.astype(config.compute_dtype)
        skipped: list[jax.Array] = []
        for level in range(config.levels):
            width = config.width * 2**level
            x = convolutions((width, 2 * width), name=f"down_{level}")(x)
            if level < config.levels - 1:
                skipped.append(x)
                x = nn.max_pool(x, (2, 2, 2), strides=(2, 2, 2))
        for level, skip in reversed(tuple(enumerate(skipped))):
            twice: Any = {"kernel_size": (2, 2, 2), "strides": (2, 2, 2), "use_bias": False}
            x = logical(
                nn.ConvTranspose(x.shape[-1], **twice, dtype=config.compute_dtype, name=f"grow_{level}")(x), *NAMES
            )
            x = jnp.concatenate([crop(skip, x.shape), x], axis=-1)
            x = convolutions((skip.shape[-1], skip.shape[-1]), name=f"up_{level}")(x)
        return nn.Conv(config.classes, (1, 1, 1), dtype=config.compute_dtype, name="head")(x).astype(jnp.float32)


def training(config: Config | None = None) -> Training:
    """The training step: mean cross-entropy of each voxel's class, Adam; the state holds `batch_stats` where there are.

    The batch is `volumes`, float32 `[batch, depth, height, width, inputs]`, and `labels`, int32 of the logits' shape.
    Raises `ValueError` for a padding or a normalisation that is not known.
    """
    config = config or Config()
    if config.padding not in ("SAME", "VALID") or config.norm not in ("batch", "group"):
        raise ValueError(
            f"`padding` is SAME or VALID and `norm` batch or group: got {config.padding!r} and {config.norm!r}"
        )
    model = UNet3D(config)
    shape = (config.batch, *config.volume, config.inputs)

    def init(key: jax.Array) -> State:
        return dict(model.init(key, jnp.zeros(shape)))

    def make_batch(key: jax.Array) -> Batch:
        volumes_key, labels_key = jax.random.split(key)
        logits, _ = jax.eval_shape(lambda: model.init_with_output(labels_key, jnp.zeros(shape)))
        return {
            "volumes": jax.random.normal(volumes_key, shape),
            "labels": jax.random.randint(labels_key, logits.shape[:-1], 0, config.classes),
        }

    def loss_function(params: Any, others: State, batch: Batch) -> tuple[jax.Array, State]:
        variables = {"params": params, **others}
        logits, new_others = model.apply(variables, batch["volumes"], mutable=list(others))
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
        return loss, dict(new_others)

    return make_training(init, make_batch, loss_function, optax.adam(config.learning_rate))
