"""The result of a search, and its progress reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["STATUSES", "Progress", "ProgressCallback", "Solution", "relative_gap"]

STATUSES = {
    "optimal": "the cost is within the asked gap of the lower bound",
    "feasible": "a valid solution whose gap is not closed; give it more time, or accept its gap",
    "infeasible": "nothing satisfies the exclusions and the usage limit; raise the limit, see `least_peak_bound`",
    "unknown": "nothing valid was found in the time; give it more time, or raise the usage limit",
    "interrupted": "stopped from outside; the best found so far is given",
}


def relative_gap(cost: float, lower_bound: float) -> float:
    """How far `cost` can be above the optimum, as a share of `cost`; 0 when both are equal."""
    if not math.isfinite(cost) or lower_bound == -math.inf:
        return math.inf
    if cost <= lower_bound:
        return 0.0
    return (cost - lower_bound) / abs(cost) if cost else math.inf


@dataclass(frozen=True, slots=True)
class Solution:
    """The outcome of a search.

    choices: one per variable, by id. Where the status is `infeasible` or `unknown`: those of the least peak found.
    cost: of `choices`; `inf` where they are not valid.
    lower_bound: no valid assignment costs less; `-inf` from methods that give none.
    status: a key of `STATUSES`.
    iterations: sweeps of message passing, over all stages.
    seconds: by stage, by the clock. processor_seconds: of the whole search, of all cores, without other processes.
    work: the estimated seconds of sweeps, local search and branching: the same on every machine.
    peak_usage, peak_time: the highest usage of `choices`, and the first time that has it.
    least_peak_bound: no assignment has a lower peak than this (0 where nothing was proven).
    prices: what a unit of usage costs at the bound, per time at which it costs anything.
    priced_bound: the lower bound that these prices prove by themselves.
    known: assignments that were best at some prices, within the limit or not.
    """

    choices: NDArray[np.int64]
    cost: float
    lower_bound: float
    status: str
    method: str
    iterations: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    processor_seconds: float = 0.0
    work: float = 0.0
    peak_usage: float = 0.0
    peak_time: int = 0
    least_peak_bound: float = 0.0
    prices: Mapping[int, float] = field(default_factory=dict)
    priced_bound: float = -math.inf
    known: Sequence[NDArray[np.int64]] = ()

    @property
    def gap(self) -> float:
        """How far the cost can be above the optimum, as a share of the cost."""
        return relative_gap(self.cost, self.lower_bound)

    def __str__(self) -> str:
        return (
            f"{self.status}: cost {self.cost:.6g}, lower bound {self.lower_bound:.6g} (gap {self.gap:.2e}), "
            f"peak usage {self.peak_usage:.6g} at {self.peak_time}, {sum(self.seconds.values()):.2f} s"
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a search, as given to the progress callback; a callback that returns False ends the search."""

    stage: str
    seconds: float
    cost: float
    lower_bound: float
    iterations: int
    peak_usage: float
    """Peak usage of the best assignment found, in the problem's units (0 without memory)."""


ProgressCallback = Callable[[Progress], object]
