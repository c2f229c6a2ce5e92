"""Searching: from a problem to the best schedule within the memory limit.

The problem is first solved without memory. Only where the plan that is found does not fit is memory made part of the
network, and solved again; so programs that fit, most of them, do not pay for the limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from shardplan.errors import InfeasibleError
from shardplan.memory.combining import ending_at_reductions
from shardplan.memory.convolutions import CONVOLUTION, copied_with_neighbours
from shardplan.memory.greedy_order import greedy_order, weights_gradients
from shardplan.memory.hiding import hiding_order
from shardplan.memory.liveness import Lifetimes, memory_profile
from shardplan.memory.order import execution_order
from shardplan.memory.recomputing import adding_products, kernels_of
from shardplan.memory.usages import Usages
from shardplan.problem import Problem
from shardplan.schedule import Schedule
from shardplan.search import Hint, Network, Solution, extended, solve
from shardplan.tables import megabytes

# A plan near the best one without a limit that exceeds the limit by so much is not worth proving.
_CLEARLY = 1.05

# The gap at which a search may stop: a plan within a thousandth of a percent of the optimum is as good as optimal.
_PRECISION = 1e-5

# Networks with more table entries than this (many layers on three or more mesh axes) take a minute for that, and a few
# seconds for a tenth of a percent, which is good enough there.
_LARGE = 5e7
_PRECISION_OF_LARGE = 1e-3

# Within a memory limit the last thousandth of a percent is what takes longest: a tenth of a percent has to do. That
# search ends with the best plan by then, after so many times the work of planning without a limit: of the search, and
# of what comes before it, so many seconds per operation; but not before the least patience, in seconds too, by
# which most small programs are proven. Work is counted, not timed, so that the same program gets the same plan on every
# machine.
_PRECISION_WITHIN_LIMIT = 1e-3
_TIMES_SLOWER_WITHIN_LIMIT = 2.0
_SECONDS_PER_OPERATION = 3e-4
_LEAST_PATIENCE = 0.2
_LEAST_SHARE = 0.3
_LEAST_WORK = 1.0
_TIMES_LONGER_WHERE_NOTHING_FITS = 4
_LEAST_SECONDS = 2.5

# A search is held to the limit where memory is short, at a few places of the order. Where what it finds exceeds the
# limit elsewhere, the highest of these places are added, at some distance from each other. Where it exceeds the limit
# at the very places, by what the network does not count, that is counted there from then on.
_MOST_CORRECTIONS = 8
_PLACES_AT_ONCE = 6
_DISTANCE = 20
_MOST_PROLONGATIONS = 3

# Where nothing fits, the least peak is looked for half-way between the least that is found and what is proven, until
# they are this near. Any schedule that is not far too dear will do.
_MOST_TRIALS = 8
_NEAR_LEAST = 0.01
_PRECISION_OF_TRIALS = 0.2
_MISSED = 1.001


@dataclass(frozen=True, slots=True)
class Found:
    """A schedule with the evidence of the search, and the bytes that a device holds at its peak."""

    schedule: Schedule
    solution: Solution
    peak_bytes: float
    lifetimes: Lifetimes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Search:
    """How to search: by a method of ``shardplan.search``, for so long, within so many bytes per device.

    ``donated`` are positions of inputs whose memory the outputs take.
    """

    method: str
    seconds: float
    limit_bytes: float
    donated: frozenset[int]
    precision: float = 0.0
    """The gap at which a search may stop, where it is above what searches stop at anyhow."""


def search_within(problem: Problem, search: Search) -> Found:
    """The best schedule whose peak keeps within the limit. Raises InfeasibleError where nothing fits."""
    deadline = time.perf_counter() + search.seconds
    limit_bytes = search.limit_bytes

    def serves(choices: NDArray[np.int64]) -> bool:
        known = Solution(choices, np.inf, -np.inf, "feasible", search.method)
        counted = _counted(problem, (Schedule(problem, problem.decode(choices)), known), search)
        return counted.peak_bytes <= _CLEARLY * limit_bytes

    asked = serves if limit_bytes < np.inf else None
    best = _solve(problem, problem.network, search, search.seconds, serves=asked)
    if best[1].status == "infeasible":
        raise InfeasibleError(
            "the hard layouts of pins and constraints exclude each other: no layout of the step has them all"
        )
    found = _counted(problem, best, search)
    if found.peak_bytes <= limit_bytes:
        return found
    return _search_again(problem, search, found, deadline)


def _counted(problem: Problem, best: tuple[Schedule, Solution], search: Search) -> Found:
    """What is found, with what it holds in the order that XLA is taken to keep."""
    schedule = best[0]
    kernels = adding_products(schedule, ending_at_reductions(schedule, kernels_of(problem)))
    found = _held(best, [Lifetimes(problem, hiding_order(schedule, kernels), kernels)], search)
    return _with_copies(problem, found, search)


def _with_copies(problem: Problem, found: Found, search: Search) -> Found:
    """What is found, in the order of a program whose convolutions copy their images with rows of neighbours first."""
    copied = copied_with_neighbours(problem, found.schedule.assignment.strategies)
    if not copied:
        return found
    program = problem.program
    # XLA's simplifications, which let images and filters change places, do not look into islands
    islands = [
        o.index for o in program.operations if o.primitive.name == CONVOLUTION and found.schedule.island_dtype(o)
    ]
    kernels = kernels_of(problem, {*copied, *((index, 0) for index in islands)})
    kernels = adding_products(found.schedule, kernels)
    held = Lifetimes(problem, range(len(program.operations)), kernels).held
    greedy = greedy_order(program, kernels.fused, held, copied, weights_gradients(program))
    orders = (execution_order(program, kernels.fused), greedy)
    return _held((found.schedule, found.solution), [Lifetimes(problem, order, kernels) for order in orders], search)


def _search_again(problem: Problem, search: Search, first: Found, deadline: float) -> Found:
    """The best schedule within the limit, where ``first``, the best one without, is not."""
    corrections = _Corrections(problem, search, first, deadline)
    corrections.follow(first)
    if corrections.best is None and corrections.least.peak_bytes > search.limit_bytes:
        _least(corrections)
        if corrections.best is not None:  # whatever fits, with a peak far below the limit
            corrections.follow(corrections.best)
    if corrections.best is not None:
        return corrections.best_proven()
    raise InfeasibleError(
        _does_not_fit(problem, corrections.least, corrections.least_bound, search), corrections.least.peak_bytes
    )


class _Corrections:
    """Searches within the limit, each at the places where what was found before exceeds it."""

    def __init__(self, problem: Problem, search: Search, first: Found, deadline: float) -> None:
        self.problem, self.search, self.first, self.deadline = problem, search, first, deadline
        self.usages = Usages(first.lifetimes, problem, search.donated)
        self.least, self.least_bound = first, 0.0
        """The schedule of the least peak, and what no peak is below."""
        self.lower = first.solution.lower_bound
        self.best: Found | None = None
        """The cheapest schedule within the limit."""
        planning = first.solution.work + _SECONDS_PER_OPERATION * len(problem.program.operations)
        self.patience = max(_LEAST_PATIENCE, _TIMES_SLOWER_WITHIN_LIMIT * planning)
        self.spent = 0.0
        self.places: set[int] = set()
        self.prices: dict[int, float] = {}
        self.known: list[NDArray[np.int64]] = []
        """Assignments that were best at some prices."""
        self.beyond: dict[int, float] = {}
        """Per place, bytes that a schedule needs which the network does not count."""

    def follow(self, found: Found) -> None:
        """Searches on from a schedule, until what is found is within the limit."""
        for _ in range(_MOST_CORRECTIONS):
            if not self._exclude(found):
                return
            found = self._search_once(found)
            if found.peak_bytes <= self.search.limit_bytes or time.perf_counter() > self.deadline:
                return
            if self.least_bound > self.search.limit_bytes:  # nothing is within the limit
                return
            if self.best is not None and self.spent > self.patience:
                return

    def keep(self, found: Found) -> None:
        """Takes a schedule into account."""
        self.least = min(self.least, found, key=lambda f: f.peak_bytes)
        self.least_bound = max(self.least_bound, found.solution.least_peak_bound)
        cost = self.problem.network.cost(found.solution.choices)
        if found.peak_bytes > self.search.limit_bytes or not cost < self._best_cost:
            return
        self.best = replace(found, solution=replace(found.solution, cost=cost, status="feasible"))

    def best_proven(self) -> Found:
        """The best schedule, with the bound of all searches."""
        assert self.best is not None
        lower = min(self.lower, self._best_cost)
        return replace(self.best, solution=replace(self.best.solution, lower_bound=lower))

    @property
    def _best_cost(self) -> float:
        return np.inf if self.best is None else self.best.solution.cost

    def _exclude(self, found: Found) -> bool:
        """Sees to it that the next network is one in which this schedule exceeds the limit, if it does; False where
        that is so already, and nothing better can be found."""
        above = {*_places_above(self.usages, found, self.search)} - self.places
        self.places |= above
        changed = self.usages.follow(found.schedule)
        limit = self.search.limit_bytes
        if found.peak_bytes <= limit or above:
            return True
        exact = memory_profile(self.usages.lifetimes, found.schedule, self.search.donated)
        for place, counted in self._counted(found).items():
            if exact[place] > limit >= counted + self.beyond.get(place, 0.0):
                self.beyond[place] = float(exact[place]) - counted
                changed = True
        return changed

    def _counted(self, found: Found) -> dict[int, float]:
        """What the network counts at the places."""
        places = sorted(self.places)
        network = self.usages.network(self.search.limit_bytes, places, self.beyond)
        times, used = network.profile(extended(network, found.solution.choices))
        used = np.append(0.0, used)[np.searchsorted(times, np.arange(len(places)), side="right")]
        return dict(zip(places, (used - [self.beyond.get(place, 0.0) for place in places]).tolist(), strict=True))

    def _search_once(self, found: Found) -> Found:
        network = self.usages.network(self.search.limit_bytes, self.places, self.beyond)
        known = [extended(network, choices) for choices in self.known]
        network.hint = replace(_hint(network, found, self.prices, self.places), lower_bound=self.lower, known=known)
        work = max(self.patience - self.spent, _LEAST_SHARE * self.patience)
        for _ in range(_MOST_PROLONGATIONS):
            left = max(_LEAST_SECONDS, self.deadline - time.perf_counter())
            best = _solve(self.problem, network, self.search, left, work, self._serves)
            found = _held(best, [self.first.lifetimes], self.search)
            self.spent += found.solution.work
            if self.beyond:  # which need not be there in other schedules
                found = replace(found, solution=replace(found.solution, least_peak_bound=0.0))
            self.keep(found)
            self.known = [choices[: len(self.problem.network)] for choices in found.solution.known]
            settled = np.isfinite(found.solution.cost) or found.solution.status == "infeasible"
            if settled or found.peak_bytes <= self.search.limit_bytes or time.perf_counter() >= self.deadline:
                break
            work *= _TIMES_LONGER_WHERE_NOTHING_FITS
        if np.isfinite(found.solution.cost):
            self.prices = {place: found.solution.prices.get(n, 0.0) for n, place in enumerate(sorted(self.places))}
            bound = found.solution.lower_bound
            if self.beyond:  # which schedules need that are not bound to: prices have counted it
                counted = sum(self.prices[place] * size for place, size in self.beyond.items())
                bound = found.solution.priced_bound - counted
            self.lower = max(self.lower, min(bound, found.solution.cost))
        return found

    def _serves(self, choices: NDArray[np.int64]) -> bool:
        """Whether an assignment of a network keeps within the limit at all places."""
        schedule = Schedule(self.problem, self.problem.decode(choices))
        profile = memory_profile(self.first.lifetimes, schedule, self.search.donated)
        return float(profile.max()) <= self.search.limit_bytes


def _hint(network: Network, found: Found, prices: Mapping[int, float], places: Collection[int]) -> Hint:
    """What is known before a search: a schedule, and the prices of places in the search before."""
    by_time = {time: prices.get(place, 0.0) for time, place in enumerate(sorted(places))}
    return Hint(extended(network, found.solution.choices), by_time)


def _places_above(usages: Usages, found: Found, search: Search) -> Iterator[int]:
    """The places of the order at which a schedule exceeds the limit most, each at some distance from the others."""
    profile = memory_profile(usages.lifetimes, found.schedule, search.donated)
    for _ in range(_PLACES_AT_ONCE):
        place = int(profile.argmax())
        if profile[place] <= search.limit_bytes:
            return
        yield place
        profile[max(0, place - _DISTANCE) : place + _DISTANCE + 1] = 0.0


def _least(known: _Corrections) -> None:
    """Looks for the schedule of the least peak, and for what no peak is below, until one is within the limit."""
    search, usages, deadline = known.search, known.usages, known.deadline
    unreached = known.least_bound
    places: set[int] = set()
    for _ in range(_MOST_TRIALS):
        least = known.least
        near = least.peak_bytes - unreached <= _NEAR_LEAST * least.peak_bytes
        if near or known.best is not None or time.perf_counter() > deadline:
            break
        target = 0.5 * (unreached + least.peak_bytes)
        trial = replace(search, limit_bytes=target, precision=_PRECISION_OF_TRIALS)
        places |= set(_places_above(usages, least, trial))
        usages.follow(least.schedule)
        network = usages.network(target, places)
        network.hint = _hint(network, least, {}, places)
        left = max(_LEAST_SECONDS, deadline - time.perf_counter())
        found = _held(_solve(known.problem, network, trial, left, _LEAST_WORK), [usages.lifetimes], trial)
        above = set(_places_above(usages, found, trial)) - places
        if found.peak_bytes > _MISSED * target and not (above and np.isfinite(found.solution.cost)):
            unreached = target
        known.keep(found)
        places |= above


def _held(best: tuple[Schedule, Solution], orders: Sequence[Lifetimes], search: Search) -> Found:
    """What is found, with the order that holds least in memory."""
    schedule, solution = best
    peaks = [float(memory_profile(lifetimes, schedule, search.donated).max()) for lifetimes in orders]
    return Found(schedule, solution, min(peaks), orders[int(np.argmin(peaks))])


def _solve(
    problem: Problem,
    network: Network,
    search: Search,
    seconds: float,
    work: float = np.inf,
    serves: Callable[[NDArray[np.int64]], bool] | None = None,
) -> tuple[Schedule, Solution]:
    """The best schedule within so many seconds and so much work, which only what is within a limit is held to.

    ``network`` is the problem's, which may have further variables behind.
    """
    precision = _PRECISION if network.usage_limit is None else _PRECISION_WITHIN_LIMIT
    entries = sum(network.tables[table].size for _, _, table in network.edges)
    precision = max(precision, search.precision, _PRECISION_OF_LARGE if entries > _LARGE else 0.0)
    solution = solve(network, method=search.method, gap=precision, time_limit=seconds, work_limit=work, serves=serves)
    solution = replace(solution, choices=solution.choices[: len(problem.network)])
    if solution.status == "unknown" and network.usage_limit is None:
        solution = _as_it_is(problem, solution)
    return Schedule(problem, problem.decode(solution.choices)), solution


def _as_it_is(problem: Problem, solution: Solution) -> Solution:
    """Where the time was over before anything was found: the first choices, which split nothing, where they may."""
    cost = problem.network.cost(solution.choices)
    if not np.isfinite(cost):
        raise InfeasibleError("no layout of the step was found in the time: give it more (time_limit)")
    return replace(solution, cost=cost, status="feasible")


def _does_not_fit(problem: Problem, least: Found, bound: float, search: Search) -> str:
    lifetimes = least.lifetimes
    profile = memory_profile(lifetimes, least.schedule, search.donated)
    moment = int(np.argmax(profile))
    program = problem.program
    makers = {result: operation for operation in program.operations for result in operation.results}
    alive = []
    for value, lifetime in lifetimes.held.items():
        if lifetime.start <= moment <= lifetime.end:
            layout = least.schedule.assignment.values[value]
            domain = problem.domain(value)
            degree = domain.degrees[domain.position[layout]]
            tensor = program.values[value]
            where = tensor.name or (makers[value].source if value in makers else "captured array")
            alive.append((tensor.total_bytes / degree, f"{tensor.dtype}{list(tensor.shape)} of `{where}`"))
    largest = sorted(alive, key=lambda entry: -entry[0])[:5]
    lines = "\n".join(f"  {megabytes(size):>10} MB  {what}" for size, what in largest)
    proven = f"; by the planner's count none is below {_size(bound)}" if bound else ""
    helps = "more devices, a smaller batch, jax.checkpoint around layers"
    return (
        f"no layout was found that keeps within {_size(search.limit_bytes)} per device; the least peak found is "
        f"{_size(least.peak_bytes)}{proven}. The largest tensors there, per device:\n{lines}\n"
        f"What helps: {helps}{'' if search.donated else ', donate_argnums for the state'}."
    )


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{megabytes(count)} MB"
