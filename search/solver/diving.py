"""Diving: a solve on the choices of the least min-marginals alone, with noise on the costs.

Many assignments may be equally good by the relaxation, and most of them contradict themselves. Noise prefers one.

>>> import math
>>> from shardplan.search.budget import Budget, Callbacks
>>> from shardplan.search.network import Network
>>> from shardplan.search.solver.graph_solver import GraphSolver
>>> net = Network()
>>> a, b, c = (net.add_variable([0.0, 0.0]) for _ in range(3))
>>> for u, v in ((a, b), (b, c), (a, c)):
...     net.add_edge(u, v, np.array([[3.0, 0.0], [0.0, 3.0]]))
>>> solver = GraphSolver(Graph.of(net), 9.0, Budget(), 1e-6, Callbacks(lambda: None, lambda: math.inf))
>>> dive(solver, solver.relax_again())
>>> solver.upper
3.0
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardplan.search.bounds.lagrangian import Relaxation
from shardplan.search.graph.graph import Graph, Infeasible
from shardplan.search.solver.bounded_graph import BoundedGraph

__all__ = ["dive"]

_LEAST_SHARE = 0.1
"""Of the work of sweeps, what a dive may take at least, and after sweeps that were cut off."""
_GAP = 1e-4
_FEW_CHOICES = 4000


def dive(solver: BoundedGraph, relaxation: Relaxation) -> None:
    """Takes the best assignment that is found so into account, where the solver's budget allows it.

    relaxation: of the solver's graph as it is.
    """
    if not solver.budget.dives:
        return
    room = 0.02 * min(solver.upper - solver.lower, abs(solver.lower))
    small: Graph = relaxation.pruned_copy(room)
    rng = np.random.default_rng(solver.sweeps)
    for v in small.live():
        small.costs[v] = small.costs[v] + rng.random(small.size(v)) * 0.2 * room  # type: ignore[operator]
    small.undominated.update(small.live())
    left = solver.budget.seconds - solver.estimate if solver.stalled else 0.0
    seconds = max(left, _LEAST_SHARE * solver.budget.seconds)
    budget = replace(
        solver.budget,
        sweeps=200,
        cp_sat_work=0.05 * solver.budget.cp_sat_work,
        dives=False,
        contraction_entries=0,
        near_optimal_dp=False,
    )
    inner = solver.of_part(small, replace(budget, seconds=seconds), gap=_GAP)
    inner.prices = solver.prices
    try:
        inner.reduce(dominance=sum(small.size(v) for v in small.live()) < _FEW_CHOICES)
        inner.solve()
    except Infeasible:
        return
    finally:
        solver.estimate += inner.estimate
    if small.hint is not None:
        full = small.expand(small.hint)
        found = {v: int(full[v]) for v in relaxation.order}
        solver.accept(found, solver.graph.cost(found))
