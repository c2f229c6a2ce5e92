"""Searching a graph and the smaller one that its twins make when taken together, each with what the other has shown.

The small graph (`shardplan.search.coarsening`) has a lower bound for both. Its best assignment, with the twins that go
together best, is one of the whole graph, and says what anything better costs less than. Choices of the small graph that
nothing so cheap takes are dropped, in both graphs with all their twins. So the sweeps of the small graph get quicker
while its bound rises, and hardly more than it has may be left of the whole graph in the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardplan.search.effort import Effort
from shardplan.search.graph import Best, Follow, Graph, Keep
from shardplan.search.relaxation import Messages
from shardplan.search.solution import relative_gap
from shardplan.search.solver import GraphSolver

__all__ = ["Narrowing", "kept_choices", "kept_twins", "restricted_messages"]

Index = NDArray[np.intp]
Masks = dict[int, NDArray[np.bool_]]


@dataclass(slots=True)
class Narrowing:
    """A graph and the small one of a solver, which has been swept; both lose choices.

    places: per variable, the choice of the small graph that each of its choices became. look: gives the best assignment
    of a graph among some choices of each variable. choices: the best assignment of the whole graph that is found.
    """

    graph: Graph
    solver: GraphSolver
    places: dict[int, Index]
    gap: float
    look: Callable[[Graph, Masks], dict[int, int] | None]
    choices: dict[int, int] | None = None
    _looked_at: float = field(default=math.inf)

    def run(self, effort: Effort) -> bool:
        """Goes on until the small graph's bound proves what is found, or hardly rises any more.

        True where the whole graph is to be searched at once, from the solver's messages: twins contradict each other,
        which the small graph does not know of, and no more is left of the whole one than there was of the small one.
        """
        solver, most = self.solver, self.solver.graph.entries()
        self._look()
        while self.choices is not None and not self.proven and not solver.closed and not solver.stalled:
            solver.effort, solver.prunes = effort, True
            if not solver.may_sweep():
                break
            contradict = relative_gap(self.graph.cost(self.choices), solver.upper) > self.gap
            self._drop(self.choices)
            if contradict and self.graph.entries() <= most:
                return True
            solver.sweep_until_prunable()
            self._look()
        return False

    @property
    def proven(self) -> bool:
        """Whether what is found is within the asked gap of the bound."""
        return self.choices is not None and relative_gap(self.graph.cost(self.choices), self.solver.lower) <= self.gap

    @property
    def looked(self) -> bool:
        """Whether the twins of the small graph's best assignment are taken into account."""
        return self._looked_at <= self.solver.upper

    def _look(self) -> None:
        """Takes the twins of the small graph's best assignment into account, if that is new."""
        if self.looked:
            return
        self._looked_at = self.solver.upper
        found = self.look(self.graph, kept_twins(self.solver.graph, self.places))
        if found is not None and (self.choices is None or self.graph.cost(found) < self.graph.cost(self.choices)):
            self.choices = found

    def _drop(self, choices: dict[int, int]) -> None:
        """Drops what is in no assignment that costs less than this one, which stays."""
        graph, small, relaxation = self.graph, self.solver.graph, self.solver.relaxation
        assert relaxation is not None
        upper = graph.cost(choices)
        bound, above = relaxation.reduced_costs()
        fits = above <= upper - bound + 1e-9 * max(abs(upper), abs(graph.constant), 1e-30)
        masks = {}
        for place, v in enumerate(relaxation.order):
            masks[v] = fits[relaxation.sweeper.offsets[place] : relaxation.sweeper.offsets[place + 1]].copy()
            masks[v][self.places[v][choices[v]]] = True
        mark, messages = len(small.undo), relaxation.messages()
        small.restrict_all(masks)
        small.make_consistent()
        self.solver.messages = restricted_messages(messages, small.undo[mark:])
        self.solver.ceiling, self.solver.relaxation = upper, None  # which is of the graph as it was
        kept = kept_choices(small.undo[mark:])
        graph.hint = choices
        graph.restrict_all({v: np.isin(self.places[v], left) for v, left in kept.items()})
        for v, left in kept.items():
            known = self.places[v]
            self.places[v] = np.searchsorted(left, known[np.isin(known, left)])
        mark = len(graph.undo)
        graph.make_consistent()
        for v, left in kept_choices(graph.undo[mark:]).items():
            self.places[v] = self.places[v][left]
        self.choices, graph.hint = graph.hint, None


def kept_twins(small: Graph, places: dict[int, Index]) -> Masks:
    """Per variable, the choices that became the one that the small graph's best assignment takes."""
    if small.hint is None:
        return {}
    return {v: place == small.hint[v] for v, place in places.items()}


def kept_choices(steps: list[Best | Follow | Keep]) -> dict[int, Index]:
    """Per variable that lost some of its choices, those that were kept."""
    kept: dict[int, Index] = {}
    for step in steps:
        assert isinstance(step, Keep)
        known = kept.get(step.variable)
        kept[step.variable] = step.kept if known is None else known[step.kept]
    return kept


def restricted_messages(messages: Messages, steps: list[Best | Follow | Keep]) -> Messages:
    """The messages into the choices that are kept."""
    kept = kept_choices(steps)
    return {(v, w): into[kept[v]] if v in kept else into for (v, w), into in messages.items()}
