"""Filling: what the best schedule leaves of the memory limit is used to send less.

What a device holds depends on the order in which a schedule's own operations run, and a search counts that of another
schedule. So the first schedule found that keeps within the limit may be far from the best. Mixtures of it and of all
that searches have found on their way (`shardplan.search.mixing`) are found soon, within any limit in its own order:
looked for is the highest one whose mixture keeps within the real limit, in the mixture's own order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shardplan.correcting import NEARLY_FULL, Corrections
from shardplan.finding import Found
from shardplan.relieving import relieve
from shardplan.search import Mixtures, Part, all_extended
from shardplan.search.solution import relative_gap

_MOST_MIXTURES = 6

# Memory counts where it comes near the limit with the schedule, or with what is cheapest of the others; between limits
# this near there is nothing to find, nor where costs differ by less than it is worth, or where it is proven.
_CHEAPEST = 2
_HIGHEST, _NEAR = 1.1, 1e-3
_WORTH, _PROVEN = 0.01, 5e-3
_INWARDS = 0.1  # at least so far from either of two limits comes the one between
_SECONDS_PER_VARIABLE = 3e-5


def fill(known: Corrections) -> None:
    """Mixes the best schedule with all that searches have found, unless that is proven nearly the best."""
    proven = known.lower
    if known.best is not None and relative_gap(known.best.solution.cost, proven) < _PROVEN:
        return
    until = known.until_filled()
    relieve(known, until)
    if known.best is not None and known.work <= until:
        _mix(known, known.best, until)
    if known.best is not None and proven <= known.best.solution.cost:  # in the order that was searched, not in others
        known.lower = proven


def _mix(known: Corrections, base: Found, until: float) -> None:
    """Tries limits in the order of a schedule."""
    limit, cost_of = known.limit_bytes, known.cost
    costs = {key: cost_of(choices) for key, choices in known.seen.items()}
    others = [known.seen[key] for key in sorted(costs, key=lambda key: costs[key]) if costs[key] < base.solution.cost]
    if not others:
        return
    known.count_in(base.lifetimes)
    known.usages.follow(base.schedule)
    places = set(known.places)
    for choices in (base.solution.choices, *others[:_CHEAPEST]):
        places |= {*known.places_above(known.within(choices), NEARLY_FULL * limit)}
    part = Part.holding(known.problem.network, [base.solution.choices, *others])
    network = known.usages.network(limit, places, known.beyond, part)
    taken = [part.inside(choices) for choices in (base.solution.choices, *others)]
    begun, *cheaper = all_extended(network, taken)
    mixtures = Mixtures(network, begun, cheaper)
    known.spent += _SECONDS_PER_VARIABLE * len(network)
    least = _Tried(network.peak(begun)[0], base.peak_bytes, base.solution.cost)
    most = _Tried(_HIGHEST * limit, math.inf, cost_of(others[0]))
    target, counted = least.target + limit - least.peak, dict[float, float]()
    for _ in range(_MOST_MIXTURES):
        if known.work > until:
            return
        mixture, work = mixtures.within(target)
        known.spent += work
        if mixture is None:
            tried = replace(least, target=target)
        else:
            mixture = part.outside(mixture)
            cost = cost_of(mixture)
            peak = counted.get(cost) or known.within(mixture).peak_bytes
            if peak <= limit and cost not in counted:  # what does not fit in this order hardly does in its own
                peak = known.count(mixture).peak_bytes
            counted[cost] = peak
            tried = _Tried(target, peak, cost)
        again = most.peak < math.inf and tried.peak > limit
        least, most = (tried, most) if tried.peak <= limit else (least, tried)
        if most.target - least.target < _NEAR * limit or least.cost - most.cost < _WORTH * least.cost:
            return
        target = 0.5 * (least.target + most.target) if again else _between(least, most, limit)


@dataclass(frozen=True, slots=True)
class _Tried:
    """A limit, and the peak of its mixture in the mixture's own order, and the cost."""

    target: float
    peak: float
    cost: float


def _between(least: _Tried, most: _Tried, limit: float) -> float:
    """The limit to try next: where peaks in between would be the limit if they rose evenly, or as far below the last
    one as that exceeded it."""
    span, room = most.target - least.target, limit - least.peak
    if most.peak == math.inf:
        return least.target + min(max(room, _NEAR * limit), 0.5 * span)
    share = min(room / (most.peak - least.peak), 1 - (most.peak - limit) / span)
    return least.target + (share if share > _INWARDS else 0.5) * span
