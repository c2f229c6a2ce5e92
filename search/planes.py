"""Planes above the concave function that prices of usage give (see `shardplan.search.pricing`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Plane", "highest_between"]

Array = NDArray[np.float64]
Index = NDArray[np.intp]
_POINTS_BETWEEN = 65


@dataclass(frozen=True, slots=True)
class Plane:
    """An assignment of a graph, by place: L(q) is at most cost + q excess."""

    cost: float
    excess: Array
    choices: Index

    def at(self, prices: Array) -> float:
        """What the plane leaves to L at these prices."""
        return self.cost + float(prices @ self.excess)


def highest_between(planes: Sequence[Plane], low: Array, high: Array) -> tuple[float, Array]:
    """The highest value that planes leave to L between two prices, and the prices where they do."""
    points = low + np.linspace(0.0, 1.0, _POINTS_BETWEEN)[:, None] * (high - low)
    ceilings = np.min([plane.cost + points @ plane.excess for plane in planes], axis=0)
    highest = int(ceilings.argmax())
    return float(ceilings[highest]), points[highest]
