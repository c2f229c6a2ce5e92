"""A multi-layer perceptron with Adam: the smallest step in which data and tensor parallelism compete.

>>> from shardplan.models import mlp
>>> mlp.training(mlp.Config(widths=(16, 64, 16), batch=8)).state["params"]["layer_1"]["kernel"]
ShapeDtypeStruct(shape=(64, 16), dtype=float32)
"""

from dataclasses import dataclass
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
    """Sizes: `widths` are the features from inputs (first) to outputs (last), one dense layer between each two."""

    widths: tuple[int, ...] = (1024, 4096, 1024, 4096, 1024, 4096, 1024, 4096, 1024)
    batch: int = 512
    compute_dtype: DTypeLike = jnp.float32
    learning_rate: float = 1e-3


CONFIGS = {"mlp-8": Config()}
SMALL = Config(widths=(32, 128, 64, 32), batch=64)
BENCHMARK = Config()


class MLP(nn.Module):
    """Dense layers with ReLU between them: `[batch, widths[0]] -> [batch, widths[-1]]`."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for number, width in enumerate(self.config.widths[1:]):
            if number > 0:
                x = nn.relu(x)
            x = nn.Dense(width, dtype=self.config.compute_dtype, name=f"layer_{number}")(x)
            x = logical(x, "batch", "mlp" if number % 2 == 0 else "embed")
        return x


def training(config: Config | None = None) -> Training:
    """The training step: mean squared error between the outputs and the batch's targets, Adam."""
    config = config or Config()
    model = MLP(config)
    inputs = (config.batch, config.widths[0])
    targets = (config.batch, config.widths[-1])

    def init(key: jax.Array) -> State:
        return dict(model.init(key, jnp.zeros(inputs)))

    def make_batch(key: jax.Array) -> Batch:
        inputs_key, targets_key = jax.random.split(key)
        return {"inputs": jax.random.normal(inputs_key, inputs), "targets": jax.random.normal(targets_key, targets)}

    def loss_function(params: Any, others: State, batch: Batch) -> tuple[jax.Array, State]:
        outputs: Any = model.apply({"params": params}, batch["inputs"])
        return jnp.mean(jnp.square(outputs.astype(jnp.float32) - batch["targets"])), others

    return make_training(init, make_batch, loss_function, optax.adam(config.learning_rate))
