"""VGG (Simonyan and Zisserman, 2015; configurations A, B, D and E) with SGD and momentum.

>>> from shardplan.models import vgg
>>> vgg.training().parameters
138357544

Without `classifier` the convolutions alone are trained, by mean squared error against a map of features, on images of
any size. VGG-16 at 10,000 x 10,000 pixels is an example in which an image is split over devices (Xu et al., CC 2022).

>>> vgg.training(vgg.CONFIGS["vgg-16-10k"]).parameters
14714688
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
    """Sizes: `stages` are numbers of convolutions and their channels, each stage followed by a pooling of 2 x 2.

    `classifier`: two dense layers of `hidden` features with `dropout`, and one of `classes`, on images of
    `image` x `image` x 3. `remat`: to save memory, the activations inside a stage are computed again in the backward
    pass, and the gradients of a convolution are finished before those of the one before it are begun.
    """

    stages: tuple[tuple[int, int], ...] = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))
    classifier: bool = True
    hidden: int = 4096
    classes: int = 1000
    image: int = 224
    batch: int = 256
    dropout: float = 0.5
    remat: bool = False
    compute_dtype: DTypeLike = jnp.float32
    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 5e-4


CONFIGS = {
    "vgg-11": Config(stages=((1, 64), (1, 128), (2, 256), (2, 512), (2, 512))),
    "vgg-13": Config(stages=((2, 64), (2, 128), (2, 256), (2, 512), (2, 512))),
    "vgg-16": Config(),
    "vgg-19": Config(stages=((2, 64), (2, 128), (4, 256), (4, 512), (4, 512))),
    "vgg-16-10k": Config(classifier=False, image=10_000, batch=1, learning_rate=1e-3, weight_decay=0.0),
    "vgg-19-10k": Config(
        stages=((2, 64), (2, 128), (4, 256), (4, 512), (4, 512)),
        classifier=False,
        image=10_000,
        batch=1,
        learning_rate=1e-3,
        weight_decay=0.0,
    ),
}
SMALL = Config(stages=((2, 8), (1, 16)), hidden=64, classes=16, image=32, batch=8)
BENCHMARK = Config()


@jax.custom_vjp
def finish_together(tensors: Any) -> Any:
    """`tensors`, whose gradients are all computed before any of them is read.

    A scheduler tends to leave the gradients of weights to the end, since they have no readers before, and keeps the
    activations for them until then.
    """
    return tensors


finish_together.defvjp(lambda tensors: (tensors, None), lambda _, gradients: (jax.lax.optimization_barrier(gradients),))


class Convolution(nn.Module):
    """A convolution of 3 x 3 with a bias and ReLU."""

    config: Config
    channels: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = self.config.compute_dtype
        kernel = self.param("kernel", nn.initializers.he_normal(), (3, 3, x.shape[-1], self.channels))
        bias = self.param("bias", nn.initializers.zeros_init(), (self.channels,))
        if self.config.remat:
            x, kernel, bias = finish_together((x, kernel, bias))
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(x, kernel.astype(dtype), (1, 1), "SAME", dimension_numbers=numbers)
        return logical(nn.relu(y + bias.astype(dtype)), "batch", "height", "width", "channels")


class Stage(nn.Module):
    """Convolutions, then the maximum of each 2 x 2 (a last odd row or column is dropped)."""

    config: Config
    convolutions: int
    channels: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for number in range(self.convolutions):
            x = Convolution(self.config, self.channels, name=f"convolution_{number}")(x)
        return logical(nn.max_pool(x, (2, 2), strides=(2, 2)), "batch", "height", "width", "channels")


class VGG(nn.Module):
    """Images `[batch, image, image, 3]` to float32 logits `[batch, classes]`, or to the last features."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        stage_type = nn.remat(Stage) if config.remat else Stage
        x = x.astype(config.compute_dtype)
        for number, (convolutions, channels) in enumerate(config.stages):
            x = stage_type(config, convolutions, channels, name=f"stage_{number}")(x)
        if not config.classifier:
            return x.astype(jnp.float32)
        dense = partial(nn.Dense, dtype=config.compute_dtype, kernel_init=nn.initializers.he_normal())
        x = x.reshape(x.shape[0], -1)
        for number in range(2):
            x = logical(nn.relu(dense(config.hidden, name=f"hidden_{number}")(x)), "batch", "mlp")
            x = nn.Dropout(config.dropout, deterministic=False)(x)
        return dense(config.classes, name="head")(x).astype(jnp.float32)


def training(config: Config | None = None) -> Training:
    """The training step; the state holds the `dropout_key` where there is a classifier.

    The loss is the mean cross-entropy of the `labels`, or without a classifier the mean squared difference from the
    `targets`, features of the size that the last pooling leaves.
    """
    config = config or Config()
    model = VGG(config)
    shape = (config.batch, config.image, config.image, 3)
    last = config.image // 2 ** len(config.stages)
    targets = (config.batch, last, last, config.stages[-1][1])

    def init(key: jax.Array) -> State:
        dropout_key, key = jax.random.split(key)
        if config.classifier:
            variables = model.init({"params": key, "dropout": key}, jnp.zeros((1, *shape[1:])))
            return {**variables, "dropout_key": dropout_key}
        return dict(model.init(key, jnp.zeros((1, 2 ** len(config.stages), 2 ** len(config.stages), 3))))

    def make_batch(key: jax.Array) -> Batch:
        if config.classifier:
            return random_images(key, shape, config.classes)
        images_key, key = jax.random.split(key)
        return {"images": jax.random.normal(images_key, shape), "targets": jax.random.normal(key, targets)}

    def loss_function(params: Any, others: State, batch: Batch) -> tuple[jax.Array, State]:
        if not config.classifier:
            outputs: Any = model.apply({"params": params}, batch["images"])
            return jnp.mean(jnp.square(outputs - batch["targets"])), others
        dropout_key, next_key = jax.random.split(others["dropout_key"])
        logits: Any = model.apply({"params": params}, batch["images"], rngs={"dropout": dropout_key})
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
        return loss, {"dropout_key": next_key}

    optimizer = optax.chain(
        optax.add_decayed_weights(config.weight_decay), optax.sgd(config.learning_rate, momentum=config.momentum)
    )
    return make_training(init, make_batch, loss_function, optimizer)
