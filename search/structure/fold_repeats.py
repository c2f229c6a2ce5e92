"""Warm start from a folded graph, which keeps a few of the repeated layers.

`shardplan.search.structure.find_repeats` drops all layers but a few at either end. The small graph is searched first,
and its result is unfolded: each dropped layer gets the choices and messages of the nearest kept layer. Periodic
messages then replace those of the dropped layers (`shardplan.search.structure.periodic_messages`). Where unfolded
choices exclude each other, the ends keep more layers.

Unfolded choices are an assignment of the whole graph, and their cost is counted there. The bound of a sweep holds for
any messages. The result therefore does not depend on equal layers. Where layers are equal, a few sweeps of the whole
graph reach the bound of a hundred sweeps of the small one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from shardplan.search.bounds.lagrangian import Messages
from shardplan.search.budget import Budget, Callbacks
from shardplan.search.graph.graph import Graph
from shardplan.search.run import Stop
from shardplan.search.solver.diving import dive
from shardplan.search.solver.graph_solver import GraphSolver
from shardplan.search.structure.find_repeats import END_LAYERS, MORE_END_LAYERS, FoldedGraph, fold
from shardplan.search.structure.periodic_messages import Ring
from shardplan.search.structure.shared_variables import excess_of_shared, means, weighted_graph
from shardplan.search.structure.unfold_repeats import unfolded_choices

__all__ = ["Start", "begin_folded", "folded_messages", "folded_start"]

_CLOSED_GAP = 2e-4
"""The gap at which the search of the small graph ends: pruning of the whole graph is faster from there on."""

_GAP_RATIO = 0.6
"""The gap asked of the small graph and of rings, as a share of that of the whole one, which may come out larger."""

_MAX_WORK_IN_SWEEPS = 80
"""The work of sweeping the small graph is held to that of so many sweeps of the whole one, which pruning makes cheaper
as it goes on."""
_LAST_SWEEPS = 20
_SECOND_SEARCH_SHARE = 0.4
"""The share of the whole graph's table entries up to which the small one is searched a second time: sweeps of the whole
one find what its layers share as well."""
_SWEEPS_TO_CHECK, _MISLEADING_EXCESS = 20, 0.1
"""After so many sweeps of the small graph, what layers share may have choices that cost all of them more by this share
of all costs: it is not searched to its end then."""
_SHARE_OF_TIME = 0.2
"""Of the time that is left, what is kept for the whole graph."""


@dataclass(frozen=True, slots=True)
class Start:
    """Messages and, where one was found, an assignment of a graph, to search on from.

    sweeps: that it took. estimate: seconds that these should have taken, the same on every machine.
    lower_bound: of the graph, as far as it is known. stalled: whether sweeps of these messages would not help any more.
    """

    messages: Messages
    choices: dict[int, int] | None
    sweeps: int
    estimate: float
    lower_bound: float = -math.inf
    stalled: bool = False


def folded_start(graph: Graph, budget: Budget, gap: float, callbacks: Callbacks) -> Start | None:
    """A start for a graph by its repeated layers; `None` where it has none.

    A usage limit makes layers differ, since they use memory at different times. There is no start then. With prices
    of usage (`shardplan.search.limits.usage_prices`), layers of equal usage at the priced times are equal.
    """
    folded = None if any(graph.spans) else fold(graph, END_LAYERS)
    if folded is None:
        return None
    start = _start_of(graph, folded, budget, gap, callbacks, settles=True)
    cost, more = math.inf if start.choices is None else graph.cost(start.choices), None
    if start.choices is None or cost == math.inf:
        more = fold(graph, MORE_END_LAYERS)
    elif _excess(graph, folded, start) > _CLOSED_GAP * abs(cost):
        more = weighted_graph(graph, folded)
    if more is not None:
        first, folded = start, more
        start = _start_of(graph, folded, budget, gap, callbacks, settles=bool(more.weight))
        start = replace(start, sweeps=first.sweeps + start.sweeps, estimate=first.estimate + start.estimate)
    return _with_periodic_messages(graph, folded, start, gap, callbacks)


def folded_messages(
    graph: Graph, choices: dict[int, int], budget: Budget, gap: float, callbacks: Callbacks
) -> Messages | None:
    """Messages of a graph whose best assignment is known, by its repeated layers; `None` where it has none."""
    folded = None if any(graph.spans) else fold(graph, END_LAYERS)
    if folded is None:
        return None
    start = _start_of(graph, folded, budget, gap, callbacks, settles=False)
    return _with_rings(graph, folded, replace(start, choices=choices), gap, callbacks).messages


def _start_of(
    graph: Graph, folded: FoldedGraph, budget: Budget, gap: float, callbacks: Callbacks, settles: bool
) -> Start:
    """The warm start of the whole graph from a folded one."""
    small = folded.graph
    if not folded.weight:  # the same share of the graph's constant cost, so that gaps compare
        small.constant = graph.constant * len(small.live()) / len(graph.live())
    sweeps = min(budget.sweeps, math.ceil(_MAX_WORK_IN_SWEEPS * graph.entries() / max(small.entries(), 1)))

    def misled(found: Start) -> bool:
        start = _unfolded(graph, folded, found)
        known = start.choices is not None and not folded.weight
        return known and _excess(graph, folded, start) > _MISLEADING_EXCESS * abs(graph.cost(start.choices or {}))

    return _unfolded(graph, folded, _search(small, replace(budget, sweeps=sweeps), gap, callbacks, settles, misled))


def _excess(graph: Graph, folded: FoldedGraph, start: Start) -> float:
    """The excess of the shared variables' choices, where a second search of the folded graph is cheap enough."""
    if start.choices is None or folded.graph.entries() > _SECOND_SEARCH_SHARE * graph.entries():
        return 0.0
    return excess_of_shared(graph, folded, start.messages, start.choices)


def _with_periodic_messages(graph: Graph, folded: FoldedGraph, start: Start, gap: float, callbacks: Callbacks) -> Start:
    """The start, with messages of layers in rings for those that were left out."""
    if start.choices is None:
        return start
    return _with_rings(
        graph, folded, replace(start, choices=unfolded_choices(graph, folded, start.choices)), gap, callbacks
    )


def _with_rings(graph: Graph, folded: FoldedGraph, start: Start, gap: float, callbacks: Callbacks) -> Start:
    """The start, whose choices are those of the whole graph, with messages of layers in rings."""
    assert start.choices is not None
    allowed = _SHARE_OF_TIME * callbacks.seconds_left()
    for found, layers in folded.repetitions:
        ring = Ring(graph, found, start.messages, start.choices)
        ring.sweep(_GAP_RATIO * gap, lambda: callbacks.seconds_left() > allowed)
        start = replace(
            start,
            messages=start.messages | ring.messages(layers),
            sweeps=start.sweeps + ring.sweeps,
            estimate=start.estimate + ring.estimate,
        )
    return start


def begin_folded(solver: GraphSolver, budget: Budget) -> None:
    """Reduces a solver's graph without a usage limit, and starts it from its repeated layers."""
    solver.reduce(dominance=False)  # what others beat is found by messages sooner
    start = folded_start(solver.graph, budget, solver.gap, solver.callbacks)
    if start is not None:
        solver.begin(start.messages, start.choices)
        solver.sweeps, solver.estimate = start.sweeps, start.estimate


def _search(
    small: Graph, budget: Budget, gap: float, callbacks: Callbacks, settles: bool, misled: Callable[[Start], bool]
) -> Start:
    """Messages and an assignment of a small graph.

    settles: whether the solver goes on for an assignment where messages leave a gap. misled: a test after some sweeps
    whether the result would be of no use.
    """
    allowed = _SHARE_OF_TIME * callbacks.seconds_left()

    def tick() -> None:
        if callbacks.seconds_left() < allowed:
            raise Stop

    def report() -> None:
        nonlocal settles
        tick()
        if solver.sweeps == _SWEEPS_TO_CHECK and solver.relaxation is not None and misled(_found(small, solver)):
            settles = False
            raise Stop

    small.tick = tick
    solver = GraphSolver(
        small.copy(), math.inf, budget, max(_GAP_RATIO * gap, _CLOSED_GAP), Callbacks(report, callbacks.seconds_left)
    )
    solver.prunes, solver.patience = False, 1
    # Where the time is over, what was found by then is lifted all the same.
    with contextlib.suppress(Stop):
        solver.sweep_until_prunable()
    found = _found(small, solver)
    if settles and solver.relaxation is not None and not solver.closed:
        # The rest of the gap is mostly at the ends, and small against the cost of all layers.
        solver.budget = replace(budget, sweeps=solver.sweeps + _LAST_SWEEPS, cp_sat_work=0.1 * budget.cp_sat_work)
        with contextlib.suppress(Stop):
            solver.prune(solver.relaxation)
            solver.reduce()
            if solver.graph.live():
                dive(solver, solver.relax_again())
            solver.prunes = True
            solver.solve()
        found = replace(_found(small, solver), messages=found.messages)
    return found


def _found(small: Graph, solver: GraphSolver) -> Start:
    """What a solver of the small graph has found."""
    messages = {} if solver.relaxation is None else solver.relaxation.messages()
    hint = solver.graph.hint
    full = None if hint is None else solver.graph.expand(hint)
    choices = None if full is None else {v: int(full[v]) for v in small.live()}
    return Start(messages, choices, solver.sweeps, solver.estimate)


def _unfolded(graph: Graph, folded: FoldedGraph, found: Start) -> Start:
    """A start for the whole graph."""
    each = {edge: into / folded.weight.get(edge, 1.0) for edge, into in found.messages.items()}
    messages = {edge: each[w] for edge, w in folded.edge.items() if w in each} | means(graph, folded, each)
    if found.choices is None:
        return Start(messages, None, found.sweeps, found.estimate)
    choices = {v: found.choices[stand_in] for v, stand_in in folded.variable.items()}
    return Start(messages, choices, found.sweeps, found.estimate)
