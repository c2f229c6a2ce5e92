"""The alternatives of a variable of the network, and their prices.

A price is the extra cost of the best assignment with another choice. Two searches find it:

1. A search of a neighbourhood, with all choices outside of it as planned. Its cost is an upper bound of the price, and
   the price itself where the neighbourhood has all that the variable has to do with.
2. With time, the lower bounds of all choices in the whole network (`shardplan.search.marginals`). The three cheapest
   alternatives become exact, the others intervals. What the bounds of all variables have in common is made once per
   plan, by the first of them.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from shardplan.plans.plan_data import PlanData
from shardplan.search import Marginals, Network, Solution, solve
from shardplan.timing.step_time import memory_traffic

_PRECISION = 1e-3
"""The share of a price up to which both ends of its interval are one."""

_ROUNDING = 1e-9
"""The same, as a share of the whole cost."""

_LOCAL_PRECISION = 1e-9

_EXACT = 3
"""The number of the cheapest alternatives with exact prices."""

_NEIGHBOURHOOD, _WIDE_NEIGHBOURHOOD = 50, 400
"""The variables of a neighbourhood."""

_LOCAL_SECONDS = 1.0
"""The most seconds of a search of one neighbourhood."""

Tables = list[list[tuple[int, NDArray[np.float64]]]]
"""Per variable its neighbours, each with the table whose rows are the variable's choices."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another choice of a variable. Its price is from ``at_least`` to ``extra_cost``.

    ``exact``: whether both are equal, within a tenth of a percent.
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

    ``time_limit`` in seconds bounds the search of the whole network; without time there is none. ``gap`` is that of the
    planned choices, which another choice may improve by as much. With ``most``, only so many of the cheapest ones in
    the neighbourhood have a price."""
    present = network.cost(choices)
    own = network.costs[variable]
    possible = np.isfinite(own) & (np.arange(own.size) != choices[variable])
    prices, complete = _local_prices(network, choices, variable, possible, most)
    least = prices if complete else np.full(own.size, -gap * abs(present))
    if not complete and time_limit > 0:
        bounds = _marginals(network, choices)
        if bounds.bounded:
            known = bounds.prices(variable, _EXACT, time.monotonic() + time_limit)
            prices = np.minimum(prices, known.at_most)
            least = np.minimum(np.maximum(least, known.at_least), prices)
            possible &= np.isfinite(known.at_least)
    if most is not None:
        possible &= np.isfinite(prices)
    room = _ROUNDING * abs(present)
    found = [
        Alternative(int(k), prices[k], least[k], prices[k] - least[k] <= _PRECISION * prices[k] + room)
        for k in np.flatnonzero(possible)
    ]
    return sorted(found, key=lambda one: (one.extra_cost, one.at_least, one.choice))


def _marginals(network: Network, choices: Sequence[int]) -> Marginals:
    """The bounds of a network's variables, which the network keeps for one assignment."""
    key = tuple(map(int, choices))
    known = network.derived.get(Marginals)
    if known is None or known[0] != key:
        known = network.derived[Marginals] = key, Marginals(network, key)
    return known[1]


def _local_prices(
    network: Network, choices: Sequence[int], variable: int, possible: NDArray[np.bool_], most: int | None
) -> tuple[NDArray[np.float64], bool]:
    """Per choice, an upper bound of its price: that of a search of the neighbourhood. Whether this has all that the
    variable has to do with, and the prices are exact."""
    prices = np.full(possible.size, np.inf)
    around = _neighbours(network)
    near = _nearest(around, variable, _NEIGHBOURHOOD)
    part = _part(network, around, choices, near)
    planned = part.cost([choices[v] for v in near])
    solutions = list(islice(_in_order(part, 0, possible), most))
    for solution in solutions:
        prices[int(solution.choices[0])] = max(0.0, solution.cost - planned)
    every = len(solutions) == min(possible.sum(), most or possible.sum())
    return prices, len(near) < _NEIGHBOURHOOD and every and all(one.status == "optimal" for one in solutions)


def without_transition(network: Network, choices: Sequence[int], number: int) -> tuple[float, dict[int, int]] | None:
    """The extra cost of a neighbourhood's best assignment whose edge of this number costs nothing, and its choices by
    variable. None where no assignment of the neighbourhood is one."""
    u, v, table = network.edges[number]
    around = _neighbours(network)
    near = _nearest(around, u, _WIDE_NEIGHBOURHOOD)
    near += [v] if v not in near else []
    part = _part(network, around, choices, near)
    planned = part.cost([choices[variable] for variable in near])
    free = np.where(network.tables[table] > 0, np.inf, 0.0)
    part.add_edge(near.index(u), near.index(v), free)
    solution = solve(part, gap=_LOCAL_PRECISION, time_limit=_LOCAL_SECONDS)
    if not np.isfinite(solution.cost):
        return None
    return max(0.0, solution.cost - planned), dict(zip(near, solution.choices.tolist(), strict=True))


def _in_order(network: Network, variable: int, possible: NDArray[np.bool_]) -> Iterator[Solution]:
    """The best assignments with each possible choice of a variable, cheapest first."""
    left = possible.copy()
    while left.any():
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
    """The neighbours of all variables, which the network keeps."""
    known: Tables | None = network.derived.get(_neighbours)
    if known is not None and len(known) == len(network):
        return known
    found: Tables = [[] for _ in network.costs]
    network.derived[_neighbours] = found
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
