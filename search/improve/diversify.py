"""Diversification: near-optimal assignments at the best prices that use choices no known assignment has.

A weight, its gradient and its optimiser state have one layout: whole, or split over some mesh axes. At the best prices
of usage several layouts are about equally good for many weights at once. The question which weight gets which layout is
a knapsack. The assignments at the prices so far contain few of the layouts. A small reward on choices that no
assignment has leads to assignments with new ones. After a few turns all layouts are known, and `crossover` mixes them.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shardplan.search.graph.graph import Infeasible
from shardplan.search.graph.reductions import shrink
from shardplan.search.limits.usage_prices import Pricing
from shardplan.search.solver.cp_sat import SECONDS_PER_UNIT, solve_by_cp_sat

__all__ = ["crossover", "diversify"]

_CROSSOVER_ENTRIES = 40_000
_LEAST_CROSSING, _MOST_CROSSING = 0.1, 1.0
"""In units of CP-SAT's deterministic time."""
_VARIATIONS = 4
_REWARD = 0.03
"""The reward of a new choice, as a share of the range of its variable's priced usages."""
_SIMILAR_RATIO = 1e-3
"""Choices whose usages cost the same but for such a share of that are one way to store a tensor."""
_LESS = 0.25
_WORTH = 0.1
"""The share of the gap that an assignment of new choices has to close for another one to be asked."""


def diversify(pricing: Pricing, seconds: float) -> None:
    """Adds assignments to `pricing` and recombines them, until there are no new choices, or the gap is closed, or for
    about so many seconds of work."""
    until, share = pricing.estimate + seconds, _REWARD
    for _ in range(_VARIATIONS):
        solver, count = pricing.solver, len(pricing.planes)
        rewards = _rewards(pricing, share)
        if not rewards or solver.closed or pricing.estimate > until:
            return
        pricing.evaluate_roughly(rewards)
        if len(pricing.planes) == count:
            return
        before = solver.upper
        if pricing.planes[-1].at(pricing.best) - pricing.bound > before - pricing.bound:
            share *= _LESS  # such a one is too dear to have anything for others
            continue
        pricing.recombine()
        if not solver.upper < before - _WORTH * (before - solver.lower):
            return


def _rewards(pricing: Pricing, share: float) -> dict[int, NDArray[np.float64]]:
    """Per variable, the reward of each remaining choice that no assignment has."""
    places = {v: place for place, v in enumerate(pricing.live)}
    rewards = {}
    for v, amounts in pricing.priced.amounts.items():
        priced = pricing.best @ amounts
        kept = pricing.priced.kept[v]
        known = np.isin(kept, [plane.choices[places[v]] for plane in pricing.planes])
        spread = float(np.ptp(priced))
        unseen = np.abs(priced[:, None] - priced[known]).min(axis=1, initial=math.inf) > _SIMILAR_RATIO * spread
        reward = share * spread
        if reward > 0 and unseen.any():
            rewards[v] = np.where(unseen, reward, 0.0)
    return rewards


def crossover(pricing: Pricing, work: float) -> None:
    """Mixes what was found at all prices; a mixture within the limit goes to the solver.

    work: seconds of CP-SAT, where that is neither little nor much.
    """
    if len(pricing.planes) == pricing.mixed:
        return
    solver = pricing.solver
    graph = solver.graph.copy()
    graph.tables = solver.graph.tables
    try:
        for place, v in enumerate(pricing.live):
            keep = np.zeros(graph.size(v), dtype=bool)
            keep[[plane.choices[place] for plane in pricing.planes]] = True
            graph.restrict(v, keep)
        graph.make_consistent()
        shrink(graph, dominance=False)
    except Infeasible:
        return
    if graph.entries() > _CROSSOVER_ENTRIES:
        return
    tolerance = 0.5 * solver.gap * abs(pricing.bound)
    units = min(max(work / SECONDS_PER_UNIT, _LEAST_CROSSING), _MOST_CROSSING)
    result = solve_by_cp_sat(graph, units, solver.callbacks.seconds_left(), tolerance, solver.prices)
    pricing.estimate += result.work
    pricing.mixed = len(pricing.planes) if result.proven else pricing.mixed
    if result.choices is not None:
        full = graph.expand(result.choices)
        pricing.take({v: int(full[v]) for v in pricing.live})
