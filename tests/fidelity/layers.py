"""Training steps of two layers of one kind, as people write them, with momentum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.fidelity.steps import Step

_B, _T, _D, _H = 64, 256, 512, 8
_TOKENS, _SQUARE, _WIDE, _NARROW, _VECTOR = (_B, _T, _D), (_D, _D), (_D, 4 * _D), (4 * _D, _D), (_D,)
_IMAGE, _FILTER = (64, 56, 56, 128), (3, 3, 128, 128)


def _normalized(x: jax.Array, gain: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6) * gain


def _attended(w: Any, x: jax.Array) -> jax.Array:
    queries, keys, values = ((x @ m).reshape(*x.shape[:2], _H, -1) for m in w[:3])
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", queries, keys) / 8)
    return x + jnp.einsum("bhqk,bkhd->bqhd", weights, values).reshape(x.shape) @ w[3]


def _recurrent(w: Any, x: jax.Array) -> jax.Array:
    def combine(left: Any, right: Any) -> Any:
        return left[0] * right[0], left[1] * right[0] + right[1]

    gate, update = jax.nn.sigmoid(x @ w[0]), x @ w[1]
    return x + lax.associative_scan(combine, (gate, update * jnp.sqrt(1 - gate * gate + 1e-6)), axis=1)[1] @ w[2]


def _scanned(w: Any, x: jax.Array) -> jax.Array:
    def body(h: jax.Array, x: jax.Array) -> Any:
        h = jnp.tanh(x + h @ w[1])
        return h, h

    return x + jnp.swapaxes(lax.scan(body, x[:, 0], jnp.swapaxes(x @ w[0], 0, 1))[1], 0, 1)


def _convolved(w: Any, x: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _batch_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    return (x - x.mean((0, 1, 2))) / jnp.sqrt(x.var((0, 1, 2)) + 1e-6) * gain


def _experts(w: Any, x: jax.Array) -> jax.Array:
    tokens = x.reshape(-1, _D)
    gates = jax.nn.softmax(tokens @ w[0])
    hidden = jax.nn.gelu(jnp.einsum("td,edf->etf", tokens, w[1]))
    return x + jnp.einsum("te,etf,efd->td", gates, hidden, w[2]).reshape(x.shape)


def _pooled(w: Any, x: jax.Array) -> jax.Array:
    return lax.reduce_window(jax.nn.relu(_convolved(w[0], x)), -jnp.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")


_LAYERS_OF: dict[str, tuple[Callable[[Any, jax.Array], jax.Array], tuple[tuple[int, ...], ...], tuple[int, ...]]] = {
    "rows": (lambda w, x: jax.nn.relu(_normalized(x @ w[0], w[2])) @ w[1], (_SQUARE, _SQUARE, _VECTOR), (_B * _T, _D)),
    "gated": (lambda w, x: x + (jax.nn.silu(x @ w[0]) * (x @ w[1])) @ w[2], (_WIDE, _WIDE, _NARROW), _TOKENS),
    "checkpointed": (
        lambda w, x: jax.checkpoint(lambda x: x + jax.nn.gelu(_normalized(x, w[2]) @ w[0]) @ w[1])(x),
        (_WIDE, _NARROW, _VECTOR),
        _TOKENS,
    ),
    "attended": (_attended, (_SQUARE,) * 4, _TOKENS),
    "perceptron": (lambda w, x: x + jax.nn.relu(x @ w[0]) @ w[1], (_WIDE, _NARROW), _TOKENS),
    "both": (
        lambda w, x: _attended(w, x) + jax.nn.gelu(x @ w[4]) @ w[5],
        (*(_SQUARE,) * 4, _WIDE, _NARROW),
        _TOKENS,
    ),
    "block": (
        lambda w, x: (y := x + _attended(w, _normalized(x, w[6]))) + jax.nn.gelu(_normalized(y, w[7]) @ w[4]) @ w[5],
        (*(_SQUARE,) * 4, _WIDE, _NARROW, _VECTOR, _VECTOR),
        _TOKENS,
    ),
    "recurrent": (_recurrent, ((1024, 1024),) * 3, (64, 512, 1024)),
    "scanned": (_scanned, (_SQUARE, _SQUARE), (64, 64, _D)),
    "experts": (_experts, ((_D, 8), (8, _D, _D), (8, _D, _D)), _TOKENS),
    "dropout": (
        lambda w, x: x + jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, x.shape), x @ w[0], 0) @ w[1],
        (_WIDE[:1] * 2, _SQUARE),
        _TOKENS,
    ),
    "convolved": (lambda w, x: jax.nn.relu(_convolved(w[0], x)), (_FILTER,), _IMAGE),
    "residual": (
        lambda w, x: x + _convolved(w[1], jax.nn.relu(_batch_norm(_convolved(w[0], x), w[2]))),
        (_FILTER, _FILTER, (128,)),
        _IMAGE,
    ),
    "pooled": (_pooled, (_FILTER,), _IMAGE),
    "sorted": (lambda w, x: x + jnp.sort(x @ w[0], axis=-1) @ w[1], (_SQUARE, _SQUARE), _TOKENS),
    "cumulative": (lambda w, x: x + jnp.cumsum(jax.nn.softplus(x @ w[0]), axis=1) @ w[1], (_SQUARE, _SQUARE), _TOKENS),
    "fourier": (lambda w, x: x + jnp.fft.fft2(x).real.astype(x.dtype) @ w[0], (_SQUARE,), _TOKENS),
}

LAYERS = (*_LAYERS_OF, *(f"{name}-bf16" for name in ("gated", "attended", "block", "perceptron", "residual")))


def layers_step(name: str) -> Step:
    """Two layers, a mean of squares, momentum; `-bf16` computes in bfloat16 over weights in float32."""
    layer, shapes, x = _LAYERS_OF[name.removesuffix("-bf16")]
    dtype = jnp.bfloat16 if name.endswith("-bf16") else jnp.float32

    def loss(layers: Any, x: jax.Array, wanted: jax.Array) -> jax.Array:
        for weights in layers:
            x = layer([w.astype(dtype) for w in weights], x)
        return jnp.mean(jnp.square(x.astype(jnp.float32) - wanted))

    def step(state: Any, x: jax.Array, wanted: jax.Array) -> Any:
        layers, momenta = state
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, jax.grad(loss)(layers, x, wanted))
        return jax.tree.map(lambda w, m: w - 1e-3 * m, layers, momenta), momenta

    weights = [[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]] * 2
    return Step(step, ((weights, weights), jax.ShapeDtypeStruct(x, dtype), jax.ShapeDtypeStruct(x, jnp.float32)))
