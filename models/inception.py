"""Inception-v3 (Szegedy et al., 2016), with SGD and momentum.

The sizes are those of the weights that TensorFlow and PyTorch give away: 27,161,264 parameters with the auxiliary
classifier, 23,834,568 without.

>>> from shardplan.models import inception
>>> inception.training().batch["images"].shape
(32, 299, 299, 3)
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
    """Sizes: images of `image` x `image` x 3, at least 75. `narrow` divides all channels. `blocks` that keep the size
    of the maps are as many as here at each of the three sizes, at most 3, 4 and 2.

    `auxiliary`: a second classifier at the maps of 17 x 17, whose loss counts 0.4. It takes images of 299 and more.
    """

    auxiliary: bool = True
    narrow: int = 1
    blocks: tuple[int, int, int] = (3, 4, 2)
    classes: int = 1000
    image: int = 299
    batch: int = 32
    compute_dtype: DTypeLike = jnp.float32
    learning_rate: float = 0.045
    momentum: float = 0.9


CONFIGS = {"inception-v3": Config(), "inception-v3-single": Config(auxiliary=False)}
SMALL = Config(auxiliary=False, narrow=16, blocks=(1, 1, 1), classes=16, image=75, batch=16, learning_rate=0.01)
BENCHMARK = Config()
_AUXILIARY = 0.4
_EPSILON = 1e-3

Shape = tuple[int, int]
Branch = tuple[tuple[int, Shape], ...]
"""Convolutions one after another: channels, and the size of the kernel."""

_STEM = ((32, 3, 2, "VALID"), (32, 3, 1, "VALID"), (64, 3, 1, "SAME"))
_STEM_2 = ((80, 1, 1, "VALID"), (192, 3, 1, "VALID"))


class Convolution(nn.Module):
    """A convolution without bias, normalisation and ReLU."""

    config: Config
    channels: int
    size: Shape
    stride: int = 1
    padding: str = "SAME"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = self.config.compute_dtype
        channels, strides = self.channels // self.config.narrow, (self.stride, self.stride)
        x = nn.Conv(channels, self.size, strides, self.padding, use_bias=False, dtype=dtype, name="convolution")(x)
        norm = nn.BatchNorm(use_running_average=False, momentum=0.9, epsilon=_EPSILON, dtype=dtype, name="norm")
        return logical(nn.relu(norm(x)), "batch", "height", "width", "channels")


class Block(nn.Module):
    """Branches next to each other, their channels one after another; `pooled`: the channels behind a mean of 3 x 3.

    `reduces`: the last convolution of each branch has stride 2, and a maximum of 3 x 3 takes the place of the mean.
    `forks`: the last convolutions of a branch, by its number, which all read the same.
    """

    config: Config
    branches: tuple[Branch, ...]
    pooled: int = 0
    reduces: bool = False
    forks: tuple[tuple[int, Branch], ...] = ()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        found, forks = [], dict(self.forks)
        for number, branch in enumerate(self.branches):
            y = x
            for place, (channels, size) in enumerate(branch):
                last = self.reduces and place == len(branch) - 1
                stride, padding = (2, "VALID") if last else (1, "SAME")
                y = Convolution(self.config, channels, size, stride, padding, name=f"branch_{number}_{place}")(y)
            if number in forks:
                for place, (channels, size) in enumerate(forks[number]):
                    found.append(Convolution(self.config, channels, size, name=f"fork_{number}_{place}")(y))
            else:
                found.append(y)
        if self.reduces:
            found.append(nn.max_pool(x, (3, 3), strides=(2, 2)))
        else:
            mean = nn.avg_pool(x, (3, 3), padding="SAME")
            found.append(Convolution(self.config, self.pooled, (1, 1), name="pooled")(mean))
        return jnp.concatenate(found, axis=-1)


def _blocks(config: Config) -> tuple[list[Block], list[Block]]:
    """The blocks before the auxiliary classifier, and those behind it."""
    block, (early, middle, late) = partial(Block, config), config.blocks
    first = [
        block((((64, (1, 1)),), ((48, (1, 1)), (64, (5, 5))), _three(64, 96)), pooled, name=f"mixed_{number}")
        for number, pooled in enumerate((32, 64, 64)[:early])
    ]
    first.append(block((((384, (3, 3)),), _three(64, 96)), reduces=True, name="mixed_3"))
    for number, c in enumerate((128, 160, 160, 192)[:middle]):
        seven = ((c, (1, 1)), (c, (1, 7)), (192, (7, 1)))
        twice = ((c, (1, 1)), (c, (7, 1)), (c, (1, 7)), (c, (7, 1)), (192, (1, 7)))
        first.append(block((((192, (1, 1)),), seven, twice), 192, name=f"mixed_{4 + number}"))
    wide = ((192, (1, 1)), (192, (1, 7)), (192, (7, 1)), (192, (3, 3)))
    last = [block((((192, (1, 1)), (320, (3, 3))), wide), reduces=True, name="mixed_8")]
    fork = ((384, (1, 3)), (384, (3, 1)))
    branches = (((320, (1, 1)),), ((384, (1, 1)),), ((448, (1, 1)), (384, (3, 3))))
    last += [block(branches, 192, forks=((1, fork), (2, fork)), name=f"mixed_{9 + n}") for n in range(late)]
    return first, last


def _three(narrow: int, wide: int) -> Branch:
    """One by one, then three by three, twice."""
    return ((narrow, (1, 1)), (wide, (3, 3)), (wide, (3, 3)))


class Inception(nn.Module):
    """Images `[batch, image, image, 3]` to float32 logits `[batch, classes]`, of the auxiliary classifier as well."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        config, dtype = self.config, self.config.compute_dtype
        x = x.astype(dtype)
        for part, stem in enumerate((_STEM, _STEM_2)):
            for number, (channels, size, stride, padding) in enumerate(stem):
                name = f"stem_{part}_{number}"
                x = Convolution(config, channels, (size, size), stride, padding, name=name)(x)
            x = nn.max_pool(x, (3, 3), strides=(2, 2))
        first, last = _blocks(config)
        for block in first:
            x = block(x)
        second = None
        if config.auxiliary:
            y = nn.avg_pool(x, (5, 5), strides=(3, 3))
            y = Convolution(config, 128, (1, 1), name="auxiliary_0")(y)
            y = Convolution(config, 768, (y.shape[1], y.shape[2]), padding="VALID", name="auxiliary_1")(y)
            second = nn.Dense(config.classes, dtype=dtype, name="auxiliary_head")(jnp.mean(y, (1, 2)))
            second = second.astype(jnp.float32)
        for block in last:
            x = block(x)
        logits = nn.Dense(config.classes, dtype=dtype, name="head")(jnp.mean(x, axis=(1, 2)))
        return logits.astype(jnp.float32), second


def training(config: Config | None = None) -> Training:
    """The training step: mean cross-entropy of the class, SGD with momentum; the state holds `batch_stats`."""
    config = config or Config()
    model = Inception(config)
    shape = (config.batch, config.image, config.image, 3)

    def init(key: jax.Array) -> State:
        return dict(model.init(key, jnp.zeros((1, *shape[1:]))))

    def make_batch(key: jax.Array) -> Batch:
        return random_images(key, shape, config.classes)

    def loss_function(params: Any, others: State, batch: Batch) -> tuple[jax.Array, State]:
        variables = {"params": params, **others}
        found, new_others = model.apply(variables, batch["images"], mutable=["batch_stats"])
        logits, second = found
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels
        loss = cross_entropy(logits, batch["labels"]).mean()
        if second is not None:
            loss += _AUXILIARY * cross_entropy(second, batch["labels"]).mean()
        return loss, dict(new_others)

    optimizer = optax.sgd(config.learning_rate, momentum=config.momentum)
    return make_training(init, make_batch, loss_function, optimizer)
