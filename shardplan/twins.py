"""Twins: layouts and strategies that differ in the names of mesh axes of equal size alone.

On a mesh (2, 2, 2) a matrix split over `a` and `b` costs what it costs over `c` and `a`, where all else is renamed in
the same way. The search takes twins together at first (`shardplan.search.coarsening`).

>>> mesh = MeshAxes(("a", "b", "c"), (2, 2, 4))
>>> renamed(mesh, ((0,), (2, 1))) == renamed(mesh, ((1,), (2, 0))), renamed(mesh, ((0,),)) == renamed(mesh, ((2,),))
(True, False)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardplan.layout import Domain, Layout, MeshAxes
from shardplan.strategy import Choices, Strategy
from shardplan.variables import Variables

__all__ = ["renamed", "twins"]

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


def twins(
    mesh: MeshAxes, variables: Variables, domain: Callable[[int], Domain], choices: Mapping[int, Choices]
) -> dict[int, Labels]:
    """Per variable of a problem's network a label per choice, equal for twins; none where no two axes are equal."""
    sizes = [mesh.sizes[axis] for axis in mesh.splitting]
    if len(set(sizes)) == len(sizes):
        return {}
    made: dict[int, Labels] = {}

    def labels(options: tuple[Any, ...], key: Callable[[Any], tuple[Any, ...]]) -> Labels:
        if id(options) not in made:
            numbers: dict[Any, int] = {}
            made[id(options)] = np.array([numbers.setdefault(key(option), len(numbers)) for option in options])
        return made[id(options)]

    def of_layout(layout: Layout) -> tuple[Any, ...]:
        return renamed(mesh, layout)

    def of_strategy(strategy: Strategy) -> tuple[Any, ...]:
        operands = (layout if layout is not None else () for layout in strategy.operands)
        return renamed(mesh, *operands, *strategy.results, strategy.pending)

    found = {}
    for numbers in (variables.values, variables.copies):
        for value, variable in numbers.items():
            found[variable] = labels(domain(value).layouts, of_layout)
    for operation, variable in variables.operations.items():
        found[variable] = labels(choices[operation].strategies, of_strategy)
    return found
