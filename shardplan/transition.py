"""Transitions: the collectives that bring a tensor from one layout to another, and their bytes.

A transition is a path of single steps, each of which XLA compiles to at most one collective; the cheapest path is
found over all layouts of the tensor, so that no recipe is fixed. Costs are ring costs (bytes that one device sends).

>>> from shardplan.layout import LayoutSpace, MeshAxes
>>> space = LayoutSpace(MeshAxes(("x",), (8,)))
>>> transitions = Transitions(space)
>>> domain = space.domain((16, 16))
>>> rows, columns = ((0,), ()), ((), (0,))
>>> [step.kind for step in transitions.path(domain, rows, columns)]
['all-to-all']
>>> round(float(transitions.table(domain, (columns,))[domain.position[rows], 0]) * 1024)   # of a tensor of 1024 bytes
112
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from shardplan.layout import Domain, Layout, LayoutSpace

# Among paths of equal bytes the shorter one: far below one byte for every tensor that fits on a device.
_FRACTION_PER_COLLECTIVE = 1e-9


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a transition: a collective (or a free slice) that ends in ``layout``.

    ``fraction`` is what one device sends, as a fraction of the bytes of the whole tensor; ``operand_fraction`` the
    bytes of the collective's operand on one device (all-gather: of its result), likewise.
    """

    kind: str
    axes: tuple[int, ...]
    layout: Layout
    fraction: float
    operand_fraction: float


class Transitions:
    """Cheapest paths between the layouts of one mesh, found once per domain."""

    def __init__(self, space: LayoutSpace) -> None:
        self.space = space
        self._solved: dict[Domain, tuple[np.ndarray, np.ndarray, dict[tuple[int, int], Step]]] = {}
        self._tables: dict[tuple[Domain, tuple[Layout, ...]], np.ndarray] = {}

    def table(self, domain: Domain, targets: tuple[Layout, ...]) -> np.ndarray:
        """float [layouts of the domain, targets]: the fraction of the tensor's bytes that one device sends."""
        key = (domain, targets)
        if key not in self._tables:
            costs = self._solve(domain)[0]
            self._tables[key] = np.ascontiguousarray(costs[:, [domain.position[target] for target in targets]])
        return self._tables[key]

    def path(self, domain: Domain, source: Layout, target: Layout) -> tuple[Step, ...]:
        """The steps of the cheapest transition, none where the layouts are equal."""
        _, previous, steps = self._solve(domain)
        start, node = domain.position[source], domain.position[target]
        found = []
        while node != start:
            before = int(previous[start, node])
            found.append(steps[before, node])
            node = before
        return tuple(reversed(found))

    def _solve(self, domain: Domain) -> tuple[np.ndarray, np.ndarray, dict[tuple[int, int], Step]]:
        if domain in self._solved:
            return self._solved[domain]
        count = len(domain)
        costs = np.full((count, count), np.inf)
        np.fill_diagonal(costs, 0.0)
        previous = np.broadcast_to(np.arange(count)[:, None], (count, count)).copy()
        steps: dict[tuple[int, int], Step] = {}
        for source, layout in enumerate(domain.layouts):
            for step in self._steps(layout):
                target = domain.position.get(step.layout)
                cost = step.fraction + _FRACTION_PER_COLLECTIVE
                if target is not None and cost < costs[source, target]:
                    costs[source, target] = cost
                    steps[source, target] = step
        for middle in range(count):
            through = costs[:, middle, None] + costs[None, middle, :]
            better = through < costs
            costs = np.where(better, through, costs)
            previous = np.where(better, previous[middle][None, :], previous)
        self._solved[domain] = costs, previous, steps
        return self._solved[domain]

    def _steps(self, layout: Layout) -> Iterator[Step]:
        """Every single step from a layout (its target may lie outside of the domain)."""
        mesh = self.space.mesh
        local = 1.0 / mesh.degree([axis for axes in layout for axis in axes])
        used = {axis for axes in layout for axis in axes}
        for dim, axes in enumerate(layout):
            for axis in mesh.splitting:
                if axis not in used:
                    yield Step("slice", (axis,), _with(layout, dim, (*axes, axis)), 0.0, local)
            for kept in range(len(axes)):
                gone = axes[kept:]
                n = mesh.degree(gone)
                whole = local * n
                yield Step("all-gather", gone, _with(layout, dim, axes[:kept]), whole * (n - 1) / n, whole)
            if axes:
                yield from self._exchanges(layout, dim, local)
            for order in self.space.orders(tuple(sorted(axes))):
                if order != axes:
                    yield Step("collective-permute", tuple(sorted(axes)), _with(layout, dim, order), local, local)

    def _exchanges(self, layout: Layout, dim: int, local: float) -> Iterator[Step]:
        """All-to-alls of a dimension's minor axes to the minor place of another, and swaps of axes by permutes."""
        mesh = self.space.mesh
        axes = layout[dim]
        used = {axis for group in layout for axis in group}
        for other in range(len(layout)):
            if other == dim:
                continue
            for kept in range(len(axes)):
                moved = axes[kept:]
                n = mesh.degree(moved)
                target = _with(_with(layout, dim, axes[:kept]), other, (*layout[other], *moved))
                yield Step("all-to-all", moved, target, local * (n - 1) / n, local)
        for position, axis in enumerate(axes):
            for free in mesh.splitting:
                if free not in used and mesh.sizes[free] == mesh.sizes[axis]:
                    swapped = (*axes[:position], free, *axes[position + 1 :])
                    yield Step("collective-permute", (axis, free), _with(layout, dim, swapped), local, local)


class Reductions:
    """Cheapest ways from partial results to whole ones, found once per layout and set of pending axes.

    Left alone, XLA reduces over all pending axes at once: by an all-reduce, or by a reduce-scatter onto one dimension,
    in the order in which the axes split what was reduced, where no further split follows directly. An *island* (the operation inside a ``shard_map`` with explicit
    collectives) may reduce axis by axis, onto several dimensions.

    >>> from shardplan.layout import LayoutSpace, MeshAxes
    >>> transitions = Transitions(LayoutSpace(MeshAxes(("x", "y"), (2, 4))))
    >>> domain = transitions.space.domain((16, 16))
    >>> reductions = Reductions(transitions)
    >>> wanted, nothing = ((0,), (1,)), ((), ())
    >>> [step.kind for step in reductions.path(domain, nothing, (0, 1), wanted, island=False)]
    ['reduce-scatter', 'all-to-all']
    >>> [step.kind for step in reductions.path(domain, nothing, (0, 1), wanted, island=True)]
    ['reduce-scatter', 'reduce-scatter']
    """

    def __init__(self, transitions: Transitions) -> None:
        self._transitions = transitions
        self._mesh = transitions.space.mesh
        self._rows: dict[Any, tuple[np.ndarray, np.ndarray, tuple[_Reduced, ...]]] = {}

    def row(self, domain: Domain, own: Layout, pending: tuple[int, ...], island: bool) -> np.ndarray:
        """float [layouts of the domain]: the fraction of the tensor's bytes sent until it is whole in each layout."""
        return self._solve(domain, own, pending, island)[0]

    def path(
        self, domain: Domain, own: Layout, pending: tuple[int, ...], target: Layout, island: bool
    ) -> tuple[Step, ...]:
        """The steps of the cheapest way, reductions first."""
        _, best, ways = self._solve(domain, own, pending, island)
        way = ways[best[domain.position[target]]]
        return (*way.steps, *self._transitions.path(domain, way.layout, target))

    def _solve(
        self, domain: Domain, own: Layout, pending: tuple[int, ...], island: bool
    ) -> tuple[np.ndarray, np.ndarray, tuple[_Reduced, ...]]:
        key = (domain, own, pending, island)
        if key not in self._rows:
            ways = tuple(way for way in self._ways(own, pending, island) if way.layout in domain.position)
            rows = np.array([self._cost(domain, way, island) for way in ways])
            self._rows[key] = rows.min(axis=0), rows.argmin(axis=0), ways
        return self._rows[key]

    def _cost(self, domain: Domain, way: _Reduced, island: bool) -> np.ndarray:
        row = way.fraction + self._transitions.table(domain, domain.layouts)[domain.position[way.layout]]
        if island or way.steps[-1].kind == "all-reduce":
            return row
        # XLA fuses a slice behind a reduction with the reduction's own, and then does not see a reduce-scatter
        first = [self._transitions.path(domain, way.layout, target)[:1] for target in domain.layouts]
        return np.where([bool(steps) and steps[0].kind == "slice" for steps in first], np.inf, row)

    def _ways(self, own: Layout, pending: tuple[int, ...], island: bool) -> list[_Reduced]:
        """Ways to reduce all of ``pending``, the cheapest per layout in which they end."""
        best: dict[Layout, _Reduced] = {}
        groups = self._groups(pending) if island else [pending]
        for group in groups:
            rest = tuple(axis for axis in pending if axis not in group)
            for step in self._steps(own, group):
                after = self._ways(step.layout, rest, island) if rest else [_Reduced(step.layout, 0.0, ())]
                for way in after:
                    fraction = step.fraction + _FRACTION_PER_COLLECTIVE + way.fraction
                    if way.layout not in best or fraction < best[way.layout].fraction:
                        best[way.layout] = _Reduced(way.layout, fraction, (step, *way.steps))
        return list(best.values())

    def _groups(self, axes: tuple[int, ...]) -> list[tuple[int, ...]]:
        subsets = [group for size in range(len(axes), 0, -1) for group in combinations(sorted(axes), size)]
        return [order for group in subsets for order in self._transitions.space.orders(group)]

    def _steps(self, own: Layout, group: tuple[int, ...]) -> Iterator[Step]:
        local = 1.0 / self._mesh.degree([axis for axes in own for axis in axes])
        n = self._mesh.degree(group)
        yield Step("all-reduce", group, own, 2 * local * (n - 1) / n, local)
        for dim, axes in enumerate(own):
            yield Step("reduce-scatter", group, _with(own, dim, (*axes, *group)), local * (n - 1) / n, local)


@dataclass(frozen=True, slots=True)
class _Reduced:
    layout: Layout
    fraction: float
    steps: tuple[Step, ...]


def _with(layout: Layout, dim: int, axes: tuple[int, ...]) -> Layout:
    return (*layout[:dim], axes, *layout[dim + 1 :])
