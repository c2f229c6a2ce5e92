"""Branch and bound: what no relaxation decides is split in two, again and again.

Prices relax the usage limit, so where a few large tensors have to share what is left of the memory, the bound stays
below the optimum however long messages are passed. Each branch here allows only the choices of one variable that use
much at the priced times, or only those that use little; each is pruned, reduced and bounded by the same solver that
works on whole graphs, and the branch of the least bound is split next.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardplan.search.graph import Graph, Infeasible
from shardplan.search.solution import relative_gap
from shardplan.search.solver import Effort, GraphSolver, Watch

__all__ = ["Branching"]


class Branching:
    """Splits `solver`'s graph, and raises its lower bound or improves its assignment.

    effort: what each branch gets.
    """

    def __init__(self, solver: GraphSolver, effort: Effort) -> None:
        self.solver = solver
        self.effort = replace(effort, dives=False, merging=0)
        self.nodes = 0
        self.estimate = 0.0
        """Seconds that the branches' sweeps should have taken, the same on every machine."""
        self.settled = math.inf
        """The least bound of the branches that need no further look."""
        # Ties in the bound go to the branch that was made last, which is the deepest.
        self.open: list[tuple[float, int, Graph, dict[int, float]]] = []
        self._push(solver.lower, solver.graph.copy(), solver.prices)

    def step(self) -> bool:
        """Splits the branch of the least bound; False when none is left, which proves the best assignment."""
        solver = self.solver
        if not self.open:
            return False
        _, _, graph, prices = heapq.heappop(self.open)
        split = _split(graph, prices)
        if split is None:
            # Nothing to tell apart by usage: this branch cannot be bounded any better here.
            self._push(solver.lower, graph, prices)
            return False
        v, low = split
        for keep in (low, ~low):
            self._bound(graph.copy(sibling=True) if keep is low else graph, v, keep, prices)
        least = min([entry[0] for entry in self.open], default=math.inf)
        solver.raise_lower(min(least, self.settled, solver.upper))
        return True

    def _push(self, lower: float, graph: Graph, prices: dict[int, float]) -> None:
        self.nodes += 1
        heapq.heappush(self.open, (lower, -self.nodes, graph, prices))

    def _bound(self, graph: Graph, v: int, keep: NDArray[np.bool_], prices: dict[int, float]) -> None:
        """Bounds one branch, and keeps it where it may hold something better."""
        parent = self.solver
        graph.hint = None
        branch = GraphSolver(graph, parent.upper, self.effort, parent.gap, Watch(graph.tick, parent.watch.seconds_left))
        branch.prices = prices
        try:
            graph.restrict(v, keep)
            graph.make_consistent()
            branch.solve()
        except Infeasible:
            return
        finally:
            self.estimate += branch.estimate
        if branch.upper < parent.upper and graph.hint is not None:
            full = graph.expand(graph.hint)
            found = {w: int(full[w]) for w in parent.graph.live()}
            parent.accept(found, parent.graph.cost(found))
        if relative_gap(parent.upper, branch.lower) > parent.gap:
            self._push(max(branch.lower, parent.lower), graph, branch.prices)
        else:
            self.settled = min(self.settled, branch.lower)


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
