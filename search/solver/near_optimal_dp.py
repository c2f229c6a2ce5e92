"""Dynamic programming on near-optimal choices, with all other choices of a variable as one group.

Where messages stall, many choices of a variable look equally good, above all symmetric ones. The few most promising
ones do not contain a consistent assignment. But a better assignment hardly takes a choice whose pairs with one
neighbour all raise the bound by a good share of the gap. These choices become one group per variable
(`shardplan.search.graph.choice_groups`), and dynamic programming solves the rest where its tables allow. It sees cycles
of any length, which messages do not, and its optimum is a bound. Groups that its assignment takes are split, and it
runs again. It ends when the assignment has no group and is optimal, when the gap is closed, or when tables get too
large.

>>> from shardplan.search.budget import Budget, Callbacks
>>> from shardplan.search.network import Network
>>> from shardplan.search.graph.graph import Graph
>>> from shardplan.search.solver.graph_solver import GraphSolver
>>> net = Network()
>>> a, b, c = (net.add_variable([0.0, 0.0, 9.0]) for _ in range(3))
>>> for u, v in ((a, b), (b, c), (a, c)):
...     net.add_edge(u, v, np.array([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 0.0]]))
>>> solver = GraphSolver(Graph.of(net), 5.0, Budget(), 1e-6, Callbacks(lambda: None, lambda: 60.0))
>>> solver.prune(solver.relax_again())
>>> solve_near_optimal(solver), solver.upper, solver.lower
(True, 3.0, 3.0)
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shardplan.search.bounds.lagrangian import Relaxation
from shardplan.search.graph.choice_groups import Groups
from shardplan.search.graph.dynamic_programming import Elimination, Plan, adjacency, plan
from shardplan.search.graph.graph import Graph
from shardplan.search.graph.table_elimination import EliminatedVariable
from shardplan.search.solver.bounded_graph import BoundedGraph

__all__ = ["MAX_GRAPH_ENTRIES", "affordable_groups", "order_of_groups", "pair_bounds", "solve_near_optimal"]

Array = NDArray[np.float64]
Index = NDArray[np.intp]

_GAP_SHARES = 0.02, 0.01
"""Of the gap, of which the first one is taken that is affordable. A few turns of splitting groups follow, which look at
little each: with a larger share, the first turn takes longer than all of them."""
_ENTRIES, _LARGEST = 1e8, 1e7
"""Table entries, in all and of one table: less than a second's."""
MAX_GRAPH_ENTRIES = 3e7
"""Of the graph, whose tables are copied."""
_GROWTH = 2.0
"""Times as many may be needed as groups are split."""
_SHARE_OF_WORK = 0.5
"""Of the work of sweeps, what splitting them may take."""
_RETRY_RATIO = 0.5
"""The share of the gap that was open when choices were looked through before, up to which they are again."""
_SECONDS_PER_ENTRY, _SECONDS_PER_VARIABLE = 2e-9, 5e-5


def solve_near_optimal(solver: BoundedGraph) -> bool:
    """Takes what dynamic programming on choices that fit, and groups of the others, finds and proves into account; True
    where the gap is closed by it."""
    graph, left = solver.graph, solver.upper - solver.lower
    live = graph.live()
    if (
        not live
        or left == math.inf
        or left > _RETRY_RATIO * solver.near_optimal_gap
        or any(graph.spans[v] for v in live)
    ):
        return False
    if graph.entries() > MAX_GRAPH_ENTRIES:
        return False
    solver.near_optimal_gap = left
    graph.make_consistent()
    relaxation = Relaxation(graph)
    bound, _ = relaxation.reduced_costs()
    affordable = affordable_groups(graph, pair_bounds(relaxation), max(solver.upper, solver.ceiling) - bound)
    if affordable is None:
        return False
    order: Plan | None
    places, order = affordable
    groups = Groups(relaxation.above_bound(), places)
    known: dict[int, EliminatedVariable] = {}  # of groups that are not split, most of what was found stays
    until = solver.estimate + _SHARE_OF_WORK * solver.budget.seconds
    while order is not None and solver.estimate < until:
        small = groups.small
        costs: dict[int, Array] = {v: small.costs[v] for v in live}  # type: ignore[misc]
        keep = {v: np.arange(len(costs[v])) for v in live}
        elimination = Elimination(small, costs, keep, known)
        found, cost = elimination.solve(order, {})
        solver.estimate += elimination.entries * _SECONDS_PER_ENTRY + len(live) * _SECONDS_PER_VARIABLE
        choices = groups.choices(found)
        solver.accept(choices, graph.cost(choices))
        solver.raise_lower(min(cost, solver.upper))
        solver.callbacks.report()
        if solver.closed:
            break
        if not groups.split(found):  # what is found is the best there is
            solver.raise_lower(solver.upper)
            break
        order = order_of_groups(graph, groups.places, _GROWTH)
    return solver.closed


def affordable_groups(graph: Graph, rises: dict[int, Array], gap: float) -> tuple[dict[int, Index], Plan] | None:
    """Per variable the group of each choice, where those that raise the bound by more than a share of the gap are one;
    and the order in which dynamic programming can look at all of them."""
    for share in _GAP_SHARES:
        places = _places(graph, rises, share * gap)
        order = order_of_groups(graph, places, 1.0)
        if order is not None:
            return places, order
    return None


def order_of_groups(graph: Graph, places: dict[int, Index], room: float) -> Plan | None:
    """The order in which to look at all groups, where that takes no more than `room` times the table entries that it
    may take at first."""
    sizes = {v: int(place.max()) + 1 for v, place in places.items()}
    order = plan(sizes, adjacency(graph), room * _LARGEST, room * _ENTRIES)
    return None if order is None or order.fixed else order


def _places(graph: Graph, rises: dict[int, Array], room: float) -> dict[int, Index]:
    """Per variable the groups of its choices: one each of those that raise the bound by no more than `room`, the least
    one and that of the best known assignment; and one of all others."""
    hint = graph.hint or {}
    places = {}
    for v, rise in rises.items():
        fits = rise <= room
        fits[rise.argmin()] = True
        if v in hint:
            fits[hint[v]] = True
        places[v] = np.where(fits, np.cumsum(fits) - 1, np.count_nonzero(fits))
    return places


def pair_bounds(relaxation: Relaxation) -> dict[int, Array]:
    """Per variable and choice, by how much the bound rises at least with the best pairs that it has with each of the
    variable's neighbours: by the most of these."""
    offsets, above = relaxation.sweeper.offsets, relaxation.sweeper.beliefs
    rises = {v: above[offsets[place] : offsets[place + 1]].copy() for place, v in enumerate(relaxation.order)}
    for v, w, rise in relaxation.pair_costs():
        np.maximum(rises[v], rise.min(axis=1), out=rises[v])
        np.maximum(rises[w], rise.min(axis=0), out=rises[w])
    return rises
