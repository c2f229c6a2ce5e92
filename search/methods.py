"""The methods by name, all with one signature."""

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

_COUNTED = 0.35
"""The share of the time limit that work, by estimate, may take where no usage is limited. What is not counted
(reducing, pruning, what is built for messages) takes about half as long besides. So it is counted work that ends
most searches, also on a machine of half the speed, and not the clock."""


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
    serves: Callable[[NDArray[np.int64]], bool] | None = None,
    enough: float = 0.0,
) -> Solution:
    """Finds a choice for every variable with the least cost.

    method: a name of `METHODS`; the default decides by itself (see `shardplan.search.exact.auto`).
    time_limit: seconds after which the search ends with the best found. Up to then the same network gives the same
        solution, however fast the machine; most searches that do not prove what they find end earlier, by their work.
    gap: the search ends when the cost is proven to be within this share of the optimum.
    progress: called now and then with a `Progress`; the search ends when it returns False. The best found so far is
        returned then, with the status `interrupted`. A `KeyboardInterrupt` is not caught.
    work_limit: estimated seconds (`Solution.work`) after which the search ends, at the same place on every machine.
    serves: may be asked of an assignment that is near the bound, where proving it takes long, or that is the best so
        far within a usage limit; the search ends with it where it does not serve.
    enough: a larger gap that would do: from there on, the search takes a third as much work again at most.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method `{method}`; there are {', '.join(sorted(METHODS))}")
    if not (time_limit > 0 and gap >= 0 and work_limit > 0):
        raise ValueError(
            f"expected time_limit > 0, gap >= 0 and work_limit > 0, got {time_limit}, {gap} and {work_limit}"
        )
    if network.usage_limit is None:
        work_limit = min(work_limit, _COUNTED * time_limit)
    before = time.process_time()
    run = Run(network, time_limit, gap, progress, work_limit, serves)
    run.enough = max(gap, enough)
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
