"""Warm start from the quotient by axis symmetry: each set of symmetric choices (twins) is one choice.

Layouts that differ only in the names of equal mesh axes cost the same: on a mesh (2, 2, 2) six such twins have the same
messages. In the quotient, a table holds the least cost of any pair of members. The quotient is a relaxation for any
groups, so its bound holds for the whole graph. With true symmetry its message passing is as strong as that of the whole
graph, whose tables are up to 36 times as large. Messages of the quotient are those of all members in the whole graph.

The assignment of the quotient does not say which members belong together. A search of the graph with only these members
finds them (`shardplan.search.structure.symmetry_refinement`). Where the result is above the bound, the search includes
the next best choices, in a part of the graph where an anchor breaks the symmetry
(`shardplan.search.solver.anchoring`). Repeated layers are folded first (`shardplan.search.structure.fold_repeats`). A
result within the gap ends the search.

>>> import numpy as np
>>> from shardplan.search.network import Network
>>> net = Network()
>>> a, b = net.add_variable([5.0, 0.0, 0.0]), net.add_variable([5.0, 0.0, 1.0])
>>> net.add_edge(a, b, np.array([[0.0, 1.0, 1.0], [1.0, 0.0, 9.0], [1.0, 9.0, 0.0]]))
>>> net.twins = {a: np.array([0, 1, 1]), b: np.array([0, 1, 1])}
>>> whole = Graph.of(net)
>>> small = quotient(whole, places_of(whole))
>>> small.costs[1].tolist(), small.neighbours[0][1].tolist()
([5.0, 0.0], [[0.0, 1.0], [1.0, 0.0]])
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardplan.search.bounds.lagrangian import Messages, Relaxation
from shardplan.search.budget import Budget, Callbacks
from shardplan.search.graph.choice_groups import quotient
from shardplan.search.graph.graph import Graph
from shardplan.search.run import Stop
from shardplan.search.solution import relative_gap
from shardplan.search.solver.graph_solver import GraphSolver
from shardplan.search.structure.fold_repeats import Start, folded_start
from shardplan.search.structure.joint_pruning import JointPruning, kept_twins, lifted_messages, restricted_messages
from shardplan.search.structure.symmetry_refinement import TWINS_GAP_RATIO, SymmetryRefinement

__all__ = ["coarse_start", "places_of", "quotient"]

Array = NDArray[np.float64]
Index = NDArray[np.intp]
Masks = dict[int, NDArray[np.bool_]]

_MIN_ENTRIES, _MIN_ENTRIES_AT_PRICES = 1_000_000, 300_000
_MAX_SHARE = 0.5
"""Graphs with fewer table entries, the second where they are searched at price after price, or that keep more than this
share of them, are not searched first."""

_FIRST_SWEEPS, _MAX_SWEEPS = 60, 1000
"""Of the small graph: before it is first seen what the twins of its best assignment cost, and then."""

_SWEEPS = 200
_NEAR_CHOICES = 4, 8
"""Where the best assignment of the small graph has no twins that go together well, so many choices of each of its
variables may be looked through, with their twins; then more of them."""

_OWN_SHARE = 0.1
"""The share of the small graph's gap that twins may cost more than its best assignment, where the next best choices are
not looked through: what messages leave open there, they leave open among those as well."""

_SHARE_OF_GAP = 0.5
"""The gap asked of the small graph, as a share of that of the whole one: its bound may then do for the whole one."""

_SHARE_OF_LAYERS = 0.2
"""Of the work of sweeps, what repeated layers may take: without a sweep of the whole small graph there is no bound."""

_SHARE_OF_TIME = 0.2
"""Of the time that is left, what is kept for the whole graph."""


def coarse_start(
    graph: Graph,
    budget: Budget,
    gap: float,
    callbacks: Callbacks,
    above: float | None = None,
    known: Messages | None = None,
) -> Start | None:
    """A warm start from the quotient; `None` for graphs with no or few twins, or with a usage limit.

    Choices of the graph that cannot be in anything better than what is found are dropped. above: a cost up to which
    they are kept, where what is found need not be the best among its twins and those near it. known: messages that a
    start gave before, at other costs.
    """
    unfit = graph.hint is not None or graph.usage_limit is not None or not graph.twins
    if unfit or (before := graph.entries()) < (_MIN_ENTRIES if above is None else _MIN_ENTRIES_AT_PRICES):
        return None
    if _entries(graph, places := places_of(graph)) > _MAX_SHARE * before:
        return None
    small = quotient(graph, places)
    allowed = _SHARE_OF_TIME * callbacks.seconds_left()

    def tick() -> None:
        if callbacks.seconds_left() < allowed:
            raise Stop

    quiet = Callbacks(tick, callbacks.seconds_left)
    small.tick = tick
    first = replace(budget, sweeps=_FIRST_SWEEPS if above is None else _SWEEPS)
    solver = GraphSolver(small, math.inf, first, _SHARE_OF_GAP * gap, quiet)
    solver.prunes, solver.patience = False, 1
    parts = SymmetryRefinement(replace(budget, sweeps=_SWEEPS), gap, quiet)
    narrowing = JointPruning(graph, solver, places, gap, parts.among_twins)
    # Where the time is over, what was found by then is lifted all the same.
    with contextlib.suppress(Stop):
        solver.messages = _quotient_messages(known or {}, places)
        layers = replace(budget, seconds=_SHARE_OF_LAYERS * budget.seconds)
        start = None if solver.messages else folded_start(small, layers, TWINS_GAP_RATIO * gap, quiet)
        if start is not None:
            solver.begin(start.messages, start.choices)
            solver.sweeps, solver.estimate = start.sweeps, start.estimate
            solver.budget = replace(budget, sweeps=start.sweeps + _SWEEPS)
        solver.sweep_until_prunable()
        narrows = start is None and above is None and not solver.closed
        further = replace(budget, sweeps=_MAX_SWEEPS)
        if narrows and (narrowing.run(further) or (solver.stalled and narrowing.open_cycles(further))):
            messages = solver.relaxation.messages() if solver.relaxation is not None else solver.messages
            return parts.start(solver, lifted_messages(messages, places), narrowing.choices, solver.stalled)
    relaxation, choices = solver.relaxation, narrowing.choices
    if relaxation is None:
        return None if choices is None else Start({}, choices, solver.sweeps, solver.estimate, solver.lower)
    if narrowing.gap_to(solver.lower) <= budget.acceptable_gap:
        return parts.start(solver, {}, choices)
    if above is None and not _gap_is_of_quotient(solver, graph, choices):
        parts.near = [_near(small, relaxation, places, count) for count in _NEAR_CHOICES]
    messages = lifted_messages(relaxation.messages(), places)
    if not narrowing.proven and (parts.near or not narrowing.looked):
        parts.kept, parts.messages = kept_twins(small, places), messages
        parts.looked, parts.fitting = narrowing.looked, lambda found: _fitting(graph, relaxation, places, found, None)
        choices = parts.assignment(graph, solver.lower, choices)
    if choices is not None and above != math.inf and relative_gap(graph.cost(choices), solver.lower) > gap:
        mark = len(graph.undo)
        choices = _dropped(graph, choices, _fitting(graph, relaxation, places, choices, above))
        messages = restricted_messages(messages, graph.undo[mark:])
    return parts.start(solver, messages, choices, solver.stalled and _gap_is_of_quotient(solver, graph, choices))


def _gap_is_of_quotient(solver: GraphSolver, graph: Graph, choices: dict[int, int] | None) -> bool:
    """Whether most of the gap is the quotient's own: its best assignment has members that hardly cost more."""
    own = _OWN_SHARE * (solver.upper - solver.lower)
    return choices is not None and graph.cost(choices) - solver.upper < own


def _dropped(graph: Graph, choices: dict[int, int], keep: Masks) -> dict[int, int] | None:
    """The assignment, of a graph that has lost all choices but those to keep."""
    graph.hint = choices
    graph.restrict_all(keep)
    graph.forget()
    graph.make_consistent()
    choices_left, graph.hint = graph.hint, None
    return choices_left


def _fitting(
    graph: Graph, relaxation: Relaxation, places: dict[int, Index], choices: dict[int, int], above: float | None
) -> Masks:
    """Per variable, the choices that may be in something better than an assignment, or than a cost above its: all
    twins, or none."""
    upper = graph.cost(choices)
    upper = upper if above is None else max(upper, above)
    bound, rise = relaxation.reduced_costs()
    fits = relaxation.by_choice(rise <= upper - bound + 1e-9 * max(abs(upper), abs(graph.constant), 1e-30))
    masks = {}
    for v in relaxation.order:
        masks[v] = fits[v][places[v]]
        masks[v][choices[v]] = True
    return masks


def places_of(graph: Graph) -> dict[int, Index]:
    """Per variable, the choice of the quotient for each of its choices."""
    places = {}
    for v in graph.live():
        labels = graph.twins.get(v)
        every = np.arange(graph.size(v), dtype=np.intp)
        places[v] = every if labels is None else np.unique(labels, return_inverse=True)[1].astype(np.intp)
    return places


def _entries(graph: Graph, places: dict[int, Index]) -> int:
    """The table entries of the quotient."""
    sizes = {v: int(place.max(initial=-1)) + 1 for v, place in places.items()}
    return sum(size * sizes[w] for v, size in sizes.items() for w in graph.neighbours[v] if v < w)


def _quotient_messages(messages: Messages, places: dict[int, Index]) -> Messages:
    """Messages of the whole graph, equal for twins, as messages of the quotient."""
    found = {}
    for (v, w), into in messages.items():
        if v in places and w in places and len(into) == len(places[v]):
            found[v, w] = into[np.unique(places[v], return_index=True)[1]]
    return found


def _near(small: Graph, relaxation: Relaxation, places: dict[int, Index], count: int) -> Masks:
    """Per variable, the choices that became one of so many best, or the one that the best assignment takes."""
    hint = small.hint or {}
    best = relaxation.promising_choices(count)
    masks = {}
    for v, place in places.items():
        near = np.zeros(small.size(v), dtype=bool)
        near[best[v]] = True
        near[hint.get(v, best[v][0])] = True
        masks[v] = near[place]
    return masks
