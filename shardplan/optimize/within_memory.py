"""The search of the best schedule within the memory limit, in stages.

The first search ignores memory. Most programs fit then, and do not pay for the limit. Only a schedule that does not fit
makes memory a part of the network. Further searches propose choices within the limit in the order of a known schedule.
Their own order may hold a little more. The next search then lowers the limit by that excess.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from shardplan.errors import InfeasibleError
from shardplan.optimize.lowest_peak import infeasible_error, lowest_peak
from shardplan.optimize.proposals import Proposal, descent_proposal, mixture_proposal, search_proposal
from shardplan.optimize.solve_once import (
    ACCEPTABLE_GAP,
    CLEARLY_ABOVE_RATIO,
    Choices,
    FoundSchedule,
    Search,
    TimeLimitReached,
    solve_network,
)
from shardplan.optimize.state import BUDGET_PER_OPERATION, MAX_TRIES, Clock, State, Task, budget_of
from shardplan.problem.canonical_axis_order import canonicalize_axis_order
from shardplan.problem.cost_network import Problem
from shardplan.search import Solution
from shardplan.search.solution import relative_gap

Stage = Callable[[Task, State], Iterator[State]]
"""From a state to further ones. The last one before the time limit is kept."""

_Propose = Callable[[State, float], Proposal]
_Improve = Callable[[Task, FoundSchedule, State, float], Proposal]


def search_within(problem: Problem, search: Search) -> FoundSchedule:
    """The best schedule whose peak is within the limit, or where the search may exceed it, that without a limit.

    Raises InfeasibleError where no schedule fits."""
    task = Task(problem, search, Clock(time.perf_counter() + search.seconds), search.limit_bytes)
    begun, solution = _without_limit(task)
    if solution.status == "infeasible":
        said = "the hard layouts of pins and constraints exclude each other: no layout of the step has them all"
        raise InfeasibleError(said)
    free = task.count(solution)  # also after the time limit
    state = State(free, task.limit).take(free)
    for known in search.known:
        state = state.take(known)
    if free.peak_bytes <= task.limit and state.best is not None:
        return state.best
    if search.may_exceed and float(free.lifetimes.least().max()) > CLEARLY_ABOVE_RATIO * task.limit:
        return free
    task = replace(task, budget=budget_of(problem, solution), begun=solution.choices if begun is None else begun)
    state, rows = run_stages(task, state)
    if (best := state.best) is None:
        if search.may_exceed:
            return free
        raise infeasible_error(task, state)
    lower = min(free.solution.lower_bound, best.solution.cost)
    return replace(best, solution=replace(best.solution, lower_bound=lower), stages=rows)


def _without_limit(task: Task) -> tuple[Choices | None, Solution]:
    """The best choices without a limit, after the first good ones of the search, which do not depend on the limit."""
    problem, search, begun = task.problem, task.search, list[Choices]()

    def is_feasible(choices: Choices) -> bool:
        choices = canonicalize_axis_order(problem, choices)  # the final order of axes, which may hold more
        begun.append(choices)
        solution = Solution(choices, np.inf, -np.inf, "feasible", search.method)
        return task.count(solution).peak_bytes <= CLEARLY_ABOVE_RATIO * search.limit_bytes

    counting = BUDGET_PER_OPERATION * len(problem.program.operations)  # the time to count the result
    seconds = search.seconds - counting * (counting < search.seconds / 2)
    found = solve_network(
        problem, problem.network, search, seconds, is_feasible=is_feasible if search.limit_bytes < np.inf else None
    )
    return (begun[0] if begun else None), found


def run_stages(task: Task, state: State) -> tuple[State, tuple[Mapping[str, float | str], ...]]:
    """The state after all stages, and a row for each."""
    rows = list[Mapping[str, float | str]]()
    for name, stage in STAGES:
        if task.search.may_exceed and stage is lowest_peak and state.best is None:
            break
        with suppress(TimeLimitReached):  # the state found by then is kept
            for after in stage(task, state):
                state = after
        found, counted = state.best or state.leanest, len(state.counted)
        cost, peak = float(found.solution.cost), found.peak_bytes
        rows.append({"stage": name, "work": state.work, "counted": counted, "cost": cost, "peak_bytes": peak})
    return state, tuple(rows)


def _search_stage(task: Task, state: State) -> Iterator[State]:
    """Searches in the order of the last schedule. Without a result there, in the order of the one without a limit."""

    def propose(state: State, limit: float) -> Proposal:
        after, choices = search_proposal(task, [*state.counted.values()][-1], state, limit)
        return (after, choices) if choices is not None else search_proposal(task, after.free, after, limit)

    return propose_within(task, state, propose)


def _descent_stage(task: Task, state: State) -> Iterator[State]:
    """The best schedule with each variable's cheapest choice, as far as that fits. It ignores the budget."""
    return iter(()) if state.best is None else propose_within(task, state, partial(descent_proposal, task, state.best))


def _improvement_stage(propose: _Improve, task: Task, state: State) -> Iterator[State]:
    """Proposals from the best schedule, and from their results, while these are better and work is left."""
    base = None
    while (best := state.best) is not None and best is not base and _is_worthwhile(task, state):
        base = best
        for after in propose_within(task, state, partial(propose, task, base)):
            state = after
            yield state


def _is_worthwhile(task: Task, state: State) -> bool:
    """Whether work is left, and the best schedule is not proven."""
    cost = np.inf if state.best is None else state.best.solution.cost
    return relative_gap(cost, state.free.solution.lower_bound) > ACCEPTABLE_GAP and state.work < task.budget


def propose_within(task: Task, state: State, propose: _Propose) -> Iterator[State]:
    """Counts proposals within the limit in their own order. A proposal that exceeds the limit there lowers the limit of
    the next one by the excess."""
    limit = task.limit
    for _ in range(MAX_TRIES):
        worth = np.inf if state.best is None else (1 - ACCEPTABLE_GAP) * state.best.solution.cost
        state, choices = propose(state, limit)
        yield state
        if choices is None or task.problem.network.cost(choices) >= worth:
            return
        state, own = state.count(task, choices)
        yield state
        if own.peak_bytes <= task.limit or (state.best is not None and state.work > task.budget):
            return
        limit *= max(
            task.limit / own.peak_bytes, 1 / CLEARLY_ABOVE_RATIO
        )  # a peak far above fits sooner in another order


STAGES: tuple[tuple[str, Stage], ...] = (
    ("orders", _search_stage),
    ("mixtures", partial(_improvement_stage, mixture_proposal)),
    ("lowest peak", lowest_peak),
    ("descent", _descent_stage),
    ("from the best", partial(_improvement_stage, search_proposal)),
    ("mixtures again", partial(_improvement_stage, mixture_proposal)),
    ("descent again", _descent_stage),
)
"""The stages after a schedule without a limit that does not fit. The first search finds the choices that others mix."""
