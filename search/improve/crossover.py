"""Crossover under a usage limit: the best mixture of the assignments at several prices of usage.

At the price that closes the bound, a few large tensors decide whether the limit holds, and decoding takes all or none
of them. The assignments at free and at dear usage differ in these tensors. The choices of all these assignments and of
the best one are few per variable. Reductions and CP-SAT solve the graph of these choices, with its usage limit. Noise
on prices and costs varies the next crossover.
"""

from __future__ import annotations

import numpy as np

from shardplan.search.bounds.lagrangian import Relaxation
from shardplan.search.budget import Callbacks
from shardplan.search.graph.graph import Graph, Infeasible
from shardplan.search.graph.reductions import shrink
from shardplan.search.solver.cp_sat import solve_by_cp_sat
from shardplan.search.solver.graph_solver import GraphSolver

__all__ = ["Crossover"]

_SCALES = ((0.0, 1.0), (0.0, 0.5, 0.8, 1.0, 1.2, 2.0), (0.0, 0.3, 0.6, 0.8, 0.9, 1.0, 1.1, 1.3, 2.0))
"""Of the prices, in the first crossing, the second, and all later ones: a few mixtures are the quickest to improve."""
_SWEEPS = 12
_WORK = 2.0
_TOLERANCE = 0.03
"""How near the best mixture is near enough, as a share of the gap."""
_LARGEST = 20_000
_NOISE_OF_PRICES = (0.6, 1.6)
_NOISE_OF_COSTS = 0.02


class Crossover:
    """Improves `solver`'s assignment, one crossing at a time."""

    def __init__(self, solver: GraphSolver) -> None:
        self.solver = solver
        self.relaxation = Relaxation(solver.graph, solver.prices)
        self.base = self.relaxation.base
        self.prices = self.relaxation.prices
        self.rng = np.random.default_rng(0)
        self.steps = 0
        self.estimate = 0.0
        """Seconds of work that the crossings should have taken, the same on every machine."""

    @property
    def seconds_of_sweeps(self) -> float:
        """What the sweeps of the next crossing should take."""
        return len(self._scales) * _SWEEPS * self.relaxation.seconds_per_sweep

    @property
    def _scales(self) -> tuple[float, ...]:
        return _SCALES[min(self.steps, len(_SCALES) - 1)]

    def step(self, callbacks: Callbacks) -> bool:
        """Crosses what is best at several prices; True where that improved the assignment by a tenth of the gap."""
        solver = self.solver
        self.estimate += self.seconds_of_sweeps
        small = self._narrowed(callbacks)
        self.steps += 1
        if small is None or small.entries() > _LARGEST:
            return False
        result = solve_by_cp_sat(
            small, _WORK, callbacks.seconds_left(), _TOLERANCE * (solver.upper - solver.lower), solver.prices
        )
        self.estimate += result.work
        if result.choices is None:
            return False
        full = small.expand(result.choices)
        found = {v: int(full[v]) for v in solver.graph.live()}
        before = solver.upper
        solver.accept(found, solver.graph.cost(found))
        return before - solver.upper > max(0.1 * (before - solver.lower), 0.0)

    def _narrowed(self, callbacks: Callbacks) -> Graph | None:
        """The graph with the choices of the best assignment, and those that are best at some price."""
        graph, relaxation, rng = self.solver.graph, self.relaxation, self.rng
        assert graph.hint is not None
        wanted = {v: {graph.hint[v]} for v in relaxation.order}
        if self.steps:
            gap = self.solver.upper - self.solver.lower
            relaxation.base = self.base + rng.random(self.base.size) * _NOISE_OF_COSTS * gap
        for scale in self._scales:
            noise = rng.uniform(*_NOISE_OF_PRICES, self.prices.size) if self.steps else 1.0
            for v, choice in relaxation.decoded_at(self.prices * scale * noise, _SWEEPS).items():
                wanted[v].add(choice)
            callbacks.report()
        small = graph.copy()
        try:
            for v, choices in wanted.items():
                keep = np.zeros(small.size(v), dtype=bool)
                keep[list(choices)] = True
                small.restrict(v, keep)
            small.make_consistent()
            shrink(small)
        except Infeasible:
            return None
        return small
