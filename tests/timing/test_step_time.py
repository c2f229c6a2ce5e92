"""The objective "time": what hides behind work, how long a step takes then, and that its bound is one."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import shardplan
from shardplan.hardware import HardwareProfile, Link, load
from shardplan.optimize.solve_once import Search
from shardplan.optimize.step_time_objective import search_shortest_step
from shardplan.options import Options
from shardplan.plans.pipeline import build_problem
from shardplan.problem.schedule import Schedule
from shardplan.program.tracing import trace_program
from shardplan.timing.step_time import step_time, timing_of

MESH = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
SPLIT = {"1/*": PartitionSpec("x")}


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def linked(bytes_per_second: float) -> HardwareProfile:
    """An H100 with links of another speed, which take no time to start."""
    return replace(load("h100"), intra_host=Link(bytes_per_second, 1e-7), launch_seconds=1e-7)


def layers(x: Any, weights: Any) -> Any:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return x


def training(weights: Any, x: Any) -> Any:
    gradients = jax.grad(lambda weights: jnp.mean(layers(x, weights) ** 2))(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]


def names_that_hide(fn: Any, *args: Any, bytes_per_second: float = 4e11) -> set[Any]:
    program = trace_program(fn, args)
    problem = build_problem(program, MESH, Options(objective="time", hardware=linked(bytes_per_second)))
    return {program.values[value].name or value for value in timing_of(problem).hidden}


def test_weights_hide_behind_the_layers_before_them_and_activations_do_not() -> None:
    found = names_that_hide(layers, floats(65536, 1024), [floats(1024, 1024)] * 4)
    assert found == {"1/1", "1/2", "1/3"}
    assert names_that_hide(layers, floats(65536, 1024), [floats(1024, 1024)] * 4, bytes_per_second=1e9) == set()


def test_gradients_hide_behind_what_is_differentiated_next_but_for_the_last() -> None:
    args = [floats(8192, 8192)] * 4, floats(65536, 8192)
    program = trace_program(training, args)
    hidden = timing_of(build_problem(program, MESH, Options(objective="time"))).hidden
    products = [o.results[0] for o in program.operations if o.primitive.name == "dot_general"]
    gradients = [product for product in products if program.values[product].shape == (8192, 8192)]
    assert len(gradients) == 4
    assert sum(gradient in hidden for gradient in gradients) == 3


def test_what_a_kernel_computes_on_the_way_moves_no_bytes() -> None:
    program = trace_program(layers, (floats(64, 64), [floats(64, 64)]))
    moved = timing_of(build_problem(program, MESH, Options(objective="time"))).memory_bytes
    by_name = {o.primitive.name: moved[o.index] for o in program.operations}
    assert by_name == {"dot_general": 3 * 64 * 64 * 4, "tanh": 2 * 64 * 64 * 4}
    program = trace_program(lambda x: jnp.sum(jnp.tanh(x) * 2, 1), (floats(4096, 64),))
    moved = timing_of(build_problem(program, MESH, Options(objective="time"))).memory_bytes
    assert [moved[o.index] for o in program.operations] == [0, 0, 4096 * 65 * 4]


@pytest.mark.parametrize("bytes_per_second", [1e11, 4e11])
def test_the_bound_holds_for_every_assignment(bytes_per_second: float) -> None:
    """All assignments of two layers whose weights come split, by the time of their own schedules."""
    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    options = Options(objective="time", hardware=linked(bytes_per_second), pins=SPLIT | {"0": PartitionSpec()})
    program = trace_program(layers, (floats(4096, 1024), [floats(1024, 1024)] * 2))
    problem = build_problem(program, mesh, options)
    search = Search("auto", 10.0, np.inf, frozenset())
    found = search_shortest_step(problem, search, lambda share: build_problem(program, mesh, options, share))
    network = problem.network
    possible = [np.flatnonzero(np.isfinite(costs)) for costs in network.costs]
    assignments = [c for c in product(*(p.tolist() for p in possible)) if np.isfinite(network.cost(c))]
    best = min(step_time(Schedule(problem, problem.decode(np.array(c)))).seconds for c in assignments)
    assert found.solution.lower_bound <= best * (1 + 1e-4)  # what is stored counts a little
    assert best * (1 - 1e-6) <= found.solution.cost <= found.solution.lower_bound * (1 + 2e-3)


def test_collectives_longer_than_the_work_are_balanced() -> None:
    """Twelve gathers of weights on links so slow that together they take longer than the work that they run beside."""
    options = {"objective": "time", "hardware": linked(2e11), "pins": SPLIT}
    plan = shardplan.plan(layers, MESH, floats(8192, 1024), [floats(1024, 1024)] * 12, **options)
    step = plan.step_time
    assert step.excess > 0 and plan.gap < 2e-3
    assert plan.objective == pytest.approx(step.seconds, rel=1e-3)
    assert step.hidden + step.exposed == pytest.approx(step.waiting + step.overlappable)
    simulated = shardplan.simulate(plan).seconds
    assert step.work <= simulated <= 1.1 * step.seconds


def test_a_plan_says_where_its_time_goes() -> None:
    plan = shardplan.plan(training, MESH, [floats(1024, 1024)] * 4, floats(65536, 1024), objective="time")
    assert "ms of work; of collectives, " in str(plan)
    assert "make the step longer" in plan._repr_html_()
    other = shardplan.plan(training, MESH, [floats(1024, 1024)] * 4, floats(65536, 1024))
    assert "ms of work" not in str(other) and other.step_time.seconds >= plan.step_time.seconds


@pytest.mark.long
@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
def test_an_audit_has_predicted_time_beside_compiled() -> None:
    pins = {"0/*": PartitionSpec("x")}
    args = [floats(4096, 4096)] * 4, floats(65536, 4096)
    plan = shardplan.plan(training, MESH, *args, objective="time", pins=pins, donate_argnums=0)
    found = shardplan.audit(plan)
    assert found.predicted_time is not None and found.compiled_time is not None
    assert found.predicted_time == plan.step_time
    assert found.compiled_time.hidden > 0.5 * plan.step_time.hidden > 0
    assert found.compiled_time.work == plan.step_time.work
    assert "make the step longer" not in str(plan) or "hides behind work" in str(found)
