"""The methods by name, all with one signature."""

from __future__ import annotations

from collections.abc import Callable

from shardplan.search.exact import exact
from shardplan.search.graph import Infeasible
from shardplan.search.network import Network
from shardplan.search.run import Run, Stop
from shardplan.search.solution import ProgressCallback, Solution

__all__ = ["METHODS", "solve"]

METHODS: dict[str, Callable[[Run], None]] = {"auto": exact, "exact": exact}


def solve(
    network: Network,
    method: str = "auto",
    time_limit: float = 60.0,
    gap: float = 1e-6,
    progress: ProgressCallback | None = None,
) -> Solution:
    """Finds a choice for every variable with the least cost.

    method: a name of `METHODS`.
    time_limit: seconds after which the search ends with the best found.
    gap: the search ends when the cost is proven to be within this share of the optimum.
    progress: called now and then with a `Progress`; the search ends when it returns False.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method `{method}`; there are {', '.join(sorted(METHODS))}")
    run = Run(network, time_limit, gap, progress)
    try:
        METHODS[method](run)
    except Stop:
        pass
    except Infeasible:
        run.proven_infeasible = True
    except KeyboardInterrupt:
        run.interrupted = True
    return run.solution(method)
