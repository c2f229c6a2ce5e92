"""Searching: from a problem to the best schedule within the memory limit.

The problem is first solved without memory. Only where the plan that is found does not fit is memory made part of the
network, and solved again; so programs that fit, most of them, do not pay for the limit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shardplan.errors import InfeasibleError
from shardplan.fusion import fused_operations
from shardplan.memory import WORKSPACE_BYTES, Lifetimes, memory_profile
from shardplan.order import execution_order
from shardplan.problem import Problem
from shardplan.schedule import Schedule
from shardplan.search import Solution, solve

# The gap at which a search may stop: a plan within a thousandth of a percent of the optimum is as good as optimal.
_PRECISION = 1e-5

# Networks with more table entries than this (many layers on three or more mesh axes) take a minute for that, and a few
# seconds for a tenth of a percent, which is good enough there.
_LARGE = 5e7
_PRECISION_OF_LARGE = 1e-3

# Within a memory limit the last thousandth of a percent is what takes longest: a tenth of a percent has to do. That
# search ends with the best plan by then, after so many times the work of the search without a limit. Work is counted,
# not timed, so that the same program gets the same plan on every machine.
_PRECISION_WITHIN_LIMIT = 1e-3
_TIMES_SLOWER_WITHIN_LIMIT = 3
_LEAST_WORK = 2.5
_TIMES_LONGER_WHERE_NOTHING_FITS = 4
_LEAST_SECONDS = 2.5

# The network counts memory as a sum over variables, the schedule exactly. Where the exact peak is above the limit
# though the sum was not, the limit of the sum is lowered by the excess, this often at most.
_MOST_CORRECTIONS = 4


@dataclass(frozen=True, slots=True)
class Found:
    """A schedule with the evidence of the search, and the bytes that a device holds at its peak."""

    schedule: Schedule
    solution: Solution
    peak_bytes: float
    lifetimes: Lifetimes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Search:
    """How to search: by a method of ``shardplan.search``, for so long, within so many bytes per device.

    ``donated`` are positions of inputs whose memory the outputs take.
    """

    method: str
    seconds: float
    limit_bytes: float
    donated: frozenset[int]


def search_within(problem: Problem, search: Search) -> Found:
    """The best schedule whose peak keeps within the limit. Raises InfeasibleError where nothing fits."""
    deadline = time.perf_counter() + search.seconds
    limit_bytes = search.limit_bytes
    # XLA schedules a program in several ways, and keeps the one with the lowest peak
    late = execution_order(problem.program, fused_operations(problem))
    orders = (late, range(len(problem.program.operations)))
    found = _search(problem, [Lifetimes(problem, order) for order in orders], search, search.seconds)
    if found.solution.status == "infeasible":
        raise InfeasibleError(
            "the hard layouts of pins and constraints exclude each other: no layout of the step has them all"
        )
    if found.peak_bytes <= limit_bytes:
        return found
    found.lifetimes.add_usages(search.donated)
    return _search_again(problem, search, found, deadline)


def _search_again(problem: Problem, search: Search, first: Found, deadline: float) -> Found:
    """The best schedule within the limit, where ``first``, the best one without, is not."""
    least, bound, allowed = first, 0.0, search.limit_bytes
    lifetimes = [first.lifetimes]
    patience = max(_LEAST_WORK, _TIMES_SLOWER_WITHIN_LIMIT * first.solution.work)
    for _ in range(_MOST_CORRECTIONS):
        problem.network.usage_limit = allowed - WORKSPACE_BYTES
        found = _search_longer(problem, lifetimes, search, deadline, patience)
        bound = max(bound, found.solution.least_peak_bound)
        least = min(least, found, key=lambda f: f.peak_bytes)
        if found.peak_bytes <= search.limit_bytes:
            valid = _as_valid(problem, found, first)
            if valid is not None:
                return valid
        if not np.isfinite(found.solution.cost):
            break
        allowed *= 0.995 * search.limit_bytes / found.peak_bytes
        if time.perf_counter() > deadline:
            break
    raise InfeasibleError(_does_not_fit(problem, least, bound, search), least.peak_bytes)


def _search_longer(
    problem: Problem, lifetimes: Sequence[Lifetimes], search: Search, deadline: float, work: float
) -> Found:
    """The best schedule within so much work, or within more of it where nothing was found."""
    while True:
        left = max(_LEAST_SECONDS, deadline - time.perf_counter())
        found = _search(problem, lifetimes, search, left, work)
        settled = np.isfinite(found.solution.cost) or found.solution.status == "infeasible"
        if settled or time.perf_counter() >= deadline:
            return found
        work *= _TIMES_LONGER_WHERE_NOTHING_FITS


def _as_valid(problem: Problem, found: Found, first: Found) -> Found | None:
    """A schedule that fits, though the search may call it infeasible: the sum over variables can count too much."""
    if np.isfinite(found.solution.cost):
        return found
    cost = problem.network.cost(found.solution.choices)
    if not np.isfinite(cost):
        return None
    solution = replace(found.solution, cost=cost, lower_bound=first.solution.lower_bound, status="feasible")
    return replace(found, solution=solution)


def _search(
    problem: Problem, orders: Sequence[Lifetimes], search: Search, seconds: float, work: float = np.inf
) -> Found:
    """The best schedule within so many seconds and so much work, which only what is within a limit is held to."""
    precision = _PRECISION if problem.network.usage_limit is None else _PRECISION_WITHIN_LIMIT
    entries = sum(problem.network.tables[table].size for _, _, table in problem.network.edges)
    precision = max(precision, _PRECISION_OF_LARGE if entries > _LARGE else 0.0)
    solution = solve(problem.network, method=search.method, gap=precision, time_limit=seconds, work_limit=work)
    if solution.status == "unknown" and problem.network.usage_limit is None:
        solution = _as_it_is(problem, solution)
    schedule = Schedule(problem, problem.decode(solution.choices))
    peaks = [float(memory_profile(lifetimes, schedule, search.donated).max()) for lifetimes in orders]
    return Found(schedule, solution, min(peaks), orders[int(np.argmin(peaks))])


def _as_it_is(problem: Problem, solution: Solution) -> Solution:
    """Where the time was over before anything was found: the first choices, which split nothing, where they may."""
    cost = problem.network.cost(solution.choices)
    if not np.isfinite(cost):
        raise InfeasibleError("no layout of the step was found in the time: give it more (time_limit)")
    return replace(solution, cost=cost, status="feasible")


def _does_not_fit(problem: Problem, least: Found, bound: float, search: Search) -> str:
    lifetimes = least.lifetimes
    profile = memory_profile(lifetimes, least.schedule, search.donated)
    moment = int(np.argmax(profile))
    program = problem.program
    makers = {result: operation for operation in program.operations for result in operation.results}
    alive = []
    for value, lifetime in lifetimes.held.items():
        if lifetime.start <= moment <= lifetime.end:
            layout = least.schedule.assignment.values[value]
            domain = problem.domain(value)
            degree = domain.degrees[domain.position[layout]]
            tensor = program.values[value]
            where = tensor.name or (makers[value].source if value in makers else "captured array")
            alive.append((tensor.total_bytes / degree, f"{tensor.dtype}{list(tensor.shape)} of `{where}`"))
    largest = sorted(alive, key=lambda entry: -entry[0])[:5]
    lines = "\n".join(f"  {size / 1e6:10.1f} MB  {what}" for size, what in largest)
    proven = f"; by the planner's count none is below {_size(bound + WORKSPACE_BYTES)}" if bound else ""
    helps = "more devices, a smaller batch, jax.checkpoint around layers"
    return (
        f"no layout was found that keeps within {_size(search.limit_bytes)} per device; the least peak found is "
        f"{_size(least.peak_bytes)}{proven}. The largest tensors there, per device:\n{lines}\n"
        f"What helps: {helps}{'' if search.donated else ', donate_argnums for the state'}."
    )


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
