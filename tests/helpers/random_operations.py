"""Random operations for random programs: loops, branches, computed indices, windows, orders, and wrappers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.helpers.random_programs import random_values

Drawn = jax.Array | None


def _pick(draw: random.Random, values: Sequence[jax.Array], rank: int = 1) -> jax.Array | None:
    able = [v for v in values if v.ndim >= rank and v.size]
    return draw.choice(able[-6:]) if able else None


def _like(seed: int, value: jax.Array) -> jax.Array:
    """A random function of a value, of its shape."""
    made = random_values(seed, [value], 2)[-1]
    return jnp.tanh(made) if made.shape == value.shape else value + jnp.tanh(jnp.mean(made))


def loop(draw: random.Random, values: Sequence[jax.Array]) -> Drawn:
    value = _pick(draw, values)
    if value is None:
        return None
    seed, times, reverse = draw.randrange(1 << 30), draw.randint(2, 4), draw.random() < 0.5
    first = jnp.zeros(value.shape[1:])
    rows = value.shape[0]

    def place(carry: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        row = lax.dynamic_index_in_dim(carry, (i + 1) % rows, 0, keepdims=False)
        return carry.at[i % rows].set(jnp.tanh(row + 1)), row

    def summed(total: jax.Array, scale: jax.Array) -> tuple[jax.Array, None]:
        return total + jax.grad(lambda w: jnp.sum(jnp.sin(w * scale)))(value), None

    still = lax.stop_gradient(value)
    forms: tuple[Callable[[], Any], ...] = (
        lambda: lax.scan(lambda c, _: (_like(seed, c), None), value, None, length=times)[0],
        lambda: lax.scan(lambda c, x: (jnp.tanh(c + x), c), first, value, reverse=reverse)[1],
        lambda: lax.scan(lambda c, x: ((c[1], jnp.tanh(c[0] + x)), c[0]), (value, value * 2), jnp.arange(3.0))[0][0],
        lambda: lax.scan(place, value, jnp.arange(times))[draw.randrange(2)],
        lambda: lax.scan(summed, jnp.zeros_like(value), jnp.arange(3.0))[0],
        lambda: lax.fori_loop(0, times, lambda i, c: _like(seed, c) * (1 + 0.1 * i), value),
        lambda: lax.while_loop(lambda s: s[0] < times, lambda s: (s[0] + 1, _like(seed, s[1])), (0, still))[1],
        lambda: jax.vmap(lambda x: lax.while_loop(lambda s: jnp.abs(s).max() > 0.5, lambda s: s * 0.6, x))(still),
        lambda: lax.map(lambda x: jnp.sin(x) + jnp.sum(x), value, batch_size=draw.choice((None, 2))),
        lambda: lax.associative_scan(
            lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (jax.nn.sigmoid(value), value), reverse=reverse
        )[1],
    )
    return draw.choice(forms)()


def branch(draw: random.Random, values: Sequence[jax.Array]) -> Drawn:
    value = _pick(draw, values)
    if value is None:
        return None
    one, other = (partial(_like, draw.randrange(1 << 30)) for _ in range(2))
    forms: tuple[Callable[[], jax.Array], ...] = (
        lambda: lax.cond(jnp.mean(value) > 0, one, other, value),
        lambda: lax.switch(jnp.argmax(value.reshape(-1)) % 3, [jnp.sin, one, jnp.ones_like], value),
        lambda: jax.vmap(lambda x: lax.cond(x.sum() > 0, lambda c: c * 2, jnp.sin, x))(value),
        lambda: lax.select_n(value > 0, value, one(value)),
    )
    return draw.choice(forms)()


def index(draw: random.Random, values: Sequence[jax.Array]) -> Drawn:
    value = _pick(draw, values)
    if value is None:
        return None
    axis = draw.randrange(value.ndim)
    size, rows = value.shape[axis], value.shape[0]
    ids = (lax.stop_gradient(value).reshape(-1)[:6] * 5).astype(jnp.int32)  # some are outside
    updates = jnp.ones((len(ids), *value.shape[1:]))
    part = lax.slice_in_dim(value, 0, max(1, size // 2), axis=axis)
    forms: tuple[Callable[[], jax.Array], ...] = (
        lambda: jnp.take(value, ids, axis, mode=draw.choice(("clip", "wrap", "fill")), fill_value=0.5),
        lambda: value.at[ids].add(updates, mode=draw.choice(("drop", "clip"))),
        lambda: value.at[ids].max(updates, mode="drop"),
        lambda: value.at[::2].multiply(3.0),
        lambda: value[::-2],
        lambda: lax.dynamic_slice_in_dim(value, ids[0], max(1, size // 2), axis),
        lambda: lax.dynamic_update_slice_in_dim(value, jnp.tanh(part), ids[0], axis),
        lambda: lax.dynamic_index_in_dim(value, ids[0] % size, axis, keepdims=False),
        lambda: jnp.put_along_axis(value, jnp.argmin(value, axis, keepdims=True), 9.0, axis, inplace=False),
        lambda: value.at[ids[0] % rows].add(1.0),
        lambda: jnp.tril(value) if value.ndim > 1 else jnp.diag(value),
        lambda: jax.vmap(lambda x, i: jnp.roll(x, i, 0))(value, jnp.arange(rows)) if value.ndim > 1 else value,
    )
    return draw.choice(forms)()


def order(draw: random.Random, values: Sequence[jax.Array]) -> Drawn:
    value = _pick(draw, values)
    if value is None:
        return None
    axis, reverse = draw.randrange(value.ndim), draw.random() < 0.5
    whole = (value * 4).astype(jnp.int32)
    forms: tuple[Callable[[], jax.Array], ...] = (
        lambda: jnp.argmax(value, axis) * 0.1,
        lambda: lax.sort((value, jnp.cos(value)), dimension=axis, num_keys=1)[1],
        lambda: lax.sort((whole, value), dimension=axis, num_keys=2)[1],
        lambda: lax.cumlogsumexp(value, axis, reverse=reverse),
        lambda: lax.cumprod(jnp.clip(value, -1.2, 1.2), axis, reverse=reverse),
        lambda: lax.top_k(value, max(1, value.shape[-1] // 2))[1] * 0.1,
        lambda: jnp.abs(jnp.fft.fft(value, axis=axis)) * 0.3,
        lambda: jnp.real(lax.complex(value, jnp.cos(value)) * jnp.exp(1j * value)),
        lambda: (value.astype(jnp.bfloat16) * 2).astype(jnp.float32),
        lambda: jnp.any(value > 1, axis) + jnp.all(value < 1, axis).astype(jnp.float32),
        lambda: (whole // 3 + whole % 5 + (whole << 2)).sum(axis) * 0.01,
        lambda: jnp.prod(jnp.clip(value, 0.5, 1.5), axis),
    )
    return draw.choice(forms)()


def window(draw: random.Random, values: Sequence[jax.Array]) -> Drawn:
    value = _pick(draw, values, 2)
    if value is None:
        return None
    flat = value.reshape(value.shape[0], -1, value.shape[-1]) if value.ndim > 2 else value[None]
    channels, numbers = flat.shape[-1], ("NHC", "HIO", "NHC")

    def convolved(taps: int, padding: Any, inner: int = channels, outer: int = 4, **params: Any) -> jax.Array:
        kernel = jnp.cos(jnp.arange(float(taps * inner * outer))).reshape(taps, inner, outer)
        made = lax.conv_general_dilated(flat, kernel, (1,), padding, dimension_numbers=numbers, **params)
        return jnp.tanh(made / channels)

    forms: tuple[Callable[[], jax.Array], ...] = (
        lambda: lax.reduce_window(flat, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "SAME"),
        lambda: lax.reduce_window(flat, 0.0, lax.add, (1, 3, 1), (1, 1, 1), ((0, 0), (2, 0), (0, 0))) / 3,
        lambda: convolved(3, "SAME", 1, channels, feature_group_count=channels),
        lambda: convolved(3, [(4, 0)], rhs_dilation=(2,)),
        lambda: convolved(5, "SAME"),
        lambda: convolved(3, [(1, 1)], lhs_dilation=(2,)),
        lambda: lax.pad(value, 0.0, [(0, 0, 0)] * (value.ndim - 1) + [(1, -1, 1)]),
    )
    return draw.choice(forms)()


@jax.custom_vjp
def _clipped(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


_clipped.defvjp(lambda x: (jnp.tanh(x), jnp.tanh(x)), lambda y, g: (jnp.clip(g * (1 - y * y), -1, 1),))


def wrapped(draw: random.Random, values: Sequence[jax.Array]) -> Drawn:
    value = _pick(draw, values, 2)
    if value is None:
        return None
    inner = partial(_like, draw.randrange(1 << 30))
    rows = value.reshape(-1, value.shape[-1])
    matrices = jnp.sin(jnp.arange(4.0 * 8 * rows.shape[1])).reshape(4, -1, 8)
    half, quarter = len(rows) // 2, len(rows) // 4
    groups = jnp.asarray(np.array([half, 0, len(rows) - half - quarter, quarter], np.int32))
    forms: tuple[Callable[[], jax.Array], ...] = (
        lambda: _clipped(value),
        lambda: jax.checkpoint(inner, policy=jax.checkpoint_policies.dots_saveable)(value),
        lambda: jax.vmap(inner)(value),
        lambda: jax.grad(lambda x: jnp.sum(inner(x)))(value),
        lambda: jax.jvp(inner, (value,), (jnp.ones_like(value),))[1],
        lambda: lax.optimization_barrier(value) * 2,
        lambda: jnp.tanh(lax.ragged_dot(rows, matrices, groups) / 4),
        lambda: value + jax.random.normal(jax.random.key(7), value.shape) * 0.1,
    )
    return draw.choice(forms)()


def _bounded(operation: Callable[..., Drawn]) -> Callable[..., Drawn]:
    def made(draw: random.Random, values: Sequence[jax.Array]) -> Drawn:
        found = operation(draw, values)
        return None if found is None else jnp.clip(found.astype(jnp.float32), -8, 8)

    return made


OPERATIONS = tuple(map(_bounded, (loop, loop, branch, index, index, order, order, window, wrapped)))
