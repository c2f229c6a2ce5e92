"""A graph under minimisation: its bounds, and the message sweeps that raise the lower one.

Diving, anchoring and dynamic programming on near-optimal choices work on such a graph. The solver imports them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np

from shardplan.search.bounds.lagrangian import Messages, Relaxation
from shardplan.search.budget import Budget, Callbacks
from shardplan.search.graph.dynamic_programming import Elimination, adjacency, plan
from shardplan.search.graph.graph import Graph
from shardplan.search.graph.reductions import shrink
from shardplan.search.solution import relative_gap

__all__ = ["BoundedGraph"]

_SWEEPS = 20
_FIRST_SWEEPS = 2
_LAST_SWEEPS, _SLOW_SHARE = 5, 0.1
"""Sweeps, and the share of the gap. Where the sweeps close less than it, dynamic programming is faster."""
_SWEEP_ON_RATIO = 0.75
_PRUNING_SHARE = 0.2
_CYCLE_ENTRIES = 1_000_000
"""Table entries up to which cycles are looked for while messages still raise the bound, though slowly."""
_FAR_GAP = 0.005
"""The gap of a start whose assignment is not as good as its messages."""


class BoundedGraph(ABC):
    """A graph under minimisation. `lower` and `upper` are valid at any moment; `graph.hint` is of cost `upper`."""

    def __init__(self, graph: Graph, upper: float, budget: Budget, gap: float, callbacks: Callbacks) -> None:
        self.graph, self.budget, self.gap = graph, budget, gap
        self.upper, self.lower = upper, -math.inf
        self.ceiling = -math.inf
        """Where the graph is a relaxation of another one, what assignments of that one are to cost less than."""
        self.callbacks = callbacks
        self.prices: dict[int, float] = {}
        self.sweeps = 0
        self.relaxation: Relaxation | None = None
        """The last one that was swept."""
        self.messages: Messages = {}
        """Of the graph as it is, for the next relaxation to start from."""
        self.prunes = True
        """Whether `sweep_until_prunable` ends where much can be pruned."""
        self.patience = 2
        """The number of turns of small gain after which messages count as stalled."""
        self.stalled = self.slow = False
        """Whether messages have stopped to raise the bound; whether the last sweeps have raised it by little."""
        self.contradicted = False  # whether twins may be what leaves the gap open, and are worth telling apart
        self.opens = self.creeping = False
        """Whether `sweep_until_prunable` ends where messages creep far from closed; and whether it has."""
        self.near_optimal_gap = math.inf  # the gap where choices that fit were looked through
        self.estimate = 0.0
        """Seconds that the sweeps should have taken, the same on every machine."""
        self._reduced = False
        self._untried, self._wait = 0, 1  # turns of sweeps until the next trial, and between two

    @abstractmethod
    def solve(self) -> None:
        """Raises `lower` and lowers `upper` until the gap is closed or the budget is used."""

    @abstractmethod
    def of_part(self, part: Graph, budget: Budget, upper: float = math.inf, gap: float | None = None) -> BoundedGraph:
        """A solver of a part of the graph, which asks for the same gap or another one."""

    def begin(self, messages: Messages, choices: dict[int, int] | None) -> None:
        """Starts from messages and an assignment of the reduced graph, which may turn out not to be valid."""
        self.messages = messages
        cost = self.graph.cost(choices) if choices is not None else math.inf
        if choices is not None and cost < math.inf and self.graph.usage_limit is None:
            self.accept(choices, cost)

    def reduce(self, dominance: bool = True) -> None:
        """The reductions that come before everything else, once."""
        if not self._reduced:
            shrink(self.graph, dominance)
            self._reduced = True

    def accept(self, choices: dict[int, int], cost: float) -> None:
        """Takes a valid assignment of the graph into account."""
        if cost < self.upper:
            self.upper = cost
            self.graph.hint = dict(choices)
            self.callbacks.report()

    def raise_lower(self, bound: float) -> None:
        """Takes a lower bound into account."""
        self.lower = max(self.lower, bound)

    @property
    def closed(self) -> bool:
        """Whether the asked gap is reached."""
        return relative_gap(self.upper, self.lower) <= self.gap

    def may_sweep(self) -> bool:
        """Whether the budget allows another round."""
        return self.sweeps < self.budget.sweeps and self.estimate < self.budget.seconds

    def prune(self, relaxation: Relaxation) -> None:
        """Drops what cannot be in anything better, and moves the messages into the graph."""
        relaxation.prune(max(self.upper, self.ceiling))
        relaxation.reparametrise()
        self.messages = {}
        self.raise_lower(relaxation.bound)

    def relax_again(self, sweeps: int = 4) -> Relaxation:
        """A relaxation of the graph as it is, at the best prices, after a few sweeps."""
        relaxation = Relaxation(self.graph, self.prices)
        for _ in range(sweeps):
            relaxation.reduced_costs()
        self.raise_lower(relaxation.bound)
        return relaxation

    def sweep_until_prunable(self) -> Relaxation:
        """Messages, until much can be pruned or they do not help any more; assignments found are accepted."""
        relaxation = Relaxation(self.graph, self.prices)
        relaxation.load(self.messages)
        self.relaxation = relaxation
        bounds: list[float] = []
        # A start has an assignment that is as good as its messages, unless it turns out to be far from their bound.
        self._untried = self._wait if self.messages and self.upper < math.inf else self._untried
        self.creeping = False
        while self.may_sweep():
            left = self.upper - self.lower
            self._sweep_while_closing(relaxation) if self.messages and not bounds else self.sweep(relaxation, _SWEEPS)
            bounds.append(self.lower)
            if self.closed:
                break
            if self._untried == 0 or (len(bounds) == 1 and relative_gap(self.upper, self.lower) > _FAR_GAP):
                upper = self.upper
                self._try_promising(relaxation)
                # Trials get rarer while they find nothing.
                self._wait = 1 if self.upper < upper - 0.1 * (upper - self.lower) else 2 * self._wait
                self._untried = self._wait
            self._untried -= 1
            self.creeping = self.opens and not self.messages and self._creeps(relaxation, left)
            if self.closed or (
                self.prunes and relaxation.prunable_share(max(self.upper, self.ceiling)) > _PRUNING_SHARE
            ):
                break
            if self._hardly_risen(bounds) and relaxation.prices_settled:
                self.stalled = True
                break
            if self.creeping:
                break
        self.slow = self.creeping or relaxation.bound_gain(_LAST_SWEEPS) < _SLOW_SHARE * (self.upper - self.lower)
        self.prices = relaxation.price_by_time()
        return relaxation

    def _hardly_risen(self, bounds: list[float]) -> bool:
        # Messages of a start have been swept before: where they are far from closed, they have stalled or nearly so.
        if self.messages and self.stalled:  # where the start knows that they have
            return True
        turns = 1 if self.messages and relative_gap(self.upper, self.lower) > _FAR_GAP else self.patience
        return len(bounds) > turns + 1 and bounds[-1] - bounds[-1 - turns] < 0.05 * (self.upper - self.lower)

    def _creeps(self, relaxation: Relaxation, left: float) -> bool:
        """Whether a turn of sweeps left most of the gap, or a later one's last do: short cycles are quicker."""
        gap, few = self.upper - self.lower, relaxation.sweeper.entries < _CYCLE_ENTRIES
        slow = relaxation.sweeps > _SWEEPS and relaxation.bound_gain(_LAST_SWEEPS) < _SLOW_SHARE * gap
        return few and (slow or gap > _SWEEP_ON_RATIO * left) and relative_gap(self.upper, self.lower) > _FAR_GAP

    def _sweep_while_closing(self, relaxation: Relaxation) -> None:
        """Sweeps, a few at a time, as long as each time closes much of the gap: messages that are good already may
        close all of it."""
        before, left = math.inf, math.inf
        while self.may_sweep() and not self.closed and (left == math.inf or left < _SWEEP_ON_RATIO * before):
            self.sweep(relaxation, _FIRST_SWEEPS)
            before, left = left, self.upper - self.lower

    def sweep(self, relaxation: Relaxation, sweeps: int) -> None:
        for _ in range(sweeps):
            relaxation.improve(self.upper)
            self.sweeps += 1
            self.estimate += relaxation.seconds_per_sweep
            self.raise_lower(relaxation.bound)
            if relaxation.choices is not None and relaxation.cost < self.upper:
                self.accept(relaxation.by_variable(relaxation.choices), relaxation.cost)
            self.callbacks.report()
            if self.closed:
                return

    def _try_promising(self, relaxation: Relaxation) -> None:
        """Dynamic programming on the choices of the least min-marginals, and those of the best assignment."""
        graph, budget = self.graph, self.budget
        last = relaxation.choices if relaxation.choices is not None else relaxation.sweeper.decode()
        hint = graph.hint if graph.hint is not None else relaxation.by_variable(last)
        for count in range(budget.promising_choices, 1, -1):
            keep = relaxation.promising_choices(count)
            for v, k in hint.items():
                if not (keep[v] == k).any():
                    keep[v] = np.sort(np.append(keep[v], k))
            order = plan(
                {v: len(k) for v, k in keep.items()}, adjacency(graph), budget.largest_table, budget.table_entries
            )
            if order is not None and (not order.fixed or count == 2):
                break
        else:
            return
        usage = relaxation.profile is not None
        for scale in (1.0, 1.02, 1.1, 1.4) if usage else (1.0,):
            found, cost = Elimination(graph, relaxation.priced_costs(scale), keep).solve(order, hint)
            if not usage:
                self.accept(found, cost)
                return
            relaxation.offer(np.array([found[v] for v in relaxation.order]))
            if relaxation.choices is not None and relaxation.cost < self.upper:
                self.accept(relaxation.by_variable(relaxation.choices), relaxation.cost)
                return
