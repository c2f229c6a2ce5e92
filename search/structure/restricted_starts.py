"""Warm starts from restricted networks, such as those of coarser meshes.

`Network.restrictions` gives a few choices per variable that belong together: for a mesh of three axes, the layouts of a
mesh of two, where some axes are joined. Such a network is much smaller and has fewer contradictory cycles, so its
optimum is found soon. The optimum is an assignment of the whole network.

>>> from shardplan.search.network import Network
>>> net = Network()
>>> a, b = net.add_variable([0.0, 0.0, 4.0]), net.add_variable([0.0, 0.0, 4.0])
>>> net.add_edge(a, b, np.array([[9.0, 9.0, 9.0], [9.0, 9.0, 9.0], [9.0, 9.0, 0.0]]))
>>> net.restrictions = [{a: np.array([True, False, True]), b: np.array([True, False, True])}]
>>> answer = solve_restricted(net, net.restrictions[0], Budget(), 0.0, Callbacks(lambda: None, lambda: math.inf))
>>> answer.choices.tolist(), reduced_choices(Graph.of(net), answer.choices)
([2, 2], {0: 2, 1: 2})
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.search.budget import Budget, Callbacks
from shardplan.search.graph.graph import Graph, Infeasible, Keep
from shardplan.search.network import Network
from shardplan.search.solution import relative_gap
from shardplan.search.solver.graph_solver import GraphSolver
from shardplan.search.structure.fold_repeats import folded_start
from shardplan.search.structure.symmetry_coarsening import coarse_start

__all__ = ["RestrictedSolution", "begin", "originals", "reduced_choices", "solve_restricted"]

_LIFTING_BUDGET = Budget(sweeps=100, cp_sat_work=0.0, dives=False, contraction_entries=0)


@dataclass(frozen=True, slots=True)
class RestrictedSolution:
    """choices: of every variable of the network. estimate: seconds that its search should have taken."""

    choices: NDArray[np.int64]
    estimate: float


def begin(solver: GraphSolver) -> float:
    """Warm start from the quotient by symmetry or from folded layers, where the graph has either.

    Returns a lower bound of the graph, as far as there is one. The first sweeps of the whole give a better one.
    """
    arguments = (solver.graph, solver.budget, solver.gap, solver.callbacks)
    start = coarse_start(*arguments) or folded_start(*arguments)
    if start is None:
        return -math.inf
    solver.begin(start.messages, start.choices)
    solver.sweeps, solver.estimate, solver.stalled = start.sweeps, start.estimate, start.stalled
    solver.contradicted = not start.stalled  # or else most of the gap is there without twins
    solver.raise_lower(min(start.lower_bound, solver.upper))
    return start.lower_bound


def solve_restricted(
    network: Network,
    kept: Mapping[int, NDArray[np.bool_]],
    budget: Budget,
    gap: float,
    callbacks: Callbacks,
    upper: float = math.inf,
) -> RestrictedSolution | None:
    """The best assignment below `upper` among some choices of each variable, or None."""
    try:
        graph = Graph.of(network)
        graph.tick = callbacks.report
        chosen = originals(graph)
        graph.restrict_all({v: kept[v][chosen[v]] for v in graph.live() if v in kept})
        graph.make_consistent()
        solver = GraphSolver(graph, upper, budget, gap, callbacks)
        solver.reduce()
        bound = begin(solver)
        if relative_gap(solver.upper, bound) > budget.acceptable_gap:
            solver.solve()
    except Infeasible:
        return None
    return None if graph.hint is None else RestrictedSolution(graph.expand(graph.hint), solver.estimate)


def reduced_choices(graph: Graph, choices: NDArray[np.int64]) -> dict[int, int] | None:
    """An assignment of a reduced graph that is as good as one of its network, or None.

    A reduction drops choices that others are as good as: a variable whose choice was dropped may take any other.
    """
    part = graph.copy()
    part.twins = {}
    masks = {}
    for v, numbers in originals(graph).items():
        same = numbers == choices[v]
        masks[v] = same if same.any() else np.ones(len(same), dtype=bool)
    try:
        part.restrict_all(masks)
        part.make_consistent()
        solver = GraphSolver(part, math.inf, _LIFTING_BUDGET, 0.0, Callbacks(part.tick, lambda: math.inf))
        solver.solve()
    except Infeasible:
        return None
    if part.hint is None:
        return None
    full = part.expand(part.hint)
    return {v: int(full[v]) for v in graph.live()}


def originals(graph: Graph) -> dict[int, NDArray[np.intp]]:
    """Per variable that is left, and choice: the number that it had in the network."""
    kept: dict[int, NDArray[np.intp]] = {}
    for step in graph.undo:
        if isinstance(step, Keep):
            known = kept.get(step.variable)
            kept[step.variable] = step.kept if known is None else known[step.kept]
    return {v: kept[v] if v in kept else np.arange(graph.size(v)) for v in graph.live()}
