"""Equal layers of Flax NNX, initialised together: parameters stacked for a scan, or one module per layer.

Separate initialisation would trace each layer, which for 80 layers takes longer than planning them.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
from flax import nnx

Layer = TypeVar("Layer", bound=nnx.Module)


def stacked_layers(make: Callable[[nnx.Rngs], Layer], count: int, rngs: nnx.Rngs) -> Layer:
    """`count` layers as one module whose parameters have an additional first dimension, as `nnx.scan` takes it."""
    return nnx.split_rngs(splits=count)(nnx.vmap(make))(rngs)


def separate_layers(make: Callable[[nnx.Rngs], Layer], count: int, rngs: nnx.Rngs) -> nnx.List[Layer]:
    """The same `count` layers, with the same parameters, as a list of modules."""
    definition, state = nnx.split(stacked_layers(make, count, rngs))
    slices = (jax.tree.map(lambda leaf, number=number: leaf[number], state) for number in range(count))
    return nnx.List([nnx.merge(definition, state) for state in slices])
