"""Twins: layouts and strategies that differ in the names of mesh axes of equal size alone.

On a mesh (2, 2, 2) a matrix split over `a` and `b` costs what it costs over `c` and `a`, where all else is renamed in
the same way. The search takes twins together at first (`shardplan.search.coarsening`). Where no two axes are equal,
twins differ in the order of axes on a dimension: it is the same to most operations, as long as all keep to one.

>>> mesh = MeshAxes(("a", "b", "c"), (2, 2, 4))
>>> renamed(mesh, ((0,), (2, 1))) == renamed(mesh, ((1,), (2, 0))), renamed(mesh, ((0,),)) == renamed(mesh, ((2,),))
(True, False)
>>> in_any_order(((0,), (2, 1))) == in_any_order(((0,), (1, 2)))
True
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardplan.layout import Domain, MeshAxes
from shardplan.strategy import Choices, Strategy
from shardplan.variables import Variables

__all__ = ["in_any_order", "renamed", "twins"]

Labels = NDArray[np.intp]


def renamed(mesh: MeshAxes, *groups: Iterable[tuple[int, ...]]) -> tuple[Any, ...]:
    """Groups of axes with axes of equal size numbered in the order in which they come."""
    names: dict[int, tuple[int, int]] = {}
    counts: dict[int, int] = {}
    for group in groups:
        for axes in group:
            for axis in axes:
                if axis not in names:
                    size = mesh.sizes[axis]
                    counts[size] = counts.get(size, 0) + 1
                    names[axis] = (size, counts[size])
    return tuple(tuple(tuple(names[axis] for axis in axes) for axes in group) for group in groups)


def in_any_order(*groups: Iterable[tuple[int, ...]]) -> tuple[Any, ...]:
    """Groups of axes with those of each dimension in the order of the mesh."""
    return tuple(tuple(tuple(sorted(axes)) for axes in group) for group in groups)


def twins(
    mesh: MeshAxes, variables: Variables, domain: Callable[[int], Domain], choices: Mapping[int, Choices]
) -> dict[int, Labels]:
    """Per variable of a problem's network a label per choice, equal for twins; none where one axis splits alone."""
    sizes = [mesh.sizes[axis] for axis in mesh.splitting]
    if len(sizes) < 2:
        return {}
    alike = in_any_order if len(set(sizes)) == len(sizes) else partial(renamed, mesh)
    made: dict[int, Labels] = {}

    def labels(options: tuple[Any, ...], key: Callable[[Any], tuple[Any, ...]]) -> Labels:
        if id(options) not in made:
            numbers: dict[Any, int] = {}
            made[id(options)] = np.array([numbers.setdefault(key(option), len(numbers)) for option in options])
        return made[id(options)]

    def of_strategy(strategy: Strategy) -> tuple[Any, ...]:
        operands = (layout if layout is not None else () for layout in strategy.operands)
        return alike(*operands, *strategy.results, strategy.pending)

    found = {}
    for numbers in (variables.values, variables.copies):
        for value, variable in numbers.items():
            found[variable] = labels(domain(value).layouts, alike)
    for operation, variable in variables.operations.items():
        found[variable] = labels(choices[operation].strategies, of_strategy)
    return found
