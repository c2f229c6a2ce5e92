"""The alternatives of a variable of the network, and their prices.

A price is the extra cost of the best assignment with another choice. Two searches find it:

1. A search of a neighbourhood, with all choices outside of it as planned. Its cost is an upper bound of the price.
   Larger neighbourhoods follow while time is left. The prices of most layouts are those of some hundred variables.
2. A search of the whole network without the choices that are priced so far. It gives the cheapest other choice with its
   exact price, and a lower bound for all others. Three of these make the three cheapest alternatives exact. It takes
   place where the network is small enough for the time that is left.
"""

from __future__ import annotations

import copy
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from shardplan.plans.plan_data import PlanData
from shardplan.search import Network, Solution, solve
from shardplan.timing.step_time import memory_traffic

_PRECISION = 1e-4
"""The gap at which searches stop, and the share of the whole cost within which a price is exact."""

_LOCAL_PRECISION = 1e-9

_EXACT = 3
"""The number of the cheapest alternatives with exact prices."""

_NEIGHBOURHOODS = (50, 400, 1000)
"""The variables of the neighbourhoods, one after another while time is left. The first one is always searched, with all
choices; the others from the cheapest choice on."""

_LOCAL_SECONDS = 1.0
"""The most seconds of a search of one neighbourhood."""

_SECONDS_PER_VARIABLE = 3e-4
"""An estimate of the time of a search of the whole network. It may exceed its time limit by as much."""

Tables = list[list[tuple[int, NDArray[np.float64]]]]
"""Per variable its neighbours, each with the table whose rows are the variable's choices."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another choice of a variable. Its price is from ``at_least`` to ``extra_cost``.

    ``exact``: whether both are equal, within a hundredth of a percent of the whole cost.
    """

    choice: int
    extra_cost: float
    at_least: float
    exact: bool


def priced_network(plan: PlanData) -> Network:
    """The network of a plan's problem, with the memory traffic of repeated work where the plan was made with it."""
    problem = plan.schedule.problem
    if plan.statistics.get("traffic") and not problem.traffic:  # of a plan from a file
        problem.traffic = memory_traffic(problem)
        vars(problem).pop("network", None)  # built without traffic
    return problem.network


def alternatives(
    network: Network,
    choices: Sequence[int],
    variable: int,
    time_limit: float,
    gap: float = 0.0,
    most: int | None = None,
) -> list[Alternative]:
    """Every other possible choice of a variable, cheapest first.

    ``time_limit`` in seconds bounds the searches. ``gap`` is that of the planned choices, which another choice may
    improve by as much. With ``most``, only so many of the cheapest ones in the first neighbourhood have a price."""
    deadline = time.monotonic() + time_limit
    present = network.cost(choices)
    own = network.costs[variable]
    possible = np.isfinite(own) & (np.arange(own.size) != choices[variable])
    prices, complete = _local_prices(network, choices, variable, possible, deadline, most)
    if most is not None:
        possible &= np.isfinite(prices)
    least = prices if complete else np.full(own.size, -gap * abs(present))
    found = [Alternative(int(k), prices[k], least[k], False) for k in np.flatnonzero(possible)]
    if not complete:
        found = _with_bounds(network, variable, found, present, deadline)
    sound = [replace(one, exact=one.extra_cost - one.at_least <= _PRECISION * abs(present)) for one in found]
    return sorted(sound, key=lambda one: (one.extra_cost, one.at_least, one.choice))


def _with_bounds(
    network: Network, variable: int, found: list[Alternative], present: float, deadline: float
) -> list[Alternative]:
    """The alternatives, the cheapest ones by searches of the whole network as far as the time suffices."""
    known = {one.choice: one for one in found}
    left = np.zeros(network.costs[variable].size, dtype=bool)
    left[list(known)] = True
    for _ in range(_EXACT):
        seconds = deadline - time.monotonic()
        if not left.any() or seconds < max(0.01, _SECONDS_PER_VARIABLE * len(network)):
            break
        solution = solve(_without(network, variable, left), gap=_PRECISION, time_limit=seconds)
        for choice in np.flatnonzero(left).tolist():
            least = max(known[choice].at_least, solution.lower_bound - present)
            known[choice] = replace(known[choice], at_least=min(least, known[choice].extra_cost))
        if not np.isfinite(solution.cost):
            break
        cheapest = int(solution.choices[variable])
        cost = min(known[cheapest].extra_cost, max(0.0, solution.cost - present))
        known[cheapest] = replace(known[cheapest], extra_cost=cost, at_least=min(known[cheapest].at_least, cost))
        if solution.status != "optimal":
            break
        left[cheapest] = False
    return list(known.values())


def _local_prices(
    network: Network,
    choices: Sequence[int],
    variable: int,
    possible: NDArray[np.bool_],
    deadline: float,
    most: int | None,
) -> tuple[NDArray[np.float64], bool]:
    """Per choice, an upper bound of its price: the least of the searches of neighbourhoods. Whether the last one had
    all that the variable has to do with, and the prices are exact."""
    prices = np.full(possible.size, np.inf)
    around = _neighbours(network)
    for size in _NEIGHBOURHOODS:
        until = math.inf if size == _NEIGHBOURHOODS[0] else deadline
        if time.monotonic() > until:
            break
        near = _nearest(around, variable, size)
        part = _part(network, around, choices, near)
        planned = part.cost([choices[v] for v in near])
        solutions = list(islice(_in_order(part, 0, possible, until), most))
        for solution in solutions:
            choice = int(solution.choices[0])
            prices[choice] = min(prices[choice], max(0.0, solution.cost - planned))
        if len(near) < size:
            all_found = len(solutions) == min(possible.sum(), most or possible.sum())
            solved = all_found and all(one.status == "optimal" for one in solutions)
            return prices, solved
    return prices, False


def without_transition(network: Network, choices: Sequence[int], number: int) -> tuple[float, dict[int, int]] | None:
    """The extra cost of a neighbourhood's best assignment whose edge of this number costs nothing, and its choices by
    variable. None where no assignment of the neighbourhood is one."""
    u, v, table = network.edges[number]
    around = _neighbours(network)
    near = _nearest(around, u, _NEIGHBOURHOODS[1])
    near += [v] if v not in near else []
    part = _part(network, around, choices, near)
    planned = part.cost([choices[variable] for variable in near])
    free = np.where(network.tables[table] > 0, np.inf, 0.0)
    part.add_edge(near.index(u), near.index(v), free)
    solution = solve(part, gap=_LOCAL_PRECISION, time_limit=_LOCAL_SECONDS)
    if not np.isfinite(solution.cost):
        return None
    return max(0.0, solution.cost - planned), dict(zip(near, solution.choices.tolist(), strict=True))


def _in_order(network: Network, variable: int, possible: NDArray[np.bool_], until: float) -> Iterator[Solution]:
    """The best assignments with each possible choice of a variable, cheapest first, up to a time."""
    left = possible.copy()
    while left.any() and time.monotonic() < until:
        solution = solve(_without(network, variable, left), gap=_LOCAL_PRECISION, time_limit=_LOCAL_SECONDS)
        if not np.isfinite(solution.cost):
            return
        yield solution
        left[int(solution.choices[variable])] = False


def _without(network: Network, variable: int, left: NDArray[np.bool_]) -> Network:
    """A network whose variable only has the choices that are left."""
    held = copy.copy(network)
    held.costs = list(network.costs)
    held.costs[variable] = np.where(left, network.costs[variable], np.inf)
    return held


def _neighbours(network: Network) -> Tables:
    found: Tables = [[] for _ in network.costs]
    for u, v, table in network.edges:
        found[u].append((v, network.tables[table]))
        found[v].append((u, network.tables[table].T))
    return found


def _nearest(around: Tables, variable: int, count: int) -> list[int]:
    """A variable and at least so many of the nearest ones, as far as they are connected."""
    found, waiting = {variable: None}, deque([variable])
    while waiting and len(found) < count:
        for other, _ in around[waiting.popleft()]:
            if other not in found:
                found[other] = None
                waiting.append(other)
    return list(found)


def _part(network: Network, around: Tables, choices: Sequence[int], inside: Sequence[int]) -> Network:
    """The network of some variables, while the others keep their choices."""
    place = {variable: number for number, variable in enumerate(inside)}
    part = Network()
    for variable in inside:
        costs = network.costs[variable] * network.multiplicities[variable]
        for other, table in around[variable]:
            if other not in place:
                costs = costs + table[:, choices[other]]
        part.add_variable(costs)
    for u, v, number in network.edges:
        if u in place and v in place:
            part.add_edge(place[u], place[v], network.tables[number])
    return part
