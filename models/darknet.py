"""DarkNet-19 (Redmon and Farhadi, "YOLO9000", 2017, table 6) with SGD and momentum.

>>> from shardplan.models import darknet
>>> darknet.training().parameters
20842376

Without `classifier` the convolutions alone are trained, by mean squared error against a map of features, on images of
any size, as those of VGG. They have biases in the place of normalisation, whose statistics take the whole image.

>>> darknet.training(darknet.CONFIGS["darknet-19-10k"]).parameters
19810176
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
from shardplan.models.vgg import finish_together


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes: `stages` are the channels of convolutions of 3 x 3, with those of 1 x 1 and half the channels between
    them. Every stage but the last is followed by a pooling of 2 x 2.

    `classifier`: a convolution of 1 x 1 to `classes`, and the mean over the image. `normalised`: batch normalisation
    instead of biases. `remat`: as in `shardplan.models.vgg`.
    """

    stages: tuple[tuple[int, int], ...] = ((1, 32), (1, 64), (2, 128), (2, 256), (3, 512), (3, 1024))
    classifier: bool = True
    normalised: bool = True
    classes: int = 1000
    image: int = 224
    batch: int = 128
    remat: bool = False
    compute_dtype: DTypeLike = jnp.float32
    learning_rate: float = 0.1
    momentum: float = 0.9


CONFIGS = {
    "darknet-19": Config(),
    "darknet-19-10k": Config(classifier=False, normalised=False, image=10_000, batch=1, learning_rate=1e-3),
}
SMALL = Config(stages=((1, 8), (2, 16)), classes=16, image=16, batch=16, learning_rate=0.01)
BENCHMARK = Config()
_SLOPE = 0.1


class Convolution(nn.Module):
    """A square convolution with normalisation or a bias, and a leaky ReLU."""

    config: Config
    channels: int
    size: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dtype, normalised = self.config.compute_dtype, self.config.normalised
        kernel = self.param("kernel", nn.initializers.he_normal(), (self.size, self.size, x.shape[-1], self.channels))
        if self.config.remat:
            x, kernel = finish_together((x, kernel))
        numbers = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, kernel.astype(dtype), (1, 1), "SAME", dimension_numbers=numbers)
        if normalised:
            x = nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=dtype, name="norm")(x)
        else:
            x = x + self.param("bias", nn.initializers.zeros_init(), (self.channels,)).astype(dtype)
        return logical(nn.leaky_relu(x, _SLOPE), "batch", "height", "width", "channels")


class Stage(nn.Module):
    """Convolutions of 3 x 3 with those of 1 x 1 between them, after the maximum of each 2 x 2 if there is a stage
    before."""

    config: Config
    convolutions: int
    channels: int
    first: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if not self.first:
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        for number in range(self.convolutions):
            if number:
                x = Convolution(self.config, self.channels // 2, 1, name=f"narrow_{number}")(x)
            x = Convolution(self.config, self.channels, 3, name=f"wide_{number}")(x)
        return x


class DarkNet(nn.Module):
    """Images `[batch, image, image, 3]` to float32 logits `[batch, classes]`, or to the last features."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        stage = nn.remat(Stage) if config.remat else Stage
        x = x.astype(config.compute_dtype)
        for number, (convolutions, channels) in enumerate(config.stages):
            x = stage(config, convolutions, channels, number == 0, name=f"stage_{number}")(x)
        if config.classifier:
            head = partial(nn.Conv, config.classes, (1, 1), dtype=config.compute_dtype, name="head")
            x = jnp.mean(head()(x), axis=(1, 2))
        return x.astype(jnp.float32)


def training(config: Config | None = None) -> Training:
    """The training step; the state holds `batch_stats` where there is normalisation.

    The loss is the mean cross-entropy of the `labels`, or without a classifier the mean squared difference from the
    `targets`, features of the size that the last stage has.
    """
    config = config or Config()
    model = DarkNet(config)
    shape = (config.batch, config.image, config.image, 3)
    last = config.image // 2 ** (len(config.stages) - 1)
    targets = (config.batch, last, last, config.stages[-1][1])

    def init(key: jax.Array) -> State:
        side = 2 ** (len(config.stages) - 1)
        return dict(model.init(key, jnp.zeros((1, side, side, 3))))

    def make_batch(key: jax.Array) -> Batch:
        if config.classifier:
            return random_images(key, shape, config.classes)
        images_key, key = jax.random.split(key)
        return {"images": jax.random.normal(images_key, shape), "targets": jax.random.normal(key, targets)}

    def loss_function(params: Any, others: State, batch: Batch) -> tuple[jax.Array, State]:
        found, new_others = model.apply({"params": params, **others}, batch["images"], mutable=["batch_stats"])
        outputs: Any = found
        if not config.classifier:
            return jnp.mean(jnp.square(outputs - batch["targets"])), dict(new_others)
        loss = optax.softmax_cross_entropy_with_integer_labels(outputs, batch["labels"]).mean()
        return loss, dict(new_others)

    optimizer = optax.sgd(config.learning_rate, momentum=config.momentum)
    return make_training(init, make_batch, loss_function, optimizer)
