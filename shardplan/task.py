"""What simulated workers do: tasks, and the events that come of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Task:
    """What one worker does in one go.

    Attributes:
        name: for the timeline.
        worker: its number.
        seconds: how long it takes.
        reads, makes: tensors by number; one that no task makes is wherever it is read, from the start.
        sent_bytes: of a collective, which takes the worker's way out and leaves it free to compute; None for work.
    """

    name: str
    worker: int
    seconds: float
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    sent_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a worker did: ``kind`` is "compute", "collective" or "transfer" (to the worker ``receiver``)."""

    kind: str
    name: str
    worker: int
    start: float
    end: float
    bytes: float = 0.0
    receiver: int | None = None
