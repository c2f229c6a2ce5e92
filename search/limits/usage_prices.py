"""Lagrange multipliers of the usage limit: the best bound by cutting planes, and assignments for mixtures.

A price on each critical time makes usage a cost and removes the limit. The graph reduces further, and the graph solver
solves it. At prices p it finds an assignment of cost c and excess e (usages less limit). L(p) = c + p e is a lower
bound for the limited graph. For all other prices q the same assignment gives L(q) <= c + q e: a plane above the concave
function L. The next prices are those where the planes leave L the most room (Kelley, 1960), until none is left. Prices
between too low ones and high enough ones come first where the planes leave enough room there. Repeated layers have
equal usages at most of these times, so they are folded as without a limit.

Some assignments at these prices use too much and some cost too much. They differ in a few large tensors. Their best
mixture within the limit (`shardplan.search.limits.recombination`) is nearly optimal. Once there is one, choices that no
better assignment has are dropped at all later prices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardplan.search.bounds.lagrangian import Messages
from shardplan.search.budget import Budget, Callbacks
from shardplan.search.graph.reductions import shrink
from shardplan.search.graph.usage_profile import Profile
from shardplan.search.limits.concave_planes import Plane, maximum, maximum_between
from shardplan.search.limits.priced_graph import PricedGraph, remaining_choices
from shardplan.search.limits.recombination import Recombination
from shardplan.search.solver.graph_solver import GraphSolver
from shardplan.search.structure.fold_repeats import begin_folded
from shardplan.search.structure.symmetry_coarsening import coarse_start

__all__ = ["Pricing"]

Array = NDArray[np.float64]
Index = NDArray[np.intp]
_EVALUATIONS = 24
_BUDGET = Budget(sweeps=120, largest_table=1e5, table_entries=1e6, cp_sat_work=0.1, cp_sat_entries=3000, dives=False)
_ROUGH_BUDGET = replace(_BUDGET, sweeps=40, cp_sat_work=0.0, cp_sat_entries=0, contraction_entries=0)
_SWEEPS_WHERE_LOOSE = 300
_LOOSE_RATIO = 0.3
"""The share of the gap that an evaluation may leave open. A larger rest gets more sweeps, up to the contraction of
neighbours: messages alone are not tight on meshes with equal axes."""
_SWEEPS_WHERE_LOW = 40
"""The number of sweeps after which an evaluation ends where its prices cannot raise the bound."""
_FIRST_TIMES = 4.0
"""The cost of the known excess at the first prices, at each time, as a multiple of all other costs."""
_MAX_TIMES = 24
_MAX_LOW_PRICES = 2
"""The number of too low prices after which a price that is high at all times follows."""
_RECOMBINATION_GAP = 0.02  # assignments that leave such a gap are recombined once more, when better prices are known
_SHARE_OF_GAP = 0.2
"""The share of the asked gap that the planes may leave above the bound."""
_STEP_TO_BEST = 0.3
"""The step back to the best prices, where several times have prices. Without it, the prices of planes zigzag."""
_BETWEEN_RATIO = 0.5
"""The share of the room above L from which on prices between too low and high enough ones are tried first. Usage is
near the limit at all times there."""
_LEAST_RAISE, _GREATEST_RAISE = 1.5, 4.0
"""The ratio of the next prices to the highest before. It is larger where the last ones changed the excess by little."""
_OVERSHOOT_RATIO = 0.1
"""The share of the gap by which the planes may leave L above the cost of the best assignment."""
_WIDE_GAP = 0.01
"""The gap between planes and best assignment from which on the last work goes into more planes instead of L."""
_ROUGH_GAP = 2e-3
"""The gap of evaluations at prices that are too low for the limit."""
_SHARE_OF_CUT = 0.1
"""The precision of an evaluation, as a share of the room that its plane takes off the planes before."""
_SECONDS_PER_VARIABLE, _SECONDS_PER_OPEN = 3e-5, 1.5e-4
"""The estimated time of copying and reducing per variable, and of pruning and decoding per variable that is left."""
_TIMES_TO_IMPROVE, _LEAST_WORK = 1.3, 0.1
"""The work for an assignment that needs no further proof, as a multiple of the work that found it, and the least work
in seconds. Small graphs are proven within that."""
_LONGEST_RATIO = 2.0
"""The time of an evaluation that is allowed in any case, as a multiple of the longest before."""
_PRUNING_GAP = 0.05  # where a gap like this is asked for, pruning takes longer than it saves
_RECOMBINATIONS, _BASES = 4, 2
_SECONDS_PER_RECOMBINATION = 0.01
"""The estimated time of a recombination, per assignment that takes parts of others."""


class Pricing:
    """Raises the lower bound of `solver`, whose graph has a usage limit and is reduced, and improves its assignment."""

    def __init__(self, solver: GraphSolver) -> None:
        self.solver = solver
        graph = solver.graph
        self.live = graph.live()
        sizes = np.array([graph.size(v) for v in self.live], dtype=np.intp)
        self.offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.intp)
        self.profile = Profile(graph, self.live, self.offsets[:-1])
        self.instants = self.profile.candidates()
        self.mark = len(graph.undo)
        """The length of the graph's `undo` at the start."""
        self.planes: list[Plane] = []
        self.begun: Plane | None = None
        """The plane of the first prices."""
        self.best = np.zeros(len(self.instants))
        self.bound = -math.inf
        self.near = 0.0
        """The ratio to the bound up to which a cost needs no further proof."""
        self.until = math.inf
        """The estimate at which the search should end."""
        self._loose = self._brief = False
        """Whether the last evaluation left a wide gap, and whether near-optimal assignments suffice."""
        self._messages: Messages = {}
        """The messages of the quotient at the last prices."""
        self.mixed = 0
        """The number of planes whose best mixture CP-SAT has computed."""
        self._recombined = 0, math.inf
        """The number of planes, and the cost of the best assignment, when they were recombined last."""
        self.feasible_prices: Array | None = None
        """The last prices of several times at which all usages were within the limit."""
        self.most = 0.0
        """The highest price that was tried."""
        self.estimate = self.longest = 0.0
        """The estimated seconds in all and of the longest evaluation, equal on all machines."""

    @property
    def has_few_times(self) -> bool:
        """Whether the times that need prices are few."""
        return 0 < len(self.instants) <= _MAX_TIMES

    def begin(self, cost: float, times: NDArray[np.int64], usage: Array) -> None:
        """Takes the cost of an assignment, and its usage from each of these times on, which need not be one of the
        graph's any more: the first prices are by these."""
        used = np.concatenate([[0.0], usage])[np.searchsorted(times, self.profile.instants[self.instants], "right")]
        self.begun = Plane(cost, used - self.profile.limit, np.zeros(0, dtype=np.intp))

    def recall(self, numbers: Mapping[int, Index], known: Sequence[NDArray[np.int64]]) -> None:
        """Takes assignments that were best at some prices of the network with fewer limits, where the graph still has
        their choices. numbers: per variable and choice, the one of the network."""
        for choices in known:
            places = {v: np.flatnonzero(numbers[v] == choices[v]) for v in self.live}
            if all(len(where) for where in places.values()):
                self.take({v: int(where[0]) for v, where in places.items()})
        self.most = max(self.solver.prices.values(), default=0.0) if self.planes else 0.0

    def assignments(self, most: int) -> list[NDArray[np.int64]]:
        """The assignments whose planes are lowest at the best prices, as assignments of the network."""
        planes = sorted((plane for plane in self.planes if plane.cost < math.inf), key=lambda p: p.at(self.best))
        chosen = [dict(zip(self.live, plane.choices.tolist(), strict=True)) for plane in planes[:most]]
        return [self.solver.graph.expand(choices, self.mark) for choices in chosen]

    def raise_bound(self, seconds: float) -> None:
        """Evaluates prices until the planes leave no room above the bound, or for about so many seconds of work."""
        self.priced = PricedGraph(self.solver.graph, self.profile, self.instants)
        self.until, known = seconds, self.solver.lower
        prices = self._highest()[1] if self.most > 0 and self.planes else self._first()
        ceiling, again, doubted = math.inf, False, False
        for number in range(_EVALUATIONS):
            high = not self.most > 0 and prices.any() and not self.known_prices().any()
            before = self.estimate
            wide = self.solver.upper - ceiling > _WIDE_GAP * abs(ceiling)
            self._brief = wide and before + self.longest > self.until
            self._evaluate(prices)
            last, self.longest = prices, max(self.longest, self.estimate - before)
            far = self.solver.upper - self.bound > _RECOMBINATION_GAP * abs(self.bound)
            between = self._between() if high and self._turned else None
            if between is not None and not self.solver.closed and self.estimate <= self.until:
                prices = between
                continue
            if self._turned and not self.solver.closed and (not self._recombined[0] or (far and not again)):
                again = self._recombined[0] > 0
                self.recombine()
            if self.solver.upper < self.near * max(known, self.bound):
                self.until = min(self.until, max(_TIMES_TO_IMPROVE * self.estimate, _LEAST_WORK))
            if self.solver.closed or self.estimate > self.until:
                break
            ceiling, prices = self._highest() if self.most > 0 else (math.inf, self._first())
            if (high or number == _MAX_LOW_PRICES) and not (doubted or self._turned):
                self.solver.callbacks.on_infeasible_hint()
                doubted = True
            if number >= _MAX_LOW_PRICES and not self._turned:
                prices = np.full(len(prices), self._scale())  # at all times at once: whatever fits is worth knowing
            if self._turned and ceiling - self.bound <= _SHARE_OF_GAP * self.solver.gap * abs(self.bound):
                break
            if np.count_nonzero(prices) > 1 and self._turned:
                prices = prices + _STEP_TO_BEST * (self.best - prices)
            if self.feasible_prices is not None and not np.allclose(self.feasible_prices, self.best):
                top, between = maximum_between(self.planes, self.best, self.feasible_prices)
                if top - self.bound > _BETWEEN_RATIO * (ceiling - self.bound):
                    prices = between
            if np.allclose(prices, last, rtol=1e-6, atol=0.0):
                break  # a plane that was not found exactly is in the way
        self.solver.prices = self.by_time()

    def _first(self) -> Array:
        """The prices to begin with: those that are known, or such that anything that fits is better than an excess
        that is known. What is best there is soon found, and says what the prices between are."""
        known = self.known_prices()
        if known.any() or self.begun is None or not (self.begun.excess > 0).any():
            return known
        over = np.maximum(self.begun.excess, 0.0)
        mean = float(over @ over / over.sum())
        room = max(mean, math.sqrt(mean * self.profile.limit))  # a small excess need not be a cheap one
        return np.full(len(known), _FIRST_TIMES * abs(self.begun.cost) / room)

    def _between(self) -> Array | None:
        """The prices, in proportion to a known excess, at which that costs as much as the last assignment, unless it is
        cheaper."""
        begun, last = self.begun, self.planes[-1]
        if begun is None or last.cost <= begun.cost:
            return None
        over = np.maximum(begun.excess, 0.0)
        return (last.cost - begun.cost) / float(over @ (begun.excess - last.excess)) * over

    def known_prices(self) -> Array:
        """The prices that the solver knows."""
        times = self.profile.instants[self.instants].tolist()
        return np.array([self.solver.prices.get(time, 0.0) for time in times])

    def by_time(self) -> dict[int, float]:
        """The best prices."""
        times = self.profile.instants[self.instants].tolist()
        return {time: price for time, price in zip(times, self.best.tolist(), strict=True) if price > 0}

    def _inner(self, prices: Array) -> GraphSolver:
        """A solver of the graph at these prices, reduced. The further below the planes, the less exactly it ends."""
        priced = self.priced.at(prices)
        ceiling = min((plane.at(prices) for plane in self.planes), default=-math.inf)
        gap = self.solver.gap
        precision = _SHARE_OF_GAP * gap if self._turned else max(_SHARE_OF_GAP * gap, min(gap, _ROUGH_GAP))

        def report() -> None:
            priced.tick()
            cut = ceiling - inner.upper if inner.upper < math.inf else 0.0
            inner.gap = max(precision, _SHARE_OF_CUT * cut / max(abs(inner.upper), 1e-30))
            low = inner.upper <= self.solver.lower or (inner.upper < math.inf and self._brief)
            if low and inner.sweeps >= _SWEEPS_WHERE_LOW and ceiling < math.inf:
                inner.gap = math.inf  # what these prices give is a plane, not a bound: it is low enough

        seconds = max(self.until - self.estimate, _LONGEST_RATIO * self.longest)
        begun = replace(_BUDGET, seconds=min(_BUDGET.seconds, seconds))
        budget = replace(begun, sweeps=_SWEEPS_WHERE_LOOSE) if self._loose else begun
        inner = GraphSolver(priced, math.inf, budget, precision, Callbacks(report, self.solver.callbacks.seconds_left))
        if self._begin(inner, begun) and not self._turned and inner.upper < math.inf:
            inner.gap = math.inf  # these prices are too low to be the best: a plane will do
        return inner

    def _begin(self, inner: GraphSolver, budget: Budget) -> bool:
        """Reduces a graph at some prices, and starts from what twins taken together say, or repeated layers; whether
        twins said something."""
        inner.reduce(dominance=False)  # what others beat is found by messages sooner
        start = coarse_start(inner.graph, budget, inner.gap, inner.callbacks, self.solver.upper, self._messages)
        if start is None:
            begin_folded(inner, budget)
            return False
        self._messages = start.messages
        inner.begin(start.messages, start.choices)
        inner.sweeps, inner.estimate = start.sweeps, start.estimate
        inner.raise_lower(min(start.lower_bound, inner.upper))
        return True

    def evaluate_roughly(self, rewards: Mapping[int, Array]) -> None:
        """Keeps a near-optimal assignment at the best prices, found with rewards on some choices."""
        priced = self.priced.at(self.best, rewards)
        callbacks, known = Callbacks(priced.tick, self.solver.callbacks.seconds_left), self._messages
        inner = GraphSolver(priced, math.inf, _ROUGH_BUDGET, _ROUGH_GAP, callbacks)
        if self._begin(inner, _ROUGH_BUDGET) and inner.upper < math.inf:
            inner.gap = math.inf
        self._settle(inner)
        self._messages = known
        if priced.hint is not None:
            self.take(self.priced.choices(priced))

    def _settle(self, inner: GraphSolver) -> None:
        """Solves a graph at some prices, and counts the work."""
        variables = 0 if inner.closed else len(inner.graph.live())
        if not inner.closed:
            inner.solve()
        self.estimate += inner.estimate + _SECONDS_PER_VARIABLE * len(self.live) + _SECONDS_PER_OPEN * variables

    def _evaluate(self, prices: Array) -> None:
        """Solves the graph at these prices."""
        solver = self.solver
        self.most = max(self.most, float(prices.max()))
        inner = self._inner(prices)
        priced = inner.graph
        if not inner.messages and priced.live() and solver.upper < math.inf and solver.gap < _PRUNING_GAP:
            self._narrow(inner)
        narrowed = len(priced.undo)
        self._settle(inner)
        solver.sweeps += inner.sweeps
        if inner.lower > self.bound:
            self.bound, self.best = inner.lower, prices
            solver.raise_lower(inner.lower)
        if priced.hint is not None:
            self.take(self.priced.choices(priced))
            if len(prices) > 1 and self.planes[-1].excess.max() <= 0:
                self.feasible_prices = prices
        self.priced.narrow(priced, narrowed)
        self._loose = not inner.closed and inner.upper - inner.lower > _LOOSE_RATIO * (solver.upper - self.bound)
        solver.callbacks.report()

    def _narrow(self, inner: GraphSolver) -> None:
        """Drops from a graph at some prices what no assignment within the limit below the best one takes."""
        relaxation = inner.sweep_until_prunable()
        relaxation.prune(max(self.solver.upper, inner.upper))
        relaxation.reparametrise()
        inner.messages = {}
        shrink(inner.graph, dominance=False)

    def take(self, found: dict[int, int]) -> None:
        """Keeps an assignment, and gives it to the solver where it keeps within the limit."""
        choices = np.array([found[v] for v in self.live], dtype=np.intp)
        used = self.profile.used(choices)
        cost = self.solver.graph.cost(found)
        self.planes.append(Plane(cost, used[self.instants] - self.profile.limit, choices))
        self.begun = self.begun or self.planes[0]
        if used.max() <= self.profile.limit:
            self.solver.accept(found, cost)

    @property
    def needs_assignments(self) -> bool:
        """Whether the best assignment is above the maximum that the planes leave to L. No prices can prove it then."""
        return self._turned and self.solver.upper - self._highest()[0] > self.solver.gap * abs(self.bound)

    @property
    def _turned(self) -> bool:
        """Whether an assignment within the limit came out at some prices."""
        return any(plane.excess.max() <= 0 for plane in self.planes)

    def _highest(self) -> tuple[float, Array]:
        """The highest value that the planes leave to L, and prices where they do: the lowest where that is more than
        the best assignment needs to be proven."""
        upper, lower = self.solver.upper, self.solver.lower
        enough = upper + _OVERSHOOT_RATIO * (upper - lower) if upper < math.inf else upper
        planes = self.planes
        if self.begun is not None and all(plane.excess.max() <= 0 for plane in planes):
            planes = [*planes, self.begun]
        return maximum(planes, self._scale(), enough) or (self.bound, self.best)

    def _scale(self) -> float:
        """The highest next price: above those tried so far, in steps below the height that the planes allow."""
        if self.most > 0 and not self._turned:
            last, before = (float(plane.excess.max()) for plane in [*self.planes[::-1], self.begun][:2] if plane)
            return self.most * min(max(before / max(before - last, 1e-30), _LEAST_RAISE), _GREATEST_RAISE)
        if self.most > 0:
            return _GREATEST_RAISE * self.most
        first = self.planes[0]
        return max(abs(first.cost), 1e-30) / max(float(first.excess.max()), 1e-3 * self.profile.limit)

    def inherit(self, known: Pricing, mark: int) -> None:
        """Takes over what was best at some prices of the graph when its `undo` had `mark` steps, where it still has
        it."""
        left = remaining_choices(self.solver.graph.undo[mark:])
        places = {v: place for place, v in enumerate(known.live)}
        for plane in known.planes:
            choices = {v: int(k) for v, k in zip(known.live, plane.choices, strict=True)}
            now = {v: int(np.searchsorted(kept, choices[v])) for v, kept in left.items() if v in places}
            if all(k < len(left[v]) and left[v][k] == choices[v] for v, k in now.items()):
                choices.update(now)
                self.take({v: choices[v] for v in self.live})
        self.most, self._recombined = known.most, known._recombined

    def recombine(self) -> None:
        """Takes parts of all assignments over into the best ones, known or at the best prices, while that helps."""
        solver, graph = self.solver, self.solver.graph
        recombination = Recombination(graph, self.live, self.profile, self.instants, self.offsets)
        tolerance = _SHARE_OF_GAP * solver.gap * abs(self.bound)
        for _ in range(_RECOMBINATIONS if self._recombined != (len(self.planes), solver.upper) else 0):
            before = solver.upper
            planes = sorted((plane for plane in self.planes if plane.cost < math.inf), key=lambda p: p.at(self.best))
            bases = [plane.choices for plane in planes[: 1 if graph.hint is not None else _BASES]]
            if graph.hint is not None:
                bases.insert(0, np.array([graph.hint[v] for v in self.live], dtype=np.intp))
            for base in bases:
                mixture = recombination.best(
                    base, [plane.choices for plane in planes], _SECONDS_PER_RECOMBINATION, tolerance
                )
                self.estimate += mixture.work
                if (found := mixture.choices) is not None and not any((found == p.choices).all() for p in planes):
                    self.take(dict(zip(self.live, found.tolist(), strict=True)))
            self._recombined = len(self.planes), solver.upper
            self.solver.prices = self.by_time()
            solver.callbacks.on_plateau()
            if solver.closed or not solver.upper < before - tolerance:
                return

    def prune(self) -> None:
        """Drops from the solver's graph what cannot be in anything better."""
        graph = self.solver.graph
        masks = {v: np.zeros(graph.size(v), dtype=bool) for v in self.live}
        for v, kept in self.priced.kept.items():
            masks[v][kept] = True
            if graph.hint is not None:
                masks[v][graph.hint[v]] = True
        graph.restrict_all(masks)
        graph.make_consistent()
        shrink(graph, dominance=False)
