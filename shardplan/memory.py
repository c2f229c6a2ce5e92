"""Memory: which tensors a device holds, when, and how many bytes that is.

Operations run in the order of `shardplan.order`. What XLA fuses never exists in memory: a value is *held* where the
operation that makes it cannot be fused into its readers (contractions, convolutions, gathers, sorts), where a reader
needs it in memory (an operand of a contraction), and where it enters or leaves the step. The readers of a fused value
read what it is computed from instead, so these live longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardplan import _jax
from shardplan.layout import Layout
from shardplan.problem import Problem
from shardplan.program import Operation
from shardplan.schedule import Schedule

# Data movement that XLA:GPU makes part of the kernels that read it, like elementwise operations; reductions, whose
# operands it computes on the way; and updates, which it writes into their first operand where nobody reads that again.
_MOVES = frozenset(
    {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "slice", "rev", "pad", "select_n", "iota"}
    | {"gather", "dynamic_slice", "concatenate", "copy", "copy_p", "stop_gradient"}
)
_READS_ON_THE_WAY = frozenset(
    {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod", "argmax", "argmin"}
)
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
_UPDATES = frozenset({"scatter", "scatter-add", "scatter_add", "dynamic_update_slice"})

WORKSPACE_BYTES = 4 * 2**20
"""What XLA:GPU gives cuBLAS to work in while a matrix product runs, whatever its size."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """When a value is in memory: from the operation that makes it up to its last reader, as places in the order."""

    start: int
    end: int


class Lifetimes:
    """The lifetimes of a program's held values, whatever the layouts are, where operations run in ``order``."""

    def __init__(self, problem: Problem, order: Sequence[int]) -> None:
        program = problem.program
        self._problem = problem
        self.order = [program.operations[index] for index in order]
        self.place = {operation.index: place for place, operation in enumerate(self.order)}
        self.end = len(program.operations)
        outputs = {o for o in program.outputs if isinstance(o, int)}
        readers: dict[int, list[Operation]] = {}
        for operation in self.order:
            for operand in operation.operands:
                if isinstance(operand, int):
                    readers.setdefault(operand, []).append(operation)
        self.held: dict[int, Lifetime] = {}
        last_read = dict.fromkeys(outputs, self.end)
        for operation in self.order:
            place = self.place[operation.index]
            for body in operation.bodies:
                leaving = {o for o in program.regions[body].outputs if isinstance(o, int)}
                outputs |= leaving
                last_read |= dict.fromkeys(leaving, place)
        for operation in reversed(self.order):
            start, place = self._start(operation), self.place[operation.index]
            for result in operation.results:
                needed = result in outputs or any(not self._fuses_operands(r) for r in readers.get(result, ()))
                if (needed or not self._fusible(operation)) and result not in problem.generated:
                    self.held[result] = Lifetime(start, last_read.get(result, place))
            until = max((last_read.get(r, place) for r in operation.results if r not in self.held), default=0)
            for operand in operation.operands:
                if isinstance(operand, int):
                    last_read[operand] = max(last_read.get(operand, 0), place, until)
        for link in (link for links in problem.links.values() for link in links.enter if link.stacked):
            if link.target in readers:  # one slice of a stack; other operands are the outer ones, or a carry's result
                first = self.place[readers[link.target][0].index]
                self.held[link.target] = Lifetime(first, last_read[link.target])
        for index in (*program.inputs, *program.captured):
            self.held[index] = Lifetime(0, self.end)
        self._share_in_place(last_read)
        # what links alone read (a body's result that is carry and stack) is read where the loop ends
        self.reads: dict[int, tuple[int, int]] = {value: (place, place) for value, place in last_read.items()}
        for value, found in readers.items():
            first = self.place[found[0].index]
            self.reads[value] = (first, max(last_read[value], first))

    def _share_in_place(self, last_read: dict[int, int]) -> None:
        """Lets a result take the memory of an operand of its size that is read for the last time."""
        for operation in self.order:
            updates = operation.primitive.name in _UPDATES
            if (
                not operation.results
                or operation.results[0] not in self.held
                or not (updates or self._fusible(operation))
            ):
                continue
            size = self._problem.program.values[operation.results[0]].total_bytes
            place = self.place[operation.index]
            for operand in operation.operands[:1] if updates else operation.operands:
                if not isinstance(operand, int) or operand not in self.held:
                    continue
                lifetime = self.held[operand]
                if lifetime.end != place or lifetime.start == place:
                    continue
                if self._problem.program.values[operand].total_bytes == size:
                    self.held[operand] = Lifetime(lifetime.start, place - 1)
                    break

    def _start(self, operation: Operation) -> int:
        """When the results of an operation take memory: a loop's carries and stacks before its first iteration."""
        regions = self._problem.program.regions
        inside = [self.place[index] for body in operation.bodies for index in regions[body].operations]
        return min(inside, default=self.place[operation.index])

    def _fusible(self, operation: Operation) -> bool:
        if operation.primitive is _jax.optimization_barrier:
            return True  # it passes on the memory of its operands, which it needs
        return not operation.bodies and self._computes_on_the_way(operation)

    def _computes_on_the_way(self, operation: Operation) -> bool:
        name = operation.primitive.name
        return name not in _PRODUCTS and (self._problem.choices[operation.index].pointwise or name in _MOVES)

    def _fuses_operands(self, operation: Operation) -> bool:
        if operation.primitive is _jax.optimization_barrier or operation.bodies:
            return False
        return self._computes_on_the_way(operation) or operation.primitive.name in _READS_ON_THE_WAY

    def add_usages(self, donated: frozenset[int]) -> None:
        """Tells the network what each layout of a held value, and of its shared copy, uses and when.

        A copy that has its value's own layout needs no memory, which a sum over variables cannot say: a copy counts
        by what it takes more than the most split layout. `memory_profile` counts exactly.
        """
        program = self._problem.program
        copied_out = [p for number, p in program.ties.items() if p not in donated]
        twice = {program.inputs[position] for position in copied_out}
        leaving = {o for n, o in enumerate(program.outputs) if isinstance(o, int) and n not in program.ties}
        replaced = {program.outputs[number] for number in program.ties}
        for value in program.values:
            variable, copy = self._problem.variables_of(value.index)
            if variable is None:
                continue
            degrees = self._problem.domain(value.index).degrees
            lifetime = Lifetime(0, self.end) if value.index in leaving else self.held.get(value.index)
            if lifetime is not None and value.index not in replaced:
                usage = value.total_bytes / degrees * (2 if value.index in twice else 1)
                self._problem.network.add_usage(variable, usage, lifetime.start, lifetime.end + 1)
            if copy is not None and value.index in self.reads:
                usage = value.total_bytes * (1 / degrees - 1 / degrees.max())
                start, end = self.reads[value.index]
                self._problem.network.add_usage(copy, usage, start, end + 1)


def memory_profile(lifetimes: Lifetimes, schedule: Schedule, donated: frozenset[int]) -> np.ndarray:
    """float [operations + 1]: bytes that one device holds while each operation runs, in their order, and at the end.

    ``donated`` are the positions of the inputs whose memory the outputs tied to them take.
    """
    program = schedule.program
    ends = np.zeros(lifetimes.end + 2)

    def hold(value: int, layout: Layout, start: int, end: int) -> None:
        domain = schedule.problem.domain(value)
        size = program.values[value].total_bytes / domain.degrees[domain.position[layout]]
        ends[start] += size
        ends[end + 1] -= size

    inputs = {*program.inputs, *program.captured}
    leaving = {output for output in program.outputs if isinstance(output, int)} - inputs
    for value, lifetime in lifetimes.held.items():
        layout, copy = schedule.assignment.values[value], schedule.copy(value)
        end = lifetime.end
        if value in leaving:
            continue
        if copy != layout and value not in inputs:
            end = max(lifetime.start, min(end, lifetimes.reads[value][0]))
        hold(value, layout, lifetime.start, end)
    for number, output in enumerate(program.outputs):
        # the caller's memory for results is there from the start; a donated argument's is the result's
        if isinstance(output, int) and program.ties.get(number) not in donated:
            hold(output, schedule.layout_of_output(number), 0, lifetimes.end)
    for value in schedule.assignment.copies:
        if schedule.copy(value) != schedule.assignment.values[value]:
            hold(value, schedule.copy(value), *lifetimes.reads[value])
    shared: dict[tuple[int, Layout], tuple[int, int]] = {}  # reshards that XLA merges and keeps for the last reader
    for place, operation in enumerate(lifetimes.order):
        if operation.primitive.name == "dot_general":
            ends[place] += WORKSPACE_BYTES
            ends[place + 1] -= WORKSPACE_BYTES
        strategy = schedule.assignment.strategies.get(operation.index)
        if strategy is None:
            continue
        for operand, wanted in zip(operation.operands, strategy.operands, strict=True):
            if not isinstance(operand, int) or wanted is None or operand not in schedule.assignment.values:
                continue
            if wanted in (schedule.assignment.values[operand], schedule.copy(operand)):
                continue
            if schedule.gathered_anew(operand, wanted):
                hold(operand, wanted, place, place)
            else:
                shared[operand, wanted] = (shared.get((operand, wanted), (place,))[0], place)
        for result, own in zip(operation.results, strategy.results, strict=True):
            if own != schedule.assignment.values[result]:
                hold(result, own, place, place)
    for (operand, wanted), (first, last) in shared.items():
        hold(operand, wanted, first, last)
    return np.cumsum(ends)[:-1]
