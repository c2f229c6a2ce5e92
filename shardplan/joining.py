"""Joining: the layouts and strategies that a coarser mesh would have, whose axes are several of this one's each.

A mesh (2, 2, 2) can do what (2, 4) does: two of its axes always split the same dimension; and what (8,) does, where all
three do. Of the layouts on three axes these are few, so that the best of them is soon found and proven. Where a search
of all layouts does not close, it has that as an answer to begin with (`shardplan.search.structure.restricted_starts`).

>>> mesh = MeshAxes(("a", "b", "c"), (2, 2, 2))
>>> list(pairs_of_groups(mesh))
[((0,), (1, 2)), ((0, 1), (2,)), ((0, 2), (1,))]
>>> together([((0,), (1, 2))], ((0,), (1, 2))), together([((0, 1), (2,))], ((0,), (1, 2)))
(True, False)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardplan.layout import Domain, MeshAxes
from shardplan.strategy import Choices, Strategy
from shardplan.variables import Variables

__all__ = ["joined", "pairs_of_groups", "together"]

Groups = tuple[tuple[int, ...], ...]


def pairs_of_groups(mesh: MeshAxes) -> Iterator[Groups]:
    """The ways to make two axes of the axes that split, each of one or several; none where there are two at most."""
    first, *others = mesh.splitting or (0,)
    if len(others) < 2:
        return
    for count in range(len(others)):
        for beside in combinations(others, count):
            group = (first, *beside)
            yield group, tuple(axis for axis in others if axis not in group)


def together(layouts: Iterable[Iterable[tuple[int, ...]]], groups: Groups) -> bool:
    """Whether each dimension of the layouts has all axes of a group, or none. One group of all is always in order."""
    if len(groups) == 1:
        return all(axes in ((), *groups) for layout in layouts for axes in layout)
    sizes = [(set(group), len(group)) for group in groups]
    return all(
        len(group.intersection(axes)) in (0, size) for layout in layouts for axes in layout for group, size in sizes
    )


def joined(
    mesh: MeshAxes, variables: Variables, domain: Callable[[int], Domain], choices: Mapping[int, Choices]
) -> list[dict[int, NDArray[np.bool_]]]:
    """Per coarser mesh, and variable of a problem's network, the choices that it has as well: fewest first."""
    every = [(mesh.splitting,)] if len(mesh.splitting) > 1 else []
    ways = (*every, *pairs_of_groups(mesh))
    made: dict[int, list[NDArray[np.bool_]]] = {}

    def kept(options: tuple[Any, ...], layouts: Callable[[Any], Iterable[Any]]) -> list[NDArray[np.bool_]]:
        if id(options) not in made:
            # Many choices split dimensions over the same axes, if not the same dimensions.
            numbers: dict[frozenset[tuple[int, ...]], int] = {}
            splits = (frozenset(axes for layout in layouts(option) for axes in layout) for option in options)
            found = [numbers.setdefault(split, len(numbers)) for split in splits]
            made[id(options)] = [np.array([together([split], groups) for split in numbers])[found] for groups in ways]
        return made[id(options)]

    masks = {}
    for numbers in (variables.values, variables.copies):
        for value, variable in numbers.items():
            masks[variable] = kept(domain(value).layouts, lambda layout: [layout])
    for operation, variable in variables.operations.items():
        masks[variable] = kept(choices[operation].strategies, _layouts_of)
    return [{variable: of_ways[way] for variable, of_ways in masks.items()} for way in range(len(ways))]


def _layouts_of(strategy: Strategy) -> list[Any]:
    operands = (layout for layout in strategy.operands if layout is not None)
    return [*operands, *strategy.results, strategy.pending]
