"""A ResNet (He et al., 2016; by default the 50-layer one, stride in the 3x3 convolution) with SGD and momentum.

>>> from shardplan.models import resnet
>>> resnet.training().parameters
25557032
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
from shardplan.models.training import Batch, State, Training, make_training, random_images


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes: `blocks` per stage, `width` channels in the first, images of `image` x `image` x 3."""

    blocks: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 1000
    image: int = 224
    batch: int = 256
    compute_dtype: DTypeLike = jnp.float32
    learning_rate: float = 0.1
    momentum: float = 0.9


CONFIGS = {
    "resnet-50": Config(),
    "resnet-101": Config(blocks=(3, 4, 23, 3)),
    "resnet-152": Config(blocks=(3, 8, 36, 3)),
}
SMALL = Config(blocks=(1, 1), width=8, classes=16, image=32, batch=16, learning_rate=0.01)
BENCHMARK = Config()


class Bottleneck(nn.Module):
    """Convolutions of 1x1, 3x3 and 1x1 (four times the channels) around a shortcut."""

    config: Config
    channels: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        convolution = partial(nn.Conv, use_bias=False, dtype=self.config.compute_dtype)
        norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=self.config.compute_dtype)
        strides = (self.stride, self.stride)
        y = convolution(self.channels, (1, 1), name="reduce")(x)
        y = nn.relu(norm(name="reduce_norm")(y))
        y = convolution(self.channels, (3, 3), strides=strides, name="window")(y)
        y = nn.relu(norm(name="window_norm")(y))
        y = convolution(4 * self.channels, (1, 1), name="expand")(y)
        y = norm(name="expand_norm", scale_init=nn.initializers.zeros_init())(y)
        if x.shape != y.shape:
            x = convolution(4 * self.channels, (1, 1), strides=strides, name="shortcut")(x)
            x = norm(name="shortcut_norm")(x)
        return logical(nn.relu(x + y), "batch", "height", "width", "channels")


class ResNet(nn.Module):
    """Images to logits: `[batch, image, image, 3]` to float32 `[batch, classes]`."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        x = x.astype(config.compute_dtype)
        x = nn.Conv(config.width, (7, 7), strides=(2, 2), use_bias=False, dtype=config.compute_dtype, name="stem")(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=config.compute_dtype, name="stem_norm")(x)
        x = nn.max_pool(nn.relu(x), (3, 3), strides=(2, 2), padding="SAME")
        for stage, blocks in enumerate(config.blocks):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                x = Bottleneck(config, config.width * 2**stage, stride, name=f"stage_{stage}_block_{block}")(x)
        x = jnp.mean(x, axis=(1, 2))
        return nn.Dense(config.classes, dtype=config.compute_dtype, name="head")(x).astype(jnp.float32)


def training(config: Config | None = None) -> Training:
    """The training step: mean cross-entropy of the class, SGD with momentum; the state holds `batch_stats`."""
    config = config or Config()
    model = ResNet(config)
    shape = (config.batch, config.image, config.image, 3)

    def init(key: jax.Array) -> State:
        return dict(model.init(key, jnp.zeros((1, *shape[1:]))))

    def make_batch(key: jax.Array) -> Batch:
        return random_images(key, shape, config.classes)

    def loss_function(params: Any, others: State, batch: Batch) -> tuple[jax.Array, State]:
        variables = {"params": params, **others}
        logits, new_others = model.apply(variables, batch["images"], mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
        return loss, dict(new_others)

    optimizer = optax.sgd(config.learning_rate, momentum=config.momentum)
    return make_training(init, make_batch, loss_function, optimizer)
