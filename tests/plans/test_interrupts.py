"""Ctrl-C while something is planned: a `KeyboardInterrupt` for the caller, at once, and nothing is left behind."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ortools.sat.python import cp_model

import shardplan
from shardplan.search.run import Run
from shardplan.search.solver.interruptible_cp_sat import solve_model
from tests.helpers.random_programs import mesh_of

MESH = jax.sharding.AbstractMesh((2, 4), ("x", "y"))


def step(w: Any, x: Any) -> Any:
    return w - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) @ w.T))(w)


def hard_model() -> cp_model.CpModel:
    """A knapsack with many kinds of room, which takes minutes."""
    draw, model = random.Random(0), cp_model.CpModel()
    taken = [model.new_bool_var("") for _ in range(120)]
    for _ in range(12):
        weights = [draw.randint(1, 10**6) for _ in taken]
        model.add(cp_model.LinearExpr.weighted_sum(taken, weights) <= sum(weights) // 2)
    model.maximize(cp_model.LinearExpr.weighted_sum(taken, [draw.randint(1, 10**6) for _ in taken]))
    return model


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Lets searches be interrupted at their first look at the clock, until it is called."""

    def interrupt(run: Run) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Run, "check", interrupt)
        yield patched.undo


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "plan": lambda w, x: shardplan.plan(step, MESH, w, x),
    "time": lambda w, x: shardplan.plan(step, MESH, w, x, objective="time"),
    "memory limit": lambda w, x: shardplan.plan(step, MESH, w, x, memory_limit=1e4),
    "number of devices": lambda w, x: shardplan.plan(step, 8, w, x),
    "compare": lambda w, x: shardplan.compare(step, MESH, w, x),
}


@pytest.mark.parametrize("way", WAYS)
def test_interrupted_search(way: str, interrupted: Callable[[], None]) -> None:
    """Whatever plans gives the interrupt on, in the place of a plan."""
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    with pytest.raises(KeyboardInterrupt):
        WAYS[way](shape, shape)


def test_interrupted_first_call(interrupted: Callable[[], None]) -> None:
    """The next call of the planned function plans, and computes what it should."""
    planned, ones = shardplan.auto(step, mesh_of((2, 4))), jnp.ones((64, 64))
    with pytest.raises(KeyboardInterrupt):
        planned(ones, ones)
    interrupted()
    assert jnp.allclose(planned(ones, ones), step(ones, ones))


def test_interrupted_cp_sat() -> None:
    """A search of CP-SAT ends within a second, and the next Ctrl-C is a `KeyboardInterrupt` too."""
    model = hard_model()
    for _ in range(2):
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = 20
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        begun = time.perf_counter()
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            solve_model(solver, model)
        assert time.perf_counter() - begun < 5
