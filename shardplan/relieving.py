"""Relieving: a schedule that exceeds the memory limit in its own order takes over parts of leaner ones.

A search holds to the limit in the order of a schedule that was found before. What it finds is cheap, but what is sent
decides in which order operations run: in its own, a device may hold a little more than the limit, at other operations.
Leaner schedules are known by then, which fit and send far more. So what is missing is taken from them, part by part
(`shardplan.search.mixing`), in the order of the schedule itself; then in that of what came out, until that fits. Two
schedules are relieved; the one without a limit may be one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from shardplan.correcting import HARDLY, NEARLY_FULL, Corrections, counted_at, highest
from shardplan.finding import Found
from shardplan.memory.bringing import Sending
from shardplan.memory.usages import Usages
from shardplan.search import Mixtures, Network, Part, all_extended, extended

# So many mixtures are counted in their own orders, each of a limit that is lower than the last one's by a share of what
# that exceeded the real one by. Memory counts where it comes near the limit with what is mixed, and where a mixture
# exceeds it: so often are such places added to one order, and what collectives of the mixture hold longer there. So
# many schedules are relieved, whose costs differ by what is worth it.
_MOST_COUNTED = 6
_STEP = 0.5
_MOST_MIXED = 2
_MOST_ABOVE = 2
_WORTH = 0.01
_SECONDS_PER_VARIABLE = 3.8e-5


def relieve(known: Corrections, until: float) -> None:
    """Takes parts of leaner schedules over into what costs least above the limit, until it fits or the work reaches
    this."""
    for base in _above(known):
        _relieve(known, base, until)


def _relieve(known: Corrections, base: Found, until: float) -> None:
    """Takes parts of leaner schedules over into one above the limit, and into what comes out, until that fits; where
    nothing else does, what hardly exceeds it is worth that whatever the work is: a search for what is leaner takes
    longer."""
    target, fits, mixed = known.limit_bytes, known.best is not None, list[Found]()
    for _ in range(_MOST_COUNTED):
        nearly = known.best is None and base.peak_bytes <= HARDLY * known.limit_bytes
        if known.work > until and not nearly:
            return
        mixture = _leaner(known, base, target, mixed)
        if mixture is None and mixed:
            mixture = _leaner(known, base, target, [])
        worth = np.inf if known.best is None else (1 - _WORTH) * known.best.solution.cost
        if mixture is None or known.cost(mixture) >= worth:
            return
        base = known.count(mixture)
        if base.peak_bytes <= known.limit_bytes:
            return
        mixed += [base] * fits
        target -= _STEP * (base.peak_bytes - known.limit_bytes)


def _above(known: Corrections) -> Iterator[Found]:
    """Of all that was counted in its own order and does not fit, two that differ in cost. Where nothing fits, these are
    the cheapest, but the one without a limit comes last; where something does, those that would cost least at the limit
    if costs rose evenly from each of them to the best."""
    above = [(found, known.cost(found.solution.choices)) for found in _counted(known)]
    above = [(found, cost) for found, cost in above if found.peak_bytes > known.limit_bytes]
    first, best = known.first.solution.choices, known.best

    def rank(found: Found, cost: float) -> tuple[bool, float]:
        if best is None:
            return np.array_equal(found.solution.choices, first), cost
        share = (found.peak_bytes - known.limit_bytes) / (found.peak_bytes - best.peak_bytes)
        return False, cost + share * (best.solution.cost - cost)

    for _ in range(_MOST_ABOVE):
        if not above:
            return
        _, like = min(above, key=lambda one: rank(*one))
        near = [found for found, cost in above if abs(cost - like) <= _WORTH * like]
        above = [(found, cost) for found, cost in above if abs(cost - like) > _WORTH * like]
        yield min(near, key=lambda found: found.peak_bytes)


def _counted(known: Corrections) -> list[Found]:
    """All that was counted in its own order, and has no other choices than those that are searched."""
    return [found for found in known.counts.counted() if known.part.holds(found.solution.choices)]


def _leaner(known: Corrections, base: Found, target: float, mixed: Sequence[Found]) -> NDArray[np.int64] | None:
    """The cheapest mixture of a schedule and dearer ones that keeps within a limit in the schedule's order.

    mixed: schedules that held more than what they were mixed for: where there are any, what is brought or reduced
    counts for as long as in them, and what the schedule's own collectives under way take counts too.
    """
    cost = known.cost(base.solution.choices)
    counted = {choices.tobytes(): choices for choices in (found.solution.choices for found in _counted(known))}
    others = [choices for choices in (known.seen | counted).values() if cost < known.cost(choices) < np.inf]
    usages = Usages(base.lifetimes, known.problem, known.search.donated, known.search.excess)
    moved = known.places_in(base.lifetimes)
    usages.follow(base.schedule)
    for found in mixed:
        usages.follow_besides(found.schedule, found.sending)
    exact = known.counts.profile_in_own(base)
    part = Part.holding(known.problem.network, [base.solution.choices, *others])
    taken = [part.inside(choices) for choices in (base.solution.choices, *others)]
    places = {moved[place] for place in known.places} | {*highest(exact, NEARLY_FULL * target)}
    mixture = None
    for _ in range(_MOST_MIXED):
        network = usages.network(target, places, part=part)
        if mixed or network.peak(extended(network, taken[0]))[0] <= target:  # else it would be the cheapest mixture
            beyond = _beyond(network, taken[0], exact, sorted(places))
            network = usages.network(target, places, beyond, part)
        begun, *dearer = all_extended(network, taken)
        mixtures = Mixtures(network, begun, dearer)
        mixture, work = mixtures.within(target)
        known.spent += work + _SECONDS_PER_VARIABLE * len(network)
        if mixture is None:
            return None
        mixture = part.outside(mixture)
        found = known.within(mixture, base.lifetimes)
        above = {*known.places_above(found, target)}
        if above <= places and (known.best is None or not above):
            break
        places |= above
        if known.best is not None:
            usages.follow_besides(found.schedule, Sending())
    return mixture


def _beyond(
    network: Network, base: NDArray[np.int64], exact: NDArray[np.float64], places: Sequence[int]
) -> dict[int, float]:
    """Per place, what the schedule of an assignment holds more than the network counts."""
    used = counted_at(network, base, len(places))
    return {place: max(0.0, float(exact[place] - size)) for place, size in zip(places, used.tolist(), strict=True)}
