"""Searching: from a problem to its best schedule within the memory limit, stage by stage.

The problem is first solved without memory. Only where the schedule that is found does not fit is memory made part of
the network; so programs that fit, most of them, do not pay for the limit. What is proposed then keeps within a limit in
the order of a schedule that is known. In its own order it may hold a little more: then it is asked for as much less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from shardplan.errors import InfeasibleError
from shardplan.optimize.lowest_peak import lowest_peak, refusal
from shardplan.optimize.proposals import Proposal, descent, mixture, searched
from shardplan.optimize.solve_once import CLEARLY, ENOUGH, Choices, Found, OutOfTime, Search, find
from shardplan.optimize.state import BUDGET_PER_OPERATION, TRIES, Clock, State, Task, budget_of
from shardplan.problem.canonical_axis_order import straightened
from shardplan.problem.cost_network import Problem
from shardplan.search import Solution
from shardplan.search.solution import relative_gap

Stage = Callable[[Task, State], Iterator[State]]
"""From a state to ever later ones: the last before the time is over is kept."""

_Propose = Callable[[State, float], Proposal]
_Improve = Callable[[Task, Found, State, float], Proposal]


def search_within(problem: Problem, search: Search) -> Found:
    """The best schedule whose peak keeps within the limit. Raises InfeasibleError where nothing fits."""
    task = Task(problem, search, Clock(time.perf_counter() + search.seconds), search.limit_bytes)
    begun, solution = _without_limit(task)
    if solution.status == "infeasible":
        said = "the hard layouts of pins and constraints exclude each other: no layout of the step has them all"
        raise InfeasibleError(said)
    free = task.count(solution)  # however late it is
    if free.peak_bytes <= task.limit:
        return free
    if search.briefly and float(free.lifetimes.least().max()) > CLEARLY * task.limit:
        raise refusal(task, State(free, task.limit).take(free))
    task = replace(task, budget=budget_of(problem, solution), begun=solution.choices if begun is None else begun)
    state, rows = run_stages(task, State(free, task.limit).take(free))
    if (best := state.best) is None:
        raise refusal(task, state)
    lower = min(free.solution.lower_bound, best.solution.cost)
    return replace(best, solution=replace(best.solution, lower_bound=lower), stages=rows)


def _without_limit(task: Task) -> tuple[Choices | None, Solution]:
    """The best choices without a limit; and the first good ones on the way, which do not depend on the limit."""
    problem, search, begun = task.problem, task.search, list[Choices]()

    def serves(choices: Choices) -> bool:
        choices = straightened(problem, choices)  # as it would be found: in another order of axes it may hold less
        begun.append(choices)
        solution = Solution(choices, np.inf, -np.inf, "feasible", search.method)
        return task.count(solution).peak_bytes <= CLEARLY * search.limit_bytes

    counting = BUDGET_PER_OPERATION * len(problem.program.operations)  # what is found
    seconds = search.seconds - counting * (counting < search.seconds / 2)
    found = find(problem, problem.network, search, seconds, serves=serves if search.limit_bytes < np.inf else None)
    return (begun[0] if begun else None), found


def run_stages(task: Task, state: State) -> tuple[State, tuple[Mapping[str, float | str], ...]]:
    """The state after all stages, and a row for each."""
    rows = list[Mapping[str, float | str]]()
    for name, stage in STAGES:
        if task.search.briefly and stage is lowest_peak and state.best is None:
            break
        with suppress(OutOfTime):  # what was found by then is kept
            for after in stage(task, state):
                state = after
        found, counted = state.best or state.leanest, len(state.counted)
        cost, peak = float(found.solution.cost), found.peak_bytes
        rows.append({"stage": name, "work": state.work, "counted": counted, "cost": cost, "peak_bytes": peak})
    return state, tuple(rows)


def _in_orders(task: Task, state: State) -> Iterator[State]:
    """Searches in the order of what was found last, or where nothing fits there, of the schedule without a limit."""

    def propose(state: State, limit: float) -> Proposal:
        after, choices = searched(task, [*state.counted.values()][-1], state, limit)
        return (after, choices) if choices is not None else searched(task, after.free, after, limit)

    return _fitting(task, state, propose)


def _descended(task: Task, state: State) -> Iterator[State]:
    """The best schedule with each variable's cheapest choice, as far as that fits: whatever work is left."""
    return iter(()) if state.best is None else _fitting(task, state, partial(descent, task, state.best))


def _improved(propose: _Improve, task: Task, state: State) -> Iterator[State]:
    """What is proposed of the best schedule, and of what comes out, while that is better and work is left."""
    base = None
    while (best := state.best) is not None and best is not base and _worth(task, state):
        base = best
        for after in _fitting(task, state, partial(propose, task, base)):
            state = after
            yield state


def _worth(task: Task, state: State) -> bool:
    """Whether work is left, and the best schedule is not proven."""
    cost = np.inf if state.best is None else state.best.solution.cost
    return relative_gap(cost, state.free.solution.lower_bound) > ENOUGH and state.work < task.budget


def _fitting(task: Task, state: State, propose: _Propose) -> Iterator[State]:
    """Takes what is proposed within the limit into account, as it is in its own order; what exceeds the limit there is
    asked for as much less."""
    limit = task.limit
    for _ in range(TRIES):
        worth = np.inf if state.best is None else (1 - ENOUGH) * state.best.solution.cost
        state, choices = propose(state, limit)
        yield state
        if choices is None or task.problem.network.cost(choices) >= worth:
            return
        state, own = state.count(task, choices)
        yield state
        if own.peak_bytes <= task.limit or (state.best is not None and state.work > task.budget):
            return
        limit *= max(task.limit / own.peak_bytes, 1 / CLEARLY)  # what is far above fits sooner in another order


STAGES: tuple[tuple[str, Stage], ...] = (
    ("orders", _in_orders),
    ("mixtures", partial(_improved, mixture)),
    ("lowest peak", lowest_peak),
    ("descent", _descended),
    ("from the best", partial(_improved, searched)),
    ("mixtures again", partial(_improved, mixture)),
    ("descent again", _descended),
)
"""What is done where the schedule without a limit does not fit. A search comes first: it finds what the rest mixes."""
