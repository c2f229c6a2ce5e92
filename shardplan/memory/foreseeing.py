"""What a schedule would hold if it brought more to other layouts than it does.

A search within a limit begins with a schedule that exceeds it. What is found then stores more in parts, and gathers it
where it is read: XLA gathers that together with what is gathered already, where the first of all is read, so that it
is in memory from there on (`shardplan.memory.gathering`). Of layers that are alike, the next search would else gather
in one what the search before has learnt not to gather in another.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardplan.layout import Layout
from shardplan.memory.brought import Brought
from shardplan.memory.combining import COMBINED_BYTES, with_partners
from shardplan.memory.gathering import groups_gathered
from shardplan.program import Operation
from shardplan.schedule import Schedule

if TYPE_CHECKING:
    from shardplan.memory.liveness import Lifetimes

Array = NDArray[np.float64]
_Axes = tuple[int, ...]


class Joining:
    """Which of a schedule's gathers another one would join."""

    def __init__(self, lifetimes: Lifetimes, schedule: Schedule) -> None:
        self._lifetimes, self._program = lifetimes, schedule.program
        self._turns = {operation.index: turn for turn, operation in enumerate(with_partners(schedule))}
        self._groups: dict[int, dict[tuple[_Axes, int], list[tuple[int, int, float]]]] = {}
        """Per region and kind of gathers, groups in their order: the turn of the first reader, the place from which on
        they are in memory, and how many bytes more they would take."""
        for (region, axes, dimension), filled, members in groups_gathered(schedule):
            read = [lifetimes.reads[g.value][0] if g.alone is None else lifetimes.place[g.alone] for g in members]
            turn = min(self._turns[lifetimes.order[place].index] for place in read)
            kinds = self._groups.setdefault(region, {})
            group = turn, min(read), COMBINED_BYTES - filled
            kinds.setdefault((tuple(sorted(axes)), dimension), []).append(group)

    def joined(self, operation: Operation, brought: Brought) -> Iterator[tuple[int, Array]]:
        """Where an operation is the first to read a value in another layout than it is there in: places from which on
        it would be in memory, each with how large it may be for that, per pair of layouts: where a gather brings it."""
        kinds = self._groups.get(operation.region)
        if not kinds:
            return
        place, turn = self._lifetimes.place[operation.index], self._turns[operation.index]
        made, shape = self._lifetimes.held.get(brought.value), self._program.values[brought.value].shape
        for kind, groups in kinds.items():
            _, begins, room = max((group for group in groups if group[0] <= turn), default=min(groups))
            if begins < place and made is not None and made.start <= begins:
                gathered = _gathers(brought.there, brought.wanted, shape).get(kind)
                if gathered is not None:
                    yield begins, np.where(gathered, room, 0.0)


def lasting(lifetimes: Lifetimes) -> dict[int, int]:
    """Per operation that is computed on the way, by index, the last place where it is, unless a reader needs what it
    makes in another layout."""
    found: dict[int, int] = {}
    for operation in reversed(lifetimes.order):
        if operation.index in lifetimes.fused and lifetimes.held.keys().isdisjoint(operation.results):
            readers = [reader.index for result in operation.results for reader in lifetimes.readers.get(result, ())]
            places = [found.get(index, lifetimes.place[index]) for index in readers]
            found[operation.index] = max([lifetimes.place[operation.index], *places])
    return found


@lru_cache(maxsize=4096)
def _gathers(
    there: tuple[Layout, ...], wanted: tuple[Layout | None, ...], shape: tuple[int, ...]
) -> dict[tuple[_Axes, int], NDArray[np.bool_]]:
    """Per mesh axes and dimension, of which layouts to which a gather over these goes, of that dimension alone."""
    found: dict[tuple[_Axes, int], NDArray[np.bool_]] = {}
    for row, own in enumerate(there):
        for column, layout in enumerate(wanted):
            if layout is None or len(own) != len(layout):
                continue
            changed = [n for n, (old, new) in enumerate(zip(own, layout, strict=True)) if old != new]
            if len(changed) == 1 and own[changed[0]][: len(layout[changed[0]])] == layout[changed[0]]:
                axes = tuple(sorted(own[changed[0]][len(layout[changed[0]]) :]))
                dimension = sum(size > 1 for size in shape[: changed[0]])
                kind = found.setdefault((axes, dimension), np.zeros((len(there), len(wanted)), dtype=bool))
                kind[row, column] = True
    return found
