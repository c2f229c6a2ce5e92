"""Closing what message passing leaves: OR-tools' CP-SAT on the pruned remainder of a graph."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from shardplan.search.graph import Graph

__all__ = ["Closing", "close"]

_LARGEST_TOTAL = 2.0**50


@dataclass(frozen=True, slots=True)
class Closing:
    """choices: by variable id, `None` where nothing was found. proven: whether nothing better exists (within
    rounding of costs to integers), or nothing at all where there are no choices. lower_bound: of the graph's cost."""

    choices: dict[int, int] | None
    lower_bound: float
    proven: bool


def close(graph: Graph, variables: list[int], work: float, seconds: float, hint: dict[int, int] | None) -> Closing:
    """Solves the graph on these variables, which have no edges to others.

    work: CP-SAT's deterministic time, which alone decides what is found, unless `seconds` end first.
    Costs are rounded to whole numbers of a unit that is 1 where they are whole already.
    """
    builder = _Builder(graph, variables)
    model = builder.model
    if hint is not None:
        for v in variables:
            for k, literal in enumerate(builder.literals[v]):
                model.add_hint(literal, k == hint[v])
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(seconds, 0.01)
    solver.parameters.max_deterministic_time = work
    solver.parameters.num_workers = 1
    solver.parameters.relative_gap_limit = 0.0
    solver.parameters.linearization_level = 2
    status = solver.solve(model)
    lower_bound = builder.offset + (solver.best_objective_bound - builder.rounding) * builder.unit
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        choices = {
            v: next(k for k, literal in enumerate(builder.literals[v]) if solver.boolean_value(literal))
            for v in variables
        }
        return Closing(choices, lower_bound, status == cp_model.OPTIMAL)
    proven = status == cp_model.INFEASIBLE
    return Closing(None, math.inf if proven else -math.inf, proven)


class _Builder:
    """The model: one literal per choice, one per pair of choices of an edge that costs anything."""

    def __init__(self, graph: Graph, variables: list[int]) -> None:
        self.graph = graph
        self.model = cp_model.CpModel()
        self.literals: dict[int, list[cp_model.IntVar]] = {}
        self.offset = 0.0
        self.terms: list[tuple[cp_model.IntVar, float]] = []
        for v in variables:
            self._add_variable(v)
        for v in variables:
            for w, table in graph.neighbours[v].items():
                if v < w:
                    self._add_edge(v, w, table)
        self._add_usage(variables)
        self.unit, self.rounding = self._objective()

    def _add_variable(self, v: int) -> None:
        costs = self.graph.costs[v]
        assert costs is not None
        literals = [self.model.new_bool_var("") for _ in costs]
        self.model.add_exactly_one(literals)
        self.literals[v] = literals
        least = float(costs.min())
        self.offset += least
        self.terms += [(x, float(c) - least) for x, c in zip(literals, costs, strict=True) if c > least]

    def _add_edge(self, v: int, w: int, table: NDArray[np.float64]) -> None:
        least = float(table.min())
        self.offset += least
        left, right = self.literals[v], self.literals[w]
        if table.max() == least:
            return
        pairs = [[None] * len(right) for _ in left]
        for i, j in np.argwhere(np.isfinite(table)).tolist():
            literal = self.model.new_bool_var("")
            pairs[i][j] = literal  # type: ignore[call-overload]
            if table[i, j] > least:
                self.terms.append((literal, float(table[i, j]) - least))
        for i, row in enumerate(pairs):
            self.model.add(sum(x for x in row if x is not None) == left[i])
        for j in range(len(right)):
            self.model.add(sum(row[j] for row in pairs if row[j] is not None) == right[j])

    def _add_usage(self, variables: list[int]) -> None:
        limit = self.graph.usage_limit
        if limit is None:
            return
        for total, parts in critical_sums(self.graph, variables):
            if not parts:
                self.model.add_bool_or([])
                continue
            literals = [x for v, _ in parts for x in self.literals[v]]
            amounts = np.concatenate([a for _, a in parts])
            room = limit - total
            scale = 1.0 if (amounts == np.round(amounts)).all() else 2.0**40 / max(1.0, float(amounts.max()))
            # Rounding up the amounts keeps every solution valid.
            weights = np.ceil(amounts * scale).astype(np.int64).tolist()
            self.model.add(cp_model.LinearExpr.weighted_sum(literals, weights) <= math.floor(room * scale))

    def _objective(self) -> tuple[float, float]:
        values = np.array([c for _, c in self.terms])
        total = float(values.sum())
        whole = total < _LARGEST_TOTAL and bool((values == np.round(values)).all())
        unit = 1.0 if whole or not total else 2.0 ** math.ceil(math.log2(total / _LARGEST_TOTAL))
        weights = np.round(values / unit).astype(np.int64).tolist()
        self.model.minimize(cp_model.LinearExpr.weighted_sum([x for x, _ in self.terms], weights))
        return unit, 0.0 if whole else 0.5 * (len(self.literals) + sum(map(len, self.graph.neighbours)) / 2)


def critical_sums(graph: Graph, variables: list[int]) -> list[tuple[float, list[tuple[int, NDArray[np.float64]]]]]:
    """Per time that could exceed the limit: the usage that is fixed, and the amounts per choice of each variable.

    Times at which a subset of another time's usages is alive are left out.
    """
    limit = graph.usage_limit
    assert limit is not None
    spans = [(v, amounts, start, end) for v in variables for amounts, start, end in graph.spans[v]]
    fixed = graph.fixed_spans
    sums = []
    seen: set[frozenset[int]] = set()
    for time in sorted({start for _, _, start, _ in spans} | {start for _, start, _ in fixed}):
        alive = [i for i, (_, _, start, end) in enumerate(spans) if start <= time < end]
        total = sum(amount for amount, start, end in fixed if start <= time < end)
        if total + sum(float(spans[i][1].max()) for i in alive) <= limit:
            continue
        key = frozenset(alive)
        if key in seen and not fixed:
            continue
        seen.add(key)
        joined: dict[int, NDArray[np.float64]] = {}
        for i in alive:
            v, amounts = spans[i][:2]
            joined[v] = joined[v] + amounts if v in joined else amounts
        sums.append((total, list(joined.items())))
    return sums
