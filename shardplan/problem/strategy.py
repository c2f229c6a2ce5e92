"""Strategies: for one operation, the layout of each operand and result, and the bytes that its devices send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from shardplan.layout.layout import Domain, Layout, MeshAxes
from shardplan.program.program import Operation
from shardplan.program.regions.collectives import Named


@dataclass(frozen=True, slots=True)
class Halo:
    """Rows that each block of an operand gets from one neighbour: ``rows`` of ``dim``, which is split over ``axes``."""

    operand: int
    dim: int
    axes: tuple[int, ...]
    rows: int


@dataclass(frozen=True, slots=True)
class Strategy:
    """The split of one operation.

    ``operands`` has the layout of each operand (None for literals), ``results`` that of each result. ``pending`` has
    per result the axes over which it is a partial result, in the order in which they split the reduced index, and
    ``reducers`` its reducers. ``degree`` is the number of devices that share the work. The others repeat it. ``halos``
    are the rows that blocks get from their neighbours. ``padded`` marks an unevenly split index: devices work on padded
    blocks, and some may have none.
    """

    operands: tuple[Layout | None, ...]
    results: tuple[Layout, ...]
    pending: tuple[tuple[int, ...], ...]
    reducers: tuple[str | None, ...]
    degree: float
    halos: tuple[Halo, ...] = ()
    possible: bool = True
    """Whether the operation can be split so: a layout without a strategy has an impossible one."""
    calls: tuple[Named, ...] = ()
    """The collectives that the operation calls by name, in a region that the user split by hand."""
    padded: bool = False


@dataclass(frozen=True, slots=True)
class Choices:
    """The strategies of one operation.

    ``follows_result`` marks strategies that are aligned with the domain of the only result, one per layout. Otherwise
    the operation is a variable of its own. ``pointwise`` marks results whose elements read the elements at the same
    place alone (of operands that may be broadcast). ``linear`` are the sets of operands through which partial sums pass
    together. ``islands`` tells that the operation can run on blocks unchanged.
    """

    strategies: tuple[Strategy, ...]
    follows_result: bool
    pointwise: bool
    linear: tuple[frozenset[int], ...]
    islands: bool
    flops: int
    memory_bytes: int
    """Bytes that the whole operation reads and writes."""
    dtype: Any
    """Element type of the work."""


def passing_on(choices: Choices, domain: Domain, linear: tuple[int, ...]) -> Choices:
    """The choices of an operation through which partial sums pass, aligned with a domain that has partial layouts.

    An impossible strategy is the entry of a partial layout that the operation cannot have.
    """
    assert domain.whole is not None
    strategies = list(choices.strategies)
    for pending, *own in domain.layouts[len(domain.whole) :]:
        base = choices.strategies[domain.whole.position[tuple(own)]]
        if base.halos or base.results[0] != tuple(own):
            strategies.append(replace(base, results=((pending, *own),), possible=False))
            continue
        operands = tuple(
            (pending, *layout) if position in linear and layout is not None else layout
            for position, layout in enumerate(base.operands)
        )
        strategies.append(replace(base, operands=operands, results=((pending, *own),)))
    return replace(choices, strategies=tuple(strategies))


def with_deferred(choices: Choices, mesh: MeshAxes, sets: tuple[tuple[int, ...], ...]) -> Choices:
    """The choices of an operation, and those with a deferred sum in one of the ``sets`` of operands.

    The devices that hold the parts all do the work, each on its own part.
    """
    found = []
    for linear, base in product(sets, choices.strategies):
        layouts = [layout for layout in (*base.operands, *base.results) if layout is not None]
        free = [axis for axis in mesh.splitting if all(axis not in axes for layout in layouts for axes in layout)]
        if any(base.pending) or base.halos or base.padded:
            continue
        for size in range(1, len(free) + 1):
            for pending in combinations(free, size):
                operands = tuple(
                    (pending, *layout) if position in linear and layout is not None else layout
                    for position, layout in enumerate(base.operands)
                )
                results = tuple((pending, *layout) for layout in base.results)
                found.append(replace(base, operands=operands, results=results))
    return replace(choices, strategies=(*choices.strategies, *found))


def barrier_strategy(operation: Operation, values: Mapping[int, Layout], mesh: MeshAxes) -> Strategy:
    """The strategy of a barrier: each operand has the layout of its result."""
    results = tuple(values[result] for result in operation.results)
    operands = tuple(r if isinstance(o, int) else None for o, r in zip(operation.operands, results, strict=True))
    nothing = ((),) * len(results)
    return Strategy(operands, results, nothing, (None,) * len(results), mesh.device_count)
