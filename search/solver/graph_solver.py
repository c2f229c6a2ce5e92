"""The solver of one graph: rounds of message sweeps, dynamic programming, pruning and exact reductions.

A round passes messages, tries the most promising choices of each variable by dynamic programming, drops choices that no
better assignment can have, and reduces the graph. Dynamic programming, or CP-SAT where usage binds, solves the rest
once it is small.
"""

from __future__ import annotations

import math
from dataclasses import replace

from shardplan.search.bounds.contraction import contract_neighbours
from shardplan.search.bounds.cycle_opening import open_cycles
from shardplan.search.bounds.lagrangian import Relaxation
from shardplan.search.budget import Budget, Callbacks
from shardplan.search.graph.dynamic_programming import settled
from shardplan.search.graph.graph import Graph
from shardplan.search.graph.reductions import shrink
from shardplan.search.solver.anchoring import bound_of_parts, solve_among
from shardplan.search.solver.bounded_graph import BoundedGraph
from shardplan.search.solver.cp_sat import solve_by_cp_sat
from shardplan.search.solver.diving import dive
from shardplan.search.solver.near_optimal_dp import MAX_GRAPH_ENTRIES, solve_near_optimal

__all__ = ["GraphSolver"]

_FEW_CHOICES = 4000
_IMMEDIATE_ENTRIES = 1e6
"""Table entries of dynamic programming that take no longer than the first sweeps would."""
_SWEEPS_AFTER_CONTRACTION = 4
_LEAST_GAIN = 0.1
_ROOM, _LEAST_ROOM = 0.5, 200_000
_FULL_RATIO, _LEAST_GAIN_WHEN_FULL = 0.6, 0.01
"""From this share of the entries up to which neighbours are merged, what each time is to close of the gap."""
_ROOM_TO_OPEN = 2
"""Times the table entries up to which neighbours are merged: opening a cycle always raises the bound."""
_SECONDS_PER_ENTRY = 2e-5
_SECONDS_PER_CONTRACTED = 1e-7
"""What merging takes, about, per table entry before it: to look for what to merge, and to copy and reduce all."""


class GraphSolver(BoundedGraph):
    """Minimises a graph by rounds of sweeps, exact reductions, dynamic programming and CP-SAT."""

    def __init__(self, graph: Graph, upper: float, budget: Budget, gap: float, callbacks: Callbacks) -> None:
        super().__init__(graph, upper, budget, gap, callbacks)
        self._merges = True
        self._unmerged: Graph | None = None  # before the first merging, where CP-SAT could take it

    def solve(self) -> None:
        """Runs rounds until the gap is closed, or a round does not help any more."""
        graph, budget = self.graph, self.budget
        self.reduce()
        # What a start leaves open is mostly twins that contradict each other.
        self.opens = self._may_merge() and not self.messages
        while self.may_sweep():
            if self.settle(budget.table_entries if self.sweeps else _IMMEDIATE_ENTRIES, budget.table_entries):
                return
            before = self._choices()
            relaxation = self.sweep_until_prunable()
            if self.stalled and not self.closed:
                self._ask_for_better()
            merges = self.stalled and self._may_merge()
            last = self.stalled or (budget.dives and graph.usage_limit is None and not self.may_sweep())
            if last and not self.closed:
                self.choose_among_twins()
            if last and not self.closed and not merges:
                dive(self, relaxation)
            if self.closed:
                return
            if not self.may_sweep() and relaxation.entries_left(max(self.upper, self.ceiling)) > MAX_GRAPH_ENTRIES:
                break  # nothing that follows could take so many, whose tables would all be copied
            self.prune(relaxation)
            shrink(graph, dominance=before < _FEW_CHOICES)
            self.callbacks.report()
            # What messages left is often few enough for dynamic programming, which merging would hide.
            if (merges or self.creeping) and self.settle(budget.table_entries, budget.table_entries):
                return
            if merges and self._unmerged is None and graph.entries() <= budget.cp_sat_entries:
                self._unmerged = graph.copy(sibling=True)
                self._unmerged.hint = graph.hint
            if (
                (self.stalled or self.slow or not self.may_sweep())
                and budget.near_optimal_dp
                and solve_near_optimal(self)
            ):
                return
            if merges and self.open_cycles():
                continue
            if merges:
                if self.closed_by_parts():
                    return
                self._merge()
                if self.stalled and not self._merges and not self.closed:  # messages would not help after it either
                    dive(self, self.relax_again())
                    break
            elif self.stalled and self._choices() > 0.95 * before:
                break
            elif self.creeping:
                self.opens = self.open_cycles()
        self.finish()

    def _ask_for_better(self) -> None:
        """Takes what others know; with a much better assignment, messages are worth going on with."""
        before = self.upper
        self.callbacks.on_stall()
        if self.upper < before - _LEAST_GAIN * (before - self.lower):
            self.stalled = False

    @property
    def seconds_to_close(self) -> float:
        """What CP-SAT's model of the graph takes to be built and relaxed, about: the same on every machine."""
        return self.graph.entries() * _SECONDS_PER_ENTRY

    def finish(self) -> None:
        """Dynamic programming or CP-SAT on the graph as it is, where it is small enough."""
        if not self.closed and not self.settle(40 * self.budget.table_entries, self.budget.table_entries):
            self._close()

    def _may_merge(self) -> bool:
        # Where usage binds, what stays open is mostly the price of it, which no merging closes.
        return (
            self._merges
            and self.budget.contraction_entries > 0
            and not any(self.graph.spans[v] for v in self.graph.live())
        )

    def _merge(self) -> None:
        """Merges neighbours until the bound rises again, or there is nothing left to merge."""
        graph, budget = self.graph, self.budget
        while self._merges and graph.live() and self.may_sweep() and not self.closed:
            relaxation = Relaxation(graph)
            entries = relaxation.sweeper.entries
            room = min(budget.contraction_entries - entries, max(int(_ROOM * entries), _LEAST_ROOM))
            self.estimate += _SECONDS_PER_CONTRACTED * entries
            if room < _LEAST_ROOM or not contract_neighbours(graph, relaxation, self.upper, room):
                self._merges = False
                return
            shrink(graph, dominance=False)
            if not graph.live():  # all that was left is decided, which elimination finds
                return
            before, relaxation = self.lower, Relaxation(graph)
            self.sweep(relaxation, _SWEEPS_AFTER_CONTRACTION)
            if self.closed:
                return
            self.prune(relaxation)
            shrink(graph, dominance=False)
            if self.lower > before + _LEAST_GAIN * (self.upper - before):
                return
            self._merges = (
                entries < _FULL_RATIO * budget.contraction_entries
                or self.lower > before + _LEAST_GAIN_WHEN_FULL * (self.upper - before)
            )

    def open_cycles(self) -> bool:
        """Opens cycles that contradict themselves; False where there are none, or too large ones."""
        graph, upper = self.graph, max(self.upper, self.ceiling)
        if not graph.live() or not self.may_sweep() or upper == math.inf:
            return False
        relaxation = Relaxation(graph)
        room = int(_ROOM_TO_OPEN * self.budget.contraction_entries) - relaxation.sweeper.entries
        opened = open_cycles(graph, relaxation, upper, room)
        self.estimate += opened.seconds
        if not opened.cycles:
            return False
        shrink(graph, dominance=False)
        self.stalled = False
        return True

    def _choices(self) -> int:
        return sum(self.graph.size(v) for v in self.graph.live())

    def choose_among_twins(self) -> None:
        """Solves the graph with the twins of the best assignment's choices alone.

        Messages say the same of twins. What is decoded from them may be right but for twins that contradict each other.
        """
        graph, hint = self.graph, self.graph.hint
        if hint is None or not graph.twins or graph.usage_limit is not None:
            return
        budget = replace(self.budget, sweeps=200, cp_sat_work=0.0, dives=False, contraction_entries=0)
        solve_among(self, {v: graph.twins_of(v, hint[v]) for v in graph.live()}, budget)

    def closed_by_parts(self) -> bool:
        """Looks for something better in parts that tell twins apart: where none has any, that is proven."""
        contradicted, self.contradicted = self.contradicted, False
        if contradicted and self.graph.hint is not None and self.graph.usage_limit is None:
            self.raise_lower(min(bound_of_parts(self), self.upper))
        return self.closed

    def of_part(self, part: Graph, budget: Budget, upper: float = math.inf, gap: float | None = None) -> GraphSolver:
        """A solver of a part of the graph, which asks for the same gap or another one."""
        callbacks = Callbacks(part.tick, self.callbacks.seconds_left)
        return GraphSolver(part, upper, budget, self.gap if gap is None else gap, callbacks)

    def settle(self, entries: float, largest: float) -> bool:
        """Solves the rest exactly where dynamic programming can within so many entries, in all and in one table."""
        found = settled(self.graph, entries, largest)
        if found is None:
            return False
        choices, cost = found
        self.raise_lower(min(cost, self.upper))
        self.accept(choices, cost)
        return True

    def _close(self) -> None:
        graph, entries = self.graph, self.graph.entries()
        if self._unmerged is not None and (before := self._unmerged.entries()) < entries:
            graph, entries = self._unmerged, before
        # Without any assignment yet, a model that is far too large to be solved may still give one. A part of a graph
        # within a limit, whose best assignment is known, needs none of its own.
        known = graph.hint is not None or (graph.usage_limit is not None and self.upper < math.inf)
        if entries > self.budget.cp_sat_entries * (1 if known else 20):
            return
        # Building the model and its first relaxation know no time limit. For an assignment within a limit they may take
        # as long as sweeps may: where none is found, the least peak is looked for.
        allowed = self.callbacks.seconds_left()
        if graph.usage_limit is not None and not known:
            allowed = min(allowed, self.budget.seconds)
        if entries * _SECONDS_PER_ENTRY > allowed:
            return
        result = solve_by_cp_sat(graph, self.budget.cp_sat_work, self.callbacks.seconds_left())
        if graph.usage_limit is not None:  # without one, the share of the time that is counted leaves room for it
            self.estimate += result.work
        self.raise_lower(min(graph.constant + result.lower_bound, self.upper))
        if result.choices is not None and (cost := graph.cost(result.choices)) < self.upper:
            if graph is not self.graph:
                self.graph.become(graph)
                self._unmerged = None
            self.accept(result.choices, cost)
        if result.proven:
            self.raise_lower(self.upper)
