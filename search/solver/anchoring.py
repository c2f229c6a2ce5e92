"""Symmetry breaking by an anchor: the graph is split by one variable's choices, each part with one of each twin set.

On a mesh (4, 4, 4) every assignment has images under permutations of the axes, of equal or nearly equal cost. Messages
average the images. A cycle that costs every assignment something looks free to half of one image and half of another.
Each part of the graph keeps one member of each set of the anchor's twins. All parts together keep all choices. Within a
part, messages see the costs of single images. A good assignment of the first part is one of the whole graph. Where no
part has a better one it is optimal. That proof needs no true symmetry.

>>> from shardplan.search.network import Network
>>> net = Network()
>>> a, b = net.add_variable([5.0, 0.0, 0.0]), net.add_variable([0.0, 0.0])
>>> net.add_edge(a, b, np.array([[0.0, 0.0], [0.0, 7.0], [7.0, 0.0]]))
>>> net.twins = {a: np.array([0, 1, 1]), b: np.array([0, 0])}
>>> anchor = Anchor.of(Graph.of(net))
>>> anchor.variable, [part.tolist() for part in anchor.parts]
(0, [[True, True, False], [False, False, True]])
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardplan.search.budget import Budget
from shardplan.search.graph.graph import Graph, Infeasible
from shardplan.search.solver.bounded_graph import BoundedGraph

__all__ = ["Anchor", "bound_of_parts", "budget_of_part", "solve_among"]

_MAX_SETS_PER_CHOICE = 0.7
"""Sets of twins of an anchor, per choice: with more, it would tell little apart."""
_MAX_PARTS = 6
"""As many as three axes have orders."""
_SWEEPS, _ENTRIES = 200, 1e6
"""What searching a part may take: what messages do not settle by then they hardly do later."""
_WORK_RATIO = 1.0
"""Of the work before, what all parts may take where they are searched for a bound: most close soon, or not at all."""
_MAX_ANCHORS = 2
"""Anchors where parts are searched for a bound."""
_FIRST_SWEEPS, _LEAST_GAIN = 20, 0.1
"""After so many sweeps of a part, the share of the gap that they must close for the search to go on."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """A variable, and per part of the graph which of its choices are in it: each in one."""

    variable: int
    parts: tuple[NDArray[np.bool_], ...]

    @staticmethod
    def of(graph: Graph) -> Anchor | None:
        """The variable on which the most depends, whose tables differ most, of those that have many twins."""
        anchors = Anchor.several(graph, 1)
        return anchors[0] if anchors else None

    @staticmethod
    def several(graph: Graph, count: int) -> list[Anchor]:
        """So many of the variables on which the most depends, the first one first."""
        able = {}
        for v in graph.live():
            labels = graph.twins.get(v)
            if labels is not None and len(labels) > 1:
                sizes = np.unique(labels, return_counts=True)[1]
                if len(sizes) <= _MAX_SETS_PER_CHOICE * len(labels) and sizes.max() <= _MAX_PARTS:
                    able[v] = sum(_difference(table) for table in graph.neighbours[v].values())
        anchors = []
        for chosen in sorted(able, key=lambda v: (-able[v], v))[:count]:
            numbers = _numbers(graph.twins[chosen])
            anchors.append(Anchor(chosen, tuple(numbers == number for number in range(int(numbers.max()) + 1))))
        return anchors


def budget_of_part(budget: Budget) -> Budget:
    """What searching a part may take, of what a search of the whole graph may: no model for CP-SAT, no merging."""
    few = replace(budget, sweeps=_SWEEPS, table_entries=_ENTRIES, cp_sat_work=0.0, cp_sat_entries=0)
    return replace(few, dives=False, contraction_entries=0, near_optimal_dp=False)


def bound_of_parts(solver: BoundedGraph) -> float:
    """A lower bound of what is better than what a solver has found in the parts of its graph, which it takes into
    account; minus infinity where not each of them is searched to its end.

    An anchor may tell apart what messages tell apart already, or what has no part in the contradiction: its first part
    has no higher bound then. So a few are tried.
    """
    most = (1 + _WORK_RATIO) * solver.estimate
    for anchor in Anchor.several(solver.graph, _MAX_ANCHORS):
        lower = math.inf
        for number, part in enumerate(anchor.parts):
            budget = budget_of_part(solver.budget)
            budget = replace(budget, seconds=min(budget.seconds, most - solver.estimate))
            masks, least = {anchor.variable: part}, -math.inf if number else _LEAST_GAIN
            lower = min(lower, solve_among(solver, masks, budget, solver.upper, least))
            if lower == -math.inf:
                break
        if lower > -math.inf or solver.estimate >= most:
            return lower
    return -math.inf


def solve_among(
    solver: BoundedGraph,
    masks: dict[int, NDArray[np.bool_]],
    budget: Budget,
    upper: float = math.inf,
    least: float = -math.inf,
) -> float:
    """Takes the best assignment below `upper` among some choices of a solver's graph into account.

    Returns a lower bound of all that are, where these are searched to the end; minus infinity otherwise. least: the
    share of the solver's gap that a few sweeps must close for the search to go on.
    """
    graph, part = solver.graph, solver.graph.copy()
    part.twins = {}
    inner = solver.of_part(part, budget, upper)
    try:
        part.restrict_all(masks)
        part.make_consistent()
        if least == -math.inf or _closes_enough(inner, solver, least):
            inner.solve()
    except Infeasible:
        inner.raise_lower(inner.upper)
    solver.estimate += inner.estimate
    if part.hint is not None:
        full = part.expand(part.hint)
        found = {v: int(full[v]) for v in graph.live()}
        solver.accept(found, graph.cost(found))
    return inner.lower if inner.closed else -math.inf


def _closes_enough(inner: BoundedGraph, solver: BoundedGraph, least: float) -> bool:
    """Whether a few sweeps of a part close so much of the gap that the solver of the whole graph has."""
    inner.reduce()
    budget, inner.budget = inner.budget, replace(inner.budget, sweeps=_FIRST_SWEEPS)
    if inner.graph.live():
        inner.prune(inner.sweep_until_prunable())
    inner.budget = budget
    left = solver.upper - solver.lower
    return inner.closed or left == math.inf or inner.lower - solver.lower > least * left


def _numbers(labels: NDArray[np.intp]) -> NDArray[np.intp]:
    """Per choice, how many of its twins come before it."""
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    numbers = np.empty(len(labels), dtype=np.intp)
    numbers[order] = np.arange(len(labels)) - np.searchsorted(ordered, ordered)
    return numbers


def _difference(table: NDArray[np.float64]) -> float:
    finite = table[np.isfinite(table)]
    return float(np.ptp(finite)) if finite.size else 0.0
