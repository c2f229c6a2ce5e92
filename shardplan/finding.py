"""Finding: one search of a network, and what a device holds with the schedule that it finds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from shardplan.errors import InfeasibleError
from shardplan.memory.bringing import Sending
from shardplan.memory.combining import ending_at_reductions
from shardplan.memory.convolutions import convolutions_of, copied_with_neighbours
from shardplan.memory.hiding import hiding_order
from shardplan.memory.liveness import Lifetimes, memory_profile
from shardplan.memory.recomputing import adding_products, kernels_in
from shardplan.problem import Problem
from shardplan.schedule import Schedule
from shardplan.search import Network, Part, Solution, solve
from shardplan.straightening import straightened

# A plan near the best one without a limit that exceeds the limit by so much is not worth proving, nor one within it
# worth counting in its own order.
CLEARLY = 1.05

# The gap at which a search may stop: a plan within a thousandth of a percent of the optimum is as good as optimal.
_PRECISION = 1e-5

# A plan within a tenth of a percent is good enough not to take much more work for a better one.
ENOUGH = 1e-3

# Networks with more table entries than this (many layers on three or more mesh axes) take a minute for that, and a few
# seconds for a tenth of a percent, which is good enough there.
_LARGE = 5e7
_PRECISION_OF_LARGE = 1e-3

# Within a memory limit the last thousandth of a percent is what takes longest: a tenth of a percent has to do.
_PRECISION_WITHIN_LIMIT = 1e-3

# What counting the memory of a schedule takes per operation: what is derived of it once, then in an order that is
# known, and in its own.
_SECONDS_PER_SCHEDULE, _SECONDS_PER_PROFILE, SECONDS_PER_OWN = 1.2e-5, 4e-6, 5.2e-5


class OutOfTime(Exception):
    """The time limit is over: what was found by then is what there is."""


@dataclass(frozen=True, slots=True)
class Found:
    """A schedule with the evidence of the search, and the bytes that a device holds at its peak."""

    schedule: Schedule
    solution: Solution
    peak_bytes: float
    lifetimes: Lifetimes = field(repr=False)
    sending: Sending = field(default_factory=Sending, repr=False)
    """When its collectives run beside others, in its own order."""


@dataclass(frozen=True, slots=True)
class Search:
    """How to search: by a method of ``shardplan.search``, for so long, within so many bytes per device.

    ``donated`` are positions of inputs whose memory the outputs take.
    """

    method: str
    seconds: float
    limit_bytes: float
    donated: frozenset[int]
    precision: float = 0.0
    """The gap at which a search may stop, where it is above what searches stop at anyhow."""
    excess: Mapping[int, float] = field(default_factory=dict)
    """Per operation, by index, bytes that a compiled program held there above what was counted."""


def find(
    problem: Problem,
    network: Network,
    search: Search,
    seconds: float,
    work: float = np.inf,
    serves: Callable[[NDArray[np.int64]], bool] | None = None,
    part: Part | None = None,
) -> Solution:
    """The best choices within so many seconds and so much work, which only what is within a limit is held to.

    ``network`` is the problem's, or that of a part of its, and may have further variables behind, which the solution's
    `known` have too. Bounds are the network's.
    """
    precision = _PRECISION if network.usage_limit is None else _PRECISION_WITHIN_LIMIT
    entries = sum(network.tables[table].size for _, _, table in network.edges)
    precision = max(precision, search.precision, _PRECISION_OF_LARGE if entries > _LARGE else 0.0)
    solution = solve(
        network,
        method=search.method,
        gap=precision,
        enough=ENOUGH,
        time_limit=seconds,
        work_limit=work,
        serves=serves,
    )
    choices = (part or Part(problem.network)).outside(solution.choices)
    solution = replace(solution, choices=straightened(problem, choices))
    if solution.status == "unknown" and network.usage_limit is None:
        solution = _as_it_is(problem, solution)
    return solution


def _as_it_is(problem: Problem, solution: Solution) -> Solution:
    """Where the time was over before anything was found: the first choices, which split nothing, where they may."""
    cost = problem.network.cost(solution.choices)
    if not np.isfinite(cost):
        raise InfeasibleError("no layout of the step was found in the time: give it more (time_limit)")
    return replace(solution, cost=cost, status="feasible")


class Counts:
    """What a device holds with schedules of a problem, in their own orders and in others: each is counted once.

    ``running``: see `shardplan.schedule.Schedule`.
    """

    def __init__(self, problem: Problem, search: Search, running: bool = False) -> None:
        self.problem, self.search, self._running = problem, search, running
        self.work = 0.0
        """Estimated seconds of all counts, the same on every machine."""
        self.deadline = np.inf
        """By the clock of ``time.perf_counter``."""
        self.late = False
        """Whether something was left out because of that."""
        self._longest = 0.0
        self._own: dict[bytes, Found] = {}
        self._schedules: dict[bytes, Schedule] = {}
        self._profiles: dict[tuple[bytes, Lifetimes], NDArray[np.float64]] = {}

    def own(self, solution: Solution) -> Found:
        """What is found, with what it holds in its own order."""
        key = solution.choices.tobytes()
        if key not in self._own:
            begun = self.check()
            schedule = self.schedule(solution.choices)
            self.work += SECONDS_PER_OWN * len(self.problem.program.operations)
            lifetimes, sending = in_own_order(schedule)
            peak = float(profile_of(lifetimes, schedule, self.search, sending).max())
            self._own[key] = Found(schedule, solution, peak, lifetimes, sending)
            self._longest = max(self._longest, time.perf_counter() - begun)
        return replace(self._own[key], solution=solution)

    def check(self, seconds: float = 0.0) -> float:
        """The time by the clock; raises `OutOfTime` where the time limit is over so many seconds later."""
        now = time.perf_counter()
        if now + seconds > self.deadline:
            self.late = True
            raise OutOfTime
        return now

    def seconds_left(self) -> float:
        """What a search may take that leaves the time to count what it finds. Raises `OutOfTime` where that is none."""
        return self.deadline - self.check(self._longest) - self._longest

    def counted(self) -> list[Found]:
        """All that was counted in its own order."""
        return list(self._own.values())

    def within(self, solution: Solution, lifetimes: Lifetimes) -> Found:
        """What is found, with what it holds in this order."""
        peak = float(self.profile(solution.choices, lifetimes).max())
        return Found(self.schedule(solution.choices), solution, peak, lifetimes)

    def profile(self, choices: NDArray[np.int64], lifetimes: Lifetimes) -> NDArray[np.float64]:
        """float [operations + 1]: what a device holds with these choices, in this order. Not to be changed."""
        key = choices.tobytes(), lifetimes
        if key not in self._profiles:
            self.check()
            schedule = self.schedule(choices)
            self.work += _SECONDS_PER_PROFILE * len(self.problem.program.operations)
            self._profiles[key] = profile_of(lifetimes, schedule, self.search)
        return self._profiles[key]

    def profile_in_own(self, own: Found) -> NDArray[np.float64]:
        """Likewise of what was counted in its own order, with its collectives under way."""
        self.work += _SECONDS_PER_PROFILE * len(self.problem.program.operations)
        return profile_of(own.lifetimes, own.schedule, self.search, own.sending)

    def schedule(self, choices: NDArray[np.int64]) -> Schedule:
        """The schedule of these choices of the problem's variables."""
        key = choices.tobytes()
        if key not in self._schedules:
            self.work += _SECONDS_PER_SCHEDULE * len(self.problem.program.operations)
            self._schedules[key] = Schedule(self.problem, self.problem.decode(choices), self._running)
        return self._schedules[key]


def in_own_order(schedule: Schedule) -> tuple[Lifetimes, Sending]:
    """The lifetimes of a schedule in the order that XLA is taken to keep, and when its collectives run there."""
    kernels = adding_products(schedule, ending_at_reductions(schedule, kernels_in(schedule, _copied(schedule))))
    order, sending = hiding_order(schedule, kernels)
    return Lifetimes(schedule.problem, order, kernels, sending), sending


def profile_of(
    lifetimes: Lifetimes, schedule: Schedule, search: Search, sending: Sending | None = None
) -> NDArray[np.float64]:
    """float [operations + 1]: what a device holds in this order, with the excess that a compiled program had."""
    profile = memory_profile(lifetimes, schedule, search.donated, sending)
    for index, excess in search.excess.items():
        profile[lifetimes.place[index]] += excess
    return profile


def _copied(schedule: Schedule) -> set[tuple[int, int]]:
    """The operands of convolutions that are copied: images with rows of neighbours, and those of islands beside, since
    XLA's simplifications, which let images and filters change places, do not look into islands."""
    copied = copied_with_neighbours(schedule.problem, schedule.assignment.strategies)
    convolutions = convolutions_of(schedule.program) if copied else ()
    return {*copied, *((o.index, 0) for o in convolutions if schedule.island_dtype(o))}
