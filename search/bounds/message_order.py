"""The model of message passing: costs, edges and tables, with an order of the variables by levels."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Model", "levels_of"]

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Model:
    """What is swept: costs per variable, and per edge its ends and its table `[first, second]`."""

    costs: list[Array]
    edges: list[tuple[int, int]]
    tables: list[Array]


def _ranks(model: Model) -> list[int]:
    """The variables' order: breadth first, from those with most edges.

    Any order gives valid bounds. This one has few levels, so that sweeps are cheap, and was about as good per sweep as
    orders with long chains.
    """
    around: list[list[int]] = [[] for _ in model.costs]
    for u, v in model.edges:
        around[u].append(v)
        around[v].append(u)
    rank = [-1] * len(around)
    found: list[int] = []
    for start in sorted(range(len(around)), key=lambda v: (-len(around[v]), v)):
        if rank[start] >= 0:
            continue
        rank[start] = len(found)
        found.append(start)
        for v in itertools.islice(found, rank[start], None):
            for w in around[v]:
                if rank[w] < 0:
                    rank[w] = len(found)
                    found.append(w)
    return rank


def levels_of(model: Model) -> list[int]:
    """Per variable: one more than the highest level of its neighbours of lower rank."""
    below: list[list[int]] = [[] for _ in model.costs]
    rank = _ranks(model)
    for u, v in model.edges:
        if rank[u] < rank[v]:
            below[v].append(u)
        else:
            below[u].append(v)
    levels = [0] * len(model.costs)
    for v in sorted(range(len(rank)), key=rank.__getitem__):
        levels[v] = 1 + max((levels[u] for u in below[v]), default=-1)
    return levels
