"""Searching: from a problem to the best schedule within the memory limit.

The problem is first solved without memory. Only where the plan that is found does not fit is memory made part of the
network, and solved again; so programs that fit, most of them, do not pay for the limit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from shardplan.errors import InfeasibleError
from shardplan.memory import WORKSPACE_BYTES, Lifetimes, memory_profile
from shardplan.problem import Problem
from shardplan.schedule import Schedule
from shardplan.search import Solution, solve

# The gap at which a search may stop: a plan within a thousandth of a percent of the optimum is as good as optimal.
_PRECISION = 1e-5

# The network counts memory as a sum over variables, the schedule exactly. Where the exact peak is above the limit
# though the sum was not, the limit of the sum is lowered by the excess, this often at most.
_MOST_CORRECTIONS = 4


@dataclass(frozen=True, slots=True)
class Found:
    """A schedule with the evidence of the search, and the bytes that a device holds at its peak."""

    schedule: Schedule
    solution: Solution
    peak_bytes: float


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
    lifetimes = Lifetimes(problem)
    found = _search(problem, lifetimes, search, search.seconds)
    if found.solution.status == "infeasible":
        raise InfeasibleError(
            "the hard layouts of pins and constraints exclude each other: no layout of the step has them all"
        )
    if found.peak_bytes <= limit_bytes:
        return found
    lifetimes.add_usages(search.donated)
    least = found
    allowed = limit_bytes
    for _ in range(_MOST_CORRECTIONS):
        problem.network.usage_limit = allowed - WORKSPACE_BYTES
        found = _search(problem, lifetimes, search, max(1.0, deadline - time.perf_counter()))
        if found.solution.status == "infeasible":
            break
        if found.peak_bytes <= limit_bytes:
            return found
        least = min(least, found, key=lambda f: f.peak_bytes)
        allowed *= 0.995 * limit_bytes / found.peak_bytes
        if time.perf_counter() > deadline:
            break
    raise InfeasibleError(_does_not_fit(problem, lifetimes, least, search))


def _search(problem: Problem, lifetimes: Lifetimes, search: Search, seconds: float) -> Found:
    solution = solve(problem.network, method=search.method, gap=_PRECISION, time_limit=seconds)
    schedule = Schedule(problem, problem.decode(solution.choices))
    return Found(schedule, solution, float(memory_profile(lifetimes, schedule, search.donated).max()))


def _does_not_fit(problem: Problem, lifetimes: Lifetimes, least: Found, search: Search) -> str:
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
    return (
        f"no layout was found that keeps within {search.limit_bytes / 1e9:.2f} GB per device; the least peak found is "
        f"{least.peak_bytes / 1e9:.2f} GB. The largest tensors there, per device:\n{lines}\n"
        "What helps: more devices, a smaller batch, jax.checkpoint around layers, donate_argnums for the state."
    )
