"""Descending: what makes a schedule within the memory limit cheaper where it stands is taken over.

A search pays for memory at all places at which some schedule exceeded the limit, and by prices that some other schedule
was found at. What it finds at last leaves memory in its own order, and mixtures of schedules (`shardplan.filling`) have
parts that no longer belong together: a tensor that is sent twice, once for each reader, where one copy could be held.
So each variable is given its cheapest choice while the rest stays as it is (`shardplan.search.descending`), and of
these changes, those that fit are kept.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from shardplan.correcting import Corrections
from shardplan.finding import Found
from shardplan.search import Descent, descents

_NEARLY_ALL = 0.999
"""What takes so much of the limit leaves nothing to take over."""

_WORTH = 0.01
"""Changes that save less of the cost, all together, are not tried."""

_MOST_WORK = 0.6
"""A share of what searches may take, which is not taken from them."""

_SECONDS_PER_VARIABLE = 3e-5


def descend(known: Corrections) -> None:
    """Takes over all changes that make the best schedule cheaper; or, where that exceeds the limit, those that keep
    within it in the order of the schedule, and of these, those that do so in their own."""
    base = known.best
    if base is None or base.solution.choices.tobytes() == known.stood:
        return
    if base.peak_bytes <= _NEARLY_ALL * known.limit_bytes:
        before = known.work
        _take_over(known, base, _MOST_WORK * known.patience)
        known.spent -= known.work - before  # searches go on as if nothing had been taken over
    known.stood = known.best.solution.choices.tobytes() if known.best is not None else b""


def _take_over(known: Corrections, base: Found, most_work: float) -> None:
    """Likewise, of the best schedule, with so much work, half of it in the schedule's order."""
    half = known.work + most_work / 2
    network, choices = known.problem.network, base.solution.choices
    known.spent += _SECONDS_PER_VARIABLE * len(network)
    cheaper = sorted(descents(network, choices), key=lambda descent: -descent.gain)
    if not _is_worth_it(cheaper, base) or _own(known, _changed(choices, cheaper)) <= known.limit_bytes:
        return
    fitting = _fitting(known, base, cheaper, lambda tried: known.within(tried, base.lifetimes).peak_bytes, half)
    _fitting(known, base, fitting, lambda tried: _own(known, tried), half + most_work / 2)


def _own(known: Corrections, choices: NDArray[np.int64]) -> float:
    return known.count(choices).peak_bytes


def _changed(choices: NDArray[np.int64], cheaper: list[Descent]) -> NDArray[np.int64]:
    changed = choices.copy()
    for descent in cheaper:
        changed[[*descent.choices]] = [*descent.choices.values()]
    return changed


def _is_worth_it(cheaper: list[Descent], base: Found) -> bool:
    return sum(descent.gain for descent in cheaper) >= _WORTH * base.solution.cost


def _fitting(
    known: Corrections,
    base: Found,
    cheaper: list[Descent],
    peak_of: Callable[[NDArray[np.int64]], float],
    until: float,
) -> list[Descent]:
    """What of these changes keeps within the limit: all, or where that does not, one half after the other, first that
    which saves most."""
    taken, found, waiting = base.solution.choices, list[Descent](), [cheaper]
    while known.work < until:
        while waiting and not _is_worth_it(waiting[-1], base):
            waiting.pop()
        if not waiting:
            break
        part = waiting.pop()
        tried = _changed(taken, part)
        if peak_of(tried) <= known.limit_bytes:
            taken, found = tried, found + part
        elif len(part) > 1:
            half = len(part) // 2
            waiting += [part[half:], part[:half]]
    return found
