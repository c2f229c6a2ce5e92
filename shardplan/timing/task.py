"""Tasks of simulated workers, and the events of a simulation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Task:
    """A unit of work on one worker, which nothing interrupts.

    Attributes:
        name: for the timeline.
        worker: its number.
        seconds: its duration.
        reads, makes: tensors by number. A tensor that no task makes is on all of its readers from the start.
        sent_bytes: of a collective, which occupies the worker's outgoing link and leaves it free to compute. None for
            work.
        axes: the mesh axes of a collective.
        operation: the index of the operation that the task runs, or that makes or reads the collective's tensor.
    """

    name: str
    worker: int
    seconds: float
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    sent_bytes: float | None = None
    axes: tuple[str, ...] = ()
    operation: int | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """An interval of a worker: ``kind`` is "compute", "collective" or "transfer" (to the worker ``receiver``).

    ``axes`` and ``operation`` are those of the task.
    """

    kind: str
    name: str
    worker: int
    start: float
    end: float
    bytes: float = 0.0
    receiver: int | None = None
    axes: tuple[str, ...] = ()
    operation: int | None = None
