"""Networks drawn from a seed: a stem, some blocks of drawn kinds and sizes, a loss, an optimizer, a precision."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from tests.fidelity.steps import Step

Weights = dict[str, Any]
Block = Callable[[Weights, jax.Array], jax.Array]


def drawn_step(seed: int) -> Step:
    """The training step of a seed: of tokens for even ones, of images for one in three of the others."""
    draw = random.Random(seed)
    dtype = draw.choice([jnp.float32, jnp.bfloat16])
    make = _images if seed % 6 == 1 else _tokens
    params, batch, loss = make(draw, dtype)
    optimizer = draw.choice([optax.adamw(1e-3), optax.sgd(0.1), optax.sgd(0.1, momentum=0.9), optax.lion(1e-4)])
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optimizer) if draw.random() < 0.4 else optimizer
    state = {"params": params, "opt": jax.eval_shape(clipped.init, params)}
    parts = draw.choice([1, 1, 1, 4])

    def gradients(params: Weights, batch: Any) -> tuple[jax.Array, Weights]:
        if parts == 1:
            return jax.value_and_grad(loss)(params, batch)
        split = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)

        def add(total: Any, part: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, part)), None

        zero = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
        return jax.tree.map(lambda x: x / parts, lax.scan(add, zero, split)[0])

    def step(state: Any, batch: Any) -> Any:
        value, found = gradients(state["params"], batch)
        updates, opt = clipped.update(found, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    return Step(step, (state, batch))


def _shape(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _norm(kind: str, gain: jax.Array, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True) if kind == "layer" else wide
    return (centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6) * gain).astype(x.dtype)


def _cast(weights: Weights, dtype: Any) -> Weights:
    return jax.tree.map(lambda w: w.astype(dtype), weights)


def _tokens(draw: random.Random, dtype: Any) -> tuple[Weights, Any, Callable[[Weights, Any], jax.Array]]:
    width, heads = draw.choice([256, 512, 768]), draw.choice([4, 8])
    length, rows, words = draw.choice([128, 256, 1024]), draw.choice([16, 32]), draw.choice([4096, 16384, 32768])
    kinds = [
        draw.choice(["attention", "gated", "dense", "mixer", "window", "recurrent"])
        for _ in range(draw.choice([3, 4, 6]))
    ]
    norm, checkpoints, tied = draw.choice(["layer", "rms"]), draw.random() < 0.3, draw.random() < 0.5
    activation = draw.choice([jax.nn.gelu, jax.nn.relu, jax.nn.silu])
    blocks = [_token_block(kind, draw, width, heads, length, activation) for kind in kinds]
    params: Weights = {f"block_{n}": {"norm": _shape(width), **weights} for n, (weights, _) in enumerate(blocks)}
    params["words"] = _shape(words, width)
    params |= {} if tied else {"head": _shape(width, words)}

    def loss(params: Weights, ids: jax.Array) -> jax.Array:
        norms = {name: p["norm"] for name, p in params.items() if "block" in name}
        params = _cast(params, dtype)
        x = params["words"][ids]
        for number, (_, block) in enumerate(blocks):
            name = f"block_{number}"

            def apply(p: Weights, gain: jax.Array, x: jax.Array, block: Block = block) -> jax.Array:
                return x + block(p, _norm(norm, gain, x))

            x = (jax.checkpoint(apply) if checkpoints else apply)(params[name], norms[name], x)
        logits = (x @ (params["words"].T if tied else params["head"])).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()

    return params, _shape(rows, length, dtype=jnp.int32), loss


def _token_block(
    kind: str, draw: random.Random, width: int, heads: int, length: int, activation: Callable[[jax.Array], jax.Array]
) -> tuple[Weights, Block]:
    wide = width * draw.choice([2, 4])
    causal = draw.random() < 0.5

    def attention(p: Weights, x: jax.Array) -> jax.Array:
        q, k, v = ((x @ p[n]).reshape(*x.shape[:2], heads, -1) for n in "qkv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
        if causal:
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(x.dtype), v)
        return mixed.reshape(x.shape) @ p["o"]

    def recurrent(p: Weights, x: jax.Array) -> jax.Array:
        gate, update = jax.nn.sigmoid(x @ p["a"]), x @ p["b"]

        def body(h: jax.Array, at: Any) -> Any:
            h = at[0] * h + (1 - at[0]) * at[1]
            return h, h

        parts = jnp.swapaxes(gate, 0, 1), jnp.swapaxes(update, 0, 1)
        return jnp.swapaxes(lax.scan(body, jnp.zeros_like(x[:, 0]), parts)[1], 0, 1) @ p["c"]

    square = _shape(width, width)
    found: dict[str, tuple[Weights, Block]] = {
        "attention": ({n: square for n in "qkvo"}, attention),
        "gated": (
            {"g": _shape(width, wide), "u": _shape(width, wide), "d": _shape(wide, width)},
            lambda p, x: (activation(x @ p["g"]) * (x @ p["u"])) @ p["d"],
        ),
        "dense": (
            {"u": _shape(width, wide), "c": _shape(wide), "d": _shape(wide, width)},
            lambda p, x: activation(x @ p["u"] + p["c"]) @ p["d"],
        ),
        "mixer": (
            {"u": _shape(length, length), "d": square},
            lambda p, x: activation(jnp.einsum("btd,ts->bsd", x, p["u"])) @ p["d"],
        ),
        "window": (
            {"w": _shape(3, 1, width), "d": square},
            lambda p, x: (
                activation(
                    lax.conv_general_dilated(
                        x, p["w"], (1,), [(2, 0)], dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=width
                    )
                )
                @ p["d"]
            ),
        ),
        "recurrent": ({n: square for n in "abc"}, recurrent),
    }
    return found[kind]


def _images(draw: random.Random, dtype: Any) -> tuple[Weights, Any, Callable[[Weights, Any], jax.Array]]:
    size, rows, classes = draw.choice([64, 112]), draw.choice([64, 128]), 1000
    channels = [draw.choice([64, 128])]
    kinds = [draw.choice(["plain", "residual", "strided"]) for _ in range(draw.choice([3, 5]))]
    batch_norm, pooled = draw.random() < 0.6, draw.random() < 0.5
    params: Weights = {"stem": _shape(3, 3, 3, channels[0])}
    for number, kind in enumerate(kinds):
        channels.append(channels[-1] * (2 if kind == "strided" else 1))
        params[f"block_{number}"] = {
            "w": _shape(3, 3, channels[-2], channels[-1]),
            "g": _shape(channels[-1]),
            "b": _shape(channels[-1]),
        }
    params["head"] = _shape(channels[-1], classes)

    def convolve(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
        return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def normalize(x: jax.Array, p: Weights) -> jax.Array:
        if not batch_norm:
            return x + p["b"]
        wide = x.astype(jnp.float32)
        mean, variance = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
        return ((wide - mean) * lax.rsqrt(variance + 1e-5) * p["g"] + p["b"]).astype(x.dtype)

    def loss(params: Weights, batch: Any) -> jax.Array:
        images, labels = batch
        params = _cast(params, dtype)
        x = convolve(images.astype(dtype), params["stem"])
        for number, kind in enumerate(kinds):
            p = params[f"block_{number}"]
            y = jax.nn.relu(normalize(convolve(x, p["w"], 2 if kind == "strided" else 1), p))
            x = x + y if kind == "residual" else y
        if pooled:
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
        logits = (x.mean((1, 2)) @ params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return params, (_shape(rows, size, size, 3), _shape(rows, dtype=jnp.int32)), loss
