"""Random programs, drawn from a seed, and random plans of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

import shardplan
from shardplan.plans.pipeline import planned_arguments, planned_collectives
from shardplan.problem.schedule import Schedule
from shardplan.search import solve

SHAPES = ((8, 16), (16, 8), (8, 24), (4, 8, 6), (2, 16, 4), (16,), (8, 4, 2, 2), (3, 8))
MOST_ELEMENTS = 4096


def mesh_of(sizes: Sequence[int], explicit: bool = False) -> Mesh:
    """A mesh of the first emulated devices."""
    kind = AxisType.Explicit if explicit else AxisType.Auto
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(tuple(sizes), ("x", "y", "z")[: len(sizes)], axis_types=(kind,) * len(sizes), devices=devices)


def with_schedule(plan: shardplan.Plan, schedule: Schedule) -> shardplan.Plan:
    """The plan of another schedule of the same program."""
    arguments, collectives = planned_arguments(schedule), planned_collectives(schedule)
    return replace(plan, built=schedule, arguments=arguments, collectives=collectives)


def scrambled(plan: shardplan.Plan, seed: int) -> shardplan.Plan:
    """The same program with random layouts and strategies among all possible ones."""
    problem = plan.schedule.problem
    draw = np.random.default_rng(seed)
    costs = list(problem.network.costs)
    problem.network.costs[:] = [c + 1e9 * draw.random(c.shape) for c in costs]
    solution = solve(problem.network, time_limit=5.0, gap=0.5)
    problem.network.costs[:] = costs
    return with_schedule(plan, Schedule(problem, problem.decode(solution.choices)))


def run(plan: shardplan.Plan, mesh: Mesh, *args: Any) -> Any:
    """The results of a planned step for arguments in any layout."""
    leaves, structure = jax.tree.flatten(args)
    placed = [jax.device_put(leaf, s) for leaf, s in zip(leaves, plan.leaf_shardings(mesh), strict=True)]
    return plan.jitted(mesh)(*jax.tree.unflatten(structure, placed))


def assert_equal_trees(found: Any, expected: Any, tolerance: float = 1e-4) -> None:
    """Equal structures, types and, up to rounding relative to the largest element, values."""
    assert jax.tree.map(lambda _: 0, found) == jax.tree.map(lambda _: 0, expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        one, other = np.asarray(one), np.asarray(other)
        if one.dtype.kind in "fc" and one.size:
            scale = float(np.max(np.abs(other), initial=1e-3, where=np.isfinite(other)))
            np.testing.assert_allclose(one / scale, other / scale, rtol=0, atol=tolerance)
        else:
            np.testing.assert_array_equal(one, other)


def inputs_of(seed: int) -> dict[str, jax.Array]:
    """Two to four float arrays."""
    draw = random.Random(seed)
    shapes = [draw.choice(SHAPES) for _ in range(draw.randint(2, 4))]
    values = np.random.default_rng(seed)
    return {f"p{n}": jnp.asarray(values.normal(size=shape), jnp.float32) for n, shape in enumerate(shapes)}


def random_step(seed: int, length: int = 8) -> Callable[..., Any]:
    """A training step ``(params, batch) -> (params, loss)`` over a random function of its arrays."""

    def loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        return sum_of_means(random_values(seed, [*params.values(), batch], length))

    def step(params: dict[str, jax.Array], batch: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, gradients), value

    return step


def sum_of_means(values: Sequence[jax.Array]) -> jax.Array:
    return sum(
        (jnp.mean(jnp.sin(v)) for v in values if v.size and jnp.issubdtype(v.dtype, jnp.floating)), jnp.float32(0)
    )


def random_values(seed: int, arrays: Sequence[jax.Array], length: int) -> list[jax.Array]:
    """Arrays made from ``arrays`` by so many operations, the same for the same seed and shapes."""
    draw = random.Random(seed)
    values = list(arrays)
    for _ in range(length):
        made = draw.choice(OPERATIONS)(draw, values)
        if made is not None and 0 < made.size <= MOST_ELEMENTS and made.ndim <= 4:
            values.append(made)
    return values[len(arrays) :] or [values[0] * 2]


def _pick(draw: random.Random, values: Sequence[jax.Array], rank: int = 1) -> jax.Array | None:
    able = [v for v in values if v.ndim >= rank]
    return draw.choice(able[-6:]) if able else None


def _axis(draw: random.Random, value: jax.Array) -> int:
    return draw.randrange(value.ndim)


def _unary(draw: random.Random, values: Sequence[jax.Array]) -> jax.Array | None:
    functions = (jnp.tanh, jnp.sin, jax.nn.gelu, jax.nn.silu, lambda v: jnp.where(v > 0.3, v, 0.1 * v), jnp.square)
    value = _pick(draw, values, 0)
    return None if value is None else draw.choice(functions)(jnp.clip(value, -4, 4))


def _binary(draw: random.Random, values: Sequence[jax.Array]) -> jax.Array | None:
    one = _pick(draw, values, 0)
    fitting = [] if one is None else [v for v in values if v.shape == one.shape or v.ndim == 0]
    if one is None or not fitting:
        return None
    return draw.choice((jnp.add, jnp.multiply, jnp.subtract, jnp.maximum))(one, draw.choice(fitting))


def _contract(draw: random.Random, values: Sequence[jax.Array]) -> jax.Array | None:
    one, other = _pick(draw, values), _pick(draw, values)
    if one is None or other is None:
        return None
    pairs = [(i, j) for i, n in enumerate(one.shape) for j, m in enumerate(other.shape) if n == m]
    if not pairs:
        return None
    draw.shuffle(pairs)
    left, right = "abcd"[: one.ndim], list("efgh"[: other.ndim])
    used: set[int] = set()
    for i, j in pairs[: draw.randint(1, 2)]:
        if i not in used and right[j] in "efgh":
            used.add(i)
            right[j] = left[i]
    letters = [c for c in dict.fromkeys(left + "".join(right))]
    shared = [c for c in left if c in right]
    summed = set(draw.sample(shared, draw.randint(1, len(shared))))
    kept = [c for c in letters if c not in summed]
    draw.shuffle(kept)
    sizes = dict(zip(left, one.shape, strict=True)) | dict(zip(right, other.shape, strict=True))
    if np.prod([sizes[c] for c in kept], initial=1) > MOST_ELEMENTS:
        return None
    return jnp.tanh(jnp.einsum(f"{left},{''.join(right)}->{''.join(kept)}", one, other) / 4)


def _reshape(draw: random.Random, values: Sequence[jax.Array]) -> jax.Array | None:
    value = _pick(draw, values)
    if value is None:
        return None
    left, shape = value.size, []
    for _ in range(draw.randint(0, 2)):
        size = draw.choice([n for n in range(1, left + 1) if left % n == 0])
        shape.append(size)
        left //= size
    return value.reshape(*shape, left)


def _move(draw: random.Random, values: Sequence[jax.Array]) -> jax.Array | None:
    value = _pick(draw, values)
    if value is None:
        return None
    axis = _axis(draw, value)
    shift = draw.randint(1, 3)
    moves: tuple[Callable[[jax.Array], jax.Array], ...] = (
        lambda v: jnp.transpose(v, draw.sample(range(v.ndim), v.ndim)),
        lambda v: jnp.flip(v, axis),
        lambda v: jnp.roll(v, shift, axis),
        lambda v: jnp.pad(v, [(1, 1) if d == axis else (0, 0) for d in range(v.ndim)]),
        lambda v: jax.lax.slice_in_dim(v, 0, max(1, v.shape[axis] // 2), axis=axis),
        lambda v: jax.lax.slice_in_dim(v, v.shape[axis] % 2, v.shape[axis], stride=2, axis=axis),
        lambda v: jnp.concatenate([v, 2 * v], axis),
        lambda v: jnp.stack([v, -v], axis),
        lambda v: jnp.expand_dims(v, axis),
        lambda v: jnp.repeat(v, 2, axis),
        lambda v: jnp.split(v, [max(1, v.shape[axis] // 2)], axis)[0],
    )
    return draw.choice(moves)(value)


def _reduce(draw: random.Random, values: Sequence[jax.Array]) -> jax.Array | None:
    value = _pick(draw, values)
    if value is None:
        return None
    axes = tuple(draw.sample(range(value.ndim), draw.randint(1, value.ndim)))
    keep = draw.random() < 0.3
    reducer = draw.choice((jnp.sum, jnp.mean, jnp.max, jnp.min, jnp.var, jax.scipy.special.logsumexp))
    return jnp.tanh(reducer(value, axis=axes, keepdims=keep))


def _along(draw: random.Random, values: Sequence[jax.Array]) -> jax.Array | None:
    value = _pick(draw, values)
    if value is None:
        return None
    axis = _axis(draw, value)
    functions: tuple[Callable[[jax.Array], jax.Array], ...] = (
        lambda v: jax.nn.softmax(v, axis),
        lambda v: jnp.cumsum(v, axis) / 4,
        lambda v: jnp.sort(v, axis),
        lambda v: jax.lax.cummax(v, axis),
        lambda v: jax.lax.top_k(v, max(1, v.shape[-1] // 2))[0],
        lambda v: v - jnp.mean(v, axis, keepdims=True),
    )
    return draw.choice(functions)(value)


def _index(draw: random.Random, values: Sequence[jax.Array]) -> jax.Array | None:
    value = _pick(draw, values)
    if value is None:
        return None
    axis = _axis(draw, value)
    size = value.shape[axis]
    ids = (jnp.arange(8) * draw.choice((1, 3, 5)) + draw.randint(0, 3)) % size
    functions: tuple[Callable[[jax.Array], jax.Array], ...] = (
        lambda v: jnp.take(v, ids, axis),
        lambda v: jnp.take(v, ids.reshape(4, 2), axis) if v.ndim < 4 else v,
        lambda v: jnp.take_along_axis(v, jnp.argsort(jax.lax.stop_gradient(v), axis), axis),
        lambda v: jnp.zeros((16, *v.shape[1:]), v.dtype).at[jnp.arange(v.shape[0]) * 3 % 16].add(v),
        lambda v: v.at[0].set(0.5),
        lambda v: jax.lax.dynamic_slice_in_dim(v, jnp.argmax(v) % 2, max(1, size // 2), axis),
        lambda v: jax.lax.dynamic_update_slice_in_dim(v, jnp.ones_like(v[:1]), 0, 0),
        lambda v: v * jax.nn.one_hot(jnp.argmax(v, -1), v.shape[-1]),
    )
    return draw.choice(functions)(value)


def _window(draw: random.Random, values: Sequence[jax.Array]) -> jax.Array | None:
    value = _pick(draw, values, 2)
    if value is None:
        return None
    flat = value.reshape(value.shape[0], -1, value.shape[-1]) if value.ndim > 2 else value[None]
    channels = flat.shape[-1]
    kernel = jnp.cos(jnp.arange(3 * channels * 8, dtype=jnp.float32)).reshape(3, channels, 8)
    if draw.random() < 0.5:
        return jax.lax.reduce_window(flat, 0.0, jax.lax.add, (1, 3, 1), (1, draw.choice((1, 2)), 1), "SAME") / 3
    numbers = ("NHC", "HIO", "NHC")
    padding = draw.choice(("SAME", "VALID"))
    if flat.shape[1] < 3:
        return None
    return jnp.tanh(jax.lax.conv_general_dilated(flat, kernel, (1,), padding, dimension_numbers=numbers) / channels)


def _wrapped(draw: random.Random, values: Sequence[jax.Array]) -> jax.Array | None:
    """A few more operations inside of a call."""
    seed = draw.randrange(1 << 30)
    wrap = draw.choice((jax.jit, jax.checkpoint, lambda f: f))
    arrays = values[-3:]
    return wrap(lambda *v: random_values(seed, v, 2)[-1])(*arrays)


OPERATIONS = (
    _unary, _binary, _binary, _contract, _contract, _contract, _reshape, _reshape, _move, _move, _reduce, _along,
    _along, _index, _index, _window, _wrapped,
)  # fmt: skip
