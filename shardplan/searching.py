"""Searching: from a problem to the best schedule within the memory limit.

The problem is first solved without memory. Only where the plan that is found does not fit is memory made part of the
network, and solved again; so programs that fit, most of them, do not pay for the limit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardplan.correcting import Corrections
from shardplan.errors import InfeasibleError
from shardplan.filling import fill
from shardplan.finding import CLEARLY, Counts, Found, Search, find
from shardplan.leanest import MOST_TRIALS, Leanest
from shardplan.memory.liveness import memory_profile
from shardplan.memory.products import turned_carries
from shardplan.problem import Problem
from shardplan.relieving import relieve
from shardplan.running import sums_of_products
from shardplan.search import Solution
from shardplan.search.solution import relative_gap
from shardplan.tables import megabytes

_FAR_TOO_DEAR = 0.35
"""The gap, to what is needed without a limit, above which a schedule that fits is held against leaner ones, and the
best of these is searched on from."""


_TRIALS_BESIDE = 2
"""So many trials are made for it: they need not find one within the limit, as is needed where nothing else is."""


def search_within(problem: Problem, search: Search) -> Found:
    """The best schedule whose peak keeps within the limit. Raises InfeasibleError where nothing fits."""
    deadline = time.perf_counter() + search.seconds
    limit_bytes, ways = search.limit_bytes, [Counts(problem, search)]
    if limit_bytes < np.inf and (sums_of_products(problem).running or turned_carries(problem.program)):
        ways.append(Counts(problem, search, running=True))
    begun: list[Solution] = []

    def serves(choices: NDArray[np.int64]) -> bool:
        known = Solution(choices, np.inf, -np.inf, "feasible", search.method)
        if not begun:  # whatever the limit is: it has decided nothing so far
            begun.append(known)
        return any(counts.own(known).peak_bytes <= CLEARLY * limit_bytes for counts in ways)

    asked = serves if limit_bytes < np.inf else None
    best = find(problem, problem.network, search, search.seconds, serves=asked)
    if best.status == "infeasible":
        raise InfeasibleError(
            "the hard layouts of pins and constraints exclude each other: no layout of the step has them all"
        )
    for counts in ways:
        found = counts.own(best)
        if found.peak_bytes <= limit_bytes:
            return found
    return _search_again(counts, search, [found, counts.own(begun[0] if begun else best)], deadline)


def _search_again(counts: Counts, search: Search, first: Sequence[Found], deadline: float) -> Found:
    """The best schedule within the limit, where none of the ``first`` is: the best one without a limit, and one that
    does not depend on this limit."""
    corrections = Corrections(counts, search, first[0], deadline)
    leanest = Leanest(counts, search, first[1], deadline)

    def otherwise() -> None:
        leanest.begin()
        corrections.unreached = leanest.bound
        corrections.take_counted()
        relieve(corrections, corrections.until)

    def far_too_dear(found: Found) -> bool:
        return relative_gap(found.solution.cost, first[0].solution.lower_bound) > _FAR_TOO_DEAR

    corrections.follow(first[0], otherwise)
    if corrections.best is None or far_too_dear(corrections.best):
        leanest.look(MOST_TRIALS if corrections.best is None else _TRIALS_BESIDE)
        corrections.take_leaner()
        if corrections.best is not None and far_too_dear(corrections.best):
            corrections.search_from_best()
    else:
        corrections.search_a_little_more()
    if corrections.best is not None:
        fill(corrections)
        return corrections.best_proven()
    least, late = leanest.found, time.perf_counter() > deadline and leanest.bound <= search.limit_bytes
    raise InfeasibleError(
        _does_not_fit(counts.problem, least, min(leanest.bound, least.peak_bytes), search, late), least.peak_bytes
    )


def _does_not_fit(problem: Problem, least: Found, bound: float, search: Search, late: bool) -> str:
    lifetimes = least.lifetimes
    profile = memory_profile(lifetimes, least.schedule, search.donated)
    moment = int(np.argmax(profile))
    program = problem.program
    makers = program.makers
    alive = []
    for value, lifetime in lifetimes.held.items():
        if lifetime.start <= moment <= lifetime.end:
            layout = least.schedule.assignment.values[value]
            domain = problem.domain(value)
            degree = domain.degrees[domain.position[layout]]
            tensor = program.values[value]
            where = tensor.name or (makers[value].source if value in makers else "captured array")
            alive.append((tensor.total_bytes / degree, f"{tensor.dtype}{list(tensor.shape)} of `{where}`"))
    largest = sorted(alive, key=lambda entry: -entry[0])[:5]
    lines = "\n".join(f"  {megabytes(size):>10} MB  {what}" for size, what in largest)
    proven = f"; by the planner's count none is below {_size(bound)}" if bound else ""
    helps = ["more devices", "a smaller batch", "jax.checkpoint around layers"]
    helps += ["donate_argnums for the state"] * (not search.donated) + ["more time"] * late
    stopped = f" in the {search.seconds:g} seconds of its search (`time_limit`)" if late else ""
    return (
        f"no layout was found{stopped} that keeps within {_size(search.limit_bytes)} per device; "
        f"the least peak found is {_size(least.peak_bytes)}{proven}. The largest tensors there, per device:\n{lines}\n"
        f"What helps: {', '.join(helps)}."
    )


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{megabytes(count)} MB"
