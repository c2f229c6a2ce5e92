"""Places: which dimension of each value an index is, and how operations go along it."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from shardplan import _jax
from shardplan.program.program import Operation
from shardplan.rules import Along


@dataclass(frozen=True, slots=True)
class Place:
    """The dimension of a value that an index is, and the positions by which it advances per position of the seed."""

    dim: int
    scale: Fraction


@dataclass(slots=True)
class Growth:
    """What indices reach: ``places`` per index by value, ``along`` per operation, ``cuts`` with reasons.

    ``inside``: the operations of the bodies of scans, by index. ``partial``: the values there that are parts of sums
    over an index."""

    places: tuple[dict[int, Place], ...]
    along: dict[int, tuple[Along, ...]] = field(default_factory=dict)
    cuts: dict[int, str] = field(default_factory=dict)
    inside: dict[int, tuple[Along, ...]] = field(default_factory=dict)
    partial: set[int] = field(default_factory=set)

    def blocked(self, value: int) -> bool:
        """Whether a value has all of the indices."""
        return all(value in places for places in self.places)


def is_barrier(operation: Operation) -> bool:
    """Whether an operation is a barrier, which passes each operand on by itself."""
    return operation.primitive is _jax.optimization_barrier
