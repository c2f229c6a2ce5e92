"""The cheapest paths between all layouts of a tensor, where single steps lead from each to a few others.

There are few steps, and paths are short: going through all layouts forth and back, as long as paths get cheaper (by the
method of Bellman and Ford), looks at each step a few times, for all that paths begin at together. Four mesh axes make
1,296 layouts of a tensor of five dimensions, with 22,000 steps between them.

>>> priced, previous = cheapest_paths([{}, {0: (2.0, 1.0)}, {0: (9.0, 1.0), 1: (3.0, 1.0)}])
>>> float(priced.per_byte[0, 2]), float(priced.fixed[0, 2]), int(previous[0, 2]), float(priced.per_byte[2, 0])
(5.0, 2.0, 1, inf)
>>> priced.of(10.0, [2, 0])
array([[52.,  0.],
       [31., inf],
       [ 0., inf]])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Priced:
    """A price that is linear in the bytes of the whole tensor, per pair of layouts."""

    per_byte: np.ndarray
    fixed: np.ndarray

    def of(self, total_bytes: float, targets: Sequence[int] | None = None) -> np.ndarray:
        """The prices for a tensor of so many bytes, float [sources, targets]: of some of the targets, or of all."""
        per_byte, fixed = self.per_byte, self.fixed
        if targets is not None:
            per_byte, fixed = (array.take(targets, axis=1) for array in (per_byte, fixed))
        if not total_bytes:  # what cannot be costs nothing of no bytes
            return np.where(np.isfinite(per_byte), fixed, np.inf)
        prices = per_byte * total_bytes
        prices += fixed
        return prices


def cheapest_paths(into: Sequence[Mapping[int, tuple[float, float]]]) -> tuple[Priced, np.ndarray]:
    """The prices between all nodes, float [sources, targets], and the last node on the cheapest path before its end,
    int [sources, targets]; the source where there is no path.

    ``into`` are per node those from which a single step leads there, with its price per byte, above 0, and what it
    costs besides, which decides nothing.
    """
    count = len(into)
    sources = [np.fromiter(steps, dtype=np.intp, count=len(steps)) for steps in into]
    prices = [np.array([*steps.values()]).reshape(-1, 2) for steps in into]
    costs = np.full((count, count), np.inf)  # [target, source], so that what is added up lies together
    np.fill_diagonal(costs, 0.0)
    cheaper = set(range(count))
    order = [node for node in range(count) if into[node]]
    while cheaper:
        before, cheaper = cheaper, set()
        for node in order:
            if cheaper.isdisjoint(into[node]) and before.isdisjoint(into[node]):
                continue
            found = (costs[sources[node]] + prices[node][:, :1]).min(axis=0)
            if (found < costs[node]).any():
                np.minimum(costs[node], found, out=costs[node])
                cheaper.add(node)
        order.reverse()
    itself = np.arange(count)
    previous, fixed = np.empty((count, count), dtype=np.intp), np.zeros((count, count))
    previous[:] = itself
    for node in order:
        best = (costs[sources[node]] + prices[node][:, :1]).argmin(axis=0)
        onto = np.isfinite(costs[node]) & (itself != node)
        previous[node, onto] = sources[node][best[onto]]
        fixed[node, onto] = prices[node][best[onto], 1]
    total, passed = fixed.copy(), previous
    while (passed != itself).any():  # back along all paths at once
        total += fixed[passed, itself]
        passed = previous[passed, itself]
    return Priced(np.ascontiguousarray(costs.T), np.ascontiguousarray(total.T)), np.ascontiguousarray(previous.T)
