"""The leanest schedules: of ever lower peaks, whatever the memory limit is.

Where no search within a limit finds anything, the least peak is looked for. What is tried then depends on the program
alone: the limit says only when it ends. So a limit that is at least the peak which an error has reported is kept.
"""

from __future__ import annotations

import math
from dataclasses import replace

from shardplan.correcting import FAR, MISSED, MOST_ORDERS, Corrections, hint_of
from shardplan.finding import Counts, Found, Search, find
from shardplan.search import Part

# The least peak is looked for half-way between the least that is found and what is proven, until they are this near or
# as many trials one after the other have found nothing lower in an order, and then in the order of the least, from such
# a share of it on. Any schedule that is not far too dear will do.
_MOST_TRIALS, _MOST_IN_VAIN = 12, 3
_NEAR_LEAST = 0.01
_BELOW_OWN = 0.9
_PRECISION_OF_TRIALS = 0.2
_SECONDS_PER_OPERATION, _LEAST_SECONDS = 4.5e-4, 0.1  # of a trial


class Leanest:
    """The schedule of the least peak that is found, from a first one on."""

    def __init__(
        self,
        counts: Counts,
        search: Search,
        first: Found,
        part: Part | None = None,
        above: Leanest | None = None,
    ) -> None:
        """``first`` must not depend on the limit of ``search``. What has looked ``above``, among fewer choices, is gone
        on from, a little below what that has found."""
        self._above = above
        self._known = Corrections(counts, replace(search, limit_bytes=0.0), first, part)
        self._known.enough = search.limit_bytes
        self._counts, self._search = counts, search
        self.bound = 0.0
        """What no peak is below, in the orders that were searched."""
        self._spent = 0.0
        self._trials = self._in_vain = self._orders = 0
        self._unreached, self._again = 0.0, False
        self._places: set[int] = set()
        self._least = self._latest = counts.within(first.solution, first.lifetimes)

    @property
    def found(self) -> Found:
        """The schedule of the least peak so far, in its own order."""
        return min(self._known.least, self._known.aside, key=lambda one: one.peak_bytes)

    def take_spent(self) -> float:
        """What searches have taken since this was asked last, in estimated seconds."""
        spent, self._spent = self._spent, 0.0
        return spent

    def begin(self) -> None:
        """Makes the first trial, of a target a little below what was found above, or of one that is hardly ever kept:
        it soon says so, and finds what holds little."""
        if self._trials:
            return
        if self._above is not None:
            self._go_on_in(self._above.found)
            self._unreached = _BELOW_OWN * self._least.peak_bytes
        self._try()

    def look(self) -> None:
        """Looks for schedules of lower peaks until one is within the limit."""
        limit = self._search.limit_bytes
        while self._trials < _MOST_TRIALS and self.found.peak_bytes > limit:
            if self._in_vain == _MOST_IN_VAIN or (self._nearest_reached() and not self._go_over()):
                return
            before = self.found
            self._try()
            self._in_vain = 0 if self.found is not before else self._in_vain + 1

    def _nearest_reached(self) -> bool:
        return self._least.peak_bytes - self._unreached <= _NEAR_LEAST * self._least.peak_bytes

    def _go_over(self) -> bool:
        """Goes over to the order of the least; False where that holds hardly more in its own, or this was often."""
        known = self._known
        if self._orders == MOST_ORDERS or known.least.peak_bytes <= (1 + _NEAR_LEAST) * self._least.peak_bytes:
            return False
        self._go_on_in(known.least)
        self._unreached = _BELOW_OWN * self._least.peak_bytes
        return True

    def _go_on_in(self, own: Found) -> None:
        """Looks on in the order of a schedule."""
        self._known.count_in(own.lifetimes)
        self._least = self._latest = own
        self._orders, self._in_vain, self._places = self._orders + 1, 0, set()

    def _try(self) -> None:
        """Searches half-way between the least that is found and what is proven."""
        known, search = self._known, self._search
        self._trials += 1
        work = max(_LEAST_SECONDS, _SECONDS_PER_OPERATION * len(known.problem.program.operations))
        target, usages = 0.5 * (self._unreached + self._least.peak_bytes), known.usages
        self._places |= {*known.places_above(self._least, target)}
        usages.follow(self._latest.schedule)
        network = usages.network(target, self._places, part=known.part)
        network.hint = hint_of(network, known.part, self._least, {}, self._places)
        trial = replace(search, limit_bytes=target, precision=_PRECISION_OF_TRIALS)
        left = self._counts.seconds_left()
        solution = find(known.problem, network, trial, left, work, part=known.part)
        self._spent += solution.work
        found = self._counts.within(solution, known.lifetimes)
        own = known.keep(found)
        known.keep_leanest(network, found)
        self.bound = max(self.bound, known.least_bound)
        above, self._latest = {*known.places_above(found, target)} - self._places, found
        more = bool(above or (usages.follow(found.schedule) and not self._again))
        self._again = more and found.solution.cost < math.inf
        if found.peak_bytes > MISSED * target and not self._again:
            self._unreached = target
        reached = min(found.peak_bytes, self._least.peak_bytes)
        self._unreached = min(max(self._unreached, known.least_bound), reached)
        self._places |= above
        self._least = min(self._least, found, key=lambda one: one.peak_bytes)
        if found.peak_bytes <= target and target < own.peak_bytes <= FAR * target and self._orders < MOST_ORDERS:
            self._go_on_in(own)
