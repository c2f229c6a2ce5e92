"""The objective "time": the schedule of the shortest step, a maximum that a sequence of weighted sums bounds.

The time of a step is the waiting for collectives, plus the maximum of the work and of the collectives that can hide
(`shardplan.timing.step_time`). A maximum is not a sum of tables. For every share s between 0 and 1, it is at least the
sum of (1 - s) times the work and s times these collectives. So the best schedule at any share is a candidate, and its
bound is a bound of the step's time. At a share near 0 both agree for a step with more work than collectives that can
hide. Most programs need only this search. For the others, the next share is the one at which the best two schedules
cost the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from shardplan.optimize.solve_once import FoundSchedule, Search
from shardplan.optimize.within_memory import search_within
from shardplan.problem.cost_network import Problem
from shardplan.timing.step_time import StepTime, step_time

LEAST_SHARE = 1e-6
"""The share of its time that a hidden collective costs. Of equally long steps, it prefers the one that sends less."""

_MAX_SHARES = 4
_ACCEPTED_GAP = 1e-3


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The result of a search at one share. ``value`` is the step's time."""

    share: float
    found: FoundSchedule
    step: StepTime

    @property
    def excess(self) -> float:
        return self.step.excess

    @property
    def value(self) -> float:
        return self.found.solution.cost + max((1 - self.share) * self.excess, -self.share * self.excess)

    def at(self, share: float) -> float:
        """The cost of the schedule at another share."""
        return self.found.solution.cost + (share - self.share) * self.excess


def search_shortest_step(problem: Problem, search: Search, rebuild: Callable[[float], Problem] | None) -> FoundSchedule:
    """The best schedule for the objective "time", its cost and bound those of the step's time.

    ``problem`` is priced at the least share. ``rebuild`` prices it at another one.
    Without ``rebuild`` the result is that of the first search.
    """
    deadline = time.perf_counter() + search.seconds
    tried = [_try(problem, search)]
    while rebuild is not None and tried[0].excess > 0 and len(tried) <= _MAX_SHARES:
        best, bound = min(one.value for one in tried), max(one.found.solution.lower_bound for one in tried)
        share, left = _next_share(tried), deadline - time.perf_counter()
        if best - bound <= _ACCEPTED_GAP * best or share is None or left <= 0:
            break
        repriced = rebuild(share)
        left = deadline - time.perf_counter()
        if left <= 0:
            break
        tried.append(_try(repriced, replace(search, seconds=left)))
    fitting = [one for one in tried if one.found.peak_bytes <= search.limit_bytes]
    chosen = min(fitting or tried, key=lambda one: one.value)
    bound = max(one.found.solution.lower_bound for one in tried)
    solution = replace(chosen.found.solution, cost=chosen.value, lower_bound=min(bound, chosen.value))
    return replace(chosen.found, solution=solution)


def _try(problem: Problem, search: Search) -> _Attempt:
    share = problem.prices.share
    assert share is not None
    found = search_within(problem, search)
    return _Attempt(share, found, step_time(found.schedule))


def _next_share(tried: list[_Attempt]) -> float | None:
    """The share at which the best schedule with more to hide than work costs the same as the best one with less. None
    where it was tried."""
    more = max((one for one in tried if one.excess > 0), key=lambda one: one.share)
    less = min((one for one in tried if one.excess <= 0), key=lambda one: one.share, default=None)
    if less is None:
        share = 0.5 if more.share < 0.5 else 1 - (1 - more.share) / 100
    else:
        share = more.share + (less.at(more.share) - more.at(more.share)) / (more.excess - less.excess)
    nearest = min(abs(share - one.share) for one in tried)
    return share if nearest > LEAST_SHARE and LEAST_SHARE < share < 1 else None
