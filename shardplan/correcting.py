"""Correcting: searches within a memory limit, each at the places where what was found before exceeds it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardplan.finding import CLEARLY, SECONDS_PER_OWN, Counts, Found, Search, find
from shardplan.memory.liveness import Lifetimes
from shardplan.memory.usages import Usages
from shardplan.problem import Problem
from shardplan.search import Hint, Network, Part, Solution, all_extended, extended
from shardplan.search.solution import relative_gap

# Searches within a limit, and all that is counted and mixed with them, take so many times the work of planning without
# a limit: so many seconds per operation and per table, and of the search (fitted to 27 programs, 10 of them on two axes
# too, and 5 on three); but not less than the least patience. Where nothing was found, one more search
# may overdraw it: leaner schedules take longer to find. Where what is found costs hardly more than without a limit, not
# memory is missing but an order: leaner schedules would send far more, and a few searches are made anyhow. Where the
# cheapest of what is found just does not fit, making it fit is worth as much work again.
# Work is counted, not timed, so that a program gets the same plan on every machine.
_TIMES_SLOWER_WITHIN_LIMIT = 0.8
_SECONDS_PER_OPERATION, _SECONDS_PER_TABLE = 1.7e-4, 2.6e-4
_TIMES_SEARCH = 1.8
LEAST_PATIENCE = 0.15
_LEAST_SHARE = 0.5
_OVERDRAWN = 1.25
_TIMES_LONGER_FILLED = 1.6
_SECONDS_PER_VARIABLE = 1.8e-5
_TIMES_LONGER_WHERE_NOTHING_FITS = 4

# A search is held to the limit where memory is short, at a few places of the order. Where what it finds exceeds the
# limit elsewhere, the highest of these places are added, at some distance from each other. Where it exceeds the limit
# at the very places, by what the network does not count, that is counted there from then on.
_MOST_CORRECTIONS = 8
_PLACES_AT_ONCE = 6
_DISTANCE = 20
_MOST_PROLONGATIONS = 3
NEARLY_FULL = 0.95

# What is sent decides in which order operations run. So what keeps within the limit in the order of what was found
# before may exceed it in its own: the searches go over to that, so often, and ask for less by what collectives under
# way add there. Else they ask for as much less as what was found is above the limit, as they do where that order holds
# no more, or so many of them have found nothing.
MOST_ORDERS = 2
FAR = 1.1
_MANY = 4

# Of what fits nowhere in the order of a search, so many are counted in their own orders, while these fit.
_LEANEST = 2

# What fits so, but costs so many times what fits in the order of the search, is not all that is looked for; nor, where
# all takes no more than the least patience, what costs any more.
_DEAR = 1.3

# Where searches have taken so small a part of the work, and the gap is so wide, one more is made from the best.
_SMALL_PART, _WIDE, _HALF_AGAIN = 0.2, 0.05, 0.5

# Where the work for mixing is over, but the gap is that wide, such a share of the work is taken for it.
_VERY_WIDE, _LEAST_FILLED = 0.3, 0.25

MISSED = 1.001

HARDLY = 1.005
"""What a first search finds that exceeds the limit by so little is made to fit, whatever it costs: the next one is
asked for that much less."""


class Corrections:
    """Searches within the limit, each at the places where what was found before exceeds it."""

    def __init__(self, counts: Counts, search: Search, first: Found, part: Part | None = None) -> None:
        """``part``: that of the problem's network which is searched; all of it, where none is given."""
        self.counts, self.search, self.first = counts, search, first
        self.part = part or Part(counts.problem.network)
        self.problem = problem = counts.problem
        self.limit_bytes = search.limit_bytes
        """The limit itself: that of ``search`` may be lowered."""
        self.least = first
        """The schedule of the least peak, in its own order."""
        self.aside = first
        """Likewise, of those that were best at some prices, and were not searched on from."""
        self.enough = 0.0
        """The least peak that is looked for, whatever the limit is."""
        self.best: Found | None = None
        """The cheapest schedule within the limit, in its own order."""
        self.stood = b""
        """The choices of the last best schedule of which no change was left to take over."""
        self.unlimited = first.solution.lower_bound
        self.orders = 0
        self.unreached = 0.0
        """Limits below this are not worth a search."""
        self.searched = np.inf
        """The limit of the last search."""
        self.patience = max(LEAST_PATIENCE, _TIMES_SLOWER_WITHIN_LIMIT * _seconds_without(problem, first))
        self.until = _TIMES_LONGER_FILLED * self.patience
        self._enough = _DEAR if self.patience > LEAST_PATIENCE else 1.0
        self.spent, self._begun = 0.0, counts.work
        self.known: list[NDArray[np.int64]] = []
        """Assignments that were best at some prices."""
        self.seen: dict[bytes, NDArray[np.int64]] = {first.solution.choices.tobytes(): first.solution.choices}
        """All assignments that searches have found."""
        self._costs: dict[bytes, float] = {}
        self.places: set[int] = set()
        self.prices: dict[int, float] = {}
        self.lifetimes = first.lifetimes
        self.count_in(first.lifetimes)

    def be_patient(self, share: float, others: Corrections) -> None:
        """Lets searches take a share of the work that others may, and what makes their results fit as much as there."""
        self.patience, self.until = share * others.patience, others.until

    def until_filled(self) -> float:
        """The work up to which what was found is mixed: a little more in any case where nothing fits, or what does is
        far dearer than what is proven."""
        far = self.best is None or relative_gap(self.best.solution.cost, self.lower) > _VERY_WIDE
        return max(self.until, self.work + _LEAST_FILLED * self.patience) if far else self.until

    def count_in(self, lifetimes: Lifetimes) -> None:
        """Searches in this order from here on: memory is short while the same operations run, but nothing that is
        proven holds any more."""
        moved = self.places_in(lifetimes)
        self.places = {moved[place] for place in self.places}
        self.prices = {moved[place]: price for place, price in self.prices.items()}
        self.lifetimes = lifetimes
        self.usages = Usages(lifetimes, self.problem, self.search.donated, self.search.excess)
        self.lower, self.least_bound = self.unlimited, 0.0
        """What no cost is below, within the limit, and no peak."""
        self.beyond: dict[int, float] = {}
        """Per place, bytes that a schedule needs which the network does not count."""

    def places_in(self, lifetimes: Lifetimes) -> dict[int, int]:
        """Per place of the order that is searched, where the same operation runs in another one."""
        places = {place: lifetimes.place[o.index] for place, o in enumerate(self.lifetimes.order)}
        return places | {self.lifetimes.end: lifetimes.end}

    def take_over(self, others: Corrections) -> None:
        """Takes all into account that searches among fewer choices have found, with the work that it took."""
        self.spent += others.spent
        self.seen |= others.seen
        self.take_counted()

    def go_on_from(self, others: Corrections) -> None:
        """Likewise, and searches on where these did."""
        self.take_over(others)
        self.stood = others.stood
        self.count_in(others.lifetimes)
        self.places, self.prices = {*others.places}, {**others.prices}
        self.until = self.work + others.until - others.work

    def take_counted(self) -> None:
        """Takes all into account that was counted meanwhile."""
        for found in self.counts.counted():
            self.take(found)

    def take_leaner(self, spent: float) -> None:
        """Takes all into account that was counted meanwhile, with the work of the searches, and goes on in the order of
        the best."""
        self.spent += spent
        self.take_counted()
        if self.best is not None:
            self.count_in(self.best.lifetimes)

    def follow(self, found: Found, otherwise: Callable[[bool], None]) -> None:
        """Searches on from a schedule, until what is found is within the limit. What is to be done besides where
        nothing is within it is given: it is told whether that was so near that another search comes first, in another
        order or within a little less."""
        cheap = True
        for number in range(_MOST_CORRECTIONS):
            over = self.work > _OVERDRAWN * self.patience and not (cheap and number < _MANY)
            if not self._exclude(found) or over:
                return
            found, own = self._search_once(found)
            near = own.peak_bytes <= CLEARLY * self.limit_bytes
            just, above = number == 0 and self._just_missed(found), own.peak_bytes / self.limit_bytes
            hardly = 1 < above <= HARDLY
            if self.best is None:
                again = hardly or (near and found.solution.cost <= CLEARLY * self.unlimited)
                otherwise(just or (number == 0 and again))
            if just and self.best is None:
                self.orders, found = 1, self.counts.within(self.aside.solution, self.aside.lifetimes)
                self.count_in(self.aside.lifetimes)
                continue
            cheap = cheap and (number > 0 or found.solution.cost <= CLEARLY * self.unlimited)
            dear = self._best_cost > self._enough * found.solution.cost and self.work < self.patience
            if self.best is not None and not dear:  # what is better is soon found from it
                return
            fits = found.peak_bytes <= self.search.limit_bytes
            if fits and self.orders < MOST_ORDERS:
                self.orders, found = self.orders + 1, self.counts.within(own.solution, own.lifetimes)
                self.count_in(own.lifetimes)
                # what is under way is not counted in the order alone
                missed = found.peak_bytes / own.peak_bytes if found.peak_bytes <= self.limit_bytes else 1.0
                missed -= hardly * (HARDLY - 1)  # else the same may be found once more
                self.search = replace(self.search, limit_bytes=missed * self.limit_bytes)
            elif fits or (near and (number >= _MANY or own.peak_bytes <= MISSED * found.peak_bytes)):
                lower = self.limit_bytes * min(found.peak_bytes, self.limit_bytes) / own.peak_bytes
                lower = max(min(self.search.limit_bytes, lower), self.search.limit_bytes / FAR)
                self.search = replace(self.search, limit_bytes=lower)
            lowest = max(self.unreached, 0.0 if fits else self.least_bound)
            if lowest > self.search.limit_bytes:
                return

    def _just_missed(self, found: Found) -> bool:
        """Whether the work was over before a search found anything, and of what it has seen, the lowest peak in its
        own order is hardly above the limit."""
        nothing = found.solution.status == "unknown" and np.isinf(found.solution.cost)
        return nothing and self.aside.peak_bytes <= CLEARLY * self.limit_bytes

    def search_a_little_more(self) -> None:
        """One more search, for half as much work again, where the gap is wide and work is left in plenty."""
        gap = relative_gap(self._best_cost, self.lower)
        if gap > _WIDE and self.work < _SMALL_PART * self.patience:
            self.search_from_best(_HALF_AGAIN * self.work)

    def search_from_best(self, most: float = np.inf) -> None:
        """One more search within the limit itself, from the best schedule, for no more than so much work."""
        assert self.best is not None
        self.search = replace(self.search, limit_bytes=self.limit_bytes)
        self.usages.follow(self.best.schedule)
        self.places |= {*self.places_above(self.best, NEARLY_FULL * self.limit_bytes)}
        self._search_once(self.best, most)

    def keep(self, found: Found) -> Found:
        """Takes a schedule into account as it is in its own order, which it gives, unless it is far above the limit."""
        self.least_bound = max(self.least_bound, found.solution.least_peak_bound)
        lower = self.best is None and found.peak_bytes < self.least.peak_bytes
        if not lower and found.peak_bytes > CLEARLY * max(self.limit_bytes, self.search.limit_bytes):
            return found
        return self.take(self.counts.own(found.solution))

    def take(self, own: Found) -> Found:
        """Takes a schedule into account that was counted in its own order."""
        self.least = min(self.least, own, key=lambda f: f.peak_bytes)
        cost = self.cost(own.solution.choices)
        if own.peak_bytes <= self.limit_bytes and cost < self._best_cost:
            self.best = replace(own, solution=replace(own.solution, cost=cost, status="feasible"))
        return own

    def best_proven(self) -> Found:
        """The best schedule, with the bound of all searches."""
        assert self.best is not None
        lower = min(self.lower, self._best_cost)
        return replace(self.best, solution=replace(self.best.solution, lower_bound=lower))

    @property
    def work(self) -> float:
        """What searches and counts have taken, in estimated seconds."""
        return self.spent + self.counts.work - self._begun

    @property
    def _best_cost(self) -> float:
        return np.inf if self.best is None else self.best.solution.cost

    def _exclude(self, found: Found) -> bool:
        """Sees to it that the next network is one in which this schedule exceeds the limit, if it does; False where
        that is so already, and nothing better can be found."""
        limit = self.search.limit_bytes
        above = {*self.places_above(found, limit)} - self.places
        self.places |= above
        changed = self.usages.follow(found.schedule)
        if found.peak_bytes <= limit or above or limit < self.searched:
            return True
        exact = self.counts.profile(found.solution.choices, self.lifetimes)
        for place, size in self._counted(found).items():
            if exact[place] > limit >= size + self.beyond.get(place, 0.0):
                self.beyond[place] = float(exact[place]) - size
                changed = True
        return changed

    def places_above(self, found: Found, limit: float) -> Iterator[int]:
        """The places of its order at which a schedule exceeds a limit most, each at some distance from the others."""
        return highest(self.counts.profile(found.solution.choices, found.lifetimes), limit)

    def _counted(self, found: Found) -> dict[int, float]:
        """What the network counts at the places."""
        places = sorted(self.places)
        network, choices = self.network(self.search.limit_bytes, places), self.part.inside(found.solution.choices)
        used = counted_at(network, choices, len(places))
        return dict(zip(places, (used - [self.beyond.get(place, 0.0) for place in places]).tolist(), strict=True))

    def network(self, limit: float, places: Collection[int]) -> Network:
        """The network of a limit at these places of the order that is searched."""
        self.counts.check()
        network = self.usages.network(limit, places, self.beyond, self.part)
        self.spent += _SECONDS_PER_VARIABLE * len(network)
        return network

    def _search_once(self, found: Found, most: float = np.inf) -> tuple[Found, Found]:
        """What is found in the order of the search, and in its own, by no more than so much work."""
        network = self.network(self.search.limit_bytes, self.places)
        self.searched = self.search.limit_bytes
        known = all_extended(network, self.known)
        hint = hint_of(network, self.part, found, self.prices, self.places)
        network.hint = replace(hint, lower_bound=self.lower, known=known, served=self.best is not None)
        count = SECONDS_PER_OWN * len(self.problem.program.operations)
        work = self.patience - self.work - count
        work = min(max(work, _LEAST_SHARE * self.patience), most)
        for _ in range(_MOST_PROLONGATIONS):
            left = self.counts.seconds_left()
            solution = find(self.problem, network, self.search, left, work, self._serves, self.part)
            found = self.counts.within(solution, self.lifetimes)
            self.spent += found.solution.work
            if self.beyond:  # which need not be there in other schedules
                found = replace(found, solution=replace(found.solution, least_peak_bound=0.0))
            own = self.keep(found)
            self.keep_leanest(network, found)
            self.known = [choices[: len(self.problem.network)] for choices in found.solution.known]
            seen = [found.solution.choices, *map(self.part.outside, self.known)]
            self.seen |= {choices.tobytes(): choices for choices in seen}
            settled = np.isfinite(found.solution.cost) or found.solution.status == "infeasible"
            over = self.work > self.patience or most < np.inf
            if settled or found.peak_bytes <= self.search.limit_bytes or over:
                break
            work *= _TIMES_LONGER_WHERE_NOTHING_FITS
        if np.isfinite(found.solution.cost):
            self.prices = {place: found.solution.prices.get(n, 0.0) for n, place in enumerate(sorted(self.places))}
            bound, lowered = found.solution.lower_bound, self.limit_bytes - self.search.limit_bytes
            if self.beyond or lowered:  # prices have counted what is not needed, or not asked for
                short = sum(price * (lowered + self.beyond.get(p, 0.0)) for p, price in self.prices.items())
                bound = found.solution.priced_bound - short
            self.lower = max(self.lower, min(bound, found.solution.cost))
        return found, own

    def keep_leanest(self, network: Network, found: Found) -> None:
        """Where nothing fits in the order of a search, what has the lowest peaks there may fit in its own order."""
        if self.best is not None or (np.isfinite(found.solution.cost) and found.peak_bytes <= self.limit_bytes):
            return
        least = self.least
        leanest = sorted(found.solution.known, key=lambda choices: network.peak(choices)[0])
        for choices in leanest[:_LEANEST]:
            here = self.within(self.part.outside(choices))
            if self.best is not None and here.peak_bytes > self.search.limit_bytes:
                break
            if self.cost(here.solution.choices) < self._best_cost:
                self.keep(here)
            if self.least.peak_bytes <= self.enough:
                break
        self.least, self.aside = least, min(self.aside, self.least, key=lambda one: one.peak_bytes)

    def within(self, choices: NDArray[np.int64], lifetimes: Lifetimes | None = None) -> Found:
        """What a search has found on its way, in an order: that which is searched, unless another one is given."""
        return self.counts.within(self._solution(choices), lifetimes or self.lifetimes)

    def cost(self, choices: NDArray[np.int64]) -> float:
        """What an assignment of the problem's variables costs, and perhaps of others behind."""
        own = choices[: len(self.problem.network)]
        key = own.tobytes()
        if key not in self._costs:
            self._costs[key] = self.problem.network.cost(own)
        return self._costs[key]

    def count(self, choices: NDArray[np.int64]) -> Found:
        """What is found besides, taken into account as it is in its own order."""
        return self.take(self.counts.own(self._solution(choices)))

    def _solution(self, choices: NDArray[np.int64]) -> Solution:
        return Solution(choices[: len(self.problem.network)], np.inf, -np.inf, "feasible", self.search.method)

    def _serves(self, choices: NDArray[np.int64]) -> bool:
        """Whether an assignment of a network keeps within the limit at all places, and in its own order too, unless
        that was gone over to so often that what is found at last may do so sooner."""
        found = self.within(self.part.outside(choices))
        if found.peak_bytes > self.search.limit_bytes:
            return False
        own = self.keep(found)
        return own.peak_bytes <= self.limit_bytes or self.orders == MOST_ORDERS


def _seconds_without(problem: Problem, first: Found) -> float:
    """Estimated seconds of all planning without a limit, which has found ``first``."""
    seconds = _SECONDS_PER_OPERATION * len(problem.program.operations)
    return seconds + _SECONDS_PER_TABLE * len(problem.network.tables) + _TIMES_SEARCH * first.solution.work


def hint_of(network: Network, part: Part, found: Found, prices: Mapping[int, float], places: Collection[int]) -> Hint:
    """What is known before a search of a part: a schedule in it, and the prices of places in the search before."""
    by_time = {time: prices.get(place, 0.0) for time, place in enumerate(sorted(places))}
    return Hint(extended(network, part.inside(found.solution.choices)), by_time)


def counted_at(network: Network, choices: NDArray[np.int64], places: int) -> NDArray[np.float64]:
    """float [places]: what a network of so many places counts at each of them."""
    times, used = network.profile(extended(network, choices))
    return np.append(0.0, used)[np.searchsorted(times, np.arange(places), side="right")]


def highest(profile: NDArray[np.float64], limit: float) -> Iterator[int]:
    """The places at which a profile exceeds a limit most, each at some distance from the others."""
    profile = profile.copy()
    for _ in range(_PLACES_AT_ONCE):
        place = int(profile.argmax())
        if profile[place] <= limit:
            return
        yield place
        profile[max(0, place - _DISTANCE) : place + _DISTANCE + 1] = 0.0
