"""Elimination of one variable from a sum of tables: the minimum over its choices, as a table over the others.

`shardplan.search.graph.dynamic_programming` spends most of its time here. Adjacent dimensions that the same tables have
count as one long dimension. Large results are computed choice by choice. The sum over all dimensions, which would not
fit the processor's caches, is never stored.

>>> costs, table = np.array([0.0, 1.0]), np.array([[5.0, 0.0, 9.0], [0.0, 1.0, 1.0]])
>>> taken = eliminate_variable(7, costs, [((7, 8), table)], Scratch(), True)
>>> taken.scope, taken.least.tolist(), [taken.decide({8: choice}) for choice in range(3)]
((8,), [1.0, 0.0, 2.0], [1, 0, 1])
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["Decision", "EliminatedVariable", "Factor", "Scratch", "axes_in_order", "eliminate_variable"]

Array = NDArray[np.float64]
Factor = tuple[tuple[int, ...], Array]
"""Variables, and a table with a dimension for each."""
Decision = Callable[[dict[int, int]], int]
"""A variable's cheapest choice, given those of others."""
_ALL = slice(None)
_LARGE_RESULT = 2048
"""Entries of what is left from which on choices are taken one after the other, and dimensions in runs."""


@dataclass(slots=True)
class Scratch:
    """Memory for one table after the other: to ask for new memory takes longer than to write sums to it."""

    entries: Array = field(default_factory=lambda: np.empty(0))

    def of(self, shape: tuple[int, ...]) -> Array:
        """A table of this shape, whose entries may be anything."""
        count = math.prod(shape)
        if len(self.entries) < count:
            self.entries = np.empty(count)
        return self.entries[:count].reshape(shape)


@dataclass(frozen=True, slots=True)
class EliminatedVariable:
    """What taking a variable out, of these costs and factors, has left.

    least: a table over `scope`, of the least sum of all that any choice of the variable has. decide: says which one.
    """

    costs: Array
    factors: list[Factor]
    scope: tuple[int, ...]
    least: Array
    decide: Decision

    def of(self, costs: Array, factors: list[Factor]) -> bool:
        """Whether these are the ones."""
        same = costs is self.costs and len(factors) == len(self.factors)
        return same and all(one[1] is other[1] for one, other in zip(factors, self.factors, strict=True))


def eliminate_variable(
    v: int, costs: Array, factors: list[Factor], scratch: Scratch, keeps: bool
) -> EliminatedVariable:
    """Takes a variable of these costs out of the factors that have it.

    keeps: whether these are kept to decide by, rather than which choice is the cheapest for each of the others'.
    """
    ordered = sorted(factors, key=_size)  # sums grow to the full size only at the end
    sizes = {w: size for names, table in factors for w, size in zip(names, table.shape, strict=True) if w != v}
    large = math.prod(sizes.values()) >= _LARGE_RESULT
    scope = _in_runs(sizes, ordered) if large else (*sizes,)
    tables = [axes_in_order(factor, (v, *scope), large) for factor in ordered]
    total, shape = costs.reshape(-1, *[1] * len(scope)), tuple([sizes[w] for w in scope])
    best = None if keeps else np.zeros(shape, dtype=np.uint16)
    if large:
        least = _least_of_rows(total, tables, scratch.of(shape), best)
    else:
        for number, table in enumerate(tables):
            if number and total.shape[1:] == shape:
                total += table
            else:
                total = total + table
        least = np.minimum.reduce(total)
        best = None if keeps else total.argmin(axis=0).astype(np.uint16)
    decide = _of_sums(v, costs, ordered) if best is None else _of_all(scope, best)
    return EliminatedVariable(costs, factors, scope, least, decide)


def _in_runs(sizes: dict[int, int], factors: list[Factor]) -> tuple[int, ...]:
    """The variables in an order in which those of the same factors stand together, the longest such run last."""
    runs: dict[tuple[bool, ...], list[int]] = {}
    for w in dict.fromkeys([w for names, _ in reversed(factors) for w in names if w in sizes]):
        runs.setdefault(tuple([w in names for names, _ in factors]), []).append(w)
    return tuple([w for run in sorted(runs.values(), key=lambda run: math.prod([sizes[w] for w in run])) for w in run])


def axes_in_order(factor: Factor, order: tuple[int, ...], copies: bool) -> Array:
    """A factor's table with dimensions in the order of these variables, of one entry for those that it has not."""
    names, table = factor
    table = table.transpose([names.index(w) for w in order if w in names])
    if copies:
        table = np.ascontiguousarray(table)
    return table if len(names) == len(order) else table[tuple([_ALL if w in names else None for w in order])]


def _least_of_rows(total: Array, tables: list[Array], row: Array, best: NDArray[np.uint16] | None) -> Array:
    """The least of the rows of a total and tables added to it; `best` gets which row it is.

    row: memory for one row.
    """
    first = 0
    while first + 1 < len(tables) and np.broadcast_shapes(total.shape[1:], tables[first].shape[1:]) != row.shape:
        total = total + tables[first]
        first += 1
    least: Array = np.empty(row.shape)
    for k in range(len(total)):
        into = row if k else least
        np.add(total[k], tables[first][k], out=into)
        for table in tables[first + 1 :]:
            into += table[k]
        if k and best is not None:
            best[row < least] = k
        if k:
            np.minimum(least, row, out=least)
    return least


def _of_sums(v: int, costs: Array, factors: list[Factor]) -> Decision:
    """The choice of `v` of the least cost and entries of its tables, given the choices of all others."""

    def decide(found: dict[int, int]) -> int:
        total = costs
        for names, table in factors:
            total = total + table[tuple([_ALL if w == v else found[w] for w in names])]
        return int(total.argmin())

    return decide


def _of_all(scope: tuple[int, ...], best: NDArray[np.uint16]) -> Decision:
    """The same where only the choices are kept."""
    return lambda found: int(best[tuple([found[w] for w in scope])])


def _size(factor: Factor) -> int:
    return factor[1].size
