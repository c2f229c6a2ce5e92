"""Joint pruning of a graph and its quotient by symmetric choices.

The quotient (`shardplan.search.structure.symmetry_coarsening`) has a lower bound for both graphs. Its best assignment,
with the best members of each group, is an assignment of the whole graph and an upper bound. Choices of the quotient
that no better assignment has are dropped in both graphs, with all their members. Sweeps of the quotient get faster as
its bound rises, and little more than it may be left of the whole graph.

Where messages of the quotient stall, its contradictory cycles are opened first
(`shardplan.search.bounds.cycle_opening`). Most cycles of the whole graph are images of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from shardplan.search.bounds.lagrangian import Messages, Relaxation
from shardplan.search.budget import Budget
from shardplan.search.graph.graph import Best, Follow, Graph, Infeasible, Keep
from shardplan.search.graph.reductions import shrink
from shardplan.search.solution import relative_gap
from shardplan.search.solver.graph_solver import GraphSolver

__all__ = ["JointPruning", "kept_choices", "kept_twins", "lifted_messages", "restricted_messages"]

Index = NDArray[np.intp]
Masks = dict[int, NDArray[np.bool_]]
_GUESSED_GAPS = 5e-4, 4e-3
"""Of the bound of the small graph, by how much the best assignment of the whole graph is guessed to be above it."""


@dataclass(slots=True)
class JointPruning:
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

    def run(self, budget: Budget) -> bool:
        """Sweeps and prunes until the small graph's bound closes the gap or hardly rises.

        True where the whole graph is to be searched at once, from the solver's messages: twins contradict each other,
        which the small graph does not know of, and no more is left of the whole one than there was of the small one.
        """
        solver, most = self.solver, self.solver.graph.entries()
        self._look()
        while self.choices is not None and not self.proven and not solver.closed and not solver.stalled:
            solver.budget, solver.prunes = budget, True
            if not solver.may_sweep():
                break
            contradict = relative_gap(self.graph.cost(self.choices), solver.upper) > self.gap
            self._drop(self.choices)
            if contradict and self.graph.entries() <= most:
                return True
            solver.sweep_until_prunable()
            self._look()
        return False

    def open_cycles(self, budget: Budget) -> bool:
        """Goes on where the small graph's messages have stalled: opens its cycles that contradict themselves, which are
        mostly those of the whole graph, whose tables are far larger.

        True where the whole graph is to be searched at once (see `run`), from the messages before.
        """
        solver, opened = self.solver, self.solver.graph.copy()
        if self.choices is None or self.proven or solver.relaxation is None:
            return False
        opened.hint = solver.graph.hint and dict(solver.graph.hint)
        further = GraphSolver(opened, solver.upper, budget, solver.gap, solver.callbacks)
        further.lower, further.sweeps, further.estimate = solver.lower, solver.sweeps, solver.estimate
        further.ceiling = self.graph.cost(self.choices)
        swept: Relaxation | None
        swept = loaded = Relaxation(opened)
        loaded.load(solver.relaxation.messages())
        opens = rises = False
        while swept is not None and not self._done(further, budget.acceptable_gap) and further.may_sweep():
            further.prune(swept)
            shrink(opened, dominance=False)
            swept = None  # which is of the graph as it was
            if not rises and not further.open_cycles():
                break
            opens = True
            if opened.live():
                swept = further.sweep_until_prunable()
            else:
                further.settle(budget.table_entries, budget.table_entries)
            rises = not further.stalled
            self._look_at(opened)
            further.ceiling = self.graph.cost(self.choices)
        solver.sweeps, solver.estimate = further.sweeps, further.estimate
        solver.raise_lower(min(further.lower, further.ceiling))
        if not opens or not opened.live() or self.gap_to(solver.lower) <= budget.acceptable_gap:
            return False
        most = sum(table.size for table in solver.relaxation.sweeper.model.tables)
        return (
            self._guess(swept or Relaxation(opened), _GUESSED_GAPS if further.closed else (), budget)
            or self.graph.entries() <= most
        )

    def _look_at(self, opened: Graph) -> None:
        """Accepts the best assignment of the opened small graph, with its twins."""
        if opened.hint is not None:
            full = opened.expand(opened.hint)
            choices = {v: int(full[v]) for v in self.solver.graph.live()}
            self.solver.accept(choices, self.solver.graph.cost(choices))
            self._look()

    def _guess(self, relaxation: Relaxation, guesses: tuple[float, ...], budget: Budget) -> bool:
        """Drops what is in nothing better than what is found.

        Where twins contradict each other, that may be far from the bound of the small graph, opened, while the best is
        near it: so what costs hardly more than the bound is searched first. True where nothing else can be better.
        """
        bound, above = relaxation.reduced_costs()
        for share in (*guesses, math.inf):
            assert self.choices is not None
            upper = self.graph.cost(self.choices)
            room = min(upper - bound, share * abs(bound)) + 1e-9 * max(abs(upper), abs(self.graph.constant), 1e-30)
            left = remaining_masks(relaxation.graph, relaxation.by_choice(above <= room))
            if self.proven or bound + room >= upper:
                self._keep(left, self.choices)
                break
            self._search_among({v: np.isin(self.places[v], fits) for v, fits in left.items()}, bound + room, budget)
        return share < math.inf

    def _search_among(self, masks: Masks, upper: float, budget: Budget) -> None:
        """Looks for something better than `upper` in the whole graph, which is among these choices if there is any;
        `upper` is a lower bound if there is none."""
        graph, small = self.graph, self.solver
        assert small.relaxation is not None
        part = graph.copy()
        solver = GraphSolver(part, upper, replace(budget, dives=False), self.gap, small.callbacks)
        try:
            part.restrict_all(masks)
            part.make_consistent()
            solver.reduce()
            solver.messages = restricted_messages(lifted_messages(small.relaxation.messages(), self.places), part.undo)
            solver.sweeps, solver.estimate, solver.stalled = small.sweeps, small.estimate, True
            solver.solve()
        except Infeasible:
            solver.raise_lower(upper)
        finally:
            small.sweeps, small.estimate = max(small.sweeps, solver.sweeps), max(small.estimate, solver.estimate)
            small.raise_lower(min(solver.lower, upper))
            if part.hint is not None:
                full = part.expand(part.hint)
                self.choices = {v: int(full[v]) for v in graph.live()}

    def _done(self, further: GraphSolver, enough: float) -> bool:
        """Whether the solver of the opened small graph is done."""
        return self.proven or further.closed or self.gap_to(further.lower) <= enough

    @property
    def proven(self) -> bool:
        """Whether the gap of the best assignment is the asked one."""
        return self.gap_to(self.solver.lower) <= self.gap

    def gap_to(self, lower: float) -> float:
        """The gap between the best assignment of the whole graph and a lower bound."""
        return math.inf if self.choices is None else relative_gap(self.graph.cost(self.choices), lower)

    @property
    def looked(self) -> bool:
        """Whether the twins of the small graph's best assignment have been searched."""
        return self._looked_at <= self.solver.upper

    def _look(self) -> None:
        """Searches the twins of the small graph's best assignment, if that is new."""
        if self.looked:
            return
        self._looked_at = self.solver.upper
        found = self.look(self.graph, kept_twins(self.solver.graph, self.places))
        if found is not None and (self.choices is None or self.graph.cost(found) < self.graph.cost(self.choices)):
            self.choices = found

    def _drop(self, choices: dict[int, int]) -> None:
        """Drops choices that no cheaper assignment than this one has. Its own choices stay."""
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
        self._keep(kept, choices)
        for v, left in kept.items():
            self.places[v] = np.searchsorted(left, self.places[v])

    def _keep(self, kept: dict[int, Index], choices: dict[int, int]) -> None:
        """Drops all choices of the whole graph but those that became such of the small one."""
        graph, mark = self.graph, len(self.graph.undo)
        graph.hint = choices
        graph.restrict_all({v: np.isin(self.places[v], left) for v, left in kept.items()})
        graph.forget()
        graph.make_consistent()
        for v, left in kept_choices(graph.undo[mark:]).items():
            self.places[v] = self.places[v][left]
        self.choices, graph.hint = graph.hint, None


def lifted_messages(messages: Messages, places: dict[int, Index]) -> Messages:
    """Messages into the choices of the small graph, as messages into those of the whole one, equal for twins."""
    return {(v, w): into[places[v]] for (v, w), into in messages.items()}


def kept_twins(small: Graph, places: dict[int, Index]) -> Masks:
    """Per variable, the choices that became the one that the small graph's best assignment takes."""
    if small.hint is None:
        return {}
    return {v: place == small.hint[v] for v, place in places.items()}


def remaining_masks(graph: Graph, masks: Masks) -> dict[int, Index]:
    """Per variable that a graph had, its choices then that go with some of the choices of those that are left."""
    left: dict[int, Index] = {v: np.flatnonzero(mask) for v, mask in masks.items()}
    for step in reversed(graph.undo):
        v = step.variable
        if isinstance(step, Best):
            left[v] = np.arange(len(step.costs))
        elif isinstance(step, Follow):
            left[v] = np.unique(step.mapping[left[step.leader]])
        else:
            left[v] = np.unique(step.kept[left[v]])
    return left


def kept_choices(steps: list[Best | Follow | Keep]) -> dict[int, Index]:
    """Per variable that lost some of its choices, those that were kept."""
    kept: dict[int, Index] = {}
    for step in steps:
        if isinstance(step, Keep):
            known = kept.get(step.variable)
            kept[step.variable] = step.kept if known is None else known[step.kept]
    return kept


def restricted_messages(messages: Messages, steps: list[Best | Follow | Keep]) -> Messages:
    """The messages into the choices that are kept."""
    kept = kept_choices(steps)
    return {(v, w): into[kept[v]] if v in kept else into for (v, w), into in messages.items()}
