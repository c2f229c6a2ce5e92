"""What a device holds besides of a tensor that is brought to another layout, per choices of two variables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.layout import Layout
from shardplan.memory.narrower import narrower_copies
from shardplan.memory.sizes import layout_left
from shardplan.memory.slicing import sliced_among
from shardplan.once import once
from shardplan.problem import Problem
from shardplan.program import Operation

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

    def places(self, problem: Problem) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The positions of the layouts that are there, and wanted, among the value's: -1 where none is."""
        position = problem.domain(self.value).position
        wanted = [-1 if layout is None else position[layout] for layout in self.wanted]
        return np.array([position[layout] for layout in self.there]), np.array(wanted)

    def amounts(self, problem: Problem) -> Array:
        """float [choices of the source, choices of the target]: bytes on one device."""
        domain, (there, wanted) = problem.domain(self.value), self.places(problem)
        sizes = problem.program.values[self.value].total_bytes / domain.degrees
        narrow = narrower_copies(problem).get(self.value, 1.0)
        held = sizes[there][:, None] if self.result else narrow * sizes[wanted][None, :]
        if self.fused:
            held = np.where(sliced_among(domain.layouts)[np.ix_(there, wanted)], 0.0, held)
        return np.where((there[:, None] == wanted[None, :]) | (wanted[None, :] < 0), 0.0, held)

    def remaining(self, problem: Problem) -> Array:
        """float [choices of the source, choices of the target]: bytes on one device of what is there, but where it is
        gathered: of what a loop reads otherwise, it is kept, or the result of an all-to-all is beside its copy."""
        domain, (there, wanted) = problem.domain(self.value), self.places(problem)
        sizes = problem.program.values[self.value].total_bytes / domain.degrees[there]
        gathered = sliced_among(domain.layouts)[np.ix_(wanted, there)].T & (wanted >= 0)
        return np.where(gathered, 0.0, sizes[:, None])


def own_variable(problem: Problem, operation: Operation) -> int | None:
    """The variable of an operation, which may be its result's."""
    choices, variables = problem.choices.get(operation.index), problem.variables
    if choices is None or not choices.follows_result:
        return variables.operations.get(operation.index)
    return variables.values.get(operation.results[0])


@once
def brought_by(problem: Problem, index: int, updating: bool, fused: bool) -> list[tuple[Brought, Array]]:
    """The operands and results that an operation brings to other layouts, and what that takes.

    updating: whether it updates what it reads, of which a copy may be gone by then. fused: whether it is in a kernel
    with what reads its result.
    """
    operation, choices, variables = problem.program.operations[index], problem.choices[index], problem.variables
    own, strategies, found = own_variable(problem, operation), choices.strategies, list[Brought]()
    assert own is not None
    for position, operand in enumerate(operation.operands):
        if isinstance(operand, int) and operand in variables.values:
            wanted = tuple([strategy.operands[position] for strategy in strategies])
            source = variables.values[operand] if updating else problem.source_of(operation, operand)
            found.append(Brought(operand, source, own, problem.domain(operand).layouts, wanted))
    for position, result in enumerate(operation.results if not choices.follows_result else ()):
        there = tuple([layout_left(problem, operation, strategy, position) for strategy in strategies])
        ends, layouts = (own, variables.values[result]), problem.domain(result).layouts
        found.append(Brought(result, *ends, there, layouts, result=True, fused=fused))
    return [(brought, brought.amounts(problem)) for brought in found]
