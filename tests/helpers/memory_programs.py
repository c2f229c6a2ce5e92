"""Small plans for the tests of the memory model, and the model's results for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardplan
from shardplan.memory.graph import Graph
from shardplan.memory.kernels import kernels_of
from shardplan.memory.model import lifetimes_of
from shardplan.plans.plan import Plan

MESH = jax.sharding.AbstractMesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def shape(*sizes: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def planned(function: Callable[..., Any], *arguments: Any, mesh: Any = 1, **options: Any) -> Plan:
    return shardplan.plan(function, mesh, *arguments, **options)


def stored(plan: Plan) -> list[str]:
    """The primitives whose results are materialised."""
    kept = kernels_of(plan.schedule).stored
    return [o.primitive.name for o in plan.program.operations if not kept.isdisjoint(o.results)]


def graph_of(plan: Plan) -> Graph:
    return Graph(plan.schedule, kernels_of(plan.schedule), 0)


def profile(plan: Plan, donated: int = 0) -> np.ndarray:
    """Bytes at each position, where the first so many inputs are donated."""
    lifetimes = lifetimes_of(plan.schedule, frozenset(range(donated)))
    return lifetimes.profile(plan.schedule.problem.encode(plan.schedule.assignment))


def training(optimizer_steps: int = 1, width: int = 512, layers: int = 4, batch: int = 2048) -> tuple[Any, ...]:
    """A training step of a perceptron, with its state and a batch."""

    def loss(weights: Any, x: Any) -> Any:
        for w in weights:
            x = jax.nn.relu(x @ w)
        return jnp.mean(x**2)

    def step(weights: Any, x: Any) -> Any:
        for _ in range(optimizer_steps):
            weights = jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))
        return weights

    return step, [shape(width, width)] * layers, shape(batch, width)
