"""What the stages of a search within a memory limit hand on: what was counted, what is known, and the work so far."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from shardplan.memory import Lifetimes, lifetimes_of
from shardplan.optimize.solve_once import Choices, Found, OutOfTime, Search
from shardplan.problem.cost_network import Problem
from shardplan.problem.schedule import Schedule
from shardplan.search import Solution

WORK_PER_OPERATION = 1.5e-4
"""Estimated seconds in which the memory of a schedule is counted in its own order, per operation of the program: in
the unit of `Solution.work`, so the same on every machine."""

BUDGET_PER_OPERATION, BUDGET_TIMES_SEARCH = 7e-4, 2.0
"""The work that stages may take, in estimated seconds, per operation and times that of the search without a limit: with
it, planning takes less than three times as long as without a limit."""

LEAST_WORK = 0.05
"""Estimated seconds of a search of the smallest program: with less, prices are not found."""

TRIES = 4
"""So often is what exceeds the limit in its own order asked for less: orders differ by a percent, at random."""

PLACES_AT_ONCE = 8
"""The positions at which a schedule exceeds the limit most that a network is held to at first: prices of a few are
soon found, and those that are missing are added."""


@dataclass(slots=True)
class Clock:
    """The time limit, by ``time.perf_counter``. It ends a search, and decides nothing else."""

    deadline: float
    longest: float = 0.0  # seconds that a count has taken
    late: bool = False  # whether something was left out because of the time

    def seconds_left(self) -> float:
        """What may be taken that leaves the time to count what it finds. Raises `OutOfTime` where that is none."""
        left = self.deadline - time.perf_counter() - self.longest
        if left <= 0:
            self.late = True
            raise OutOfTime
        return left


@dataclass(frozen=True, slots=True)
class Task:
    """What is searched: all that stages share, and none of them changes."""

    problem: Problem
    search: Search
    clock: Clock
    limit: float  # bytes per device
    budget: float = np.inf  # the work that stages may take, in estimated seconds
    begun: Choices = field(default_factory=lambda: np.zeros(0, np.int64))
    """A schedule without a limit that does not depend on what the limit is."""

    def beyond(self, order: Lifetimes) -> dict[int, float]:
        """Per position of an order, what a compiled program held above the count, at whichever operation runs there."""
        found = dict[int, float]()
        for index, size in self.search.excess.items():
            found[order.place[index]] = max(size, found.get(order.place[index], 0.0))
        return found

    def profile(self, order: Lifetimes, choices: Choices) -> NDArray[np.float64]:
        """float [positions + 1]: what a device holds in an order with some choices."""
        profile = order.profile(choices)
        for place, size in self.beyond(order).items():
            profile[place] += size
        return profile

    def count(self, solution: Solution) -> Found:
        """A solution, with what it holds in its own order."""
        begun = time.perf_counter()
        schedule = Schedule(self.problem, self.problem.decode(solution.choices))
        lifetimes = lifetimes_of(schedule, self.search.donated)
        peak = float(self.profile(lifetimes, solution.choices).max())
        self.clock.longest = max(self.clock.longest, time.perf_counter() - begun)
        return Found(schedule, solution, peak, lifetimes)


@dataclass(frozen=True, slots=True)
class State:
    """What is known after a stage; ``free`` is the best schedule without the limit."""

    free: Found
    limit: float
    counted: Mapping[bytes, Found] = field(default_factory=dict)
    """All that was counted in its own order, by choices."""
    known: Mapping[bytes, Choices] = field(default_factory=dict)
    """All that searches have found."""
    work: float = 0.0
    least: Found | None = None
    """What the search for the lowest peak has found: it does not depend on the limit."""
    bound: float = 0.0
    """What no peak is below in the order of that search."""

    @property
    def best(self) -> Found | None:
        """The cheapest schedule within the limit."""
        fitting = (found for found in self.counted.values() if found.peak_bytes <= self.limit)
        return min(fitting, key=lambda found: found.solution.cost, default=None)

    @property
    def leanest(self) -> Found:
        """The schedule of the lowest peak."""
        return min(self.counted.values(), key=lambda found: found.peak_bytes)

    def spend(self, work: float) -> State:
        """After so much work."""
        return replace(self, work=self.work + work)

    def learn(self, assignments: Iterable[Choices]) -> State:
        """With assignments that searches have found."""
        return replace(self, known={**self.known, **{one.tobytes(): one for one in assignments}})

    def take(self, found: Found) -> State:
        """With a schedule that was counted in its own order."""
        counted = {**self.counted, found.solution.choices.tobytes(): found}
        return replace(self, counted=counted).learn([found.solution.choices])

    def count(self, task: Task, choices: Choices) -> tuple[State, Found]:
        """With the schedule of some choices, counted once."""
        if (known := self.counted.get(choices.tobytes())) is not None:
            return self, known
        task.clock.seconds_left()
        cost = task.problem.network.cost(choices)
        found = task.count(Solution(choices, cost, -np.inf, "feasible", task.search.method))
        return self.take(found).spend(WORK_PER_OPERATION * len(task.problem.program.operations)), found


def highest(profile: NDArray[np.float64], limit: float) -> Iterator[int]:
    """The positions at which a profile exceeds a limit most, at some distance from each other."""
    profile, apart = profile.copy(), len(profile) // PLACES_AT_ONCE**2
    for _ in range(PLACES_AT_ONCE):
        place = int(profile.argmax())
        if profile[place] <= limit:
            return
        yield place
        profile[max(0, place - apart) : place + apart + 1] = 0.0


def budget_of(problem: Problem, solution: Solution) -> float:
    """The work that stages may take, in estimated seconds, where a search without a limit has found a solution."""
    work = BUDGET_PER_OPERATION * len(problem.program.operations) + BUDGET_TIMES_SEARCH * solution.work
    return (TRIES + 1) * LEAST_WORK + work
