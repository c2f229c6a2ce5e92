"""Knapsack by linear programming and rounding: the parts of least cost within several capacities, with exclusions.

The linear program leaves about one fractional part per capacity. Parts that it takes whole are taken. While the
capacity is exceeded, the parts with the most relief per cost follow. Then all other parts that save cost and fit are
taken.

>>> costs, usages = np.array([-6.0, -5.0, -4.0]), np.array([[3.0], [2.0], [2.0]])
>>> packing = solve_knapsack(costs, usages, np.array([4.0]), [])
>>> packing.taken.tolist(), bool(packing.bound <= costs[packing.taken].sum())
([False, True, True], True)
>>> solve_knapsack(costs, usages, np.array([4.0]), [(0, 1), (0, 2), (1, 2)]).taken.tolist()
[True, False, False]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.search.or_tools import pywraplp

__all__ = ["KnapsackSolution", "solve_knapsack"]

Array = NDArray[np.float64]
_INTEGRAL = 1 - 1e-6


@dataclass(frozen=True, slots=True)
class KnapsackSolution:
    """taken: bool [parts]; bound: what no choice of parts costs less than."""

    taken: NDArray[np.bool_]
    bound: float


def solve_knapsack(
    costs: Array, usages: Array, room: Array, exclusions: Sequence[tuple[int, ...]]
) -> KnapsackSolution | None:
    """The parts to take, or None where no selection that fits was found.

    costs: [parts]; usages: [parts, kinds of room]; exclusions: numbers of parts of which one at most can be taken.
    """
    shares = _shares(costs, usages, room, exclusions)
    if shares is None:
        return None
    excluded: list[list[int]] = [[] for _ in costs]
    for numbers in exclusions:
        for number in numbers:
            excluded[number] += [other for other in numbers if other != number]
    scale = np.maximum(np.abs(usages).max(axis=0), 1e-30)
    taken, barred, left = np.zeros(len(costs), dtype=bool), np.zeros(len(costs), dtype=bool), room

    def take(number: int) -> None:
        nonlocal left
        taken[number], barred[number], left = True, True, left - usages[number]
        barred[excluded[number]] = True

    for number in np.flatnonzero(shares > _INTEGRAL).tolist():
        take(number)
    while (left < 0).any():
        short = np.maximum(-left, 0.0)
        made = np.where(barred, 0.0, (np.clip(-usages, -short, short) / scale).sum(axis=1))
        if not (made > 0).any():
            return None
        take(int(np.where(made > 0, costs / np.where(made > 0, made, 1.0), np.inf).argmin()))
    for number in np.argsort(-shares, kind="stable").tolist():
        if costs[number] < 0 and not barred[number] and (usages[number] <= left).all():
            take(number)
    return KnapsackSolution(taken, float(costs @ shares))


def _shares(costs: Array, usages: Array, room: Array, exclusions: Sequence[tuple[int, ...]]) -> Array | None:
    """How much of each part the linear program takes; None where nothing has room."""
    program = pywraplp.Solver.CreateSolver("GLOP")
    shares = [program.NumVar(0.0, 1.0, "") for _ in costs]
    objective, unit = program.Objective(), max(float(np.abs(costs).max()), 1e-30)
    for share, cost in zip(shares, costs.tolist(), strict=True):
        objective.SetCoefficient(share, cost / unit)
    objective.SetMinimization()
    for used, space in zip(usages.T, room.tolist(), strict=True):
        size = float(np.abs(used).max()) or max(abs(space), 1.0)
        row = program.Constraint(-program.infinity(), space / size)
        for number in np.flatnonzero(used).tolist():
            row.SetCoefficient(shares[number], float(used[number]) / size)
    for numbers in exclusions:
        row = program.Constraint(-program.infinity(), 1.0)
        for number in numbers:
            row.SetCoefficient(shares[number], 1.0)
    if program.Solve() != pywraplp.Solver.OPTIMAL:
        return None
    return np.array([share.solution_value() for share in shares])
