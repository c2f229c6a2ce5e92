"""Canonical axis order: of assignments of equal cost, the one whose dimensions have mesh axes in the mesh's order.

The order of two axes on one dimension has no effect on most operations, if all tensors have the same order. A search
finds both orders among the cheapest choices, and may mix them. XLA optimises mixed orders less: values stay live
longer. Each connected part of the network therefore gets the mesh's order as a whole, if that costs no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import fsum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardplan.layout.layout import Layout
from shardplan.memoize import memoize
from shardplan.problem.axis_symmetry import in_any_order
from shardplan.problem.cost_network import Problem
from shardplan.problem.strategy import Strategy

_Parts = tuple[tuple[Layout, ...], tuple[object, ...]]


def canonicalize_axis_order(problem: Problem, choices: NDArray[np.int64]) -> NDArray[np.int64]:
    """The choices of a problem's variables, with mesh axes in the mesh's order wherever that costs no more."""
    others = {v: int(to[choices[v]]) for v, to in canonical_choices(problem).items() if to[choices[v]] != choices[v]}
    found = choices.copy()
    for group, edges in _groups(problem, others) if others else ():
        reordered = found.copy()
        reordered[group] = [others[variable] for variable in group]
        if _cost(problem, group, edges, reordered) <= _cost(problem, group, edges, found):
            found = reordered
    return found


@memoize
def canonical_choices(problem: Problem) -> dict[int, NDArray[np.intp]]:
    """Per variable and choice, the same choice with axes in the mesh's order, if it exists.

    Variables whose choices all have the mesh's order already are left out.
    """
    variables, made = problem.variables, dict[int, NDArray[np.intp] | None]()

    def reordered(options: Sequence[Any], parts: Callable[[Any], _Parts]) -> NDArray[np.intp] | None:
        if id(options) not in made:
            keys = [parts(option) for option in options]
            numbers = {key: number for number, key in enumerate(keys)}
            found = [numbers.get((in_any_order(*axes), rest), number) for number, (axes, rest) in enumerate(keys)]
            made[id(options)] = np.array(found) if found != list(range(len(found))) else None
        return made[id(options)]

    found = {}
    for numbers in (variables.values, variables.copies):
        for value, variable in numbers.items():
            found[variable] = reordered(problem.domain(value).layouts, lambda layout: ((layout,), ()))
    for operation, variable in variables.operations.items():
        found[variable] = reordered(problem.choices[operation].strategies, _parts)
    return {variable: to for variable, to in found.items() if to is not None}


def _parts(strategy: Strategy) -> _Parts:
    """The axes of a strategy with their order, and its other fields."""
    layouts = (*(layout if layout is not None else () for layout in strategy.operands), *strategy.results)
    halos = strategy.halos
    axes = (*layouts, strategy.pending, tuple(halo.axes for halo in halos))
    others = tuple((halo.operand, halo.dim, halo.rows) for halo in halos)
    return axes, (strategy.reducers, strategy.possible, strategy.calls, strategy.padded, others)


def _groups(problem: Problem, others: Mapping[int, int]) -> Iterator[tuple[list[int], list[int]]]:
    """The variables with another choice in the mesh's order, grouped by shared tables, each group with its edges."""
    network = problem.network
    leader = {variable: variable for variable in others}

    def leads(variable: int) -> int:
        while leader[variable] != variable:
            leader[variable] = variable = leader[leader[variable]]
        return variable

    for u, v, _ in network.edges:
        if u in leader and v in leader:
            leader[leads(u)] = leads(v)
    groups: dict[int, tuple[list[int], list[int]]] = {}
    for variable in sorted(leader):
        groups.setdefault(leads(variable), ([], []))[0].append(variable)
    for number, (u, v, _) in enumerate(network.edges):
        for group in {leads(w) for w in (u, v) if w in leader}:
            groups[group][1].append(number)
    yield from groups.values()


def _cost(problem: Problem, group: Sequence[int], numbers: Sequence[int], choices: NDArray[np.int64]) -> float:
    """The cost of variables and edges, summed with one rounding."""
    network = problem.network
    costs = [float(network.costs[v][choices[v]]) * network.multiplicities[v] for v in group]
    edges = (network.edges[number] for number in numbers)
    return fsum(costs + [float(network.tables[table][choices[u], choices[v]]) for u, v, table in edges])
