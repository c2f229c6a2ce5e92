"""One solve of the network, its limits, and the peak memory of the resulting schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from shardplan.errors import InfeasibleError
from shardplan.memory import Lifetimes
from shardplan.problem.canonical_axis_order import canonicalize_axis_order
from shardplan.problem.cost_network import Problem
from shardplan.problem.schedule import Schedule
from shardplan.search import Network, Solution, solve

Choices = NDArray[np.int64]

PRECISION = 1e-5
"""The gap at which a search stops: a thousandth of a percent counts as optimal."""

ACCEPTABLE_GAP = 1e-3
"""The gap that is not worth much more work. A search within a memory limit, or of a large network, stops at it, since
the last tenth of a percent takes longest there."""

LARGE_NETWORK_ENTRIES = 5e7
"""Table entries of a large network, such as that of many layers on three mesh axes. A smaller gap takes a minute
there."""

CLEARLY_ABOVE_RATIO = 1.05
"""A schedule without a limit that exceeds the limit by this factor is not worth a proof. A position counts from the
start if it is less than this factor below the limit, since other choices soon fill it."""


class TimeLimitReached(Exception):
    """The time limit is over. The best schedule found by then is the result."""


@dataclass(frozen=True, slots=True)
class FoundSchedule:
    """A schedule with the evidence of the search, and its peak memory in its own order."""

    schedule: Schedule
    solution: Solution
    peak_bytes: float
    lifetimes: Lifetimes = field(repr=False)
    stages: tuple[Mapping[str, float | str], ...] = ()
    """A row for each stage of the search within the memory limit."""


@dataclass(frozen=True, slots=True)
class Search:
    """The limits of a search: a method of ``shardplan.search``, seconds, and bytes per device.

    ``donated`` are positions of inputs whose memory the outputs take. ``excess``: per operation, by index, bytes that a
    compiled program held there above its prediction. With ``may_exceed`` the schedule without a limit is the result
    where the first searches find nothing within it: the step may fit by other means than layouts. ``known`` are
    schedules that the search begins from.
    """

    method: str
    seconds: float
    limit_bytes: float
    donated: frozenset[int]
    excess: Mapping[int, float] = field(default_factory=dict)
    may_exceed: bool = False
    known: Sequence[FoundSchedule] = ()


def solve_network(
    problem: Problem,
    network: Network,
    search: Search,
    seconds: float,
    work: float = np.inf,
    is_feasible: Callable[[Choices], bool] | None = None,
) -> Solution:
    """The best choices within the seconds and the work. The work only bounds a search within a memory limit.

    ``network`` is the problem's, or has further variables after these. The solution's `known` have them too.
    """
    entries = sum(network.tables[table].size for _, _, table in network.edges)
    precise = network.usage_limit is None and entries <= LARGE_NETWORK_ENTRIES
    solution = solve(
        network,
        method=search.method,
        gap=PRECISION if precise else ACCEPTABLE_GAP,
        acceptable_gap=ACCEPTABLE_GAP,
        time_limit=seconds,
        work_limit=work,
        is_feasible=is_feasible,
    )
    choices = canonicalize_axis_order(problem, solution.choices[: len(problem.network)])
    solution = replace(solution, choices=choices)
    if solution.status == "unknown" and network.usage_limit is None:  # the first choices, which split nothing
        cost = problem.network.cost(solution.choices)
        if not np.isfinite(cost):
            raise InfeasibleError("no layout of the step was found in the time: give it more (time_limit)")
        solution = replace(solution, cost=cost, status="feasible")
    return solution
