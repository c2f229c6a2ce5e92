"""Programs with loops and branches: every form that JAX has, as functions of stacked matrices and a batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

Step = Callable[[Any, Any], Any]


def descend(loss: Step, weights: Any, x: Any) -> Any:
    """One step of gradient descent: (weights, loss)."""
    value, gradients = jax.value_and_grad(loss)(weights, x)
    return weights - 0.1 * gradients, value


def layer(h: Any, w: Any) -> Any:
    return jnp.tanh(h @ w)


def scan_loss(weights: Any, x: Any) -> Any:
    """Carries, stacks in, stacks out, and a constant of the loop."""
    scale = weights[0].mean(0)
    last, sums = jax.lax.scan(lambda h, w: (layer(h, w) * (1 + scale), h.sum(1)), x, weights)
    return (last**2).mean() + 1e-3 * (sums**2).mean()


def reverse_loss(weights: Any, x: Any) -> Any:
    last, every = jax.lax.scan(lambda h, w: (layer(h, w), layer(h, w.T)), x, weights, reverse=True)
    return (last * every[1]).mean()


def nested_loss(weights: Any, x: Any) -> Any:
    def outer(h: Any, w: Any) -> Any:
        return jax.lax.scan(lambda g, _: (layer(g, w) + h, None), h, None, length=2)[0], None

    return (jax.lax.scan(outer, x, weights)[0] ** 2).mean()


def unrolled_loss(weights: Any, x: Any) -> Any:
    return (jax.lax.scan(lambda h, w: (layer(h, w), None), x, weights, unroll=2)[0] ** 2).mean()


def several_carries_loss(weights: Any, x: Any) -> Any:
    def body(carry: Any, w: Any) -> Any:
        h, total, count = carry
        h = layer(h, w)
        return (h, total + h.sum(0), count + 1), None

    (h, total, count), _ = jax.lax.scan(body, (x, jnp.zeros(x.shape[1:]), 0), weights)
    return (h**2).mean() + 1e-3 * (total**2).mean() / count


def checkpoint_loss(weights: Any, x: Any, policy: Any = None) -> Any:
    body = jax.checkpoint(lambda h, w: (layer(layer(h, w), w.T), None), policy=policy)
    return (jax.lax.scan(body, x, weights)[0] ** 2).mean()


def named_loss(weights: Any, x: Any) -> Any:
    """A policy by names."""

    def body(h: Any, w: Any) -> Any:
        h = checkpoint_name(layer(h, w), "kept")
        return layer(h, w.T), None

    policy = jax.checkpoint_policies.save_only_these_names("kept")
    return (jax.lax.scan(jax.checkpoint(body, policy=policy), x, weights)[0] ** 2).mean()


def unscanned_checkpoint_loss(weights: Any, x: Any) -> Any:
    block = jax.checkpoint(lambda h, w: layer(layer(h, w), w.T))
    for w in weights:
        x = block(x, w)
    return (x**2).mean()


def counted(weights: Any, x: Any) -> Any:
    return jax.lax.fori_loop(0, 5, lambda i, h: layer(h, weights[0]) + i, x)


def counted_by_carry(weights: Any, x: Any) -> Any:
    """A while loop with a bound that can be read off."""
    state = jax.lax.while_loop(lambda s: s[0] < 7, lambda s: (s[0] + 1, layer(s[1], weights[1])), (3, x))
    return state[1]


def until(weights: Any, x: Any) -> Any:
    """A while loop whose end depends on data, with constants in its condition."""
    bound = jnp.abs(x).sum() * 1e3

    def proceed(state: Any) -> Any:
        return (state[1] < 3) & (jnp.abs(state[0]).sum() < bound)

    return jax.lax.while_loop(proceed, lambda s: (layer(s[0], weights[1]), s[1] + 1), (x, 0))


def until_each(weights: Any, x: Any) -> Any:
    """Many while loops at once, by ``vmap``: each row stops when it is small, and the others go on."""

    def one(row: Any, size: Any) -> Any:
        return jax.lax.while_loop(lambda h: jnp.abs(h).max() > size, lambda h: layer(h, weights[0]) * 0.7, row)

    return jax.vmap(one)(x, jnp.abs(x[:, 0]))


def scanned_literal(weights: Any, x: Any) -> Any:
    """A scan that stacks a number of the program."""
    return jax.lax.scan(lambda h, w: (layer(h, w), jnp.float32(2)), x, weights)


def branches(weights: Any, x: Any) -> Any:
    return jax.lax.cond(x.sum() > 0, lambda a, w: a @ w, lambda a, w: (a * 2) @ w.T, x, weights[2])


def branches_loss(weights: Any, x: Any) -> Any:
    def body(h: Any, pair: Any) -> Any:
        number, w = pair
        return jax.lax.cond(number % 2 == 0, layer, lambda h, w: layer(h, w.T) + h, h, w), None

    return (jax.lax.scan(body, x, (jnp.arange(len(weights)), weights))[0] ** 2).mean()


def switching(weights: Any, x: Any) -> Any:
    ways = [lambda a: a @ weights[0], lambda a: a + 1, lambda a: jnp.cumsum(a, 0) @ weights[1]]
    return jax.lax.switch((x.sum() > 0).astype(jnp.int32) + 1, ways, x)


def mapped(weights: Any, x: Any) -> Any:
    return jax.lax.map(lambda w: layer(x, w).sum(0), weights), jax.lax.map(jnp.sort, x, batch_size=16)


def associative(weights: Any, x: Any) -> Any:
    def compose(one: Any, other: Any) -> Any:
        return one[0] * other[0], one[1] * other[0] + other[1]

    decay = jax.nn.sigmoid(x @ weights[0])
    return jax.lax.associative_scan(compose, (decay, x), axis=0)[1] @ weights[1]


def experts_loss(weights: Any, x: Any) -> Any:
    """Weighted experts added up one after another, with their results kept for the gradients of the weights."""
    chosen = jax.nn.softmax(x @ weights[0][:, : len(weights)])

    def add(total: Any, expert: Any) -> Any:
        w, weight = expert
        return total + (layer(x, w) @ w.T) * weight[:, None], None

    return (jax.lax.scan(add, jnp.zeros_like(x), (weights, chosen.T))[0] ** 2).mean()


def accumulating(weights: Any, x: Any) -> Any:
    """Gradient accumulation over microbatches, of layers that are arrays of their own."""
    micro = x.reshape(4, -1, x.shape[-1])
    layers = tuple(weights)

    def body(total: Any, part: Any) -> Any:
        value, gradients = jax.value_and_grad(unscanned_loss)(layers, part)
        return (jax.tree.map(jnp.add, total[0], gradients), total[1] + value), None

    (gradients, value), _ = jax.lax.scan(body, (jax.tree.map(jnp.zeros_like, layers), 0.0), micro)
    return tuple(w - 0.1 * g / len(micro) for w, g in zip(layers, gradients, strict=True)), value


def accumulating_scans(weights: Any, x: Any) -> Any:
    """Gradient accumulation over microbatches, of layers that are scanned."""
    micro = x.reshape(4, -1, x.shape[-1])

    def body(total: Any, part: Any) -> Any:
        value, gradients = jax.value_and_grad(checkpoint_loss)(weights, part)
        return (total[0] + gradients, total[1] + value), None

    (gradients, value), _ = jax.lax.scan(body, (jnp.zeros_like(weights), 0.0), micro)
    return weights - 0.1 * gradients / len(micro), value


def accumulating_on(weights: Any, x: Any) -> Any:
    """The first microbatch outside of the loop, whose sum begins with its gradient."""
    micro = x.reshape(4, -1, x.shape[-1])
    first = jax.value_and_grad(checkpoint_loss)(weights, micro[0])

    def body(i: Any, total: Any) -> Any:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(checkpoint_loss)(weights, micro[i]))

    value, gradients = jax.lax.fori_loop(1, len(micro), body, first)
    return weights - 0.1 * gradients / len(micro), value


def accumulating_within(weights: Any, x: Any) -> Any:
    """A loop that adds to the sum of the loop around it, which begins with a tensor of the caller's."""
    micro = x.reshape(2, 2, -1, x.shape[-1])

    def body(total: Any, part: Any) -> Any:
        return 0.9 * total + jax.grad(checkpoint_loss)(weights, part), None

    return weights - jax.lax.scan(lambda total, parts: jax.lax.scan(body, total, parts), weights, micro)[0]


def accumulating_while(weights: Any, x: Any) -> Any:
    micro = x.reshape(4, -1, x.shape[-1])

    def body(state: Any) -> Any:
        i, total = state
        return i + 1, total + jax.grad(checkpoint_loss)(weights, micro[i])

    return weights - jax.lax.while_loop(lambda state: state[0] < 4, body, (0, jnp.ones_like(weights)))[1]


def unscanned_loss(weights: Any, x: Any) -> Any:
    for w in weights:
        x = layer(x, w)
    return (x**2).mean()


@jax.custom_vjp
def clipped(h: Any, w: Any) -> Any:
    """A matrix product with a gradient of its own."""
    return h @ w


clipped.defvjp(lambda h, w: (h @ w, (h, w)), lambda kept, g: (jnp.clip(g, -1, 1) @ kept[1].T, kept[0].T @ g))


@jax.custom_jvp
def softened(h: Any) -> Any:
    return jnp.maximum(h, 0)


@softened.defjvp
def _softened_jvp(primals: Any, tangents: Any) -> Any:
    return softened(primals[0]), jax.nn.sigmoid(primals[0]) * tangents[0]


def custom_loss(weights: Any, x: Any) -> Any:
    return (jax.lax.scan(lambda h, w: (softened(clipped(h, w)), None), x, weights)[0] ** 2).mean()


def custom_forward(weights: Any, x: Any) -> Any:
    return softened(clipped(x, weights[0]))


def vmapped_loss(weights: Any, x: Any) -> Any:
    def one(row: Any) -> Any:
        return jax.lax.scan(lambda h, w: (layer(h, w), None), row, weights)[0]

    return (jax.vmap(one)(x) ** 2).mean()


def truncated_loss(weights: Any, x: Any) -> Any:
    """A recurrence over time that reads a time-major sequence."""
    times = jnp.moveaxis(x.reshape(x.shape[0] // 8, 8, -1), 1, 0)
    start = jnp.zeros_like(times[0])
    _, every = jax.lax.scan(lambda h, part: (layer(h, weights[0]) + layer(part, weights[1]),) * 2, start, times)
    return (every**2).mean()


_POLICY = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

LOSSES: dict[str, Step] = {
    "scan": scan_loss,
    "reverse": reverse_loss,
    "nested": nested_loss,
    "unrolled": unrolled_loss,
    "several carries": several_carries_loss,
    "checkpoint": checkpoint_loss,
    "checkpoint, dots": partial(checkpoint_loss, policy=_POLICY),
    "checkpoint, everything": partial(checkpoint_loss, policy=jax.checkpoint_policies.everything_saveable),
    "checkpoint, names": named_loss,
    "checkpoint, no loop": unscanned_checkpoint_loss,
    "branches in a loop": branches_loss,
    "custom rules": custom_loss,
    "vmapped loop": vmapped_loss,
    "recurrence": truncated_loss,
    "experts": experts_loss,
}

FORMS: dict[str, Step] = {
    **{name: partial(descend, loss) for name, loss in LOSSES.items()},
    "fori": counted,
    "while, counted": counted_by_carry,
    "while": until,
    "while, many": until_each,
    "scan of a literal": scanned_literal,
    "cond": branches,
    "switch": switching,
    "map": mapped,
    "associative scan": associative,
    "accumulation": accumulating,
    "accumulation, scanned": accumulating_scans,
    "accumulation, begun": accumulating_on,
    "accumulation, nested": accumulating_within,
    "accumulation, while": accumulating_while,
    "custom rules, forward": custom_forward,
}
"""Every form as ``(weights [layers, n, n], x [batch, n]) -> results``."""
