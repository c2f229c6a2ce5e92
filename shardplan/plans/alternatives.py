"""The alternatives of a variable of the network, and their extra cost.

A search with the variable fixed to another choice gives the exact cost, while the time suffices. For the rest, a local
search improves the other choices one by one. Its cost is an upper bound: "at most".
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.search import Network, solve

# The gap at which searches stop. The last digits of an extra cost do not matter.
_PRECISION = 1e-4

# The most improvements of a local search, per variable of the network.
_UPDATES_PER_VARIABLE = 4


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another choice of a variable, and the extra cost of the best assignment with it.

    ``searched``: whether the cost is exact, within a hundredth of a percent of the whole cost. Else it is an upper
    bound.
    """

    choice: int
    extra_cost: float
    searched: bool


def alternatives(network: Network, choices: Sequence[int], variable: int, time_limit: float) -> list[Alternative]:
    """Every other possible choice of a variable, cheapest first. ``time_limit`` in seconds bounds the searches."""
    deadline = time.monotonic() + time_limit
    present = network.cost(choices)
    neighbours = _neighbours(network)
    estimates = [
        Alternative(choice, _improved(network, neighbours, choices, variable, choice) - present, False)
        for choice in range(network.costs[variable].size)
        if choice != choices[variable] and np.isfinite(network.costs[variable][choice])
    ]
    found = []
    for estimate in sorted(estimates, key=lambda alternative: alternative.extra_cost):
        left = deadline - time.monotonic()
        found.append(_searched(network, variable, estimate, present, left) if left > 0 else estimate)
    return sorted(found, key=lambda alternative: alternative.extra_cost)


def _searched(network: Network, variable: int, estimate: Alternative, present: float, seconds: float) -> Alternative:
    held = copy.copy(network)
    held.costs = list(network.costs)
    held.costs[variable] = np.where(
        np.arange(network.costs[variable].size) == estimate.choice, network.costs[variable], np.inf
    )
    solution = solve(held, gap=_PRECISION, time_limit=seconds)
    if solution.status == "optimal":
        return Alternative(estimate.choice, max(0.0, solution.cost - present), True)
    return Alternative(estimate.choice, max(0.0, min(solution.cost - present, estimate.extra_cost)), False)


def _neighbours(network: Network) -> list[list[tuple[int, np.ndarray]]]:
    """Per variable its neighbours, each with the table whose rows are the variable's choices."""
    found: list[list[tuple[int, np.ndarray]]] = [[] for _ in network.costs]
    for u, v, table in network.edges:
        found[u].append((v, network.tables[table]))
        found[v].append((u, network.tables[table].T))
    return found


def _improved(
    network: Network,
    neighbours: list[list[tuple[int, np.ndarray]]],
    choices: Sequence[int],
    variable: int,
    choice: int,
) -> float:
    """The cost with a variable fixed to a choice, after a local search of the others."""
    picked = list(choices)
    picked[variable] = choice
    waiting = deque(dict.fromkeys(other for other, _ in neighbours[variable]))
    queued = set(waiting)
    for _ in range(_UPDATES_PER_VARIABLE * len(picked)):
        if not waiting:
            break
        other = waiting.popleft()
        queued.discard(other)
        if other == variable:
            continue
        costs = network.costs[other] * network.multiplicities[other]
        for neighbour, table in neighbours[other]:
            costs = costs + table[:, picked[neighbour]]
        best = int(costs.argmin())
        if costs[best] < costs[picked[other]]:
            picked[other] = best
            fresh = [n for n, _ in neighbours[other] if n not in queued]
            waiting.extend(fresh)
            queued.update(fresh)
    return network.cost(picked)
