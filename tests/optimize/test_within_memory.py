"""The search within a memory limit: its stages, what they propose, and what they hand on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import shardplan
from shardplan.optimize import state as states
from shardplan.optimize.proposals import descent_proposal, mixture_proposal, solve_in_order
from shardplan.optimize.solve_once import Choices, Search, solve_network
from shardplan.optimize.state import Clock, State, Task, highest_positions
from shardplan.optimize.within_memory import STAGES, propose_within, run_stages
from shardplan.problem.schedule import Schedule
from shardplan.search import Network
from shardplan.search.bounds.lagrangian import Relaxation
from shardplan.search.graph.graph import Graph
from tests.helpers.limited_step import MESH, plan_within, training


def begun(share: float = 0.8, **options: object) -> tuple[Task, State]:
    """The small training step within a share of what it holds without a limit."""
    step, state, batch = training()
    problem = shardplan.plan(step, MESH, state, batch, donate_argnums=0).schedule.problem
    search = Search("auto", 60.0, math.inf, frozenset(range(len(state))), **options)  # type: ignore[arg-type]
    solution = solve_network(problem, problem.network, search, 60.0)
    task = Task(problem, search, Clock(math.inf), math.inf, budget=1.0, begun=solution.choices)
    free = task.count(solution)
    limit = share * free.peak_bytes
    return replace(task, limit=limit), State(free, limit).take(free)


def test_stages_are_traced() -> None:
    """A plan has a row for each stage where the limit binds, and none where it does not."""
    plan, step = plan_within(), training()
    assert [row["stage"] for row in plan.statistics["stages"]] == [name for name, _ in STAGES]
    works = [row["work"] for row in plan.statistics["stages"]]
    assert works == sorted(works) and works[0] > 0
    assert plan.statistics["stages"][-1]["peak_bytes"] == plan.peak_bytes
    free = shardplan.plan(step[0], MESH, *step[1:], donate_argnums=0)
    assert free.statistics["stages"] == []


@pytest.mark.long
def test_stages_are_deterministic() -> None:
    """Work decides the result, not the clock."""
    (task, state), (again, same) = begun(), begun()
    (found, rows), (other, repeated) = run_stages(task, state), run_stages(again, same)
    assert rows == repeated
    assert found.best is not None and other.best is not None
    assert found.best.solution.choices.tobytes() == other.best.solution.choices.tobytes()
    assert state.work == 0.0 and len(state.counted) == 1, "a stage changes no state"


@pytest.mark.long
def test_schedules_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count in the schedule's own order takes longest."""
    task, state = begun(share=0.6)
    seen, count = list[bytes](), states.lifetimes_of

    def watched(schedule: Schedule, donated: frozenset[int]) -> object:
        seen.append(task.problem.encode(schedule.assignment).tobytes())
        return count(schedule, donated)

    monkeypatch.setattr(states, "lifetimes_of", watched)
    run_stages(task, state)
    assert len(seen) > 1
    assert len(seen) == len(set(seen))


def test_limit_is_held_at_all_positions_of_an_order() -> None:
    """Though the network has a few of them."""
    task, state = begun()
    free = state.free
    held = solve_in_order(task, state, free.lifetimes, task.limit, free.solution.choices, 1.0)
    assert task.profile(free.lifetimes, free.solution.choices).max() > task.limit
    assert task.profile(free.lifetimes, held.choices).max() == held.peak_bytes <= task.limit
    assert not held.infeasible and held.state.work > 0


def test_nothing_below_the_arguments_is_infeasible() -> None:
    """The bound is one of the peaks in that order."""
    task, state = begun()
    free = state.free
    held = solve_in_order(task, state, free.lifetimes, 1e5, free.solution.choices, 1.0)
    assert held.infeasible
    assert 1e5 < held.bound <= free.peak_bytes


def test_excess_counts_once_at_a_position() -> None:
    """Operations of one kernel were measured at one moment: the largest excess of them is that of the moment."""
    task, state = begun(excess={0: 3e6, 1: 5e6})
    order, choices = state.free.lifetimes, state.free.solution.choices
    moved = replace(order, place={**order.place, 0: 2, 1: 2})
    more = task.profile(moved, choices) - moved.profile(choices)
    assert more[2] == 5e6 and np.count_nonzero(more) == 1


def test_excess_is_held_within_the_limit() -> None:
    """At its operation, where nothing else exceeds the limit."""
    task, state = begun(share=1.0)
    order, choices = state.free.lifetimes, state.free.solution.choices
    profile = order.profile(choices)
    index = min(order.place, key=lambda index: profile[order.place[index]])
    size = task.limit - 0.9 * float(profile[order.place[index]])
    task = replace(task, search=replace(task.search, excess={index: size}))
    assert task.profile(order, choices).max() > task.limit
    held = solve_in_order(task, state, order, task.limit, choices, 1.0)
    assert held.infeasible or held.peak_bytes <= task.limit
    assert held.choices.tobytes() != choices.tobytes()


def _propose(task: Task, asked: list[float]) -> Callable[[State, float], tuple[State, Choices | None]]:
    def propose(state: State, limit: float) -> tuple[State, Choices | None]:
        asked.append(limit / task.limit)
        return state, state.free.solution.choices + len(asked)

    return propose


@pytest.mark.parametrize(("above", "less"), [(1.01, 1.01), (2.0, 1.05)])
def test_a_peak_above_the_limit(above: float, less: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next limit is lowered by the excess, by at most a twentieth."""
    task, state = begun()
    monkeypatch.setattr(type(task.problem.network), "cost", lambda network, choices: 1.0)
    monkeypatch.setattr(
        State, "count", lambda state, task, c: (state, replace(state.free, peak_bytes=above * task.limit))
    )
    seen = list[float]()
    for _ in propose_within(task, state, _propose(task, seen)):
        pass
    assert seen == pytest.approx([less**-number for number in range(states.MAX_TRIES)])


def test_a_proposal_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the tries."""
    task, state = begun()
    monkeypatch.setattr(type(task.problem.network), "cost", lambda network, choices: 1.0)
    monkeypatch.setattr(State, "count", lambda state, task, c: (state, replace(state.free, peak_bytes=task.limit)))
    seen = list[float]()
    for _ in propose_within(task, state, _propose(task, seen)):
        pass
    assert seen == [1.0]


def test_mixtures_are_within_the_limit_in_their_order() -> None:
    """A leaner schedule takes all choices of the free one if they fit, and else some of them."""
    task, state = begun()
    free = state.free
    held = solve_in_order(task, state, free.lifetimes, 0.9 * task.limit, free.solution.choices, 1.0)
    state, own = held.state.count(task, held.choices)
    room = float(task.profile(own.lifetimes, free.solution.choices).max())
    _, choices = mixture_proposal(task, own, state, room)
    assert choices is not None
    assert task.problem.network.cost(choices) == pytest.approx(free.solution.cost)
    _, choices = mixture_proposal(task, own, state, 0.5 * (room + own.peak_bytes))
    if choices is not None:
        assert task.profile(own.lifetimes, choices).max() <= 0.5 * (room + own.peak_bytes)


def test_descents_are_within_the_limit_in_their_order() -> None:
    """A dearer single choice is reverted if the cheaper one fits."""
    task, state = begun()
    network, choices = task.problem.network, state.free.solution.choices
    trials = (np.where(np.arange(len(choices)) == v, k, choices) for v in range(len(choices)) for k in range(2))
    dear = next(one for one in trials if 1.1 * state.free.solution.cost < network.cost(one) < math.inf)
    state, own = state.count(task, dear)
    _, cheaper = descent_proposal(task, own, state, math.inf)
    assert cheaper is not None
    assert network.cost(cheaper) < own.solution.cost
    _, nothing = descent_proposal(task, own, state, 0.0)
    assert nothing is None


def test_highest_positions_of_a_profile() -> None:
    """The highest one of neighbours counts. Positions within the limit do not."""
    profile = np.ones(640)
    profile[[100, 101, 300, 301]] = 5.0, 6.0, 4.0, 3.0
    assert [*highest_positions(profile, 2.0)] == [101, 300]
    assert [*highest_positions(profile, 7.0)] == []


def test_bound_is_one_of_all_schedules() -> None:
    """It is that of the search without a limit. A bound in one order need not hold in another."""
    step, state, batch = training()
    free = shardplan.plan(step, MESH, state, batch, donate_argnums=0)
    assert plan_within().lower_bound <= free.lower_bound * (1 + 1e-9)


def test_excluded_choices_have_no_peak() -> None:
    """Messages may decode to choices that tables exclude."""
    network = Network(usage_limit=1.0)
    u, v = network.add_variable([0.0, 0.0]), network.add_variable([0.0, 0.0])
    network.add_edge(u, v, np.array([[math.inf, 0.0], [0.0, 0.0]]))
    for variable in (u, v):
        network.add_usage(variable, [1.0, 3.0], 0, 1)
    relaxation = Relaxation(Graph.of(network))
    relaxation.offer(np.array([0, 0]))
    assert relaxation.leanest is None
    relaxation.offer(np.array([1, 1]))
    assert relaxation.peak == 6.0
