"""Wide ResNets in the sizes of the Tofu paper: ResNet-50, 101 and 152 with 4 to 10 times the channels everywhere.

`CONFIGS` are the models of "Supporting Very Large Models using Automatic Dataflow Graph Partitioning" (Wang et al.,
EuroSys 2019, section 7, table 1): images of 224 x 224, the convolutions' weights grow with the square of the widening.
With gradients and momentum, 12 bytes a weight, their memory agrees with the table in GiB. The network is that of
`shardplan.models.resnet`, trained by SGD with momentum.

>>> from shardplan.models import wide_resnet
>>> round(12 * wide_resnet.training(wide_resnet.CONFIGS["wresnet-152-10"]).parameters / 2**30, 1)  # the table: 65.1
65.0
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike

from shardplan.models import resnet
from shardplan.models.training import Training

BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Bottleneck blocks per stage by the number of layers, as in He et al. (2016)."""
_CHANNELS = 64


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes: `layers` of a ResNet (50, 101, 152), or `blocks` per stage, with `widen` times the channels."""

    layers: int = 50
    widen: int = 4
    blocks: tuple[int, ...] | None = None
    classes: int = 1000
    image: int = 224
    batch: int = 32
    compute_dtype: DTypeLike = jnp.float32
    learning_rate: float = 0.1
    momentum: float = 0.9


CONFIGS = {
    f"wresnet-{layers}-{widen}": Config(layers=layers, widen=widen) for layers in BLOCKS for widen in (4, 6, 8, 10)
}
SMALL = Config(blocks=(1,), widen=1, classes=16, image=16, batch=16, learning_rate=0.01)
BENCHMARK = Config(blocks=(1, 1, 1, 1))


def training(config: Config | None = None) -> Training:
    """The training step of `shardplan.models.resnet`, with wide layers.

    Raises `ValueError` for an unknown number of layers.
    """
    config = config or Config()
    if config.blocks is None and config.layers not in BLOCKS:
        raise ValueError(f"there is no ResNet of {config.layers} layers; there are {', '.join(map(str, BLOCKS))}")
    return resnet.training(
        resnet.Config(
            blocks=config.blocks or BLOCKS[config.layers],
            width=_CHANNELS * config.widen,
            classes=config.classes,
            image=config.image,
            batch=config.batch,
            compute_dtype=config.compute_dtype,
            learning_rate=config.learning_rate,
            momentum=config.momentum,
        )
    )
