"""What a device holds besides of a tensor that is brought to another layout, per choices of two variables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.layout import Layout
from shardplan.memory.slicing import sliced_among
from shardplan.problem import Problem

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Brought:
    """A tensor that a device holds besides while something needs it in another layout than the one that is there.

    source, target: the variables whose choices say which layouts these are: ``there`` and ``wanted``, per choice, the
    latter None where none is needed. Held is the one that is wanted; of an operation's result the one that is there.
    """

    value: int
    source: int
    target: int
    there: tuple[Layout, ...]
    wanted: tuple[Layout | None, ...]
    result: bool = False
    fused: bool = False

    def amounts(self, problem: Problem) -> Array:
        """float [choices of the source, choices of the target]: bytes on one device."""
        domain = problem.domain(self.value)
        there = np.array([domain.position[layout] for layout in self.there])
        wanted = np.array([-1 if layout is None else domain.position[layout] for layout in self.wanted])
        sizes = problem.program.values[self.value].total_bytes / domain.degrees
        held = sizes[there][:, None] if self.result else sizes[wanted][None, :]
        if self.fused:
            held = np.where(sliced_among(domain.layouts)[np.ix_(there, wanted)], 0.0, held)
        return np.where((there[:, None] == wanted[None, :]) | (wanted[None, :] < 0), 0.0, held)

    def remaining(self, problem: Problem) -> Array:
        """float [choices of the source, choices of the target]: bytes on one device of what is there, but where it is
        gathered: of what a loop reads otherwise, it is kept, or the result of an all-to-all is beside its copy."""
        domain = problem.domain(self.value)
        there = np.array([domain.position[layout] for layout in self.there])
        wanted = np.array([-1 if layout is None else domain.position[layout] for layout in self.wanted])
        sizes = problem.program.values[self.value].total_bytes / domain.degrees[there]
        gathered = sliced_among(domain.layouts)[np.ix_(wanted, there)].T & (wanted >= 0)
        return np.where(gathered, 0.0, sizes[:, None])
