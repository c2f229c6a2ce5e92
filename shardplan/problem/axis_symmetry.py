"""Axis symmetry: layouts and strategies that differ only in the names of mesh axes of equal size.

On a mesh (2, 2, 2) a matrix split over `a` and `b` costs the same as one over `c` and `a`, if all other tensors are
renamed in the same way. The search treats symmetric choices as one at first
(`shardplan.search.structure.symmetry_coarsening`). On a mesh without equal axes, choices are symmetric if they differ
in the order of axes on a dimension: most operations cost the same in any order that all tensors share.

>>> mesh = MeshAxes(("a", "b", "c"), (2, 2, 4))
>>> renamed(mesh, ((0,), (2, 1))) == renamed(mesh, ((1,), (2, 0))), renamed(mesh, ((0,),)) == renamed(mesh, ((2,),))
(True, False)
>>> in_any_order(((0,), (2, 1))) == in_any_order(((0,), (1, 2)))
True

If a mesh has just two split axes, and they are equal, swapping them turns each layout into its mirror image. The search
then visits one half of the assignments (`shardplan.search.graph.mirror_symmetry`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardplan.layout.layout import Domain, Layout, MeshAxes
from shardplan.problem.strategy import Choices, Strategy
from shardplan.problem.variables import Variables

__all__ = ["in_any_order", "mirror_images", "renamed", "symmetry_labels"]

Labels = NDArray[np.intp]


def renamed(mesh: MeshAxes, *groups: Iterable[tuple[int, ...]]) -> tuple[Any, ...]:
    """Groups of axes, with axes of equal size numbered in the order of their first use."""
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
    """Groups of axes, each dimension's axes in the order of the mesh."""
    return tuple(tuple(tuple(sorted(axes)) for axes in group) for group in groups)


def symmetry_labels(
    mesh: MeshAxes, variables: Variables, domain: Callable[[int], Domain], choices: Mapping[int, Choices]
) -> dict[int, Labels]:
    """Per variable of a problem's network a label per choice, equal for symmetric ones. None on a mesh with one split
    axis."""
    sizes = [mesh.sizes[axis] for axis in mesh.splitting]
    if len(sizes) < 2:
        return {}
    key_of = in_any_order if len(set(sizes)) == len(sizes) else partial(renamed, mesh)
    made: dict[int, Labels] = {}

    def labels(options: tuple[Any, ...], key: Callable[[Any], tuple[Any, ...]]) -> Labels:
        if id(options) not in made:
            numbers: dict[Any, int] = {}
            made[id(options)] = np.array([numbers.setdefault(key(option), len(numbers)) for option in options])
        return made[id(options)]

    def of_strategy(strategy: Strategy) -> tuple[Any, ...]:
        operands = (layout if layout is not None else () for layout in strategy.operands)
        return key_of(*operands, *strategy.results, strategy.pending)

    found = {}
    for numbers in (variables.values, variables.copies):
        for value, variable in numbers.items():
            found[variable] = labels(domain(value).layouts, key_of)
    for operation, variable in variables.operations.items():
        found[variable] = labels(choices[operation].strategies, of_strategy)
    return found


def mirror_images(
    mesh: MeshAxes, variables: Variables, domain: Callable[[int], Domain], choices: Mapping[int, Choices]
) -> dict[int, Labels]:
    """Per variable of a problem's network, the number of each choice's mirror image, with two equal axes swapped.

    None if the mesh has not exactly two split axes, of one size, or if a choice has no image.
    """
    axes = mesh.splitting
    if len(axes) != 2 or mesh.sizes[axes[0]] != mesh.sizes[axes[1]]:
        return {}
    other = {axes[0]: axes[1], axes[1]: axes[0]}
    made: dict[int, Labels | None] = {}

    def images(options: tuple[Any, ...], key: Callable[[Any, Mapping[int, int]], Any]) -> Labels | None:
        if id(options) not in made:
            numbers = {key(option, {}): number for number, option in enumerate(options)}
            found = np.array([numbers.get(key(option, other), -1) for option in options], dtype=np.intp)
            clear = (
                len(numbers) == len(options) and (found >= 0).all() and (found[found] == np.arange(len(found))).all()
            )
            made[id(options)] = found if clear else None
        return made[id(options)]

    found: dict[int, Labels | None] = {}
    for numbers in (variables.values, variables.copies):
        for value, variable in numbers.items():
            of_value = domain(value)
            found[variable] = images(of_value.layouts, partial(_moved, of_value.rank))
    for operation, variable in variables.operations.items():
        found[variable] = images(choices[operation].strategies, partial(_moved_strategy, _ranks(choices[operation])))
    images_of_all = {v: image for v, image in found.items() if image is not None}
    return images_of_all if len(images_of_all) == len(found) else {}


def _moved(rank: int, layout: Layout, other: Mapping[int, int]) -> Layout:
    """A layout with axes replaced by others. Its entries in front of its dimensions are a set, see `Domain`."""
    moved = tuple(tuple(other.get(axis, axis) for axis in axes) for axes in layout)
    return (tuple(sorted(moved[0])), *moved[1:]) if len(layout) > rank else moved


def _moved_strategy(ranks: list[int], strategy: Strategy, other: Mapping[int, int]) -> tuple[Any, ...]:
    """A strategy with mesh axes replaced by others in all its parts."""
    layouts = (*strategy.operands, *strategy.results)
    moved = tuple(None if to is None else _moved(rank, to, other) for rank, to in zip(ranks, layouts, strict=True))
    halos = sorted((h.operand, h.dim, *_moved(1, (h.axes,), other), h.rows) for h in strategy.halos)
    pending = _moved(len(strategy.pending), strategy.pending, other)
    return moved, pending, strategy.reducers, tuple(halos), strategy.calls, strategy.possible


def _ranks(choices: Choices) -> list[int]:
    """The rank of each operand and result of an operation. Layouts of partial sums have one entry more."""
    columns = zip(*((*strategy.operands, *strategy.results) for strategy in choices.strategies), strict=True)
    return [min((len(layout) for layout in column if layout is not None), default=0) for column in columns]
