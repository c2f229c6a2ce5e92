"""The state of one search: clock, work, best assignment and best bound."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from shardplan.search.graph.graph import Graph
from shardplan.search.network import Network
from shardplan.search.solution import Progress, ProgressCallback, Solution, relative_gap

__all__ = ["Run", "Stop"]

_SECONDS_BETWEEN_EXPANSIONS = 2.0
_EXTRA_WORK_SHARE = 0.35
"""The share of the work before that may be spent on more than is enough."""


class Stop(Exception):
    """The time is over, or the progress callback asked to end."""


class Run:
    """The best assignment and bound of a search, kept so that it can end at any moment."""

    def __init__(
        self,
        network: Network,
        time_limit: float,
        gap: float = 1e-6,
        progress: ProgressCallback | None = None,
        work_limit: float = math.inf,
        is_feasible: Callable[[NDArray[np.int64]], bool] | None = None,
    ) -> None:
        self.network = network
        self.gap = gap
        self.acceptable_gap = 0.0
        """A larger gap: see `reaches_acceptable_gap`."""
        self._acceptable_since: float | None = None
        self.time_limit = time_limit
        self.work_limit = work_limit
        self.work = 0.0
        """Estimated seconds of what was done: the same for the same network, however fast the machine."""
        self.started = time.monotonic()
        self.deadline = self.started + time_limit
        self.progress = progress
        self.is_feasible = is_feasible
        """A test of good assignments beyond the network. See `check_feasibility`."""
        self.peak_searched = network.hint is not None and network.hint.served
        """Whether the lowest peak was looked for, or need not be."""
        self.known: list[NDArray[np.int64]] = []
        """Assignments that were best at some prices of usage."""
        self.priced_bound = -math.inf
        """What `prices` alone prove."""
        self._checked_cost = math.inf
        self.choices: NDArray[np.int64] | None = None
        self.cost = math.inf
        self.peak = (math.inf, 0)
        self.lower_bound = -math.inf
        self.least_peak_bound = 0.0
        self.prices: dict[int, float] = {}
        self.iterations = 0
        self.seconds: dict[str, float] = {}
        self.interrupted = False
        self.proven_infeasible = False
        self.restrictions_solved = False
        """Whether the restricted networks have been solved."""
        self._stage = "start"
        self._within: str | None = None
        self._settled_at = self.started
        self._pending: tuple[Graph, dict[int, int], int] | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Counts the time spent inside under this name, and no more under that of a stage around it."""
        outer, self._within = self._within, name
        self._stage, begun = name, time.monotonic()
        try:
            yield
        finally:
            spent = time.monotonic() - begun
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
            if outer is not None:
                self._stage, self.seconds[outer] = outer, self.seconds.get(outer, 0.0) - spent
            self._within = outer

    def seconds_left(self) -> float:
        """Until the time limit; negative when it is over."""
        return self.deadline - time.monotonic()

    def check(self) -> None:
        """Raises `Stop` when the time is over, or somebody interrupted."""
        if self.interrupted or time.monotonic() > self.deadline:
            raise Stop

    def offer(self, choices: NDArray[np.int64]) -> bool:
        """Takes an assignment of the whole network into account; True where it is the best so far.

        Without any valid one, the one of the least peak is kept.
        """
        self.settle()
        network = self.network
        cost = network.cost(choices)
        peak = network.peak(choices) if network.usages else (0.0, 0)
        limit = network.usage_limit
        if not math.isfinite(cost) or (limit is not None and peak[0] > limit):
            better = self.cost == math.inf and math.isfinite(cost) and peak[0] < self.peak[0]
            cost = math.inf
        else:
            better = cost < self.cost or self.choices is None
        if better:
            self.choices, self.cost, self.peak = choices, cost, peak
            self.report()
        return better

    def offer_reduced(self, graph: Graph, choices: dict[int, int], cost: float) -> None:
        """Takes a valid assignment of a reduced graph into account. It is expanded only when it is asked for."""
        if cost < self.cost:
            self.cost = cost
            self._pending = (graph, dict(choices), len(graph.undo))
            self.report()

    def settle(self) -> None:
        """Expands what `offer_reduced` left, and counts its cost on the network itself."""
        if self._pending is None:
            return
        graph, choices, mark = self._pending
        self._pending = None
        self.choices = graph.expand(choices, mark)
        self.cost = self.network.cost(self.choices)
        self.peak = self.network.peak(self.choices) if self.network.usages else (0.0, 0)

    def bound(self, lower_bound: float) -> None:
        """Takes a lower bound into account."""
        if lower_bound > self.lower_bound:
            self.lower_bound = lower_bound

    def peak_bound(self, least_peak: float) -> None:
        """Takes a lower bound of the peak into account; above the limit, it proves that nothing satisfies it."""
        self.least_peak_bound = max(self.least_peak_bound, least_peak)
        if self.least_peak_bound > (1 + 1e-9) * (self.network.usage_limit or math.inf):
            self.proven_infeasible = True

    def check_feasibility(self) -> None:
        """Ends the search where the best assignment fails the test of the caller."""
        self.settle()
        if self.is_feasible is None or self.choices is None or not self.cost < self._checked_cost:
            return
        self._checked_cost = self.cost
        if not self.is_feasible(self.choices):
            raise Stop

    def closed(self) -> bool:
        """Whether the asked gap is reached."""
        return relative_gap(self.cost, self.lower_bound) <= self.gap

    def reaches_acceptable_gap(self, work: float) -> bool:
        """Whether the gap has been acceptable for a good part of all work. The acceptable gap is the asked gap then.

        work: all that was done, in seconds by estimate.
        """
        if relative_gap(self.cost, self.lower_bound) > self.acceptable_gap:
            return False
        if self._acceptable_since is None:
            self._acceptable_since = work
        if work <= (1 + _EXTRA_WORK_SHARE) * self._acceptable_since:
            return False
        self.gap = self.acceptable_gap
        return True

    def accept_gap(self, work: float) -> None:
        """Makes the acceptable gap the asked gap, after this much work."""
        self.gap, self.work = self.acceptable_gap, work

    def report(self) -> None:
        """Calls the progress callback."""
        if self.progress is None:
            return
        now = time.monotonic()
        if self._pending is not None and now - self._settled_at > _SECONDS_BETWEEN_EXPANSIONS:
            self._settled_at = now
            self.settle()
        peak = self.peak[0] if math.isfinite(self.peak[0]) else 0.0
        seconds = now - self.started
        state = Progress(self._stage, seconds, self.cost, self.lower_bound, self.iterations, peak)
        if self.progress(state) is False:
            self.interrupted = True

    def solution(self, method: str) -> Solution:
        """What was found, in its final form."""
        self.settle()
        network = self.network
        choices = self.choices if self.choices is not None else np.zeros(len(network), dtype=np.int64)
        peak = network.peak(choices) if network.usages else (0.0, 0)
        # A bound above the cost of a valid assignment can only be rounding.
        lower_bound = min(self.lower_bound, self.cost)
        return Solution(
            choices=choices,
            cost=self.cost,
            lower_bound=lower_bound,
            status=self._status(lower_bound),
            method=method,
            iterations=self.iterations,
            work=self.work,
            seconds=dict(self.seconds),
            peak_usage=peak[0],
            peak_time=peak[1],
            least_peak_bound=min(self.least_peak_bound, peak[0]),
            prices=self.prices,
            known=self.known,
            priced_bound=self.priced_bound,
        )

    def _status(self, lower_bound: float) -> str:
        if self.cost == math.inf and self.proven_infeasible:
            return "infeasible"
        if relative_gap(self.cost, lower_bound) <= self.gap:
            return "optimal"
        if self.interrupted:
            return "interrupted"
        return "unknown" if self.cost == math.inf else "feasible"
