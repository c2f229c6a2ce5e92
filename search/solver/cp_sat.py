"""CP-SAT of OR-tools on the rest of a pruned graph."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.search.graph.graph import Graph
from shardplan.search.graph.usage_profile import Profile
from shardplan.search.or_tools import cp_model
from shardplan.search.solver.interruptible_cp_sat import solve_model

__all__ = ["SECONDS_PER_UNIT", "CpSatResult", "solve_by_cp_sat"]

_LARGEST_TOTAL = 2.0**50
_FEW_INSTANTS = 60
_INSTANTS_PER_ROUND = 8
_DISTANCE = 20
SECONDS_PER_UNIT = 4.0
"""The seconds of a unit of CP-SAT's deterministic time, which counts the search and only a part of the presolve."""
_SECONDS_PER_PAIR = 3e-5
"""The estimated time of one pair of choices in the model, for its construction in Python and for CP-SAT's presolve."""


@dataclass(frozen=True, slots=True)
class CpSatResult:
    """choices: by variable id, `None` where nothing was found. proven: whether nothing better exists (within
    rounding of costs to integers, and the tolerance), or nothing at all where there are no choices. lower_bound: of the
    graph's cost. work: seconds that it should have taken, the same on every machine."""

    choices: dict[int, int] | None
    lower_bound: float
    proven: bool
    work: float = 0.0


def solve_by_cp_sat(
    graph: Graph, work: float, seconds: float, tolerance: float = 0.0, times: Iterable[int] = ()
) -> CpSatResult:
    """Solves what is left of the graph.

    work: CP-SAT's deterministic time, which alone decides what is found, unless `seconds` end first.
    tolerance: how far above the least cost is good enough. times: at which usage is known to bind.
    Costs are rounded to whole numbers of a unit that is 1 where they are whole already. Of the times at which usage
    could exceed the limit, only a few are constrained at first; those at which a solution does exceed it come in, and
    the model is solved again. What bounds the first of these models bounds the last.
    """
    variables = graph.live()
    deadline = time.monotonic() + seconds
    builder = _Builder(graph, variables)
    profile = _profile(graph, variables)
    instants = _first_instants(profile, times) if profile is not None else []
    for instant in instants:
        builder.limit(profile, instant)  # type: ignore[arg-type]
    lower_bound, left, spent = -math.inf, work, builder.pairs * _SECONDS_PER_PAIR
    while True:
        solver = _solver(profile is not None)
        solver.parameters.max_time_in_seconds = max(deadline - time.monotonic(), 0.01)
        solver.parameters.max_deterministic_time = left
        solver.parameters.absolute_gap_limit = max(tolerance / builder.unit, 1e-4)  # the latter is CP-SAT's own
        status = solve_model(solver, builder.model)
        left -= solver.response_proto.deterministic_time
        spent += solver.response_proto.deterministic_time * SECONDS_PER_UNIT
        if status == cp_model.INFEASIBLE:
            return CpSatResult(None, math.inf, True, spent)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return CpSatResult(None, lower_bound, False, spent)
        bound = builder.offset + (solver.best_objective_bound - builder.rounding) * builder.unit
        lower_bound = max(lower_bound, bound)
        choices = builder.choices(solver)
        over = _exceeded(profile, choices, instants) if profile is not None else []
        if not over:
            found = dict(zip(variables, choices, strict=True))
            return CpSatResult(found, lower_bound, status == cp_model.OPTIMAL, spent)
        if left <= 0:
            return CpSatResult(None, lower_bound, False, spent)
        for instant in over:
            builder.limit(profile, instant)  # type: ignore[arg-type]
        instants += over


def _solver(limited: bool) -> cp_model.CpSolver:
    """CP-SAT with one worker.

    limited: whether usage has a limit. The model is then a few sums of amounts and tables
    of nearly integral relaxation. The search tree proves it faster than cuts, probing and symmetries.
    """
    solver = cp_model.CpSolver()
    solver.parameters.linearization_level = 2
    if limited:
        solver.parameters.cut_level = 0
        solver.parameters.cp_model_probing_level = 0
        solver.parameters.symmetry_level = 0
    return solver


def _profile(graph: Graph, variables: list[int]) -> Profile | None:
    if graph.usage_limit is None:
        return None
    sizes = np.array([graph.size(v) for v in variables], dtype=np.intp)
    return Profile(graph, variables, np.cumsum(sizes) - sizes)


def _first_instants(profile: Profile, times: Iterable[int]) -> list[int]:
    """All times that could exceed the limit where they are few, or the one that could most and those that are known."""
    candidates = profile.candidates()
    if len(candidates) <= _FEW_INSTANTS:
        return candidates.tolist()
    most = int(candidates[profile.extreme(most=True)[candidates].argmax()])
    known = np.searchsorted(profile.instants, np.array(list(times), dtype=np.int64), side="right") - 1
    return sorted({most, *np.intersect1d(known, candidates).tolist()})


def _exceeded(profile: Profile, choices: list[int], known: list[int]) -> list[int]:
    """The highest times over the limit, each at some distance from the others."""
    used = profile.used(np.array(choices, dtype=np.intp))
    found: list[int] = []
    while len(found) < _INSTANTS_PER_ROUND and used.max() > profile.limit:
        instant = int(used.argmax())
        found.append(instant)
        used[max(0, instant - _DISTANCE) : instant + _DISTANCE + 1] = 0.0
    return [instant for instant in found if instant not in known]


class _Builder:
    """The model: one literal per choice, one per pair of choices of an edge that costs anything."""

    def __init__(self, graph: Graph, variables: list[int]) -> None:
        self.graph = graph
        self.model = cp_model.CpModel()
        self.literals: dict[int, list[cp_model.IntVar]] = {}
        self.offset = 0.0
        self.pairs = 0
        """Pairs of choices that have a literal of their own."""
        self.terms: list[tuple[cp_model.IntVar, float]] = []
        for v in variables:
            self._add_variable(v)
        for v in variables:
            for w, table in graph.neighbours[v].items():
                if v < w:
                    self._add_edge(v, w, table)
        self.unit, self.rounding = self._objective()
        if graph.hint is not None:
            for v in variables:
                for k, literal in enumerate(self.literals[v]):
                    self.model.add_hint(literal, k == graph.hint[v])

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
        rows: list[list[cp_model.IntVar]] = [[] for _ in left]
        columns: list[list[cp_model.IntVar]] = [[] for _ in right]
        pairs = np.argwhere(np.isfinite(table)).tolist()
        self.pairs += len(pairs)
        for i, j in pairs:
            literal = self.model.new_bool_var("")
            rows[i].append(literal)
            columns[j].append(literal)
            if table[i, j] > least:
                self.terms.append((literal, float(table[i, j]) - least))
        for literal, several in zip([*left, *right], [*rows, *columns], strict=True):
            self.model.add(cp_model.LinearExpr.sum(several) == literal)

    def limit(self, profile: Profile, instant: int) -> None:
        """Keeps the usage at this instant within the limit."""
        amounts = profile.at(instant)
        room = profile.limit - float(profile.fixed[instant])
        # Rounding up the amounts keeps every solution valid.
        scale = 1.0 if (amounts == np.round(amounts)).all() else 2.0**40 / max(1.0, float(amounts.max()))
        weights = np.ceil(amounts * scale).astype(np.int64)
        literals = [x for several in self.literals.values() for x in several]
        used = np.flatnonzero(weights).tolist()
        terms = cp_model.LinearExpr.weighted_sum([literals[i] for i in used], weights[used].tolist())
        self.model.add(terms <= math.floor(room * scale))

    def choices(self, solver: cp_model.CpSolver) -> list[int]:
        """The choices of the solver's solution, in the order of the variables."""
        return [
            next(k for k, literal in enumerate(several) if solver.boolean_value(literal))
            for several in self.literals.values()
        ]

    def _objective(self) -> tuple[float, float]:
        values = np.array([c for _, c in self.terms])
        total = float(values.sum())
        whole = total < _LARGEST_TOTAL and bool((values == np.round(values)).all())
        unit = 1.0 if whole or not total else 2.0 ** math.ceil(math.log2(total / _LARGEST_TOTAL))
        weights = np.round(values / unit).astype(np.int64).tolist()
        self.model.minimize(cp_model.LinearExpr.weighted_sum([x for x, _ in self.terms], weights))
        return unit, 0.0 if whole else 0.5 * (len(self.literals) + sum(map(len, self.graph.neighbours)) / 2)
