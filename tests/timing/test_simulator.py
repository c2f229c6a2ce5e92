"""The simulator against times worked out by hand, and plans and placements of real steps on it."""

import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import shardplan
from shardplan.errors import ArgumentError
from shardplan.hardware import Link
from shardplan.models import lstm, mlp
from shardplan.options import Options
from shardplan.plans.pipeline import build_problem
from shardplan.program.tracing import trace_program
from shardplan.timing.operator_placement import PLACEMENT_METHODS, simulate_placement
from shardplan.timing.simulator import simulate_tasks
from shardplan.timing.step_time import time_prices, work_seconds
from shardplan.timing.task import Task

LINK = Link(1.0, 0.5)  # bytes per second, seconds
MESH = AbstractMesh((8,), ("data",))


def test_a_chain_over_two_workers():
    """Each task waits for the transfer of its tensor."""
    tasks = [Task("a", 0, 1.0, (), (0,)), Task("b", 1, 2.0, (0,), (1,)), Task("c", 0, 1.0, (1,))]
    result = simulate_tasks(tasks, {0: 3.0, 1: 1.0}, LINK)
    assert result.seconds == 1 + 3.5 + 2 + 1.5 + 1
    assert result.busy_seconds == (2.0, 2.0)
    assert result.sent_bytes == (3.0, 1.0)
    assert [(e.kind, e.start, e.end) for e in result.events][:2] == [("compute", 0.0, 1.0), ("transfer", 1.0, 4.5)]


@pytest.mark.parametrize(("overlap", "seconds"), [(True, 5.5), (False, 8.5)])
def test_sending_overlaps_with_computing(overlap: bool, seconds: float):
    """Worker 0 sends for 3.5 seconds during 4 of work, or before these without overlap."""
    tasks = [Task("a", 0, 1.0, (), (0,)), Task("read", 1, 1.0, (0,)), Task("long", 0, 4.0, (0,))]
    result = simulate_tasks(tasks, {0: 3.0}, LINK, overlap=overlap)
    assert result.seconds == seconds
    assert result.busy_seconds == (5.0, 1.0)


def test_two_transfers_over_one_outgoing_link():
    """Each takes 2.5 seconds, one after another on the outgoing link of worker 0."""
    tasks = [Task("a", 0, 0.0, (), (0, 1)), Task("b", 1, 1.0, (0,)), Task("c", 2, 1.0, (1,))]
    assert simulate_tasks(tasks, {0: 2.0, 1: 2.0}, LINK).seconds == 2 * 2.5 + 1
    # Both from others into one: its way in is taken.
    tasks = [Task("a", 0, 0.0, (), (0,)), Task("b", 1, 0.0, (), (1,)), Task("c", 2, 1.0, (0, 1))]
    assert simulate_tasks(tasks, {0: 2.0, 1: 2.0}, LINK).seconds == 2 * 2.5 + 1


def test_a_tensor_with_readers_on_two_workers():
    """It is sent once to each worker."""
    tasks = [Task("a", 0, 1.0, (), (0,)), Task("b", 1, 1.0, (0,)), Task("c", 1, 1.0, (0,)), Task("d", 2, 1.0, (0,))]
    assert simulate_tasks(tasks, {0: 4.0}, LINK).sent_bytes == (8.0, 0.0, 0.0)


def test_memory_is_freed_after_the_last_reader():
    """Two tensors of a chain are live at a time. Kept ones stay, and copies count on their worker."""
    tasks = [Task(str(n), 0, 1.0, (n - 1,) if n else (), (n,)) for n in range(5)]
    sizes = dict.fromkeys(range(5), 10.0)
    assert simulate_tasks(tasks, sizes, LINK).peak_bytes == (20.0,)
    assert simulate_tasks(tasks, sizes, LINK, kept=frozenset({0})).peak_bytes == (30.0,)
    moved = [Task("a", 0, 1.0, (), (0,)), Task("b", 1, 1.0, (0,), (1,))]
    assert simulate_tasks(moved, {0: 10.0, 1: 5.0}, LINK).peak_bytes == (10.0, 15.0)


def test_collectives_overlap_with_work():
    """A collective leaves its worker free to compute."""
    tasks = [
        Task("a", 0, 1.0, (), (0,)),
        Task("all-gather", 0, 3.0, (0,), (1,), sent_bytes=7.0),
        Task("b", 0, 2.0, (0,)),
        Task("c", 0, 1.0, (1,)),
    ]
    result = simulate_tasks(tasks, {}, LINK)
    assert (result.seconds, result.busy_seconds, result.sent_bytes) == (5.0, (4.0,), (7.0,))


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([Task("a", 0, 1.0, (1,), (0,)), Task("b", 0, 1.0, (0,), (1,))], "tasks wait for each other: `a`, `b`"),
        ([Task("a", 0, 1.0, (), (0,)), Task("b", 0, 1.0, (), (0,))], "tensor 0 is made by `a` and again by `b`"),
        ([Task("a", 0, -1.0)], "task `a` has -1.0 seconds"),
    ],
)
def test_tasks_that_cannot_run(tasks: list[Task], message: str):
    """The error names the reason."""
    with pytest.raises(ArgumentError, match=message):
        simulate_tasks(tasks, {}, LINK)


@pytest.fixture(scope="module")
def plan() -> shardplan.Plan:
    training = mlp.training(mlp.Config(widths=(512, 1024, 512), batch=256))
    return shardplan.plan(training.train_step, MESH, training.state, training.batch)


def test_the_simulation_of_a_plan(plan: shardplan.Plan):
    """Its figures are those of the plan's work and collectives."""
    result = shardplan.simulate(plan)
    problem = plan.schedule.problem
    strategies, prices = plan.schedule.assignment.strategies, time_prices(problem)
    work = sum(
        work_seconds(problem, prices, operation, strategies[operation.index].degree)
        for operation in plan.program.operations
        if operation.index in strategies
    )
    assert plan.step_time.work == pytest.approx(work)
    assert result.busy_seconds == (pytest.approx(work),)
    assert result.sent_bytes == (plan.communication_bytes,)
    sending = sum(e.end - e.start for e in result.events if e.kind == "collective")
    assert max(work, sending) <= result.seconds <= work + sending
    assert result.peak_bytes == (plan.peak_bytes,)


def test_slower_devices_take_longer(plan: shardplan.Plan):
    seconds = [shardplan.simulate(plan, hardware).seconds for hardware in ("h100", "a100", "k80")]
    assert sorted(seconds) == seconds


def test_a_reader_of_an_all_gathered_tensor():
    """It waits for the all-gather. Only an independent product runs meanwhile."""

    def step(x, w):
        return jnp.tanh(x @ w).sum() + jnp.tanh(x.T @ x).sum()

    x, w = jax.ShapeDtypeStruct((65536, 1024), "float32"), jax.ShapeDtypeStruct((1024, 1024), "float32")
    pins = {"0": PartitionSpec("data"), "1": PartitionSpec("data")}
    plan = shardplan.plan(step, MESH, x, w, pins=pins)
    gathers = [c for c in plan.collectives if c.kind == "all-gather"]
    assert [gather.tensor for gather in gathers] == ["1"]
    events = {event.name: event for event in shardplan.simulate(plan).events}
    for gather in gathers:
        assert events[gather.operation].start >= events[f"all-gather {gather.tensor}"].end
    first = min(event.start for event in events.values() if event.name.endswith("dot_general"))
    assert first < events["all-gather 1"].end


def test_halos_to_both_neighbours():
    """The convolution waits for the collectives of both directions."""

    def step(image, window):
        return jax.lax.conv_general_dilated(image, window, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    image, window = jax.ShapeDtypeStruct((1, 512, 512, 16), "float32"), jax.ShapeDtypeStruct((3, 3, 16, 16), "float32")
    plan = shardplan.plan(step, MESH, image, window, pins={"0": PartitionSpec(None, "data")})
    assert [c.kind for c in plan.collectives] == ["collective-permute"] * 2
    (_, first, _), (_, second, _), (kind, end, _) = [(e.kind, e.end, e.name) for e in shardplan.simulate(plan).events]
    assert kind == "compute"
    assert end >= max(first, second)


def loops(x, weights, flag):
    def body(carry, weight):
        return jnp.tanh(carry @ weight), None

    y, _ = jax.lax.scan(body, x, weights)
    return jax.lax.cond(flag, lambda y: y @ y.T, lambda y: jnp.zeros((64, 64)), y)


def test_loops_and_branches():
    """A loop takes its turns times as long as its body, and of branches the longer one runs."""
    x, flag = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((), "bool")
    seconds = []
    for turns in (4, 400):
        weights = jax.ShapeDtypeStruct((turns, 64, 64), "float32")
        plan = shardplan.plan(loops, MESH, x, weights, flag)
        seconds.append(shardplan.simulate(plan).busy_seconds[0])
        placed = simulate_placement(
            build_problem(trace_program(loops, (x, weights, flag)), MESH, Options()), "placement:min_cut"
        )
        assert sum(placed.busy_seconds) >= seconds[-1]
    assert seconds[1] > 20 * seconds[0]


@pytest.mark.slow
@pytest.mark.parametrize("method", PLACEMENT_METHODS)
def test_placements_do_all_work_once(method: str):
    """The busy times of all devices add up to the work of the step."""
    training = lstm.training(lstm.SMALL)
    program = trace_program(training.train_step, (training.state, training.batch))
    problem = build_problem(program, MESH, Options())
    result = simulate_placement(problem, method)
    work = sum(work_seconds(problem, time_prices(problem), operation) for operation in program.operations)
    assert sum(result.busy_seconds) == pytest.approx(work)
    assert len(result.busy_seconds) == len(result.peak_bytes) == 8
    assert max(result.busy_seconds) <= result.seconds <= work + sum(e.end - e.start for e in result.events)
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(training.state))
    assert sum(result.peak_bytes) >= state


def test_layers_stay_on_their_devices():
    """Round robin only sends activations and their gradients between neighbouring layers."""
    width, batch, count = 256, 64, 8
    training = mlp.training(mlp.Config(widths=(width,) * (count + 1), batch=batch))
    program = trace_program(training.train_step, (training.state, training.batch))
    result = simulate_placement(build_problem(program, MESH, Options()), "placement:round_robin")
    activation = 4 * batch * width
    assert max(result.sent_bytes) <= 4 * activation
    assert min(result.busy_seconds) > 0.5 * max(result.busy_seconds)


def test_compare_has_placements_and_plans():
    """The figures of placements are those of their simulations, and the plan is simulated too."""
    training = mlp.training(mlp.Config(widths=(512, 1024, 512), batch=256))
    methods = ("exact", *PLACEMENT_METHODS)
    found = shardplan.compare(training.train_step, MESH, training.state, training.batch, methods=methods)
    for method in PLACEMENT_METHODS:
        row = found[method]
        assert row.plan is None
        assert math.isnan(row.objective)
        assert math.isnan(row.gap)
        assert row.simulation is not None
        assert row.communication_bytes == max(row.simulation.sent_bytes)
        assert row.peak_bytes == max(row.simulation.peak_bytes)
    exact = found["exact"]
    assert exact.plan is not None
    assert exact.simulated_seconds == shardplan.simulate(exact.plan).seconds
    lines = str(found).splitlines()
    assert "simulated ms" in lines[1]
    assert all(len(line.split()) >= 4 for line in lines[3:])
    assert f"{1e3 * found['placement:min_cut'].simulated_seconds:.2f}" in found._repr_html_()
    assert "simulated" not in str(
        shardplan.compare(training.train_step, MESH, training.state, training.batch, methods=("exact",))
    )


def test_a_placement_above_the_memory_limit():
    """Its row has a note."""
    training = mlp.training(mlp.Config(widths=(512, 512), batch=64))
    found = shardplan.compare(
        training.train_step, MESH, training.state, training.batch, methods=PLACEMENT_METHODS[:1], memory_limit=1e6
    )
    assert found[PLACEMENT_METHODS[0]].note == "does not fit the memory"


def test_timelines(plan: shardplan.Plan, tmp_path: Path):
    result = shardplan.simulate(plan)
    drawn = result._repr_html_()
    assert drawn.count("<rect") == len(result.events)
    lanes = {", ".join(one.axes) for one in plan.collectives}
    shown = re.findall(r">(compute|network of [^<]*), (\d+)% busy<", drawn)
    assert {name.removeprefix("network of ") for name, _ in shown} == lanes | {"compute"}
    assert float(dict(shown)["compute"]) == pytest.approx(100 * result.busy_seconds[0] / result.seconds, abs=0.51)
    assert "worker" in str(result)
    result.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(result.events)
    assert max(span["ts"] + span["dur"] for span in spans) == pytest.approx(1e6 * result.seconds)
