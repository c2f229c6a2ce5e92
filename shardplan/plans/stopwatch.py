"""The time limit of a planning that has several parts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """The seconds that planning has left, in which stating problems does not count."""

    def __init__(self, seconds: float) -> None:
        self._begun, self._seconds, self.stating = time.perf_counter(), seconds, 0.0

    @property
    def spent(self) -> float:
        """The seconds since it was begun, without those that stated problems."""
        return time.perf_counter() - self._begun - self.stating

    @property
    def left(self) -> float:
        return self._seconds - self.spent

    @contextmanager
    def states(self) -> Iterator[None]:
        """A part of planning that states a problem."""
        begun = time.perf_counter()
        yield
        self.stating += time.perf_counter() - begun
