"""A mixture-of-experts language model in the shape of Mixtral (Jiang et al., 2024), in Flax NNX, with AdamW.

Decoder blocks with RMSNorm, rotary positions, grouped-query attention and experts with SwiGLU. A router sends every
token to `chosen` of the `experts` and adds up their results, weighted by the softmax of the chosen experts' scores.
`Config.routing` selects how tokens reach them:

- `"capacity"` (GShard, Lepikhin et al., 2020; Switch, Fedus et al., 2021): tokens are cut into groups, and each expert
  takes at most `capacity_factor * tokens * chosen / experts` tokens of a group; products with one-hot tensors bring
  tokens to the places `[experts, groups, capacity]` and back. First choices come before second ones, and a token that
  finds no place is left out. Places are counted within a group, so that groups are independent of one another.
- `"ragged"` (dropless, as in MegaBlocks, Gale et al., 2022): tokens are sorted by expert, `jax.lax.ragged_dot`
  multiplies each run of tokens by its expert's matrix, and the sorting is undone.

The loss has `balance` times the load-balancing loss of Switch: `experts * sum(fraction of choices * mean probability)`,
for each group and layer, averaged.

`mixtral-8x7b` and `mixtral-8x22b` are the `config.json` files that Mistral AI published (46.7 and 140.6 billion
parameters).

>>> from shardplan.models import moe
>>> moe.training(moe.CONFIGS["mixtral-8x7b"]).parameters
46702792704
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, gcd
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike

from shardplan.models.logical import logical
from shardplan.models.training import Batch, State, Training, make_training, random_tokens

NORMAL = nnx.initializers.normal(0.02)


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes. Parameters are float32; `compute_dtype` is that of the layers (router, softmax and loss: float32).

    `chosen` is the number of experts that a token is sent to; `groups` how many groups the tokens of a batch are cut
    into (None: a group per sequence). `scan_layers` stacks the layers' parameters and loops over them; `checkpoint`
    recomputes each layer in the backward pass.
    """

    layers: int = 2
    width: int = 1024
    heads: int = 16
    kv_heads: int = 8
    hidden: int = 3584
    experts: int = 8
    chosen: int = 2
    vocabulary: int = 32000
    sequence: int = 1024
    batch: int = 16
    routing: Literal["capacity", "ragged"] = "capacity"
    capacity_factor: float = 1.25
    groups: int | None = None
    balance: float = 0.02
    rope_base: float = 1e6
    scan_layers: bool = False
    checkpoint: bool = False
    compute_dtype: DTypeLike = jnp.float32
    learning_rate: float = 3e-4
    weight_decay: float = 0.1

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def capacity(self) -> int:
        """How many tokens of a group one expert takes, at most all of them."""
        per_group = self.tokens // (self.groups or self.batch)
        return min(per_group, ceil(self.capacity_factor * per_group * self.chosen / self.experts))


CONFIGS = {
    "mixtral-8x7b": Config(
        layers=32, width=4096, heads=32, hidden=14336, sequence=4096, scan_layers=True, checkpoint=True
    ),
    "mixtral-8x22b": Config(
        layers=56, width=6144, heads=48, hidden=16384, vocabulary=32768, sequence=4096, scan_layers=True,
        checkpoint=True,
    ),
}  # fmt: skip
SMALL = Config(layers=1, width=64, heads=8, kv_heads=4, hidden=96, vocabulary=256, sequence=32, batch=16)
BENCHMARK = Config(layers=2, width=4096, heads=32, hidden=14336, compute_dtype=jnp.bfloat16)


class Linear(nnx.Module):
    """A matrix product without bias: `[..., inputs]` to `[..., outputs]`."""

    def __init__(self, inputs: int, outputs: int, config: Config, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(NORMAL(rngs.params(), (inputs, outputs)))
        self.dtype = config.compute_dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.kernel[...].astype(self.dtype)


class RMSNorm(nnx.Module):
    """Division by the root of the mean square over the last dimension, in float32, and a scale."""

    def __init__(self, config: Config) -> None:
        self.scale = nnx.Param(jnp.ones(config.width))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-5)
        return (wide * self.scale[...]).astype(x.dtype)


def rotate(x: jax.Array, base: float) -> jax.Array:
    """Rotary positions (Su et al., 2021): `[batch, sequence, heads, head_width]`, its two halves rotated."""
    half = x.shape[-1] // 2
    speeds = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * speeds
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return rotated.astype(x.dtype)


class Attention(nnx.Module):
    """Causal attention, of which several query heads share a key and a value head: `[batch, sequence, width]`."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        narrow = config.kv_heads * config.head_width
        self.query = Linear(config.width, config.width, config, rngs)
        self.key = Linear(config.width, narrow, config, rngs)
        self.value = Linear(config.width, narrow, config, rngs)
        self.out = Linear(config.width, config.width, config, rngs)
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:
        config, (batch, sequence, _) = self.config, x.shape
        shape, size = (batch, sequence, config.kv_heads, -1), config.head_width
        names = ("batch", "sequence", "heads", "head_dim")
        query = logical(self.query(x).reshape(batch, sequence, config.heads, size), *names)
        key = logical(self.key(x).reshape(batch, sequence, config.kv_heads, size), *names)
        value = logical(self.value(x).reshape(batch, sequence, config.kv_heads, size), *names)
        query = rotate(query, config.rope_base).reshape(*shape, size)
        scores = jnp.einsum("bqgrd,bkgd->bgrqk", query, rotate(key, config.rope_base)).astype(jnp.float32)
        causal = jnp.tril(jnp.ones((sequence, sequence), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores / size**0.5, jnp.finfo(jnp.float32).min))
        mixed = jnp.einsum("bgrqk,bkgd->bqgrd", weights.astype(value.dtype), value)
        return self.out(logical(mixed.reshape(batch, sequence, config.heads, size), *names).reshape(x.shape))


class Experts(nnx.Module):
    """A router and its experts: `[batch, sequence, width]` to the same, and the load-balancing loss, a scalar."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        into, back = (config.experts, config.width, config.hidden), (config.experts, config.hidden, config.width)
        self.router = nnx.Param(NORMAL(rngs.params(), (config.width, config.experts)))
        self.gate = nnx.Param(NORMAL(rngs.params(), into))
        self.up = nnx.Param(NORMAL(rngs.params(), into))
        self.down = nnx.Param(NORMAL(rngs.params(), back))
        self.config = config

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        config = self.config
        groups = config.groups or config.batch
        grouped = x.reshape(groups, -1, config.width)
        scores = jnp.einsum("gsd,de->gse", grouped.astype(jnp.float32), self.router[...])
        best, chosen = jax.lax.top_k(scores, config.chosen)
        weights = jax.nn.softmax(best)
        choices = jax.nn.one_hot(chosen, config.experts, dtype=jnp.int32)
        run = self.by_capacity if config.routing == "capacity" else self.by_sorting
        mixed = run(grouped, weights, chosen, choices)
        fractions, probabilities = jnp.mean(choices, axis=(1, 2)), jnp.mean(jax.nn.softmax(scores), axis=1)
        loss = config.experts * jnp.mean(jnp.sum(fractions * probabilities, axis=-1))
        return mixed.reshape(x.shape), loss

    def by_capacity(self, x: jax.Array, weights: jax.Array, chosen: jax.Array, choices: jax.Array) -> jax.Array:
        """Tokens `[groups, tokens, width]` to the same by places `[groups, tokens, experts, capacity]`.

        `weights` and `chosen` are `[groups, tokens, chosen]`, `choices` the one-hot of `chosen`, int32.
        """
        groups, tokens, count, experts = choices.shape
        in_order = jnp.swapaxes(choices, 1, 2).reshape(groups, count * tokens, experts)
        before = (jnp.cumsum(in_order, axis=1) - in_order).reshape(groups, count, tokens, experts)
        place = jnp.sum(jnp.swapaxes(before, 1, 2) * choices, axis=-1)
        places = jax.nn.one_hot(place, self.config.capacity)  # all zeros where there is no place left
        combine = jnp.einsum("gsk,gske,gskc->gsec", weights, choices.astype(weights.dtype), places)
        combine = logical(combine.astype(x.dtype), "groups", None, None, None)
        dispatch = (combine > 0).astype(x.dtype)
        names = ("experts", "groups", "capacity")
        inputs = logical(jnp.einsum("gsec,gsd->egcd", dispatch, x), *names, "embed")
        gate, up, down = (kernel[...].astype(x.dtype) for kernel in (self.gate, self.up, self.down))
        hidden = jax.nn.silu(jnp.einsum("egcd,edh->egch", inputs, gate)) * jnp.einsum("egcd,edh->egch", inputs, up)
        outputs = jnp.einsum("egch,ehd->egcd", logical(hidden, *names, "mlp"), down)
        return jnp.einsum("gsec,egcd->gsd", combine, logical(outputs, *names, "embed"))

    def by_sorting(self, x: jax.Array, weights: jax.Array, chosen: jax.Array, choices: jax.Array) -> jax.Array:
        """Tokens `[groups, tokens, width]` to the same by sorting all choices of all groups by expert."""
        del choices
        tokens, count = x.reshape(-1, x.shape[-1]), chosen.shape[-1]
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=self.config.experts)
        rows = tokens[order // count]
        gate, up, down = (kernel[...].astype(x.dtype) for kernel in (self.gate, self.up, self.down))
        hidden = jax.nn.silu(jax.lax.ragged_dot(rows, gate, sizes)) * jax.lax.ragged_dot(rows, up, sizes)
        outputs = jax.lax.ragged_dot(logical(hidden, None, "mlp"), down, sizes)
        by_choice = outputs[jnp.argsort(order)].reshape(-1, count, x.shape[-1])
        mixed = jnp.einsum("tk,tkd->td", weights.reshape(-1, count).astype(x.dtype), by_choice)
        return mixed.reshape(x.shape)


class Block(nnx.Module):
    """Attention and experts, each with a normalisation before and a residual sum after, and the load-balancing loss."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.attention_norm, self.attention = RMSNorm(config), Attention(config, rngs)
        self.experts_norm, self.experts = RMSNorm(config), Experts(config, rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        names = ("batch", "sequence", "embed")
        x = logical(x + self.attention(self.attention_norm(x)), *names)
        mixed, loss = self.experts(self.experts_norm(x))
        return logical(x + mixed, *names), loss


class Mixture(nnx.Module):
    """Tokens to logits: int32 `[batch, sequence]` to float32 `[batch, sequence, vocabulary]` and the balancing loss."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Param(NORMAL(rngs.params(), (config.vocabulary, config.width)))
        if config.scan_layers:
            make = nnx.vmap(lambda rngs: Block(config, rngs))
            self.layers: Any = nnx.split_rngs(splits=config.layers)(make)(rngs)
        else:
            self.layers = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = RMSNorm(config)
        self.head = Linear(config.width, config.vocabulary, config, rngs)
        self.config = config

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        config = self.config
        # The lookup stays in float32, so that the gradient of a token's row is summed over its places in float32.
        x = jnp.take(self.tokens[...], tokens, axis=0).astype(config.compute_dtype)
        x = logical(x, "batch", "sequence", "embed")
        if config.scan_layers:
            definition, stacked = nnx.split(self.layers)
            x, losses = jax.lax.scan(_recomputed(config, lambda x, one: nnx.merge(definition, one)(x)), x, stacked)
        else:
            losses = []
            for layer in self.layers:
                definition, own = nnx.split(layer)
                apply = _recomputed(config, lambda x, one, definition=definition: nnx.merge(definition, one)(x))
                x, loss = apply(x, own)
                losses.append(loss)
        logits = self.head(self.norm(x)).astype(jnp.float32)
        return logical(logits, "batch", "sequence", "vocabulary"), jnp.mean(jnp.stack(losses))


def _recomputed(config: Config, layer: Callable) -> Callable:
    return jax.checkpoint(layer) if config.checkpoint else layer


def training(config: Config | None = None) -> Training:
    """The training step: mean cross-entropy of the next token and the load-balancing loss, AdamW.

    The batch is `inputs` and `labels`, int32 `[batch, sequence]`. Raises `ValueError` where sizes do not fit together.
    """
    config = config or Config()
    _check(config)
    definition = nnx.graphdef(nnx.eval_shape(lambda: Mixture(config, nnx.Rngs(0))))

    def init(key: jax.Array) -> State:
        return {"params": nnx.to_pure_dict(nnx.state(Mixture(config, nnx.Rngs(key))))}

    def make_batch(key: jax.Array) -> Batch:
        return random_tokens(key, config.batch, config.sequence, config.vocabulary)

    def loss_function(params: Any, others: State, batch: Batch) -> tuple[jax.Array, State]:
        logits, balance = nnx.merge(definition, nnx.State(params))(batch["inputs"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
        return loss + config.balance * balance, others

    optimizer = optax.adamw(config.learning_rate, weight_decay=config.weight_decay)
    return make_training(init, make_batch, loss_function, optimizer)


def _check(config: Config) -> None:
    if config.width % config.heads or config.heads % config.kv_heads or config.head_width % 2:
        raise ValueError(
            f"`kv_heads` must divide `heads`, and `heads` the `width` into even parts: got {config.kv_heads}, "
            f"{config.heads} and {config.width}"
        )
    if not 1 <= config.chosen <= config.experts:
        raise ValueError(f"a token goes to 1 to {config.experts} experts: got `chosen={config.chosen}`")
    if config.routing not in ("capacity", "ragged"):
        raise ValueError(f"`routing` is 'capacity' or 'ragged': got {config.routing!r}")
    groups = config.groups or config.batch
    if config.tokens % groups or gcd(groups, config.batch) not in (groups, config.batch):
        raise ValueError(f"`groups` must cut {config.batch} x {config.sequence} tokens evenly: got {groups}")
