"""Refinement of a quotient's assignment: a solve among the members of the chosen groups.

Messages of the quotient (`shardplan.search.structure.symmetry_coarsening`) rank the groups, but not their members. The
members of the best groups are few, and are searched first. Where they contradict each other, the search includes the
next best groups of each variable, first in a part of the graph with an anchor (`shardplan.search.solver.anchoring`),
then with all members. Repeated layers are folded first.

>>> import numpy as np
>>> from shardplan.search.network import Network
>>> net = Network()
>>> a, b = net.add_variable([5.0, 0.0, 0.0]), net.add_variable([5.0, 0.0, 1.0])
>>> net.add_edge(a, b, np.array([[0.0, 1.0, 1.0], [1.0, 0.0, 9.0], [1.0, 9.0, 0.0]]))
>>> best = np.array([False, True, True])
>>> refinement = SymmetryRefinement(Budget(), 1e-6, Callbacks(lambda: None, lambda: 60.0))
>>> refinement.among_twins(Graph.of(net), {a: best, b: best})
{0: 1, 1: 1}
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from shardplan.search.bounds.lagrangian import Messages
from shardplan.search.budget import Budget, Callbacks
from shardplan.search.graph.graph import Graph, Infeasible
from shardplan.search.run import Stop
from shardplan.search.solution import relative_gap
from shardplan.search.solver.anchoring import Anchor, budget_of_part
from shardplan.search.solver.graph_solver import GraphSolver
from shardplan.search.structure.find_repeats import END_LAYERS, MORE_END_LAYERS, fold
from shardplan.search.structure.fold_repeats import Start
from shardplan.search.structure.joint_pruning import restricted_messages

__all__ = ["TWINS_GAP_RATIO", "SymmetryRefinement"]

Masks = dict[int, NDArray[np.bool_]]

_MAX_ENTRIES = 2_000_000
"""Table entries up to which that is worth its time."""

_SWEEPS_OF_NEAR_CHOICES = 100
"""Among near choices: messages among few choices decode well long before they prove anything."""

TWINS_GAP_RATIO, _NEAR_GAP_RATIO = 0.3, 0.1
"""The gap asked among the twins of the best assignment, and among near choices from known messages, as a share of that
of the whole graph."""


@dataclass(slots=True)
class SymmetryRefinement:
    """Sets of choices per variable that contain a good assignment: the twins of the small graph's best choice, and
    those of its next best choices. messages: of the graph, to look through the latter
    from in a few of its layers, where they are good at once.
    """

    budget: Budget
    gap: float
    callbacks: Callbacks
    kept: Masks = field(default_factory=dict)
    near: list[Masks] = field(default_factory=list)
    messages: Messages = field(default_factory=dict)
    looked: bool = False
    """Whether the best assignment that is known is the best among the twins, or better."""
    fitting: Callable[[dict[int, int]], Masks] = lambda _: {}
    """Says which choices of the whole graph may be in something better than an assignment."""
    estimates: list[float] = field(default_factory=list)
    """Seconds that each search among them should have taken, the same on every machine."""

    def start(
        self, small: GraphSolver, messages: Messages, choices: dict[int, int] | None, stalled: bool = False
    ) -> Start:
        """A warm start from the searches of the small graph and among its twins."""
        estimate = small.estimate + sum(self.estimates)
        return Start(messages, choices, small.sweeps, estimate, small.lower, stalled)

    def assignment(self, graph: Graph, lower: float, best: dict[int, int] | None = None) -> dict[int, int] | None:
        """The best assignment that is found, or the first one that is within the gap of a lower bound.

        Twins that go together in one layer do so in all: layers that repeat are looked through once, and what is
        found is lifted to all of them. Where that does not close the gap, the whole graph is looked through.
        """
        for ends in (END_LAYERS, MORE_END_LAYERS):
            folded = fold(graph, ends)
            if folded is None:
                break
            messages = {stood: self.messages[e] for e, stood in folded.edge.items() if e in self.messages}
            lifted = (
                {v: choices[stand_in] for v, stand_in in folded.variable.items()}
                for choices in self._found(folded.graph, messages)
            )
            best = self._best(graph, lower, lifted, best)
            if best is not None and relative_gap(graph.cost(best), lower) <= self.gap:
                return best
        known = best if self.looked else self.among_twins(graph, self.kept)
        return self._best(graph, lower, self._found_near(graph, {}, known, self.fitting), best)

    def _best(
        self, graph: Graph, lower: float, found: Iterable[dict[int, int]], best: dict[int, int] | None
    ) -> dict[int, int] | None:
        """The best of assignments, or the first one that is within the gap of a lower bound."""
        for choices in found:
            if best is None or graph.cost(choices) < graph.cost(best):
                best = choices
            if relative_gap(graph.cost(best), lower) <= self.gap:
                break
        return best

    def _found(self, graph: Graph, messages: Messages) -> Iterator[dict[int, int]]:
        """The best assignment of some of the variables among the twins, then with the next best choices too."""
        choices = self.among_twins(graph, {v: self.kept[v] for v in graph.live()} if self.kept else {})
        yield from self._found_near(graph, messages, choices)

    def _found_near(
        self,
        graph: Graph,
        messages: Messages,
        choices: dict[int, int] | None,
        fitting: Callable[[dict[int, int]], Masks] | None = None,
    ) -> Iterator[dict[int, int]]:
        """The best assignment among the twins, then with the next best choices too.

        fitting: says which choices may be in anything better, where all of them are searched afterwards. An assignment
        of a part that tells twins apart does then; without one, near choices are looked through while they are fewer.
        """
        best = choices
        if choices is not None:
            yield choices
        if self.near and fitting is not None and choices is not None:
            best = self._anchored(graph, choices, fitting(choices))
            if best is not choices:
                yield best
                return
        for near in self.near:  # each from the twins: what is best of a few layers need not be of all
            fits = None if fitting is None or best is None else fitting(best)
            if fits is not None and _entries(graph, fits) < _entries(graph, near):
                break
            with contextlib.suppress(Stop, Infeasible):
                found = self._among_near(graph, {v: near[v] for v in graph.live()}, choices, messages)
                if found is not None:
                    best = found
                    yield found

    def _anchored(self, graph: Graph, choices: dict[int, int], fits: Masks) -> dict[int, int]:
        """A better assignment than `choices` among the next best ones that fit, in the first part that an anchor makes
        (`shardplan.search.solver.anchoring`); or the same."""
        anchor = Anchor.of(graph)
        if anchor is None:
            return choices
        part, masks = graph.copy(), {v: fits[v] & near for v, near in self.near[0].items()}
        part.twins = {}
        masks[anchor.variable] = masks[anchor.variable] & anchor.parts[0]
        budget = replace(budget_of_part(self.budget), near_optimal_dp=self.budget.near_optimal_dp)
        solver = GraphSolver(part, graph.cost(choices), budget, self.gap, self.callbacks)
        with contextlib.suppress(Stop, Infeasible):
            part.restrict_all(masks)
            part.make_consistent()
            solver.reduce(dominance=False)
            solver.messages = restricted_messages(self.messages, part.undo)
            solver.solve()
        self.estimates.append(solver.estimate)
        found = _expanded(graph, part)
        return found if found is not None and graph.cost(found) < graph.cost(choices) else choices

    def among_twins(self, graph: Graph, keep: Masks) -> dict[int, int] | None:
        """The best assignment of a graph that is found among some choices of each variable."""
        if not keep:
            return None
        part = graph.copy()
        part.twins = {}
        with contextlib.suppress(Stop, Infeasible):
            part.restrict_all(keep)
            part.make_consistent()
            budget = replace(self.budget, cp_sat_work=0.0, dives=False, contraction_entries=0)
            solver = GraphSolver(part, math.inf, budget, TWINS_GAP_RATIO * self.gap, self.callbacks)
            solver.solve()
            self.estimates.append(solver.estimate)
            return _expanded(graph, part)
        return None

    def _among_near(
        self, graph: Graph, keep: Masks, choices: dict[int, int] | None, messages: Messages
    ) -> dict[int, int] | None:
        """A better assignment than `choices` among some choices of each variable, or the same.

        What is best with twins taken together may have no twins that go together round a cycle, where something that is
        hardly dearer has. Messages among few choices are quick, and decode well long before they prove anything.
        """
        part = graph.copy()
        part.twins, part.hint = {}, choices and dict(choices)
        part.restrict_all(keep)
        part.make_consistent()
        if part.entries() > _MAX_ENTRIES:
            return choices
        budget = replace(
            self.budget, sweeps=_SWEEPS_OF_NEAR_CHOICES, cp_sat_work=0.0, dives=False, contraction_entries=0
        )
        solver = GraphSolver(part, math.inf, budget, _NEAR_GAP_RATIO * self.gap, self.callbacks)
        if messages:
            solver.messages = restricted_messages(messages, part.undo)
        else:
            solver.reduce(dominance=False)
        solver.prunes, solver.patience = False, budget.sweeps
        if part.hint is not None:
            solver.upper = part.cost(part.hint)
        with contextlib.suppress(Stop):
            if part.live():
                solver.sweep_until_prunable()
            else:
                solver.accept({}, part.constant)
        self.estimates.append(solver.estimate)
        found = _expanded(graph, part)
        better = found is not None and (choices is None or graph.cost(found) < graph.cost(choices))
        return found if better else choices


def _entries(graph: Graph, masks: Masks) -> int:
    """The table entries of a graph with only these choices of each variable."""
    sizes = {v: int(np.count_nonzero(mask)) for v, mask in masks.items()}
    return sum(sizes[v] * sizes[w] for v in sizes for w in graph.neighbours[v] if v < w)


def _expanded(graph: Graph, part: Graph) -> dict[int, int] | None:
    if part.hint is None:
        return None
    full = part.expand(part.hint)
    return {v: int(full[v]) for v in graph.live()}
