"""The time limit where memory is short too: it is kept, what was found by then is taken, and an error says so."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan import InfeasibleError
from shardplan.optimize import repeated_work as repeating
from shardplan.optimize.solve_once import FoundSchedule, Search, TimeLimitReached
from shardplan.optimize.state import Clock, Task
from shardplan.problem.cost_network import Problem
from shardplan.search import Solution
from tests.helpers.limited_step import MESH, training


@pytest.fixture
def processor_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is what this process computes: other processes do not make a search late."""
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    monkeypatch.setattr(time, "monotonic", time.process_time)


def layer(x: Any, p: Any) -> Any:
    q, k, v = (jnp.einsum("btd,dhe->bthe", x, p[name]) for name in "qkv")
    mixed = jax.nn.softmax(jnp.einsum("bthe,bshe->bhts", q, k))
    x = x + jnp.einsum("bhts,bshe,hed->btd", mixed, v, p["o"])
    return x + jax.nn.gelu(x @ p["u"]) @ p["d"]


def step(params: Any, moments: Any, x: Any) -> Any:
    def loss(params: Any, x: Any) -> Any:
        for i, p in enumerate(params):
            x = layer(x, p) * (1 + 0.1 * i) if i % 2 else jnp.roll(layer(x, p), i, 1)
        return jnp.mean(x**2)

    gradients = jax.grad(loss)(params, x)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments


def arguments(layers: int) -> tuple[Any, Any, Any]:
    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    widths = [2048 + 256 * i for i in range(layers)]
    projections = {name: shape(512, 8, 64) for name in "qkv"} | {"o": shape(8, 64, 512)}
    params = [projections | {"u": shape(512, width), "d": shape(width, 512)} for width in widths]
    return params, params, shape(16, 256, 512)


@pytest.mark.long
@pytest.mark.parametrize("share", [0.1, 0.75])
def test_search_ends_soon_after_its_time(share: float, processor_clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that differ, on three axes, where a search within a memory limit took ten times the time limit."""
    mesh, given, seconds = jax.sharding.AbstractMesh((2, 2, 2), ("x", "y", "z")), arguments(4), list[float]()
    limit = share * shardplan.plan(step, mesh, *given).peak_bytes
    within = repeating.search_within

    def timed(problem: Problem, search: Search) -> FoundSchedule:
        begun = time.perf_counter()
        try:
            return within(problem, search)
        finally:
            seconds.append(time.perf_counter() - begun)

    monkeypatch.setattr(repeating, "search_within", timed)
    with suppress(InfeasibleError):
        shardplan.plan(step, mesh, *given, memory_limit=limit, time_limit=1.0)
    assert len(seconds) == 1
    assert seconds[0] < 1.0 + 1.5


@pytest.mark.parametrize("found", [1, 2])
def test_plan_found_in_time_is_taken(found: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the time is over once some schedules are within the limit, the best of these is the plan, with its gap."""
    train_step, state, batch = training()
    limit = 0.8 * shardplan.plan(train_step, MESH, state, batch, donate_argnums=0).peak_bytes
    fitting, count = list[FoundSchedule](), Task.count

    def watched(task: Task, solution: Solution) -> FoundSchedule:
        own = count(task, solution)
        fitting.extend([own] * (own.peak_bytes <= limit))
        if len(fitting) >= found:
            task.clock.deadline = -math.inf
        return own

    monkeypatch.setattr(Task, "count", watched)
    plan = shardplan.plan(train_step, MESH, state, batch, donate_argnums=0, memory_limit=limit)
    assert len(fitting) <= found
    assert plan.peak_bytes <= limit
    assert 0 < plan.lower_bound <= plan.objective and 0 <= plan.gap < 1


def test_time_is_over_before_anything_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says that it was, with the least peak that was found."""

    def seconds_left(clock: Clock) -> float:
        clock.late = True
        raise TimeLimitReached

    monkeypatch.setattr(Clock, "seconds_left", seconds_left)
    train_step, state, batch = training()
    with pytest.raises(InfeasibleError, match=r"(?s)in the time of its search \(`time_limit`\).*more time\.") as caught:
        shardplan.plan(train_step, MESH, state, batch, donate_argnums=0, memory_limit=1.1e6)
    assert caught.value.least_peak_bytes > 1.1e6
