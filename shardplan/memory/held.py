"""What a device holds, and when."""

from __future__ import annotations

from typing import NamedTuple

from shardplan.layout import Layout


class Lifetime(NamedTuple):
    """When a value is in memory: from the operation that makes it up to its last reader, as places in the order."""

    start: int
    end: int


class Held(NamedTuple):
    """Memory that one device gives to a value, or to a copy of it, in bytes; None stands for a library's workspace."""

    value: int | None
    layout: Layout
    size: float
    lifetime: Lifetime
