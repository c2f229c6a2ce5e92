"""The table of search methods by name, and `solve`, which runs one."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardplan.search.exact import auto, exact, lowest_peak
from shardplan.search.graph.graph import Infeasible
from shardplan.search.network import Network
from shardplan.search.rivals import tofu
from shardplan.search.run import Run, Stop
from shardplan.search.solution import ProgressCallback, Solution

__all__ = ["METHODS", "Method", "register", "solve"]


@dataclass(frozen=True, slots=True)
class Method:
    """A search, and what it can do.

    search: gets the run, and gives it assignments and bounds as it finds them.
    proves: whether it gives lower bounds. limits: whether it keeps usage limits. annotated: whether every variable
    must be annotated.
    """

    search: Callable[[Run], None]
    proves: bool
    limits: bool
    annotated: bool


METHODS: dict[str, Method] = {}

_WORK_SHARE = 0.35
"""The share of the time limit that estimated work may take where no usage is limited. Reductions, pruning and the
arrays of message passing are not counted and take about half as long again. So work ends most searches instead of the
clock, also on a machine of half the speed."""


def register(name: str, method: Method) -> None:
    """Makes a method known to `solve`; names are given once."""
    if name in METHODS:
        raise ValueError(f"the method `{name}` is there already")
    METHODS[name] = method


register("auto", Method(auto, proves=True, limits=True, annotated=False))
register("exact", Method(exact, proves=True, limits=True, annotated=False))
for _rival in (tofu.recursive, tofu.all_row_greedy, tofu.largest_first, tofu.equal_chop):
    register(_rival.__name__, Method(_rival, proves=False, limits=False, annotated=True))


def solve(
    network: Network,
    method: str = "auto",
    time_limit: float = 60.0,
    gap: float = 1e-6,
    progress: ProgressCallback | None = None,
    work_limit: float = math.inf,
    is_feasible: Callable[[NDArray[np.int64]], bool] | None = None,
    acceptable_gap: float = 0.0,
) -> Solution:
    """Finds a choice for every variable with the least cost.

    method: a name of `METHODS`; the default decides by itself (see `shardplan.search.exact.auto`).
    time_limit: seconds after which the search ends with the best found. Up to then the same network gives the same
        solution, however fast the machine; most searches that do not prove what they find end earlier, by their work.
    gap: the search ends when the cost is proven to be within this share of the optimum.
    progress: called now and then with a `Progress`; the search ends when it returns False. The best found so far is
        returned then, with the status `interrupted`. A `KeyboardInterrupt` is not caught.
    work_limit: estimated seconds (`Solution.work`) after which the search ends, at the same place on every machine.
    is_feasible: a test beyond the network, called for an assignment near the bound where the proof takes long, or for
        the best one within a usage limit. The search ends with an assignment that fails it.
    acceptable_gap: a larger gap. Once it is reached, the search takes a third as much work again at most.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method `{method}`; there are {', '.join(sorted(METHODS))}")
    if not (time_limit > 0 and gap >= 0 and work_limit > 0):
        raise ValueError(
            f"expected time_limit > 0, gap >= 0 and work_limit > 0, got {time_limit}, {gap} and {work_limit}"
        )
    if network.usage_limit is None:
        work_limit = min(work_limit, _WORK_SHARE * time_limit)
    before = time.process_time()
    run = Run(network, time_limit, gap, progress, work_limit, is_feasible)
    run.acceptable_gap = max(gap, acceptable_gap)
    with contextlib.suppress(Stop):
        _search(run, METHODS[method])
    if run.choices is None and run.cost == math.inf and not run.proven_infeasible:
        # The time was over before anything was found: a poor assignment serves better than none.
        with contextlib.suppress(Infeasible):
            run.offer(tofu.greedy(network))
    return replace(run.solution(method), processor_seconds=time.process_time() - before)


def _search(run: Run, method: Method) -> None:
    try:
        method.search(run)
    except Infeasible:
        run.proven_infeasible = True
        run.bound(math.inf)
        # What is the least that would do? Unless the exclusions alone leave nothing.
        with contextlib.suppress(Infeasible), run.stage("fit"):
            lowest_peak(run)
