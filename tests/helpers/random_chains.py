"""Random programs of several operations: chains of layers over images or sequences, with losses at the end."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = Any
Layer = Callable[[random.Random, Array], tuple[list[np.ndarray], Callable[[list[Array], Array], Array]]]
"""From the shape of its input to weights, and the function of both."""

IMAGE: dict[str, Layer] = {}
SEQUENCE: dict[str, Layer] = {}


def _layer(*kinds: dict[str, Layer]) -> Callable[[Layer], Layer]:
    def add(layer: Layer) -> Layer:
        for kind in kinds:
            kind[layer.__name__] = layer
        return layer

    return add


def _weights(rng: random.Random, *shape: int) -> np.ndarray:
    scale = max(1, int(np.prod(shape[:-1]))) ** -0.5
    return np.random.default_rng(rng.randrange(2**31)).normal(0, scale, shape).astype(np.float32)


@_layer(IMAGE)
def convolution(rng, x):
    groups = rng.choice([1, 1, 1, x.shape[-1]])
    sizes = [rng.choice([1, 2, 3, 5]) for _ in range(2)]
    own = [(rng.randrange(3), rng.randrange(3)) for _ in range(2)]
    options = {
        "window_strides": [rng.choice([1, 1, 2, 3]) for _ in range(2)],
        "padding": rng.choice(["SAME", "SAME", "VALID", own]),
        "rhs_dilation": [rng.choice([1, 1, 2]) for _ in range(2)],
        "feature_group_count": groups,
    }
    channels = groups * rng.choice([1, 2]) if groups > 1 else rng.choice([2, 4])
    kernel = _weights(rng, *sizes, x.shape[-1] // groups, channels)
    numbers = ("NHWC", "HWIO", "NHWC")
    return [kernel], lambda w, x: lax.conv_general_dilated(x, w[0], **options, dimension_numbers=numbers)


@_layer(IMAGE)
def transposed_convolution(rng, x):
    size, stride = rng.choice([2, 3, 4]), rng.choice([2, 2, 3])
    padding = rng.choice(["SAME", "VALID", [(1, 2), (2, 1)]])
    kernel = _weights(rng, size, size, x.shape[-1], 2)
    return [kernel], lambda w, x: lax.conv_transpose(x, w[0], (stride, stride), padding)


@_layer(IMAGE)
def pool(rng, x):
    size, stride = rng.choice([2, 3]), rng.choice([1, 2, 2, 3])
    padding = rng.choice(["SAME", "VALID"])
    window = {"window_dimensions": (1, size, size, 1), "window_strides": (1, stride, stride, 1), "padding": padding}
    if rng.random() < 0.5:
        return [], lambda w, x: lax.reduce_window(x, -jnp.inf, lax.max, **window)
    return [], lambda w, x: lax.reduce_window(x, 0.0, lax.add, **window) / size**2


@_layer(IMAGE)
def batch_norm(rng, x):
    def normed(w, x):
        mean = x.mean((0, 1, 2), keepdims=True)
        return (x - mean) * lax.rsqrt(jnp.square(x - mean).mean((0, 1, 2), keepdims=True) + 0.1)

    return [], normed


@_layer(IMAGE)
def add_mean_of_columns(rng, x):
    return [], lambda w, x: x + x.mean(2, keepdims=True)


@_layer(IMAGE)
def row_numbers(rng, x):
    return [], lambda w, x: x * jnp.cos(jnp.arange(x.shape[1], dtype=x.dtype))[:, None, None]


@_layer(IMAGE)
def merge_rows_and_columns(rng, x):
    kernel = _weights(rng, x.shape[-1], x.shape[-1])

    def merged(w, x):
        return jnp.tanh(x.reshape(x.shape[0], -1, x.shape[-1]) @ w[0]).reshape(x.shape)

    return [kernel], merged


@_layer(IMAGE)
def space_to_depth(rng, x):
    def moved(w, x):
        batch, rows, columns, channels = x.shape
        x = x[:, : rows // 2 * 2, : columns // 2 * 2]
        x = x.reshape(batch, rows // 2, 2, columns // 2, 2, channels)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, rows // 2, columns // 2, 4 * channels)[..., :4]

    return [], moved


@_layer(SEQUENCE)
def dense(rng, x):
    kernel = _weights(rng, x.shape[-1], rng.choice([4, 6]))
    return [kernel], lambda w, x: jnp.einsum("btd,de->bte", x, w[0])


@_layer(SEQUENCE)
def layer_norm(rng, x):
    return [_weights(rng, x.shape[-1])], lambda w, x: jax.nn.standardize(x, epsilon=0.1) * w[0]


@_layer(SEQUENCE)
def softmax_over_positions(rng, x):
    return [], lambda w, x: x * jax.nn.softmax(x, axis=1)


@_layer(SEQUENCE)
def attention(rng, x):
    kernels = [_weights(rng, x.shape[-1], x.shape[-1]) for _ in range(2)]

    def attended(w, x):
        scores = jnp.einsum("bqd,de,bke->bqk", x, w[0], x)
        place = jnp.arange(x.shape[1])
        scores = jnp.where(place[:, None] >= place[None], scores, -1e9)
        return x + jax.nn.softmax(scores) @ (x @ w[1])

    return kernels, attended


@_layer(SEQUENCE)
def cumulative_sum(rng, x):
    axis = rng.choice([1, 2])
    return [], lambda w, x: jnp.cumsum(x, axis) * 0.3


@_layer(SEQUENCE)
def lookup(rng, x):
    table = _weights(rng, 7, x.shape[-1])
    return [table], lambda w, x: x + w[0][jnp.argmax(x, -1) % 7]


@_layer(SEQUENCE)
def chosen_features(rng, x):
    return [], lambda w, x: x + jnp.take_along_axis(x, jnp.argsort(x, -1)[..., :1], -1)


@_layer(SEQUENCE)
def chosen_positions(rng, x):
    return [], lambda w, x: x + jnp.take_along_axis(x, jnp.argmax(x, 1, keepdims=True), 1)


@_layer(SEQUENCE)
def counts(rng, x):
    """Rows added into zeros, and into what is not zero."""
    start = rng.choice([0.0, 1.0])

    def counted(w, x):
        rows = jnp.argmax(x, -1)
        return x + jnp.full((x.shape[-1], x.shape[-1]), start).at[rows].add(x)[rows] * 0.1

    return [], counted


@_layer(SEQUENCE)
def splits_heads(rng, x):
    def split(w, x):
        return jnp.tanh(x.reshape(*x.shape[:2], -1, 2)).sum(-1, keepdims=True).repeat(2, -1).reshape(x.shape)

    return [], split


@_layer(SEQUENCE)
def joins_batch(rng, x):
    return [], lambda w, x: jnp.sin(x.reshape(-1, x.shape[-1])).reshape(x.shape)


@_layer(SEQUENCE)
def dropout(rng, x):
    key = rng.randrange(100)
    return [], lambda w, x: x * jax.random.bernoulli(jax.random.key(key), 0.8, x.shape)


@_layer(SEQUENCE, IMAGE)
def concatenated(rng, x):
    axis = rng.choice([1, -1])
    return [], lambda w, x: jnp.concatenate([x, jnp.sin(x)], axis)[..., : x.shape[-1]]


@_layer(SEQUENCE, IMAGE)
def padded(rng, x):
    low, high, inner = rng.choice([(1, 2, 0), (0, 1, 0), (2, 0, 0), (-1, 1, 0), (0, -1, 0), (1, 1, 1)])
    config = [(0, 0, 0), (low, high, inner), *[(0, 0, 0)] * (x.ndim - 2)]
    return [], lambda w, x: lax.pad(x, jnp.float32(0.5), config)


@_layer(SEQUENCE, IMAGE)
def sliced(rng, x):
    start, step = rng.choice([0, 1, 2]), rng.choice([1, 1, 2])
    return [], lambda w, x: x[:, start::step]


@_layer(SEQUENCE, IMAGE)
def extremes(rng, x):
    axis = rng.choice([0, 1, x.ndim - 1])
    reduce = rng.choice([jnp.max, jnp.min, jnp.sum])
    return [], lambda w, x: x - 0.1 * reduce(x, axis, keepdims=True)


@_layer(SEQUENCE, IMAGE)
def product(rng, x):
    return [], lambda w, x: x * jnp.prod(1 + 0.05 * jnp.tanh(x), axis=(0, 1), keepdims=True)


@_layer(SEQUENCE, IMAGE)
def elementwise(rng, x):
    return [], lambda w, x: jnp.log1p(jnp.exp(x)) - 1 / (1.5 + jnp.square(x))


@_layer(SEQUENCE, IMAGE)
def reversed_rows(rng, x):
    return [], lambda w, x: x + x[:, ::-1]


@_layer(SEQUENCE, IMAGE)
def barred(rng, x):
    return [], lambda w, x: lax.optimization_barrier((x, jnp.sin(x)))[1]


def chain(names: list[str], seed: int, shape: tuple[int, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The gradient of a chain of layers by weights and input, and example arguments. A layer that would leave nothing
    of its input is left out; some stand under `jax.checkpoint`."""
    rng, kinds = random.Random(seed), IMAGE if len(shape) == 4 else SEQUENCE
    x = jax.ShapeDtypeStruct(shape, np.float32)
    weights, functions = [], []
    for name in names:
        own, function = kinds[name](rng, x)
        try:
            made = jax.eval_shape(function, own, x)
        except (ValueError, TypeError):
            continue
        if 0 in made.shape or made.size > 20_000:
            continue
        weights.append(own)
        functions.append(jax.checkpoint(function) if rng.random() < 0.2 else function)
        x = made
    heavy = _weights(rng, *x.shape[1:])

    def loss(weights, x):
        for own, function in zip(weights, functions, strict=True):
            x = function(own, x)
        return jnp.mean(jnp.square(x - heavy)) + 0.1 * jnp.mean(x * heavy)

    example = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return jax.value_and_grad(loss, argnums=(0, 1)), (weights, example)
