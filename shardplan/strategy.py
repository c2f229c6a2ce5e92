"""Strategies: for one operation, the layout of each operand and result, and what its devices send for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from shardplan.layout import Domain, Layout, MeshAxes
from shardplan.program import Operation
from shardplan.regions.collectives import Named


@dataclass(frozen=True, slots=True)
class Halo:
    """Rows that each block of an operand gets from one neighbour: ``rows`` of ``dim``, which is split over ``axes``."""

    operand: int
    dim: int
    axes: tuple[int, ...]
    rows: int


@dataclass(frozen=True, slots=True)
class Strategy:
    """How one operation is split.

    ``operands`` holds the layout that each operand must have (None for literals), ``results`` the layout in which
    each result comes out, ``pending`` per result the axes over which it is still a partial result, in the order in
    which they split the reduced index, with its ``reducers``. ``degree`` is the number of devices that share the
    work; the others repeat it. ``halos`` are the rows that blocks get from their neighbours. ``padded`` tells that some
    index is split unevenly: devices then work on padded blocks, and fewer than there are share the work.
    """

    operands: tuple[Layout | None, ...]
    results: tuple[Layout, ...]
    pending: tuple[tuple[int, ...], ...]
    reducers: tuple[str | None, ...]
    degree: float
    halos: tuple[Halo, ...] = ()
    possible: bool = True
    """Whether the operation can be split so; a strategy that cannot be stands where a layout has none."""
    calls: tuple[Named, ...] = ()
    """The collectives that the operation itself calls by name: a region that the user split by hand."""
    padded: bool = False


@dataclass(frozen=True, slots=True)
class Choices:
    """The strategies of one operation.

    ``follows_result`` tells that they are aligned with the domain of the only result, one per layout; otherwise the
    operation is a variable of its own. ``pointwise`` tells that each element of the result reads the elements at its
    own place alone (of operands that may be broadcast). ``linear`` are the sets of operands through which partial sums
    pass together; ``islands`` tells that the operation can run on blocks as it is.
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
    """Element type that the work is done in."""


def passing_on(choices: Choices, domain: Domain, linear: tuple[int, ...]) -> Choices:
    """The choices of an operation through which partial sums pass, aligned with a domain that has partial layouts.

    Where an operation cannot be split as its partial result asks for, an impossible strategy stands.
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


def waiting(choices: Choices, mesh: MeshAxes, sets: tuple[tuple[int, ...], ...]) -> Choices:
    """The choices of an operation, and those in which a partial sum of one of the ``sets`` of operands waits.

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
    """How a barrier is split, which passes on each operand in the layout that its result has."""
    results = tuple(values[result] for result in operation.results)
    operands = tuple(r if isinstance(o, int) else None for o, r in zip(operation.operands, results, strict=True))
    nothing = ((),) * len(results)
    return Strategy(operands, results, nothing, (None,) * len(results), mesh.device_count)
