"""How much a solver of graphs tries, and whom it answers to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Budget", "Callbacks"]


@dataclass(frozen=True, slots=True)
class Budget:
    """How much is tried; counts of work, not of seconds, so that results repeat.

    sweeps: of messages, at most. seconds: that they may take, by estimate from the sizes of tables.
    promising: choices per variable that are tried together. table, entries: of dynamic programming, in one table and
    in all. closing: CP-SAT's deterministic time; closable: table entries up to which it is tried.
    dives: whether to try the choices near the relaxation's best alone.
    merging: table entries up to which neighbours are merged where messages stall.
    fitting: whether choices that raise the bound by little, and groups of the others, are looked through where messages
    stall, raise the bound by little, or have been swept enough.
    enough: the gap at which what twins taken together give is not searched on.
    """

    sweeps: int = 3000
    seconds: float = 60.0
    promising: int = 4
    table: float = 2e5
    entries: float = 3e7
    closing: float = 30.0
    closable: int = 60_000
    dives: bool = True
    merging: int = 4_000_000
    fitting: bool = False
    enough: float = 0.0


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Whom a solver answers to.

    report: called after each step that may have changed a bound; it may raise, to end the search.
    seconds_left: until the search has to end. ask: called where an assignment is as good as it gets for a while; doubt:
    called where it seems that nothing keeps within the limit. Both may raise likewise. stuck: called where messages do
    not help any more; it may know a better assignment.
    """

    report: Callable[[], None]
    seconds_left: Callable[[], float]
    ask: Callable[[], None] = lambda: None
    doubt: Callable[[], None] = lambda: None
    stuck: Callable[[], None] = lambda: None
