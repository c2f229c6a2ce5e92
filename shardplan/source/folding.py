"""Repeated parts of a program: runs of statements that come several times, one after another, as layers do.

A run is found by a period: the statements are equal to those so many places later. Its copies become calls of one
function where values flow in the same way in all of them.

>>> [(run.start, run.length, run.copies) for run in repeats([9, *[1, 2, 3, 4, 5, 6, 7, 8] * 3, 9], least=8)]
[(1, 8, 3)]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEAST = 40
"""The least statements that folding must save."""

_CONTEXT = 8
"""The statements that must be equal at both ends of a period for it to be tried."""

_PERIODS = 60
"""The most periods that are tried."""


@dataclass(frozen=True, slots=True)
class Run:
    """Equal parts of some length, one after another. ``slack`` statements behind them repeat as well."""

    start: int
    length: int
    copies: int
    slack: int

    @property
    def saved(self) -> int:
        return (self.copies - 1) * self.length


def repeats(tokens: Sequence[int], least: int = LEAST) -> list[Run]:
    """The runs that save most statements, in the order of the program."""
    numbers = np.asarray(tokens, dtype=np.int64)
    free = np.ones(len(numbers), dtype=bool)
    periods, found = _periods(numbers, least), list[Run]()
    while True:
        runs = [run for period in periods for run in _runs(numbers, free, period)]
        best = max(runs, key=lambda run: (run.saved, -run.length), default=None)
        if best is None or best.saved < least:
            return sorted(found, key=lambda run: run.start)
        found.append(best)
        free[best.start : best.start + best.length * best.copies + best.slack] = False


def _periods(tokens: NDArray[np.int64], least: int) -> list[int]:
    """The most frequent distances between equal sequences of statements."""
    latest: dict[bytes, int] = {}
    distances: Counter[int] = Counter()
    for place in range(len(tokens) - min(_CONTEXT, least) + 1):
        key = tokens[place : place + _CONTEXT].tobytes()
        if key in latest:
            distances[place - latest[key]] += 1
        latest[key] = place
    return [period for period, _ in distances.most_common(_PERIODS) if period >= 4]


def _runs(tokens: NDArray[np.int64], free: NDArray[np.bool_], period: int) -> Iterator[Run]:
    """The runs of a period in the part that is free."""
    equal = (tokens[:-period] == tokens[period:]) & free[:-period] & free[period:]
    edges = np.flatnonzero(np.diff(np.concatenate(([False], equal, [False])).astype(np.int8)))
    for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        copies = (end - start) // period + 1
        if copies > 1:
            yield Run(start, period, copies, (end - start) % period)
