"""Recombination of assignments: their differences fall into independent parts (partition crossover).

The variables in which two assignments differ fall into parts with no edge between them. The exchange of one part
changes the cost and the usage at each time by amounts that do not depend on the other parts. The best selection of
parts within the limit is a knapsack with a few constraints, and with exclusions of parts that overlap or touch. It is
far smaller than the graph: a plan of a hundred layers has some hundred parts. The travelling salesman problem has the
same operator (Whitley, Hains, Howe, "Tunneling between optima", 2009).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.search.graph.graph import Graph
from shardplan.search.graph.usage_profile import Profile
from shardplan.search.limits.knapsack import solve_knapsack
from shardplan.search.or_tools import cp_model
from shardplan.search.solver.cp_sat import SECONDS_PER_UNIT
from shardplan.search.solver.interruptible_cp_sat import solve_model

__all__ = ["Mixture", "Recombination"]

Array = NDArray[np.float64]
Index = NDArray[np.intp]
_UNITS = 2.0**45
"""Costs and usages are counted in such shares of the largest, where they are not whole numbers."""
_SECONDS_PER_VARIABLE = 3e-6
"""What finding the parts of one assignment takes, about, and packing one of them."""
_TOLERANCE = 0.01
"""How far above its bound a packing is good enough, as a share of that."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Places that change, what their choices are then, and what that adds to the cost and to usage per instant."""

    places: Index
    choices: Index
    cost: float
    usage: Array


@dataclass(frozen=True, slots=True)
class Mixture:
    """An assignment by place, or None where none was found, and the seconds of work that it should have taken."""

    choices: Index | None
    work: float


class Recombination:
    """Mixes assignments of a graph's variables, part by part."""

    def __init__(self, graph: Graph, live: Sequence[int], profile: Profile, instants: Index, offsets: Index) -> None:
        """instants: those at which usage may exceed the limit. offsets: where each variable's choices start among
        all."""
        self.graph, self.live, self.offsets = graph, live, offsets
        self.place = {v: place for place, v in enumerate(live)}
        self.amounts = np.stack([profile.at(instant) for instant in instants])
        self.room = profile.limit - profile.fixed[instants]
        self._known: tuple[list[bytes], list[_Part], list[tuple[int, ...]]] = [], [], []
        """The assignments that were mixed last, their parts and exclusions."""

    def best(self, base: Index, others: Sequence[Index], work: float, tolerance: float) -> Mixture:
        """The cheapest mixture within the limit of one assignment and parts of others, by place.

        work: of CP-SAT, in its deterministic time, at most. tolerance: how far above the least cost is good enough.
        """
        mixed, spent = [assignment.tobytes() for assignment in (base, *others)], 0.0
        if mixed != self._known[0]:
            parts: dict[tuple[bytes, bytes], _Part] = {}
            for other in others:
                for part in self._parts(base, other):
                    parts.setdefault((part.places.tobytes(), part.choices.tobytes()), part)
            every = list(parts.values())
            self._known = mixed, every, self._exclusions(every)
            spent = _SECONDS_PER_VARIABLE * len(self.live) * len(others)
        _, every, exclusions = self._known
        if not every:
            return Mixture(None, spent)
        room = self.room - self.amounts[:, self.offsets[:-1] + base].sum(axis=1)
        taken, time = _knapsack(every, room, exclusions, work, tolerance)
        if not taken:
            return Mixture(None, spent + time)
        mixture = base.copy()
        for part in taken:
            mixture[part.places] = part.choices
        return Mixture(mixture, spent + time)

    def _parts(self, base: Index, other: Index) -> list[_Part]:
        """The difference of two assignments, as parts that no edge joins."""
        graph, live, place = self.graph, self.live, self.place
        left = dict.fromkeys(np.flatnonzero(base != other).tolist())
        parts = []
        while left:
            first = next(iter(left))
            del left[first]
            part, cost = [first], 0.0
            for here in part:  # which grows
                v, old, new = live[here], int(base[here]), int(other[here])
                costs = graph.costs[v]
                assert costs is not None
                cost += float(costs[new] - costs[old])
                for w, table in graph.neighbours[v].items():
                    there = place[w]
                    if base[there] == other[there]:
                        cost += float(table[new, base[there]] - table[old, base[there]])
                        continue
                    if v < w:
                        cost += float(table[new, other[there]] - table[old, base[there]])
                    if there in left:
                        del left[there]
                        part.append(there)
            places = np.array(sorted(part), dtype=np.intp)
            starts = self.offsets[:-1][places]
            change = self.amounts[:, starts + other[places]] - self.amounts[:, starts + base[places]]
            parts.append(_Part(places, other[places], cost, change.sum(axis=1)))
        return parts

    def _exclusions(self, parts: Sequence[_Part]) -> list[tuple[int, ...]]:
        """Sets of parts that exclude each other: those that change either end of an edge."""
        touching: dict[int, list[int]] = {}
        for number, part in enumerate(parts):
            for here in part.places.tolist():
                touching.setdefault(here, []).append(number)
        found: dict[tuple[int, ...], None] = {}
        for here, numbers in touching.items():
            found[tuple(numbers)] = None
            for w in self.graph.neighbours[self.live[here]]:
                if (there := self.place[w]) > here and there in touching:
                    found[tuple(sorted({*numbers, *touching[there]}))] = None
        return [numbers for numbers in found if len(numbers) > 1]


def _knapsack(
    parts: Sequence[_Part], room: Array, exclusions: Sequence[tuple[int, ...]], work: float, tolerance: float
) -> tuple[list[_Part], float]:
    """The parts that keep within the room at the least cost, empty where none are known, and the seconds of work
    that it should have taken."""
    costs, usages = np.array([part.cost for part in parts]), np.stack([part.usage for part in parts])
    begun, time = solve_knapsack(costs, usages, room, exclusions), _SECONDS_PER_VARIABLE * len(parts)
    chosen = None if begun is None else begun.taken
    if begun is None or costs[begun.taken].sum() - begun.bound > max(tolerance, _TOLERANCE * abs(begun.bound)):
        chosen, spent = _closed(costs, usages, room, exclusions, (work, tolerance, chosen))
        time += spent
    return [] if chosen is None else [parts[number] for number in np.flatnonzero(chosen).tolist()], time


def _closed(
    costs: Array,
    usages: Array,
    room: Array,
    exclusions: Sequence[tuple[int, ...]],
    begun: tuple[float, float, NDArray[np.bool_] | None],
) -> tuple[NDArray[np.bool_] | None, float]:
    """CP-SAT's choice of parts, or what is known where it has no better one, and the seconds that it should have taken.

    begun: the work, the tolerance, and what is known.
    """
    work, tolerance, known = begun
    model = cp_model.CpModel()
    taken = [model.new_bool_var("") for _ in costs]
    for numbers in exclusions:
        model.add_at_most_one([taken[number] for number in numbers])
    for changes, left in zip(usages.T, room.tolist(), strict=True):
        whole = (changes == np.round(changes)).all() and np.abs(changes).sum() < _UNITS
        unit = 1.0 if whole else max(float(np.abs(changes).max()), abs(left)) / _UNITS
        if unit > 0:  # rounding up keeps what is found within the limit
            weights = np.ceil(changes / unit).astype(np.int64).tolist()
            model.add(cp_model.LinearExpr.weighted_sum(taken, weights) <= int(np.floor(left / unit)))
    unit = max(float(np.abs(costs).max()), 1e-30) / _UNITS
    model.minimize(cp_model.LinearExpr.weighted_sum(taken, np.round(costs / unit).astype(np.int64).tolist()))
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = work
    # presolving a knapsack of large numbers takes a quarter of a second, uncounted; relaxed it was by `solve_knapsack`
    solver.parameters.cp_model_presolve = False
    solver.parameters.linearization_level = 0
    solver.parameters.absolute_gap_limit = max(tolerance / unit, 1.0)
    if known is not None or (room >= 0).all():
        for number, variable in enumerate(taken):
            model.add_hint(variable, known is not None and bool(known[number]))
    status = solve_model(solver, model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        found = np.array([solver.boolean_value(variable) for variable in taken])
        known = found if known is None or costs[found].sum() < costs[known].sum() else known
    return known, SECONDS_PER_UNIT * solver.response_proto.deterministic_time
