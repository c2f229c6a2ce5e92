"""What a device holds, and when."""

from __future__ import annotations

from dataclasses import dataclass

from shardplan.layout import Layout


@dataclass(frozen=True, slots=True)
class Lifetime:
    """When a value is in memory: from the operation that makes it up to its last reader, as places in the order."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Held:
    """Memory that one device gives to a value, or to a copy of it, in bytes; None stands for a library's workspace."""

    value: int | None
    layout: Layout
    size: float
    lifetime: Lifetime
