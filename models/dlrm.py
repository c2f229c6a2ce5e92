"""DLRM (Naumov et al., 2019): a recommender of embedding tables, pairwise products and two MLPs, with SGD.

Nearly all memory is tables: 96 GB with the categories of the Criteo Terabyte data. A step changes only the rows that
its batch names: their gradients are scattered into the tables. For SGD this is the same as a gradient of the tables'
own size, which `dense_gradients` selects.

>>> from shardplan.models import dlrm
>>> dlrm.training(dlrm.CONFIGS["dlrm-kaggle"]).parameters
540677217
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from shardplan.models.logical import logical
from shardplan.models.training import Batch, State, Training

_KAGGLE = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
_TERABYTE = (
    *(39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10),
    *(2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36),
)


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes: rows per table, numbers per row (`embedding`), the widths of the MLPs after their inputs.

    By default the Criteo Terabyte data, at most 40 million rows per table (the MLPerf training benchmark).
    """

    tables: tuple[int, ...] = _TERABYTE
    embedding: int = 128
    dense: int = 13
    bottom: tuple[int, ...] = (512, 256, 128)
    top: tuple[int, ...] = (1024, 1024, 512, 256, 1)
    batch: int = 65536
    dense_gradients: bool = False
    compute_dtype: DTypeLike = jnp.float32
    learning_rate: float = 0.1


CONFIGS = {
    "dlrm-kaggle": Config(tables=_KAGGLE, embedding=16, bottom=(512, 256, 64, 16), top=(512, 256, 1), batch=2048),
    "dlrm-terabyte": Config(),
}
SMALL = Config(tables=(512, 8, 64, 256), embedding=16, dense=8, bottom=(32, 16), top=(64, 32, 1), batch=64)
BENCHMARK = Config()


class MLP(nn.Module):
    """Dense layers with ReLU, after the last one too if `activate_last`: `[batch, any]` to `[batch, widths[-1]]`."""

    widths: Sequence[int]
    activate_last: bool
    compute_dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for number, width in enumerate(self.widths):
            x = nn.Dense(width, dtype=self.compute_dtype, name=f"layer_{number}")(x)
            if self.activate_last or number < len(self.widths) - 1:
                x = nn.relu(x)
            x = logical(x, "batch", "mlp")
        return x


class DLRM(nn.Module):
    """The layers after the tables: float32 `[batch, dense]` and `[batch, tables, embedding]` to logits `[batch]`."""

    config: Config

    @nn.compact
    def __call__(self, dense: jax.Array, rows: jax.Array) -> jax.Array:
        config, dtype = self.config, self.config.compute_dtype
        bottom = MLP(config.bottom, True, dtype, name="bottom")(dense)
        vectors = jnp.concatenate([bottom[:, None], rows.astype(dtype)], axis=1)
        vectors = logical(vectors, "batch", None, "embed")
        products = jnp.einsum("bie,bje->bij", vectors, vectors)
        left, right = np.array(list(combinations(range(len(config.tables) + 1), 2))).T
        pairs = products[:, left, right]
        top = MLP(config.top, False, dtype, name="top")(jnp.concatenate([bottom, pairs], axis=1))
        return top[:, 0].astype(jnp.float32)


def look_up(tables: dict[str, jax.Array], ids: jax.Array) -> jax.Array:
    """The rows of every table that a batch names: int32 `[batch, tables]` to `[batch, tables, embedding]`."""
    rows = [logical(tables[f"table_{n}"][ids[:, n]], "batch", "embed") for n in range(ids.shape[1])]
    return jnp.stack(rows, axis=1)


def training(config: Config | None = None) -> Training:
    """The training step: mean binary cross-entropy of a click, SGD.

    The batch is `dense`, float32 `[batch, dense]`, `ids`, int32 `[batch, tables]`, and `clicks`, float32 `[batch]`.
    Raises `ValueError` where the bottom MLP does not end in the embedding's width.
    """
    config = config or Config()
    if config.bottom[-1] != config.embedding:
        raise ValueError(f"the bottom MLP ends in {config.bottom[-1]} features, and rows have {config.embedding}")
    model = DLRM(config)
    optimizer = optax.sgd(config.learning_rate)
    counts = config.tables

    def make_state(key: jax.Array) -> State:
        keys = jax.random.split(key, len(counts) + 1)
        shapes = jnp.zeros((1, config.dense)), jnp.zeros((1, len(counts), config.embedding))
        params = dict(model.init(keys[-1], *shapes)["params"])
        params["tables"] = {
            f"table_{n}": jax.random.uniform(keys[n], (rows, config.embedding), minval=-1, maxval=1) / rows**0.5
            for n, rows in enumerate(counts)
        }
        return {"params": params, "step": jnp.zeros((), jnp.int32)}

    def make_batch(key: jax.Array) -> Batch:
        keys = jax.random.split(key, 3)
        return {
            "dense": jax.random.normal(keys[0], (config.batch, config.dense)),
            "ids": jax.random.randint(keys[1], (config.batch, len(counts)), 0, jnp.array(counts)),
            "clicks": jax.random.bernoulli(keys[2], 0.25, (config.batch,)).astype(jnp.float32),
        }

    def loss_function(params: Any, rows: jax.Array, batch: Batch) -> jax.Array:
        logits: Any = model.apply({"params": params}, batch["dense"], rows)
        return optax.sigmoid_binary_cross_entropy(logits, batch["clicks"]).mean()

    def dense_loss(params: Any, batch: Batch) -> jax.Array:
        return loss_function(params, look_up(params["tables"], batch["ids"]), batch)

    def dense_step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        loss, gradients = jax.value_and_grad(dense_loss)(state["params"], batch)
        updates, _ = optimizer.update(gradients, optimizer.init(state["params"]))
        return {"params": optax.apply_updates(state["params"], updates), "step": state["step"] + 1}, loss

    def sparse_step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        params = {name: value for name, value in state["params"].items() if name != "tables"}
        tables = state["params"]["tables"]
        rows = look_up(tables, batch["ids"])
        loss, (gradients, of_rows) = jax.value_and_grad(loss_function, argnums=(0, 1))(params, rows, batch)
        updates, _ = optimizer.update(gradients, optimizer.init(params))
        changes = -config.learning_rate * of_rows
        moved = {
            f"table_{n}": tables[f"table_{n}"].at[batch["ids"][:, n]].add(changes[:, n]) for n in range(len(counts))
        }
        return {"params": {**optax.apply_updates(params, updates), "tables": moved}, "step": state["step"] + 1}, loss

    return Training(dense_step if config.dense_gradients else sparse_step, make_state, make_batch)
