"""Collectives: the kinds that exist, what each sends by a ring algorithm, and single steps of transitions.

>>> CollectiveKind("all-reduce").sent(4), CollectiveKind.ALL_GATHER.sent(4), CollectiveKind.PERMUTE.hops(4)
(1.5, 0.75, 1)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from shardplan.layout import Layout


class CollectiveKind(StrEnum):
    """The kinds of collectives, by their names in HLO, and the slice, which sends nothing."""

    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"
    PERMUTE = "collective-permute"
    BROADCAST = "collective-broadcast"
    RAGGED_ALL_TO_ALL = "ragged-all-to-all"
    SLICE = "slice"

    @property
    def reduces(self) -> bool:
        """Whether it adds up the parts of a partial result."""
        return self in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)

    def sent(self, devices: int) -> float:
        """What one of so many devices sends by a ring algorithm, as a fraction of the bytes of its operand; of an
        all-gather, of its result."""
        if self in (CollectiveKind.PERMUTE, CollectiveKind.BROADCAST):
            return 1.0
        return self._rounds * (devices - 1) / devices

    def hops(self, devices: int) -> int:
        """The messages that follow each other in a ring of so many devices."""
        return 1 if self == CollectiveKind.PERMUTE else self._rounds * (devices - 1)

    @property
    def _rounds(self) -> int:
        return 2 if self == CollectiveKind.ALL_REDUCE else 1


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a transition: a collective (or a free slice) that ends in ``layout``.

    ``fraction`` is what one device sends, as a fraction of the bytes of the whole tensor.
    """

    kind: CollectiveKind
    axes: tuple[int, ...]
    layout: Layout
    fraction: float


def ends_of(steps: Sequence[Step]) -> list[Step]:
    """The steps at whose end a constraint stands: each collective, and the last of free slices in a row."""
    return [
        step
        for step, after in zip(steps, (*steps[1:], None), strict=False)
        if step.fraction > 0 or after is None or after.fraction > 0
    ]
