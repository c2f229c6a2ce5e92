"""Filling: what the best schedule leaves of the memory limit is used to send less.

What a device holds depends on the order in which a schedule's own operations run, and a search counts that of another
schedule. So the first schedule found that keeps within the limit may be far from the best. Mixtures of it and of all
that searches have found on their way (`shardplan.search.mixing`) are found soon, within any limit in its own order:
looked for is the highest one whose mixture keeps within the real limit, in the mixture's own order.
"""

from __future__ import annotations

from shardplan.correcting import Corrections
from shardplan.finding import Found
from shardplan.search import Mixtures, extended

# The work for this, as a share of that for the searches before, or what is left of it; but some mixtures are tried in
# any case, as they are what brings most. Mixed is again, from what came out, while that helps.
_LEAST_SHARE = 0.5
_FEWEST_MIXTURES, _MOST_MIXTURES = 4, 6
_ROUNDS = 2

# Memory counts where it comes near the limit with the schedule, or with what is cheapest of the others; between limits
# this near there is nothing to find.
_NEARLY_FULL = 0.95
_CHEAPEST = 6
_HIGHEST, _NEAR = 1.1, 1e-3
_SECONDS_PER_VARIABLE = 1e-4


def fill(known: Corrections) -> None:
    """Mixes the best schedule with all that searches have found."""
    proven = known.lower
    until = max(known.patience, known.work + _LEAST_SHARE * known.patience)
    for number in range(_ROUNDS):
        before = known.best
        if before is not None:
            _mix(known, before, until, 0 if number else _FEWEST_MIXTURES)
        if known.best is before or known.work > until:
            break
    if known.best is not None and proven <= known.best.solution.cost:  # in the order that was searched, not in others
        known.lower = proven


def _mix(known: Corrections, base: Found, until: float, fewest: int) -> None:
    """Tries limits in the order of a schedule, ``fewest`` of them whatever work they take."""
    limit, cost_of = known.limit_bytes, known.problem.network.cost
    others = sorted((c for c in known.seen.values() if cost_of(c) < base.solution.cost), key=cost_of)
    if not others:
        return
    known.count_in(base.lifetimes)
    known.usages.follow(base.schedule)
    places = set(known.places)
    for choices in (base.solution.choices, *others[:_CHEAPEST]):
        places |= {*known.places_above(known.within(choices), _NEARLY_FULL * limit)}
    network = known.usages.network(limit, places)
    begun = extended(network, base.solution.choices)
    mixtures = Mixtures(network, begun, [extended(network, choices) for choices in others])
    known.spent += _SECONDS_PER_VARIABLE * len(network)
    low, high = network.peak(begun)[0], _HIGHEST * limit
    target = low + limit - base.peak_bytes
    for number in range(_MOST_MIXTURES):
        if high - low < _NEAR * limit or (number >= fewest and known.work > until):
            return
        mixture, work = mixtures.within(target)
        known.spent += work
        if mixture is None:
            low, target = target, 0.5 * (target + high)
            continue
        own = known.count(mixture)
        room = limit - own.peak_bytes
        if room >= 0:
            low, target = target, min(0.5 * (target + high), target + max(room, _NEAR * limit))
        else:
            high, middle = target, 0.5 * (low + target)
            target = target + room if low < target + room < middle else middle
