"""Relieving: a schedule that exceeds the memory limit in its own order takes over parts of leaner ones.

A search holds to the limit in the order of a schedule that was found before. What it finds is cheap, but what is sent
decides in which order operations run: in its own, a device may hold a little more than the limit, at other operations.
Leaner schedules are known by then, which fit and send far more. So what is missing is taken from them, part by part
(`shardplan.search.mixing`), in the order of the schedule itself; then in that of what came out, until that fits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardplan.correcting import NEARLY_FULL, Corrections
from shardplan.finding import Found
from shardplan.memory.usages import Usages
from shardplan.search import Mixtures, extended

# So many mixtures are counted in their own orders, each of a limit that is lower than the last one's by a share of what
# that exceeded the real one by. Memory counts where it comes near the limit with what is mixed, and where a mixture
# exceeds it; so often are such places added to one order.
_MOST_COUNTED = 6
_STEP = 0.5
_MOST_MIXED = 2
_WORTH = 0.01
_SECONDS_PER_VARIABLE = 2.5e-5


def relieve(known: Corrections, until: float) -> None:
    """Takes parts of leaner schedules over into the cheapest one above the limit, until it fits or the work reaches
    this."""
    base, target = _cheapest_above(known), known.limit_bytes
    for _ in range(_MOST_COUNTED):
        if base is None or known.work > until:
            return
        mixture = _leaner(known, base, target)
        worth = np.inf if known.best is None else (1 - _WORTH) * known.best.solution.cost
        if mixture is None or known.cost(mixture) >= worth:
            return
        base = known.count(mixture)
        if base.peak_bytes <= known.limit_bytes:
            return
        target -= _STEP * (base.peak_bytes - known.limit_bytes)


def _cheapest_above(known: Corrections) -> Found | None:
    """Of all that was counted in its own order and does not fit, the cheapest but the one without a limit; where there
    is no other, that."""
    first = known.first.solution.choices
    above = [found for found in known.counts.counted() if found.peak_bytes > known.limit_bytes]
    others = [found for found in above if not np.array_equal(found.solution.choices, first)]
    return min(others or above, key=lambda found: known.cost(found.solution.choices), default=None)


def _leaner(known: Corrections, base: Found, target: float) -> NDArray[np.int64] | None:
    """The cheapest mixture of a schedule and dearer ones that keeps within a limit in the schedule's order."""
    cost = known.cost(base.solution.choices)
    counted = {choices.tobytes(): choices for choices in (found.solution.choices for found in known.counts.counted())}
    others = [choices for choices in (known.seen | counted).values() if cost < known.cost(choices) < np.inf]
    usages, moved = Usages(base.lifetimes, known.problem, known.search.donated), known.places_in(base.lifetimes)
    usages.follow(base.schedule)
    places = {moved[place] for place in known.places} | {*known.places_above(base, NEARLY_FULL * target)}
    mixture = None
    for _ in range(_MOST_MIXED):
        network = usages.network(target, places)
        mixtures = Mixtures(network, extended(network, base.solution.choices), [extended(network, o) for o in others])
        mixture, work = mixtures.within(target)
        known.spent += work + _SECONDS_PER_VARIABLE * len(network)
        if mixture is None:
            return None
        above = {*known.places_above(known.within(mixture, base.lifetimes), target)} - places
        if not above:
            break
        places |= above
    return mixture
