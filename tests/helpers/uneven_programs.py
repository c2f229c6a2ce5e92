"""Small programs over sizes that no mesh divides, and plans of them with as many padded splits as possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh

import shardplan
from shardplan.hardware import load
from shardplan.layout.layout import LayoutSpace
from shardplan.layout.mesh import mesh_axes
from shardplan.layout.objectives.bytes_sent import BytesSent
from shardplan.options import Options
from shardplan.plans.pipeline import plan_problem
from shardplan.problem.cost_network import Problem
from shardplan.problem.schedule import Schedule
from shardplan.problem.shared_tables import SharedTables
from shardplan.program.tracing import trace_program
from shardplan.search import solve
from tests.helpers.random_programs import with_schedule

ROWS, COLUMNS = 21, 10


def padded_plan(fn: Callable[..., Any], mesh: Mesh | AbstractMesh, args: Any, seed: int = 0) -> shardplan.Plan:
    """A random plan of those with the most uneven splits. Every size of the program may be padded."""
    program = trace_program(fn, args)
    axes = mesh_axes(mesh)
    sizes = frozenset(size for value in program.values for size in value.shape)
    problem = Problem(program, SharedTables(LayoutSpace(axes, sizes), BytesSent(load("h100"), axes)), {})
    plan = shardplan.Plan.of(plan_problem(problem, mesh, Options()))
    network, costs = problem.network, list(problem.network.costs)
    draw = np.random.default_rng(seed)
    network.costs[:] = [
        cost + 1e9 * draw.random(cost.shape) + 1e9 * ~evenly
        for cost, evenly in zip(costs, _padded_choices(problem), strict=True)
    ]
    solution = solve(network, time_limit=5.0, gap=0.5)
    network.costs[:] = costs
    return with_schedule(plan, Schedule(problem, problem.decode(solution.choices)))


def _padded_choices(problem: Problem) -> list[np.ndarray]:
    """bool [choices] per variable: the padded choices, or all if there are none."""
    found = [np.ones(size, bool) for size in problem.variables.sizes]
    for value, variable in (*problem.variables.values.items(), *problem.variables.copies.items()):
        domain = problem.domain(value)
        found[variable] = np.array([layout in domain.padded for layout in domain.layouts])
    for operation, variable in problem.variables.operations.items():
        found[variable] = np.array([strategy.padded for strategy in problem.choices[operation].strategies])
    return found


def padded_primitives(plan: shardplan.Plan) -> set[str]:
    """The primitives that a plan runs on padded blocks."""
    operations = plan.schedule.program.operations
    strategies = plan.schedule.assignment.strategies
    return {operations[index].primitive.name for index, strategy in strategies.items() if strategy.padded}


def values(*shape: int, seed: int = 0) -> jax.Array:
    """Normal numbers."""
    return jnp.asarray(np.random.default_rng(seed + sum(shape)).normal(size=shape), jnp.float32)


def numbers(most: int, *shape: int) -> jax.Array:
    """Integers from 0 up to ``most``, exclusive."""
    return jnp.asarray(np.random.default_rng(1).integers(0, most, shape), jnp.int32)


def _inner(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function between others: neither its operands nor its results are a step's own, whose splits are even.

    It sees numbers below 0 first, then above. Padding would be -1 and 3.
    """

    def around(*args: Any) -> Any:
        def floating(array: Any) -> bool:
            return jnp.issubdtype(array.dtype, jnp.floating)

        shifted = (jnp.cos(a) + (2 if n else -2) if floating(a) else jnp.abs(a) for n, a in enumerate(args))
        results = fn(*shifted)
        return jax.tree.map(lambda r: ~r if r.dtype == bool else r * 2, results)

    return around


def _elements(a: Any, b: Any) -> Any:
    kept = jnp.where(b > 0, jnp.log(jnp.abs(a) + 1e-3), b / (1 + a * a))
    counted = a * lax.broadcasted_iota(jnp.float32, a.shape, 0) / 21
    return a[:, None, :] + b[None], kept, counted, jnp.clip(a, -0.1, 0.1), a > b, a.T + 1, a.astype(jnp.bfloat16) * 2


def _products(a: Any, b: Any) -> Any:
    """Dots whose first contraction would be infinite in the padding."""
    wild = jnp.where(a == -1, -jnp.inf, a).T @ jnp.where(b == 3, jnp.inf, b)
    batched = jnp.einsum("bij,bkj->bik", a.reshape(ROWS, 5, 2), b.reshape(ROWS, 5, 2))
    return a @ b.T, wild / 100, batched, jnp.einsum("ij,ik->jk", a, b), (a @ b.T) @ (b @ a.T)


def _sums(a: Any) -> Any:
    several = [reducer(a, axis) for reducer in (jnp.sum, jnp.max, jnp.min, jnp.argmax, jnp.argmin) for axis in (0, 1)]
    return several, jnp.prod(a / 2, 0), jnp.all(a < -1.01, 0), jnp.any(a > -1.01, 0), jnp.var(a, 0), jnp.sum(a) / 1000


def _softmaxes(a: Any) -> Any:
    return jax.nn.softmax(a - 90, 0), jax.nn.log_softmax(a, 0), jax.scipy.special.logsumexp(a - 90, 0)


def _along(a: Any) -> Any:
    ordered = jnp.sort(a, 0), jnp.sort(a, 1), jnp.argsort(a, 1), lax.top_k(a, 3), lax.top_k(a.T, 3)
    running = [f(a, 1) for f in (lax.cumsum, lax.cummax, lax.cumprod, lax.cumlogsumexp)]
    return ordered, running, lax.cumsum(a, 0) / 9, lax.cumsum(a, 1, reverse=True)


def _lookups(a: Any, i: Any) -> Any:
    beyond = i * 3 - 20  # rows that there are not, on both sides
    modes = [jnp.take(a, beyond, axis=0, mode=mode) for mode in ("clip", "wrap")]
    filled = jnp.take(a, beyond, axis=0, mode="fill", fill_value=7.0)
    return a[i], modes, filled, jnp.take_along_axis(a, i[:, None] % COLUMNS, 1), jnp.take_along_axis(a, i[:3, None], 0)


def _scatters(a: Any, b: Any, i: Any) -> Any:
    beyond, near = i * 3 - 20, a + 0.1
    modes = [a.at[beyond].add(b, mode=mode) for mode in ("drop", "clip")]
    most = a.at[i].max(near), b.at[i].min(b - 0.1), a.at[i].mul(b), b.at[i].max(b + 0.1), a.at[i].min(a - 0.1)
    others = a.at[::-1].set(b), a.at[:, i[:4] % 10].add(2), jax.grad(lambda v: jnp.sin(v[i]).sum())(a)
    return jnp.zeros((ROWS, COLUMNS)).at[i].add(b), modes, most, others


def _moves(a: Any, b: Any) -> Any:
    start = jnp.argmax(a[:, 0]) % 4
    sliced = [lax.dynamic_slice_in_dim(a, start, 5, axis) for axis in (0, 1)]
    parts = (b[:3], b[:, :3])
    updated = [lax.dynamic_update_slice_in_dim(a, part, start, axis) for axis, part in enumerate(parts)]
    joined = [jnp.concatenate([a, b], axis) for axis in (0, 1)] + [jnp.stack([a, b], axis) for axis in (0, 2)]
    padded = jnp.pad(a, ((1, 2), (0, 0))), jnp.pad(a, ((0, 0), (1, 0)))
    turned = [move(a, axis) for move in (jnp.flip, lambda v, n: jnp.roll(v, 2, n)) for axis in (0, 1)]
    cut = a[2:9], a[:, 1:4], a[::2], a[1:] + b[:-1], a.reshape(ROWS, 5, 2), a.reshape(-1), a.reshape(3, 7, 10)
    return sliced, updated, joined, padded, turned, cut, jnp.repeat(a, 2, 0), jnp.repeat(a, 2, 1)


def _windows(a: Any, k: Any) -> Any:
    """Images of 13 channels; 21 of them, or 21 rows."""

    def convolved(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")) / 10

    def pooled(x: Any) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 1), (1, 1, 1), "SAME")

    gradients = jax.grad(lambda x, w: jnp.sin(convolved(x, w)).sum(), (0, 1))(a, k)
    turned = jnp.swapaxes(a, 0, 1)
    return convolved(a, k), convolved(turned, k), gradients, pooled(a), jax.grad(lambda x: jnp.sin(pooled(x)).sum())(a)


def _loops(a: Any, b: Any) -> Any:
    def body(carry: Any, one: Any) -> Any:
        carry = jnp.tanh(carry + jnp.sin(one) @ jnp.cos(one).T @ carry / 9)
        return carry, jnp.sin(carry).sum(0)

    def looped(x: Any) -> Any:
        return lax.scan(body, x, jnp.stack([b, b * 2, b * 3]))

    counted = lax.fori_loop(0, 3, lambda _, c: jnp.tanh(jnp.sin(c) @ jnp.cos(c).T @ c), a)
    chosen = lax.cond(a[0, 0] > 0, lambda v: jnp.sin(v) @ v.T, lambda v: jnp.cos(v @ jnp.sin(v).T), a)
    kept = lax.optimization_barrier((a, b))[0] * 2
    again = jax.grad(lambda v: jax.checkpoint(lambda u: jnp.sin(u @ b.T) @ u)(v).sum())(a)
    return looped(a), jax.grad(lambda x: looped(x)[0].sum())(a), counted, chosen, kept, again


def _attention(q: Any, k: Any) -> Any:
    """12 heads of 4."""
    heads = q.reshape(4, 6, 12, 4), k.reshape(4, 6, 12, 4)
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", *heads))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, heads[1]).reshape(4, 6, 48)


def _random(a: Any, seed: Any) -> Any:
    key = jax.random.key(seed[0])
    return a * jax.random.normal(key, a.shape), jnp.where(jax.random.bernoulli(key, 0.5, a.shape), a, 0)


def _linear_algebra(a: Any, b: Any) -> Any:
    square = a[:, :4, :] @ jnp.swapaxes(a[:, :4, :], 1, 2) + 4 * jnp.eye(4)
    return jnp.linalg.cholesky(square), jnp.linalg.solve(square, b), jnp.linalg.eigh(square)[0] / 9


_TABLE, _OTHER, _IDS = values(ROWS, COLUMNS), values(ROWS, COLUMNS, seed=3), numbers(ROWS, ROWS)

FAMILIES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], set[str]]] = {
    "elements": (_inner(_elements), (_TABLE, _OTHER), {"mul", "select_n", "broadcast_in_dim", "transpose"}),
    "products": (_inner(_products), (_TABLE, _OTHER), {"dot_general", "reshape"}),
    "sums": (_inner(_sums), (_TABLE,), {"reduce_sum", "reduce_max", "reduce_prod", "reduce_and", "argmax"}),
    "softmaxes": (_inner(_softmaxes), (_TABLE,), {"reduce_max", "reduce_sum"}),
    "along": (_inner(_along), (_TABLE,), {"sort", "top_k", "cumsum", "cummax", "cumprod", "cumlogsumexp"}),
    "lookups": (_inner(_lookups), (_TABLE, _IDS), {"gather"}),
    "scatters": (
        _inner(_scatters),
        (_TABLE, _OTHER, _IDS),
        {"scatter-add", "scatter-max", "scatter-mul"},
    ),
    "moves": (_inner(_moves), (_TABLE, _OTHER), {"concatenate", "pad", "rev", "slice", "dynamic_slice", "stack"}),
    "windows": (_inner(_windows), (values(ROWS, 21, 13), values(3, 13, 13)), {"conv_general_dilated"}),
    "loops": (_inner(_loops), (_TABLE, _OTHER), {"dot_general", "reduce_sum"}),
    "attention": (_inner(_attention), (values(4, 6, 48), values(4, 6, 48, seed=2)), {"dot_general"}),
    "random": (_inner(_random), (_TABLE, _IDS), {"select_n"}),
    "linear_algebra": (_inner(_linear_algebra), (values(ROWS, 4, 6), values(ROWS, 4, 5)), {"cholesky", "lu", "eigh"}),
}
"""By name: a function, its arguments, and the primitives that a padded plan pads."""
