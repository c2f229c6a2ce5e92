"""Longer steps for messages that creep.

Sweeps of message passing come near their fixed point by ever smaller steps, mostly in one direction. So every other
sweep starts from messages that are moved on, by some length, along the way that the last sweep took. Where the bound
falls, that is taken back. Where it rises more than the last sweep made it rise, the next step is twice as long,
otherwise half as long. Bounds are true wherever the messages come from, so nothing is risked but
the sweep. On the networks of training steps this takes a half to a tenth of the plain sweeps' number.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardplan.search.messages import Sweeper

__all__ = ["Extrapolation"]

_FIRST = 4
_SHORTEST = 1.0


class Extrapolation:
    """Sweeps of one `Sweeper`, whose costs stay the same."""

    def __init__(self, sweeper: Sweeper) -> None:
        self.sweeper = sweeper
        self.length = 2.0
        self.sweeps = 0
        self._bound = self._gain = 0.0
        self._step: NDArray[np.float64] | None = None

    def sweep(self) -> float:
        """One sweep up and down; returns its bound, which need not be the highest so far."""
        sweeper, step, self._step = self.sweeper, self._step, None
        self.sweeps += 1
        if step is not None:
            return self._try(step)
        before = sweeper.messages.copy()
        sweeper.up()
        bound = sweeper.down()
        self._gain, self._bound = bound - self._bound, bound
        if self.sweeps >= _FIRST:
            self._step = sweeper.messages - before
        return bound

    def _try(self, step: NDArray[np.float64]) -> float:
        sweeper = self.sweeper
        messages, beliefs = sweeper.messages, sweeper.beliefs.copy()
        sweeper.messages = messages + self.length * step
        sweeper.up()
        bound = sweeper.down()
        self.length = self.length * 2.0 if bound > self._bound + self._gain else max(self.length / 2.0, _SHORTEST)
        if bound > self._bound:
            self._bound = bound
        else:
            sweeper.messages, sweeper.beliefs = messages, beliefs
        return bound
