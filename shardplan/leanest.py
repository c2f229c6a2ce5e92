"""The leanest schedules: of ever lower peaks, whatever the memory limit is.

Where no search within a limit finds anything, the least peak is looked for. What is tried then depends on the program
alone: the limit says only when it ends. So a limit that is at least the peak which an error has reported is kept.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from shardplan.correcting import (
    FAR,
    LEAST_SECONDS,
    MISSED,
    MOST_ORDERS,
    Corrections,
    hint_of,
)
from shardplan.finding import Counts, Found, Search, find

# The least peak is looked for half-way between the least that is found and what is proven, until they are this near,
# and then in the order of the least, from such a share of it on. Any schedule that is not far too dear will do.
_MOST_TRIALS = 8
_NEAR_LEAST = 0.01
_BELOW_OWN = 0.9
_PRECISION_OF_TRIALS = 0.2
_SECONDS_PER_OPERATION, _LEAST_SECONDS = 6e-4, 0.2  # of a trial


class Leanest:
    """The schedule of the least peak that is found, from a first one on."""

    def __init__(self, counts: Counts, search: Search, first: Found, deadline: float) -> None:
        """``first`` must not depend on the limit of ``search``."""
        self._known = Corrections(counts, replace(search, limit_bytes=0.0), first, deadline)
        self._known.enough = search.limit_bytes
        self._counts, self._search, self._deadline = counts, search, deadline
        self.bound = 0.0
        """What no peak is below, in the orders that were searched."""

    @property
    def found(self) -> Found:
        """The schedule of the least peak so far, in its own order."""
        return min(self._known.least, self._known.aside, key=lambda one: one.peak_bytes)

    def look(self) -> None:
        """Looks for schedules of lower peaks, until one is within the limit."""
        known, search = self._known, self._search
        operations = len(known.problem.program.operations)
        work = max(_LEAST_SECONDS, _SECONDS_PER_OPERATION * operations)
        unreached, orders, again, places = 0.0, 0, False, set[int]()
        least = latest = self._counts.within(known.first.solution, known.lifetimes)
        for _ in range(_MOST_TRIALS):
            if self.found.peak_bytes <= search.limit_bytes or time.perf_counter() > self._deadline:
                return
            if least.peak_bytes - unreached <= _NEAR_LEAST * least.peak_bytes:  # what is found may take more in its own
                if orders == MOST_ORDERS or known.least.peak_bytes <= (1 + _NEAR_LEAST) * least.peak_bytes:
                    return
                known.count_in(known.least.lifetimes)
                least = latest = known.least
                orders, places, unreached = orders + 1, set(), _BELOW_OWN * least.peak_bytes
            target, usages = 0.5 * (unreached + least.peak_bytes), known.usages
            places |= {*known.places_above(least, target)}
            usages.follow(latest.schedule)
            network = usages.network(target, places)
            network.hint = hint_of(network, least, {}, places)
            trial = replace(search, limit_bytes=target, precision=_PRECISION_OF_TRIALS)
            left = max(LEAST_SECONDS, self._deadline - time.perf_counter())
            found = self._counts.within(find(known.problem, network, trial, left, work), known.lifetimes)
            own = known.keep(found)
            known.keep_leanest(network, found)
            self.bound = max(self.bound, known.least_bound)
            above, latest = {*known.places_above(found, target)} - places, found
            again = bool(above or (usages.follow(found.schedule) and not again)) and found.solution.cost < math.inf
            if found.peak_bytes > MISSED * target and not again:
                unreached = target
            unreached = min(max(unreached, known.least_bound), found.peak_bytes, least.peak_bytes)
            places |= above
            least = min(least, found, key=lambda one: one.peak_bytes)
            if found.peak_bytes <= target and target < own.peak_bytes <= FAR * target and orders < MOST_ORDERS:
                known.count_in(own.lifetimes)
                least = latest = own
                orders, places = orders + 1, set()
