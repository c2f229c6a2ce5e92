"""One search of a network, and what it may take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from shardplan.errors import InfeasibleError
from shardplan.memory import Lifetimes
from shardplan.problem.canonical_axis_order import straightened
from shardplan.problem.cost_network import Problem
from shardplan.problem.schedule import Schedule
from shardplan.search import Network, Solution, solve

Choices = NDArray[np.int64]

PRECISION = 1e-5
"""The gap at which a search may stop: within a thousandth of a percent of the optimum is as good as optimal."""

ENOUGH = 1e-3
"""The gap that is not worth much more work. Within a memory limit, and in large networks, the last thousandth of a
percent takes longest: there it has to do."""

LARGE = 5e7
"""Table entries of a large network, such as that of many layers on three mesh axes: a smaller gap takes a minute."""

CLEARLY = 1.05
"""A schedule that exceeds the limit by so much, without being held to it, is not worth proving. As far below the limit
a position counts from the start: what changes elsewhere soon fills it."""


class OutOfTime(Exception):
    """The time limit is over: what was found by then is what there is."""


@dataclass(frozen=True, slots=True)
class Found:
    """A schedule with the evidence of the search, and the bytes that a device holds at its peak, in its own order."""

    schedule: Schedule
    solution: Solution
    peak_bytes: float
    lifetimes: Lifetimes = field(repr=False)
    stages: tuple[Mapping[str, float | str], ...] = ()
    """A row for each stage of the search within the memory limit."""


@dataclass(frozen=True, slots=True)
class Search:
    """How to search: by a method of ``shardplan.search``, for so long, within so many bytes per device.

    ``donated`` are positions of inputs whose memory the outputs take. ``excess``: per operation, by index, bytes that a
    compiled program held there above what was counted. ``briefly`` gives up where the first searches find nothing
    within the limit: there is more than layouts that may make the step fit.
    """

    method: str
    seconds: float
    limit_bytes: float
    donated: frozenset[int]
    excess: Mapping[int, float] = field(default_factory=dict)
    briefly: bool = False


def find(
    problem: Problem,
    network: Network,
    search: Search,
    seconds: float,
    work: float = np.inf,
    serves: Callable[[Choices], bool] | None = None,
) -> Solution:
    """The best choices within so many seconds and so much work, which only what is within a limit is held to.

    ``network`` is the problem's, perhaps with further variables behind, which the solution's `known` have too.
    """
    entries = sum(network.tables[table].size for _, _, table in network.edges)
    precise = network.usage_limit is None and entries <= LARGE
    solution = solve(
        network,
        method=search.method,
        gap=PRECISION if precise else ENOUGH,
        acceptable_gap=ENOUGH,
        time_limit=seconds,
        work_limit=work,
        is_feasible=serves,
    )
    choices = straightened(problem, solution.choices[: len(problem.network)])
    solution = replace(solution, choices=choices)
    if solution.status == "unknown" and network.usage_limit is None:  # the first choices, which split nothing
        cost = problem.network.cost(solution.choices)
        if not np.isfinite(cost):
            raise InfeasibleError("no layout of the step was found in the time: give it more (time_limit)")
        solution = replace(solution, cost=cost, status="feasible")
    return solution
