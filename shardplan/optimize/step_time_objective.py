"""Balancing: the schedule of the shortest step, where its work or the collectives beside it may take longer.

A step takes the collectives that it waits for, and the longer one of its work and of the collectives that can hide
(`shardplan.timing.step_time`). A maximum is no sum of tables; but for every share s between 0 and 1 it is at least (1 -
s) times the work and s times those collectives, which is one. So the best schedule at any share is a candidate, and its
bound one of the step's time. At a share of almost nothing the two agree wherever there is more work than there is to
hide behind it: one search is all that most programs need. Elsewhere the shares at which two schedules are as good are
tried, one after another."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from shardplan.optimize.solve_once import Found, Search
from shardplan.optimize.within_memory import search_within
from shardplan.problem.cost_network import Problem
from shardplan.timing.step_time import StepTime, step_time

LEAST_SHARE = 1e-6
"""So little of its time does a hidden collective cost that of equal steps the one which sends less is best."""

_MOST_SHARES = 4
_NEAR = 1e-3


@dataclass(frozen=True, slots=True)
class _Tried:
    """What a search at one share found; ``value`` and ``bound`` are of the step's time."""

    share: float
    found: Found
    step: StepTime

    @property
    def excess(self) -> float:
        return self.step.excess

    @property
    def value(self) -> float:
        return self.found.solution.cost + max((1 - self.share) * self.excess, -self.share * self.excess)

    def at(self, share: float) -> float:
        """What the schedule costs at another share."""
        return self.found.solution.cost + (share - self.share) * self.excess


def search_balanced(problem: Problem, search: Search, rebuild: Callable[[float], Problem] | None) -> Found:
    """The best schedule for the objective "time", its cost and bound those of the step's time.

    ``problem`` is priced at the least share; ``rebuild`` prices it at another one.
    Without it the first search has to do.
    """
    deadline = time.perf_counter() + search.seconds
    tried = [_try(problem, search)]
    while rebuild is not None and tried[0].excess > 0 and len(tried) <= _MOST_SHARES:
        best, bound = min(one.value for one in tried), max(one.found.solution.lower_bound for one in tried)
        share, left = _next_share(tried), deadline - time.perf_counter()
        if best - bound <= _NEAR * best or share is None or left <= 0:
            break
        repriced = rebuild(share)
        left = deadline - time.perf_counter()
        if left <= 0:
            break
        tried.append(_try(repriced, replace(search, seconds=left)))
    chosen = min(tried, key=lambda one: one.value)
    bound = max(one.found.solution.lower_bound for one in tried)
    solution = replace(chosen.found.solution, cost=chosen.value, lower_bound=min(bound, chosen.value))
    return replace(chosen.found, solution=solution)


def _try(problem: Problem, search: Search) -> _Tried:
    share = problem.prices.share
    assert share is not None
    found = search_within(problem, search)
    return _Tried(share, found, step_time(found.schedule))


def _next_share(tried: list[_Tried]) -> float | None:
    """Where the best schedules with more to hide than work, and with less, cost the same; None where it was tried."""
    more = max((one for one in tried if one.excess > 0), key=lambda one: one.share)
    less = min((one for one in tried if one.excess <= 0), key=lambda one: one.share, default=None)
    if less is None:
        share = 0.5 if more.share < 0.5 else 1 - (1 - more.share) / 100
    else:
        share = more.share + (less.at(more.share) - more.at(more.share)) / (more.excess - less.excess)
    nearest = min(abs(share - one.share) for one in tried)
    return share if nearest > LEAST_SHARE and LEAST_SHARE < share < 1 else None
