"""Coarse meshes: the layouts and strategies of a mesh whose axes are groups of this mesh's axes.

A mesh (2, 2, 2) has the layouts of (2, 4): two of its axes always split the same dimension. It also has those of (8,),
where all three do. They are few among all layouts of three axes, so that their optimum is found and proven soon. A
search of all layouts that does not close starts with that solution (`shardplan.search.structure.restricted_starts`).

>>> mesh = MeshAxes(("a", "b", "c"), (2, 2, 2))
>>> list(pairs_of_groups(mesh))
[((0,), (1, 2)), ((0, 1), (2,)), ((0, 2), (1,))]
>>> keeps_groups([((0,), (1, 2))], ((0,), (1, 2))), keeps_groups([((0, 1), (2,))], ((0,), (1, 2)))
(True, False)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardplan.layout.layout import Domain, MeshAxes
from shardplan.problem.strategy import Choices, Strategy
from shardplan.problem.variables import Variables

__all__ = ["coarse_choices", "keeps_groups", "pairs_of_groups"]

Groups = tuple[tuple[int, ...], ...]


def pairs_of_groups(mesh: MeshAxes) -> Iterator[Groups]:
    """The ways to divide the split axes into two groups. None for two axes or fewer."""
    first, *others = mesh.splitting or (0,)
    if len(others) < 2:
        return
    for count in range(len(others)):
        for rest in combinations(others, count):
            group = (first, *rest)
            yield group, tuple(axis for axis in others if axis not in group)


def keeps_groups(layouts: Iterable[Iterable[tuple[int, ...]]], groups: Groups) -> bool:
    """Whether each dimension of the layouts has all axes of a group, or none. One group of all axes is always in
    order."""
    if len(groups) == 1:
        return all(axes in ((), *groups) for layout in layouts for axes in layout)
    sizes = [(set(group), len(group)) for group in groups]
    return all(
        len(group.intersection(axes)) in (0, size) for layout in layouts for axes in layout for group, size in sizes
    )


def coarse_choices(
    mesh: MeshAxes, variables: Variables, domain: Callable[[int], Domain], choices: Mapping[int, Choices]
) -> list[dict[int, NDArray[np.bool_]]]:
    """Per coarse mesh, and per variable of a problem's network, the choices that the coarse mesh has too. Fewest
    first."""
    every = [(mesh.splitting,)] if len(mesh.splitting) > 1 else []
    ways = (*every, *pairs_of_groups(mesh))
    made: dict[int, list[NDArray[np.bool_]]] = {}

    def kept(options: tuple[Any, ...], layouts: Callable[[Any], Iterable[Any]]) -> list[NDArray[np.bool_]]:
        if id(options) not in made:
            # Many choices have the same groups of axes, on other dimensions.
            numbers: dict[frozenset[tuple[int, ...]], int] = {}
            splits = (frozenset(axes for layout in layouts(option) for axes in layout) for option in options)
            found = [numbers.setdefault(split, len(numbers)) for split in splits]
            made[id(options)] = [
                np.array([keeps_groups([split], groups) for split in numbers])[found] for groups in ways
            ]
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
