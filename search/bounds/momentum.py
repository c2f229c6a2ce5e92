"""Nesterov momentum for message passing.

Sweeps approach their fixed point by ever smaller steps, mostly in one direction. A sweep therefore starts from messages
that continue the last step, and the step grows while the bound rises (Nesterov, "A method of solving a convex
programming problem with convergence rate O(1/k^2)", 1983). A sweep that lowers the bound is undone, and the momentum
restarts from zero (O'Donoghue and Candes, "Adaptive restart for accelerated gradient schemes", 2015). The bound of a
sweep holds for any messages, so only the sweep is at risk. The networks of training steps need a fifth of the sweeps.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shardplan.search.bounds.trws import Sweeper

__all__ = ["Momentum"]

_MAX_STEP = 0.85
"""Of the way that the last sweep took, momentum and all, what the next one is moved on by at most: up to 7 plain steps
once the way is straight."""


class Momentum:
    """Sweeps of one `Sweeper`, whose costs stay the same."""

    def __init__(self, sweeper: Sweeper) -> None:
        self.sweeper = sweeper
        self._bound = -math.inf
        self._before: NDArray[np.float64] | None = None
        """The messages before the last sweep that was not taken back."""
        self._rising = 0
        """Sweeps since the bound last fell."""

    def sweep(self) -> float:
        """One sweep up and down; returns its bound, which need not be the highest so far."""
        sweeper = self.sweeper
        messages, beliefs = sweeper.messages, sweeper.beliefs.copy()
        further = min(_MAX_STEP, self._rising / (self._rising + 2.0))
        sweeper.messages = messages.copy() if self._before is None else messages + further * (messages - self._before)
        sweeper.up()
        bound = sweeper.down()
        if further > 0.0 and bound < self._bound:
            sweeper.messages, sweeper.beliefs = messages, beliefs
            self._rising = 0
        else:
            self._bound, self._before = bound, messages
            self._rising += 1
        return bound
