"""Branch and bound on the choices of one variable at a time.

Prices relax the usage limit. Where a few large tensors share the rest of the memory, the bound stays below the optimum
after any number of messages. A branch allows either the choices of one variable that use much at the priced times or
those that use little. Each branch is pruned, reduced and bounded, by prices (`shardplan.search.limits.usage_prices`) or
by the graph solver. The branch of the least bound is split next. The assignments of earlier prices show which variable
decides between too much usage and too high a cost. Each of them is also a plane of the branch that contains it, so a
branch starts at prices that are new.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardplan.search.budget import Budget, Callbacks
from shardplan.search.graph.graph import Graph, Infeasible
from shardplan.search.limits.usage_prices import Pricing
from shardplan.search.solution import relative_gap
from shardplan.search.solver.graph_solver import GraphSolver

__all__ = ["BranchAndBound"]


@dataclass(frozen=True, slots=True)
class _Branch:
    """A graph to split, its prices, and its planes, from when the graph's `undo` had `mark` steps."""

    graph: Graph
    prices: dict[int, float]
    lower: float
    pricing: Pricing | None
    mark: int = 0


class BranchAndBound:
    """Splits `solver`'s graph, and raises its lower bound or improves its assignment.

    budget: what each branch gets.
    """

    def __init__(self, solver: GraphSolver, budget: Budget, pricing: Pricing | None = None) -> None:
        """pricing: of the solver's graph, or of the graph before more was dropped from it."""
        self.solver = solver
        self.budget = replace(budget, dives=False, contraction_entries=0)
        self.nodes = 0
        self.estimate = 0.0
        """Seconds that the branches' sweeps should have taken, the same on every machine."""
        self.settled = math.inf
        """The least bound of the branches that need no further look."""
        # Ties in the bound go to the branch that was made last, which is the deepest.
        self.open: list[tuple[float, int, _Branch]] = []
        if pricing is not None:
            later = Pricing(solver)
            later.inherit(pricing, pricing.mark)
            pricing = later
        self._push(_Branch(solver.graph.copy(), solver.prices, solver.lower, pricing))

    def step(self, seconds: float = math.inf) -> bool:
        """Splits the branch of the least bound; False when none is left, which proves the best assignment.

        seconds: of work, after which no more prices of a part are tried.
        """
        solver = self.solver
        if not self.open:
            return False
        _, _, branch = heapq.heappop(self.open)
        graph, pricing = branch.graph, self._priced(branch)
        split = (_split_at_prices(pricing) if pricing is not None else None) or _split(graph, branch.prices)
        if split is None:
            # Nothing to tell apart by usage: this branch cannot be bounded any better here.
            self._push(branch)
            return False
        v, low = split
        for keep in (low, ~low):
            part = _Branch(graph.copy(sibling=True), branch.prices, branch.lower, pricing, len(graph.undo))
            try:
                part.graph.restrict(v, keep)
                part.graph.make_consistent()
                self._bound(part, seconds)
            except Infeasible:
                continue
        least = min([entry[0] for entry in self.open], default=math.inf)
        solver.raise_lower(min(least, self.settled, solver.upper))
        return True

    def _push(self, branch: _Branch) -> None:
        self.nodes += 1
        heapq.heappush(self.open, (branch.lower, -self.nodes, branch))

    def _solver(self, branch: _Branch) -> GraphSolver:
        parent, graph = self.solver, branch.graph
        graph.hint = None
        solver = GraphSolver(
            graph, parent.upper, self.budget, parent.gap, Callbacks(graph.tick, parent.callbacks.seconds_left)
        )
        solver.prices = branch.prices
        solver.raise_lower(branch.lower)
        return solver

    def _priced(self, branch: _Branch, solver: GraphSolver | None = None) -> Pricing | None:
        """Prices of a branch, with what is known of them; None where there are none, or too many."""
        if branch.pricing is None:
            return None
        pricing = Pricing(solver or self._solver(branch))
        if not pricing.has_few_times:
            return None
        pricing.inherit(branch.pricing, branch.mark)
        return pricing

    def _bound(self, branch: _Branch, seconds: float) -> None:
        """Bounds one branch, and keeps it where it may hold something better."""
        parent, graph, solver = self.solver, branch.graph, self._solver(branch)
        solver.reduce()
        pricing = self._priced(branch, solver)
        try:
            if pricing is None:
                solver.solve()
            else:
                pricing.raise_bound(seconds)
        finally:
            self.estimate += solver.estimate if pricing is None else pricing.estimate
        if solver.upper < parent.upper and graph.hint is not None:
            full = graph.expand(graph.hint)
            found = {w: int(full[w]) for w in parent.graph.live()}
            parent.accept(found, parent.graph.cost(found))
        if relative_gap(parent.upper, solver.lower) > parent.gap:
            mark = len(graph.undo)
            if pricing is not None:
                pricing.prune()
            self._push(_Branch(graph, solver.prices, solver.lower, pricing, mark))
        else:
            self.settled = min(self.settled, solver.lower)


def _split_at_prices(pricing: Pricing) -> tuple[int, NDArray[np.bool_]] | None:
    """What branches should differ in: the variable that decides most between what is best at the known prices and
    uses too much, and what is best there within the limit; and which of its choices use no more than half-way."""
    prices = pricing.known_prices()
    known = sorted((plane.at(prices), n) for n, plane in enumerate(pricing.planes) if plane.cost < math.inf)
    over = [pricing.planes[n] for _, n in known if pricing.planes[n].excess.max() > 0]
    within = [pricing.planes[n] for _, n in known if pricing.planes[n].excess.max() <= 0]
    if not over or not within:
        return None
    priced = prices @ np.stack([pricing.profile.at(instant) for instant in pricing.instants])
    first, second = (priced[pricing.offsets[:-1] + plane.choices] for plane in (over[0], within[0]))
    place = int(np.abs(first - second).argmax())
    if first[place] == second[place]:
        return None
    half = 0.5 * (first[place] + second[place])
    return pricing.live[place], priced[pricing.offsets[place] : pricing.offsets[place + 1]] <= half


def _split(graph: Graph, prices: dict[int, float]) -> tuple[int, NDArray[np.bool_]] | None:
    """The variable whose choices differ most in their priced usage, and which of them use little."""
    best: tuple[float, int, NDArray[np.bool_]] | None = None
    times = [(time, price) for time, price in prices.items() if price > 0]
    for v in graph.live():
        spans = graph.spans[v]
        if not spans or graph.size(v) < 2:
            continue
        priced = np.zeros(graph.size(v))
        for amounts, start, end in spans:
            price = sum([p for time, p in times if start <= time < end])
            if price:
                priced += price * amounts
        spread = float(np.ptp(priced))
        if spread > 0 and (best is None or spread > best[0]):
            best = (spread, v, priced < priced.min() + 0.5 * spread)
    return None if best is None else best[1:]
