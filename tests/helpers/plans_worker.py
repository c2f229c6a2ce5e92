"""One of two processes that plan together: ``python -m tests.helpers.plans_worker INDEX PORT``.

Prints a line per case: its name, and the figures that both processes must print.
"""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.errors import ArgumentError, InfeasibleError, ProcessesError
from shardplan.plans.plan import Plan
from tests.helpers.random_programs import inputs_of, random_step

X = np.arange(16384.0, dtype=np.float32).reshape(256, 64) / 16384


def step(w: Any, x: Any) -> Any:
    value, gradient = jax.value_and_grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
    return w - 0.1 * gradient, value


def digest(plan: Plan) -> str:
    chosen = (plan.fingerprint, plan.mesh_axes, plan.recipe.choices, plan.objective, [*plan.layouts.values()])
    return hashlib.sha256(repr(chosen).encode()).hexdigest()[:16]


def raised(kind: type[Exception], call: Any) -> str:
    try:
        call()
    except kind as error:
        return " ".join(str(error).split())
    return "no error"


def main(index: int, port: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, index)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    say = lambda name, what: print("CASE", name, what, flush=True)  # noqa: E731
    w = np.ones((64, 32), np.float32) / 64

    for seed in range(20):
        params = inputs_of(seed)
        batch = params.pop("p0")
        planned = shardplan.auto(random_step(seed, 8), mesh, time_limit=0.1)
        say(f"random {seed}", digest(planned.plan(params, batch)))

    programs = {"train": (step, (w, X), 100), "eval": (lambda w, x: x @ w, (w, X[:32]), 1)}
    say("together", [digest(plan) for plan in shardplan.plan_together(programs, mesh, time_limit=0.1).values()])
    pins = {"0": P(None, "model") if index == 0 else P("data", None)}
    say("pins", raised(ProcessesError, lambda: shardplan.auto(step, mesh, pins=pins)(w, X)))
    other = X if index == 0 else X[:128]
    say("batch", raised(ProcessesError, lambda: shardplan.auto(step, mesh)(w, other)))
    say("memory", raised(InfeasibleError, lambda: shardplan.auto(step, mesh, memory_limit=5000)(w, X)))

    def broken(w: Any, x: Any) -> Any:
        return step(w, x) if index == 0 else w @ w

    failing = raised(Exception, lambda: shardplan.auto(broken, mesh)(w, X))
    say("broken", "process 1 failed" in failing or "dot_general" in failing)

    alone = shardplan.plan(step, AbstractMesh((2, 4), ("data", "model")), w, X, pins=pins)
    say("files", raised(ProcessesError, lambda: alone.apply(step)(w, X)))

    expected = jax.jit(step)(jnp.asarray(w), jnp.asarray(X))
    for given in (mesh, 8, "data=2,model=4"):
        found = shardplan.auto(step, given, pins={"1": P(("data", "model"))} if given is mesh else None)(w, X)
        say(f"loss on {type(given).__name__} {given if given is not mesh else ''}", np.allclose(found[1], expected[1]))

    split = {"0": P(None, "model"), "1": P(("data", "model"))}
    plan = shardplan.plan(step, mesh, w, X, pins=split)
    placed = plan.place(X[128 * index :][:128])
    blocks = [np.array_equal(shard.data, X[shard.index]) for shard in placed.addressable_shards]
    say("own rows", (placed.shape, all(blocks), np.allclose(plan.apply(step)(w, placed)[1], expected[1])))
    say("other rows", "of this process [128, 64]" in raised(ArgumentError, lambda: plan.place(X[:100])))

    os.environ["SHARDPLAN_PROCESS_TIMEOUT"] = "1"
    if index == 0:
        say("alone", raised(ProcessesError, lambda: shardplan.auto(step, mesh).plan(w, X)))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
