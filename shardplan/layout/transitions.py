"""Transitions: the collectives that change a tensor from one layout to another, and their bytes.

A transition is a path of single steps. XLA compiles each step to at most one collective. The cheapest path is searched
over all layouts of the tensor, without fixed recipes. Costs are ring costs: the bytes that one device sends.

>>> from shardplan.hardware import load
>>> from shardplan.layout.layout import MeshAxes
>>> from shardplan.layout.objectives.bytes_sent import BytesSent
>>> mesh = MeshAxes(("x",), (8,))
>>> transitions = Transitions(LayoutSpace(mesh), BytesSent(load("h100"), mesh))
>>> space = transitions.space
>>> domain = space.domain((16, 16))
>>> rows, columns = ((0,), ()), ((), (0,))
>>> [step.kind for step in transitions.path(domain, rows, columns)]
['all-to-all']
>>> round(float(transitions.table(domain, (columns,), 1024)[domain.position[rows], 0]))   # of 1024 bytes
112
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf
from typing import Any

import numpy as np

from shardplan.layout.collectives import CollectiveKind, Step
from shardplan.layout.layout import Domain, Layout, LayoutSpace
from shardplan.layout.objectives import Prices
from shardplan.layout.shortest_paths import Priced, cheapest_paths

# Of paths with equal prices the shorter one wins: each step costs a little more, as a share of the price per byte.
_STEP_PENALTY = 1e-12


def times_trips(times: int, prices: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Prices per execution times the executions. Infinite prices stay infinite in a loop without iterations."""
    table = np.asarray(prices)
    if times == 1:
        return table
    return times * table if times else np.where(np.isinf(table), table, 0.0)


class Transitions:
    """Cheapest paths between the layouts of one mesh, computed once per domain."""

    def __init__(self, space: LayoutSpace, prices: Prices) -> None:
        self.space = space
        self.prices = prices
        self.step_penalty = _STEP_PENALTY * prices.per_byte(space.mesh.splitting) if space.mesh.splitting else 0.0
        self.reductions = Reductions(self)
        self._solved: dict[Domain, tuple[Priced, np.ndarray, dict[tuple[int, int], Step]]] = {}

    def table(self, domain: Domain, targets: tuple[Layout, ...], total_bytes: int) -> np.ndarray:
        """float [layouts of the domain, targets]: the price of each transition of a tensor of so many bytes."""
        places = [domain.position.get(target, -1) for target in targets]
        every = places == list(range(len(domain)))
        table = self._solve(domain)[0].of(total_bytes, None if every else places)
        missing = [number for number, place in enumerate(places) if place < 0]
        table[:, missing] = np.inf  # a partial layout that the tensor cannot have
        return table

    def sends(self, domain: Domain, targets: tuple[Layout, ...]) -> np.ndarray:
        """bool [layouts of the domain, targets]: whether a transition needs more than one slice per axis."""
        return self.table(domain, targets, 1) > (len(self.space.mesh.splitting) + 0.5) * self.step_penalty

    def priced(self, domain: Domain) -> Priced:
        """The prices between all layouts of a domain."""
        return self._solve(domain)[0]

    def path(self, domain: Domain, source: Layout, target: Layout) -> tuple[Step, ...]:
        """The steps of the cheapest transition, none between equal layouts."""
        if domain.whole is not None:
            if len(source) == domain.rank or source == target:
                return self.path(domain.whole, source, target) if source != target else ()
            return self.reductions.path(domain.whole, Partial(source[1:], source[0], True, domain.width), target)
        _, previous, steps = self._solve(domain)
        start, node = domain.position[source], domain.position[target]
        found = []
        while node != start:
            before = int(previous[start, node])
            found.append(steps[before, node])
            node = before
        return tuple(reversed(found))

    def begins_with_slice(self, domain: Domain, source: Layout) -> np.ndarray:
        """bool [layouts of the domain]: whether the cheapest transition from a layout to each begins with a slice."""
        _, previous, steps = self._solve(domain)
        start = domain.position[source]
        before = previous[start]
        first = np.arange(len(domain))
        while (onward := before[first] != start).any():  # back along all paths at once
            first = np.where(onward, before[first], first)
        sliced = np.zeros(len(domain), dtype=bool)
        for node in np.unique(first[first != start]).tolist():
            sliced[node] = steps[start, node].kind == CollectiveKind.SLICE
        return sliced[first]

    def _solve(self, domain: Domain) -> tuple[Priced, np.ndarray, dict[tuple[int, int], Step]]:
        if domain in self._solved:
            return self._solved[domain]
        if domain.whole is not None:
            self._solved[domain] = self._with_partial(domain, domain.whole), np.empty(0), {}
            return self._solved[domain]
        steps: dict[tuple[int, int], Step] = {}
        into: list[dict[int, tuple[float, float]]] = [{} for _ in domain.layouts]
        for source, layout in enumerate(domain.layouts):
            for step in self._steps(domain, layout):
                target = domain.position.get(step.layout)
                if target is None:
                    continue
                per_byte, per_collective = self.price(step)
                if per_byte + self.step_penalty < into[target].get(source, (inf, 0.0))[0]:
                    into[target][source] = per_byte + self.step_penalty, per_collective
                    steps[source, target] = step
        self._solved[domain] = *cheapest_paths(into), steps
        return self._solved[domain]

    def _with_partial(self, domain: Domain, whole: Domain) -> Priced:
        """The prices of a domain with partial layouts: a partial tensor is reduced once, and a whole one does not
        become partial.
        """
        among = self.priced(whole)
        count, first = len(domain), len(whole)
        per_byte, fixed = np.full((count, count), np.inf), np.zeros((count, count))
        per_byte[:first, :first], fixed[:first, :first] = among.per_byte, among.fixed
        for place in range(first, count):
            pending, *own = domain.layouts[place]
            row = self.reductions.row(whole, Partial(tuple(own), pending, True, domain.width))
            per_byte[place, :first], fixed[place, :first] = row.per_byte, row.fixed
            per_byte[place, place] = 0.0
        return Priced(per_byte, fixed)

    def price(self, step: Step) -> tuple[float, float]:
        """The price of a step per byte of the whole tensor, and its fixed price."""
        if step.fraction == 0:
            return 0.0, 0.0
        return step.fraction * self.prices.per_byte(step.axes), self.prices.per_collective(step.kind, step.axes)

    def _steps(self, domain: Domain, layout: Layout) -> Iterator[Step]:
        """All single steps from a layout. Some targets are outside of the domain."""
        mesh = self.space.mesh
        local = 1.0 / float(domain.degrees[domain.position[layout]])
        used = {axis for axes in layout for axis in axes}
        for dim, axes in enumerate(layout):
            for axis in mesh.splitting:
                if axis not in used and self._blocks_nest(domain, dim, axes, (*axes, axis)):
                    yield Step(CollectiveKind.SLICE, (axis,), _with(layout, dim, (*axes, axis)), 0.0)
            if not axes and domain.shape is not None:  # blocks may cross those over fewer axes
                free = [axis for axis in mesh.splitting if axis not in used]
                for group in (group for size in range(2, len(free) + 1) for group in combinations(free, size)):
                    for order in self.space.orders(group):
                        yield Step(CollectiveKind.SLICE, order, _with(layout, dim, order), 0.0)
            for kept in range(len(axes)):
                gone = axes[kept:]
                n = mesh.degree(gone)
                whole = local * n
                if self._blocks_nest(domain, dim, axes[:kept], axes):
                    yield Step(CollectiveKind.ALL_GATHER, gone, _with(layout, dim, axes[:kept]), whole * (n - 1) / n)
            if axes:
                yield from self._exchanges(domain, layout, dim, local)
            for order in self.space.orders(tuple(sorted(axes))):
                if order != axes:
                    yield Step(CollectiveKind.PERMUTE, tuple(sorted(axes)), _with(layout, dim, order), local)

    def _blocks_nest(self, domain: Domain, dim: int, outer: Sequence[int], inner: Sequence[int]) -> bool:
        """Whether each block of a dimension over ``inner`` axes is inside one over ``outer``. Even blocks always
        are."""
        return domain.shape is None or self.space.blocks_nest(domain.shape[dim], outer, inner)

    def _exchanges(self, domain: Domain, layout: Layout, dim: int, local: float) -> Iterator[Step]:
        """All-to-alls of a dimension's minor axes to the minor end of another, and permutes that swap axes."""
        mesh = self.space.mesh
        axes = layout[dim]
        used = {axis for group in layout for axis in group}
        for other in range(len(layout)):
            if other == dim:
                continue
            for kept in range(len(axes)):
                moved = axes[kept:]
                n = mesh.degree(moved)
                joined = (*layout[other], *moved)
                target = _with(_with(layout, dim, axes[:kept]), other, joined)
                if self._blocks_nest(domain, dim, axes[:kept], axes) and self._blocks_nest(
                    domain, other, layout[other], joined
                ):
                    sent = local * self._padding(domain, other, layout[other], joined)
                    yield Step(CollectiveKind.ALL_TO_ALL, moved, target, sent * (n - 1) / n)
        for position, axis in enumerate(axes):
            for free in mesh.splitting:
                if free not in used and mesh.sizes[free] == mesh.sizes[axis]:
                    swapped = (*axes[:position], free, *axes[position + 1 :])
                    yield Step(CollectiveKind.PERMUTE, (axis, free), _with(layout, dim, swapped), local)

    def _padding(self, domain: Domain, dim: int, before: Sequence[int], after: Sequence[int]) -> float:
        """The factor by which padding for a further split enlarges a block of a dimension."""
        fewer, more = self.space.mesh.degree(before), self.space.mesh.degree(after)
        if domain.shape is None or domain.shape[dim] % more == 0:
            return 1.0
        size = domain.shape[dim]
        return (-(-size // more) * more) / (-(-size // fewer) * fewer)


@dataclass(frozen=True, slots=True)
class Partial:
    """A partial result: its layout, and the pending mesh axes in the order in which they split the reduced index.

    ``width`` is the size of an element during the reduction, relative to its size afterwards. ``scatters`` tells
    whether XLA alone may use a reduce-scatter: it may not if the pending axes split several reduced dimensions.
    """

    layout: Layout
    pending: tuple[int, ...]
    island: bool
    width: float = 1.0
    scatters: bool = True

    @property
    def kept(self) -> Layout:
        """The layout of the tensor in this state: in front, one part for each device of the pending axes."""
        return (tuple(sorted(self.pending)), *self.layout)


class Reductions:
    """Cheapest ways from partial results to whole ones, computed once per layout and set of pending axes.

    XLA alone reduces over all pending axes at once: by an all-reduce, or by a reduce-scatter onto one dimension. The
    reduce-scatter needs the order in which the axes split the reduced dimension, and no further split directly after
    it. An *island* (the operation inside a ``shard_map`` with explicit collectives) may reduce axis by axis, onto
    several dimensions.

    >>> from shardplan.hardware import load
    >>> from shardplan.layout.layout import MeshAxes
    >>> from shardplan.layout.objectives.bytes_sent import BytesSent
    >>> mesh = MeshAxes(("x", "y"), (2, 4))
    >>> transitions = Transitions(LayoutSpace(mesh), BytesSent(load("h100"), mesh))
    >>> domain = transitions.space.domain((16, 16))
    >>> reductions = transitions.reductions
    >>> wanted, nothing = ((0,), (1,)), ((), ())
    >>> [step.kind for step in reductions.path(domain, Partial(nothing, (0, 1), island=False), wanted)]
    ['reduce-scatter', 'all-to-all']
    >>> [step.kind for step in reductions.path(domain, Partial(nothing, (0, 1), island=True), wanted)]
    ['reduce-scatter', 'reduce-scatter']
    """

    def __init__(self, transitions: Transitions) -> None:
        self._transitions = transitions
        self._mesh = transitions.space.mesh
        self._rows: dict[Any, tuple[Priced, np.ndarray, tuple[_Reduced, ...]]] = {}
        self._found: dict[Any, tuple[_Reduced, ...]] = {}

    def row(self, domain: Domain, partial: Partial) -> Priced:
        """float [layouts of the domain]: the price until the tensor is whole in each layout."""
        return self._solve(domain, partial)[0]

    def path(self, domain: Domain, partial: Partial, target: Layout) -> tuple[Step, ...]:
        """The steps of the cheapest way to a layout, reductions first."""
        _, best, ways = self._solve(domain, partial)
        way = ways[best[domain.position[target]]]
        return (*way.steps, *self._transitions.path(domain, way.layout, target))

    def _solve(self, domain: Domain, partial: Partial) -> tuple[Priced, np.ndarray, tuple[_Reduced, ...]]:
        key = (domain, partial)
        if key not in self._rows:
            ways = self._ways(domain, partial.layout, partial.pending, partial.island)
            if not (partial.island or partial.scatters):
                ways = tuple(way for way in ways if way.steps[-1].kind == CollectiveKind.ALL_REDUCE)
            after = self._transitions.priced(domain)
            places = [domain.position[way.layout] for way in ways]
            per_byte = after.per_byte[places] + [[way.per_byte * partial.width] for way in ways]
            if not partial.island:
                per_byte[self._unseen(domain, ways)] = np.inf
            fixed = after.fixed[places] + [[way.fixed] for way in ways]
            best = per_byte.argmin(axis=0)
            columns = np.arange(len(domain))
            self._rows[key] = Priced(per_byte[best, columns], fixed[best, columns]), best, ways
        return self._rows[key]

    def _unseen(self, domain: Domain, ways: Sequence[_Reduced]) -> np.ndarray:
        """bool [ways, targets]: where XLA fuses a slice after a reduce-scatter into it, and then finds no
        reduce-scatter.
        """
        nowhere = np.zeros(len(domain), dtype=bool)
        begins = self._transitions.begins_with_slice
        scatters = [way.steps[-1].kind != CollectiveKind.ALL_REDUCE for way in ways]
        return np.array([begins(domain, w.layout) if s else nowhere for w, s in zip(ways, scatters, strict=True)])

    def _ways(self, domain: Domain, own: Layout, pending: tuple[int, ...], island: bool) -> tuple[_Reduced, ...]:
        """Ways to reduce over all of ``pending``, the cheapest per final layout."""
        key = (domain, own, pending, island)
        if key in self._found:
            return self._found[key]
        best: dict[Layout, _Reduced] = {}
        groups = self._groups(pending) if island else [pending]
        for group in groups:
            rest = tuple(axis for axis in pending if axis not in group)
            for step in self._steps(domain, own, group):
                done = (_Reduced(step.layout, 0.0, 0.0, ()),)
                after = self._ways(domain, step.layout, rest, island) if rest else done
                per_byte, fixed = self._transitions.price(step)
                for way in after:
                    total = per_byte + self._transitions.step_penalty + way.per_byte
                    if way.layout not in best or total < best[way.layout].per_byte:
                        best[way.layout] = _Reduced(way.layout, total, fixed + way.fixed, (step, *way.steps))
        self._found[key] = tuple(best.values())
        return self._found[key]

    def _groups(self, axes: tuple[int, ...]) -> list[tuple[int, ...]]:
        subsets = [group for size in range(len(axes), 0, -1) for group in combinations(sorted(axes), size)]
        orders = [order for group in subsets for order in self._transitions.space.orders(group)]
        return sorted(orders, key=lambda order: order != axes)  # among equals, the order that needs no island

    def _steps(self, domain: Domain, own: Layout, group: tuple[int, ...]) -> Iterator[Step]:
        """Ways to reduce over a group of axes at once. A reduce-scatter onto an uneven dimension is none."""
        local = 1.0 / float(domain.degrees[domain.position[own]])
        n = self._mesh.degree(group)
        yield Step(CollectiveKind.ALL_REDUCE, group, own, 2 * local * (n - 1) / n)
        for dim, axes in enumerate(own):
            scattered = _with(own, dim, (*axes, *group))
            uneven = domain.shape is not None and domain.shape[dim] % self._mesh.degree(scattered[dim])
            if scattered in domain.position and not uneven:
                yield Step(CollectiveKind.REDUCE_SCATTER, group, scattered, local * (n - 1) / n)


@dataclass(frozen=True, slots=True)
class _Reduced:
    layout: Layout
    per_byte: float
    fixed: float
    steps: tuple[Step, ...]


def _with(layout: Layout, dim: int, axes: tuple[int, ...]) -> Layout:
    return (*layout[:dim], axes, *layout[dim + 1 :])
