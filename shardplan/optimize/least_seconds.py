"""A lower bound of what any fates of residuals add to a step that keeps within a limit, in the layouts of a schedule.

At one place of the schedule, residuals must go whose bytes sum up to the excess. Each saves at most the bytes that wait
there, with those of the values that kernels make of it, and takes at least what making it of kept ones takes. Fractions
of residuals are allowed: the fractional knapsack problem (Dantzig, 1957), which sorting by seconds per byte solves. The
bytes of what is made again are left out. By the estimates of `residual_graph.py`, no choice adds less.
"""

from __future__ import annotations

import numpy as np

from shardplan.optimize.choose_recomputed import Fates
from shardplan.optimize.residual_graph import ResidualGraph

_PLACES = 32
"""The places with the highest excess that are looked at. The bound is the largest of theirs, and any one is valid."""


def least_seconds(graph: ResidualGraph, limit: float, fates: Fates) -> float:
    """The seconds, as `ResidualGraph.estimate` counts them: less than zero where what is not stacked saves time.

    Infinite where all residuals together are not enough."""
    seconds = {value: graph.least_seconds(value, fates.recompute, fates.host_bytes > 0) for value in graph.residuals}
    begun = sum(min(0.0, one) for one in seconds.values())
    places = np.argsort(-graph.profile, kind="stable")[:_PLACES]
    return begun + max((_at(graph, int(place), limit, seconds) for place in places), default=0.0)


def _at(graph: ResidualGraph, place: int, limit: float, seconds: dict[int, float]) -> float:
    """The seconds above zero that residuals add which save the excess at one place."""
    excess = float(graph.profile[place]) - limit
    saved = {value: size for value, size in graph.waiting_at(place).items() if size > 0}
    added = 0.0
    for value in sorted(saved, key=lambda value: (max(0.0, seconds[value]) / saved[value], value)):
        if excess <= 0:
            break
        added += max(0.0, seconds[value]) * min(1.0, excess / saved[value])
        excess -= saved[value]
    return added if excess <= 0 else np.inf
