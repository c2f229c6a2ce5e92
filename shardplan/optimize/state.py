"""The state of a search within a memory limit: counted schedules, known choices, and the work so far."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from shardplan.memory import Lifetimes, lifetimes_of
from shardplan.optimize.solve_once import Choices, FoundSchedule, Search, TimeLimitReached
from shardplan.problem.cost_network import Problem
from shardplan.problem.schedule import Schedule
from shardplan.search import Solution

WORK_PER_OPERATION = 1.5e-4
"""The estimated seconds to count the memory of a schedule in its own order, per operation of the program. The unit is
that of `Solution.work`, the same on every machine."""

BUDGET_PER_OPERATION, BUDGET_TIMES_SEARCH = 7e-4, 2.0
"""The work that stages may take: estimated seconds per operation, and a multiple of the search without a limit. With
it, planning takes less than three times as long as without a limit."""

LEAST_WORK = 0.05
"""Estimated seconds of a search of the smallest program. Less does not suffice to find prices."""

MAX_TRIES = 4
"""The most searches with a lowered limit, for schedules that exceed the limit in their own order. Orders differ by a
percent, at random."""

FIRST_POSITIONS = 8
"""The most positions that are limited at first: those at which a schedule exceeds the limit most. Prices of a few are
found soon, and missing positions are added."""


@dataclass(slots=True)
class Clock:
    """The time limit, by ``time.perf_counter``. It only ends a search."""

    deadline: float
    longest: float = 0.0  # seconds of the longest count
    late: bool = False  # whether the time limit left out some step

    def seconds_left(self) -> float:
        """The seconds for a search, without those to count its result. Raises `TimeLimitReached` if none are left."""
        left = self.deadline - time.perf_counter() - self.longest
        if left <= 0:
            self.late = True
            raise TimeLimitReached
        return left


@dataclass(frozen=True, slots=True)
class Task:
    """The problem and the limits of a search: the constants of all stages."""

    problem: Problem
    search: Search
    clock: Clock
    limit: float  # bytes per device
    budget: float = np.inf  # the work that stages may take, in estimated seconds
    begun: Choices = field(default_factory=lambda: np.zeros(0, np.int64))
    """The choices of a schedule without a limit, which do not depend on the limit."""

    def excess_in(self, order: Lifetimes) -> dict[int, float]:
        """Per position of an order, the bytes that a compiled program held above the prediction of its operations."""
        found = dict[int, float]()
        for index, size in self.search.excess.items():
            found[order.place[index]] = max(size, found.get(order.place[index], 0.0))
        return found

    def profile(self, order: Lifetimes, choices: Choices) -> NDArray[np.float64]:
        """float [positions + 1]: the bytes that a device holds in an order with some choices."""
        profile = order.profile(choices)
        for place, size in self.excess_in(order).items():
            profile[place] += size
        return profile

    def count(self, solution: Solution) -> FoundSchedule:
        """A solution, with its peak memory in its own order."""
        begun = time.perf_counter()
        schedule = Schedule(self.problem, self.problem.decode(solution.choices))
        lifetimes = lifetimes_of(schedule, self.search.donated)
        peak = float(self.profile(lifetimes, solution.choices).max())
        self.clock.longest = max(self.clock.longest, time.perf_counter() - begun)
        return FoundSchedule(schedule, solution, peak, lifetimes)


@dataclass(frozen=True, slots=True)
class State:
    """The results so far. ``free`` is the best schedule without the limit."""

    free: FoundSchedule
    limit: float
    counted: Mapping[bytes, FoundSchedule] = field(default_factory=dict)
    """All schedules counted in their own order, by choices."""
    known: Mapping[bytes, Choices] = field(default_factory=dict)
    """All choices that searches have found."""
    work: float = 0.0
    least: FoundSchedule | None = None
    """The schedule of the search for the lowest peak, which does not depend on the limit."""
    bound: float = 0.0
    """A lower bound of all peaks in the order of that search."""

    @property
    def best(self) -> FoundSchedule | None:
        """The cheapest schedule within the limit."""
        fitting = (found for found in self.counted.values() if found.peak_bytes <= self.limit)
        return min(fitting, key=lambda found: found.solution.cost, default=None)

    @property
    def leanest(self) -> FoundSchedule:
        """The schedule of the lowest peak."""
        return min(self.counted.values(), key=lambda found: found.peak_bytes)

    def spend(self, work: float) -> State:
        """This state after so much work."""
        return replace(self, work=self.work + work)

    def learn(self, assignments: Iterable[Choices]) -> State:
        """This state with further known assignments."""
        return replace(self, known={**self.known, **{one.tobytes(): one for one in assignments}})

    def take(self, found: FoundSchedule) -> State:
        """This state with a schedule that was counted in its own order."""
        counted = {**self.counted, found.solution.choices.tobytes(): found}
        return replace(self, counted=counted).learn([found.solution.choices])

    def count(self, task: Task, choices: Choices) -> tuple[State, FoundSchedule]:
        """This state with the schedule of some choices, counted once."""
        if (known := self.counted.get(choices.tobytes())) is not None:
            return self, known
        task.clock.seconds_left()
        cost = task.problem.network.cost(choices)
        found = task.count(Solution(choices, cost, -np.inf, "feasible", task.search.method))
        return self.take(found).spend(WORK_PER_OPERATION * len(task.problem.program.operations)), found


def highest_positions(profile: NDArray[np.float64], limit: float) -> Iterator[int]:
    """The positions at which a profile exceeds a limit most, at some distance from each other."""
    profile, apart = profile.copy(), len(profile) // FIRST_POSITIONS**2
    for _ in range(FIRST_POSITIONS):
        place = int(profile.argmax())
        if profile[place] <= limit:
            return
        yield place
        profile[max(0, place - apart) : place + apart + 1] = 0.0


def budget_of(problem: Problem, solution: Solution) -> float:
    """The work that stages may take, in estimated seconds, after the solution of a search without a limit."""
    work = BUDGET_PER_OPERATION * len(problem.program.operations) + BUDGET_TIMES_SEARCH * solution.work
    return (MAX_TRIES + 1) * LEAST_WORK + work
