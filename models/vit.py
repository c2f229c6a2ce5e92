"""A vision transformer in Equinox (Dosovitskiy et al., 2020, table 1): patches and a class token, pre-LN blocks, Adam.

The layers of Equinox are for one vector. Here they are mapped over batch and sequence. The state has the module's
arrays, a pytree of its own type. The step adds the other leaves again.

>>> from shardplan.models import vit
>>> vit.training(vit.CONFIGS["vit-b16"]).parameters
86567656
>>> vit.training(vit.CONFIGS["vit-b16"]).state["params"].blocks[0].up.weight
ShapeDtypeStruct(shape=(3072, 768), dtype=float32)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from shardplan.models.logical import logical
from shardplan.models.training import Batch, State, Training, make_training, random_images


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes, by default those of ViT-B/16 at 224 x 224. Parameters are float32, `compute_dtype` is that of the layers.

    `dropout` is the part that is dropped of the embeddings and of what each half of a block adds.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    mlp: int = 3072
    image: int = 224
    patch: int = 16
    classes: int = 1000
    batch: int = 4096
    dropout: float = 0.1
    compute_dtype: DTypeLike = jnp.float32
    learning_rate: float = 1e-3
    weight_decay: float = 0.1

    @property
    def patches(self) -> int:
        return (self.image // self.patch) ** 2


CONFIGS = {
    "vit-b16": Config(),
    "vit-l16": Config(layers=24, width=1024, heads=16, mlp=4096),
    "vit-h14": Config(layers=32, width=1280, heads=16, mlp=5120, patch=14),
}
SMALL = Config(layers=1, width=64, heads=8, mlp=256, image=32, patch=8, classes=16, batch=16)
BENCHMARK = Config(layers=2, width=1280, heads=16, mlp=5120, patch=14, batch=256, compute_dtype=jnp.bfloat16)

NAMES = ("batch", "sequence", "embed")


def each(layer: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """A layer for one vector at every place: `[batch, sequence, width]` to `[batch, sequence, ...]`."""
    return jax.vmap(jax.vmap(layer))(x)


class Block(eqx.Module):
    """Attention and MLP, each with a normalisation before and a residual sum after."""

    attention_norm: eqx.nn.LayerNorm
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    out: eqx.nn.Linear
    mlp_norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    drop: eqx.nn.Dropout
    heads: int = eqx.field(static=True)

    def __init__(self, config: Config, key: jax.Array) -> None:
        keys = jax.random.split(key, 6)
        square = (eqx.nn.Linear(config.width, config.width, key=key) for key in keys[:4])
        self.query, self.key, self.value, self.out = square
        self.attention_norm = eqx.nn.LayerNorm(config.width)
        self.mlp_norm = eqx.nn.LayerNorm(config.width)
        self.up = eqx.nn.Linear(config.width, config.mlp, key=keys[4])
        self.down = eqx.nn.Linear(config.mlp, config.width, key=keys[5])
        self.drop = eqx.nn.Dropout(config.dropout)
        self.heads = config.heads

    def attend(self, x: jax.Array) -> jax.Array:
        """Self-attention of all places: `[batch, sequence, width]` to the same."""
        per_head = (*x.shape[:2], self.heads, -1)
        names = ("batch", "sequence", "heads", "head_dim")
        layers = (self.query, self.key, self.value)
        query, key, value = (logical(each(layer, x).reshape(per_head), *names) for layer in layers)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) / query.shape[-1] ** 0.5
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(value.dtype), value)
        return each(self.out, logical(mixed, *names).reshape(x.shape))

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        keys = jax.random.split(key)
        x = logical(x + self.drop(self.attend(each(self.attention_norm, x)), key=keys[0]), *NAMES)
        hidden = logical(jax.nn.gelu(each(self.up, each(self.mlp_norm, x))), "batch", "sequence", "mlp")
        return logical(x + self.drop(each(self.down, hidden), key=keys[1]), *NAMES)


class ViT(eqx.Module):
    """Images to logits: `[batch, 3, image, image]` to `[batch, classes]`."""

    patches: eqx.nn.Conv2d
    class_token: jax.Array
    positions: jax.Array
    drop: eqx.nn.Dropout
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, config: Config, key: jax.Array) -> None:
        keys = jax.random.split(key, config.layers + 3)
        self.patches = eqx.nn.Conv2d(3, config.width, config.patch, stride=config.patch, key=keys[0])
        self.class_token = jnp.zeros(config.width)
        self.positions = 0.02 * jax.random.normal(keys[1], (config.patches + 1, config.width))
        self.drop = eqx.nn.Dropout(config.dropout)
        self.blocks = [Block(config, key) for key in keys[3:]]
        self.norm = eqx.nn.LayerNorm(config.width)
        self.head = eqx.nn.Linear(config.width, config.classes, key=keys[2])

    def __call__(self, images: jax.Array, key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, len(self.blocks) + 1)
        x = jax.vmap(self.patches)(images)
        x = jnp.swapaxes(x.reshape(*x.shape[:2], -1), 1, 2)
        first = jnp.broadcast_to(self.class_token, (x.shape[0], 1, x.shape[2]))
        x = jnp.concatenate([first, x], axis=1) + self.positions
        x = logical(self.drop(x, key=keys[0]), *NAMES)
        for block, key in zip(self.blocks, keys[1:], strict=True):
            x = block(x, key)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x[:, 0]))


def cast(model: Any, dtype: DTypeLike) -> Any:
    """A module with its arrays in another element type."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), model)


def training(config: Config | None = None) -> Training:
    """The training step: mean cross-entropy of the class, AdamW.

    The batch is `images`, float32 `[batch, 3, image, image]`, and `labels`, int32 `[batch]`. Raises `ValueError` where
    sizes do not divide.
    """
    config = config or Config()
    if config.width % config.heads or config.image % config.patch:
        raise ValueError(
            f"`heads` must divide `width`, and `patch` must divide `image`: got {config.heads} heads, a width of "
            f"{config.width}, patches of {config.patch} and images of {config.image}"
        )
    shape = (config.batch, 3, config.image, config.image)
    abstract = eqx.filter_eval_shape(ViT, config, jax.random.key(0))
    static = eqx.filter(abstract, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct), inverse=True)

    def init(key: jax.Array) -> State:
        return {"params": eqx.filter(ViT(config, key), eqx.is_inexact_array)}

    def make_batch(key: jax.Array) -> Batch:
        return random_images(key, shape, config.classes)

    def loss_function(params: Any, others: State, batch: Batch) -> tuple[jax.Array, State]:
        model = eqx.combine(cast(params, config.compute_dtype), static)
        logits = model(batch["images"].astype(config.compute_dtype), batch["key"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean(), others

    optimizer = optax.adamw(config.learning_rate, weight_decay=config.weight_decay)
    return make_training(init, make_batch, loss_function, optimizer, seed=0)
