"""Cutting planes of the concave dual function of usage prices (see `shardplan.search.limits.usage_prices`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.search.or_tools import pywraplp

__all__ = ["Plane", "maximum", "maximum_between"]

Array = NDArray[np.float64]
Index = NDArray[np.intp]
_POINTS_BETWEEN = 65
_PRICE_WEIGHT = 1e-4
"""The weight of the prices in the objective, next to the value that the planes leave to L."""


@dataclass(frozen=True, slots=True)
class Plane:
    """An assignment of a graph, by place: L(q) is at most cost + q excess."""

    cost: float
    excess: Array
    choices: Index

    def at(self, prices: Array) -> float:
        """What the plane leaves to L at these prices."""
        return self.cost + float(prices @ self.excess)


def maximum(planes: Sequence[Plane], scale: float, enough: float) -> tuple[float, Array] | None:
    """The highest value that planes leave to L at prices up to `scale`, or `enough` where that is less, and the lowest
    prices where they do."""
    program = pywraplp.Solver.CreateSolver("GLOP")
    unit = max(abs(planes[0].cost), 1e-30)
    value = program.NumVar(-program.infinity(), enough / unit if enough < math.inf else program.infinity(), "")
    prices = [program.NumVar(0.0, 1.0, "") for _ in planes[0].excess]
    for plane in planes:
        terms = [float(e) * (scale / unit) * p for e, p in zip(plane.excess, prices, strict=True) if e]
        program.Add(value <= plane.cost / unit + sum(terms))
    program.Maximize(value - _PRICE_WEIGHT * sum(prices))
    if program.Solve() != pywraplp.Solver.OPTIMAL:
        return None
    return unit * value.solution_value(), scale * np.array([p.solution_value() for p in prices])


def maximum_between(planes: Sequence[Plane], low: Array, high: Array) -> tuple[float, Array]:
    """The highest value that planes leave to L between two prices, and the prices where they do."""
    points = low + np.linspace(0.0, 1.0, _POINTS_BETWEEN)[:, None] * (high - low)
    ceilings = np.min([plane.cost + points @ plane.excess for plane in planes], axis=0)
    maximum = int(ceilings.argmax())
    return float(ceilings[maximum]), points[maximum]
