"""Overlap: which collectives XLA can move beside work, and how long a step takes then.

XLA:GPU makes every collective asynchronous, and its scheduler puts between the start and the end of one what neither
leads to it nor waits for it, one collective at a time (docs/xla.md). So a collective *can hide* where enough work is
independent of the tensor that it moves: a weight is gathered while the layers before it compute, a gradient reduced
while those before it are differentiated. An activation of the forward pass has nothing beside it: the step waits.

What can hide shares the work that there is, and takes something from it: what is sent is read from the memory that the
work reads, and what arrives is written there. So a step takes the collectives that it waits for, and the longer one of
the work with what is taken from it and of the collectives that can hide:

>>> StepTime(work=10e-3, waiting=1e-3, beside=4e-3, taken=1e-3).seconds
0.012
>>> StepTime(work=10e-3, waiting=1e-3, beside=15e-3, taken=1e-3).seconds
0.016
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardplan.hardware import HardwareProfile, load
from shardplan.layout.collectives import CollectiveKind
from shardplan.layout.objectives import Prices, Timing
from shardplan.layout.objectives.step_seconds import StepSeconds
from shardplan.memory import whole_kernels
from shardplan.problem.cost_network import Problem
from shardplan.problem.schedule import Schedule, Sent
from shardplan.program.program import Operation, Program, Region
from shardplan.timing.execution_order import execution_order

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})

_MERGED_BYTES = 30 * 2**20
"""XLA:GPU merges reduce-scatters until a device gets so many bytes."""

_READS_A_PART = frozenset({"slice", "dynamic_slice", "gather"})


@dataclass(frozen=True, slots=True)
class StepTime:
    """Where the time of a step goes by the planner's model, in seconds on each device.

    Attributes:
        work: of the operations.
        waiting: of the collectives that nothing can run beside.
        beside: of those that work can run beside.
        taken: by which these make the work longer.
    """

    work: float
    waiting: float
    beside: float
    taken: float

    @property
    def excess(self) -> float:
        """By how much the collectives that can hide take longer than the work beside them."""
        return self.beside - self.work - self.taken

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.waiting + max(self.work + self.taken, self.beside)

    @property
    def exposed(self) -> float:
        """By how much collectives make the step longer than its work."""
        return self.seconds - self.work

    @property
    def hidden(self) -> float:
        """Of collectives, by which they do not."""
        return self.waiting + self.beside - self.exposed


def step_time(schedule: Schedule) -> StepTime:
    """The seconds of a schedule: its operations, and its collectives by whether they can hide."""
    problem, strategies = schedule.problem, schedule.assignment.strategies
    prices, hidden = time_prices(problem), timing_of(problem).hidden
    seconds = {
        operation.index: work_seconds(problem, prices, operation, strategies[operation.index].degree)
        for operation in problem.program.operations
        if operation.index in strategies
    }
    left_out = regions_left_out(problem.program, seconds)
    work = sum(s for index, s in seconds.items() if problem.program.operations[index].region not in left_out)
    waiting = beside = taken = 0.0
    for sent in schedule.collectives():
        if sent.tensor.index in hidden:
            beside += sent_seconds(prices, sent)
            taken += sent.times * sent.bytes * prices.memory_seconds_per_byte
        else:
            waiting += sent_seconds(prices, sent)
    return StepTime(work, waiting, beside, taken)


def time_prices(problem: Problem, hardware: HardwareProfile | str | Path | None = None) -> Prices:
    """The prices in seconds on a problem's mesh, by default of the hardware that it is planned for."""
    return StepSeconds(problem.prices.hardware if hardware is None else load(hardware), problem.space.mesh)


def work_seconds(problem: Problem, prices: Prices, operation: Operation, degree: float = 1) -> float:
    """The seconds of an operation by one of ``degree`` devices that share it, in all its turns; a loop has none of its
    own."""
    choices = problem.choices.get(operation.index)
    if choices is None or (operation.results and operation.results[0] in problem.generated):
        return 0.0
    once = prices.work(choices.flops, timing_of(problem).memory_bytes[operation.index], choices.dtype, degree)
    return once * problem.times(operation)


def regions_left_out(program: Program, seconds: Mapping[int, float]) -> set[int]:
    """The branches, with all inside, of which others take longer. ``seconds`` are those of each operation, by index."""
    regions = program.regions
    return program.regions_left_out({r.index: sum(seconds.get(o, 0.0) for o in r.operations) for r in regions})


def sent_seconds(prices: Prices, sent: Sent) -> float:
    """The seconds of a collective per step, all its turns."""
    axes = tuple(sent.step.axes)
    return sent.times * (sent.bytes * prices.per_byte(axes) + prices.per_collective(sent.step.kind, axes))


def timing_of(problem: Problem) -> Timing:
    """What the time of a problem's plans depends on, worked out once."""
    if problem.timing is None:
        memory_bytes = memory_traffic(problem)
        problem.timing = Timing(memory_bytes, _values_that_hide(problem, memory_bytes))
    return problem.timing


# ---- memory traffic


def memory_traffic(problem: Problem) -> dict[int, int]:
    """Per operation, the bytes that the kernel around it reads and writes, of whole tensors.

    An operation that becomes part of the kernels which read it moves nothing itself: these read what it is computed
    from.
    """
    program = problem.program
    kernels = whole_kernels(problem)
    held, fused = kernels.stored, kernels.fused
    leaving = (output for region in program.regions for output in region.outputs)  # a carry is the loop's result
    ends = {output for output in leaving if isinstance(output, int)}
    read: dict[int, dict[int, int]] = {}
    found: dict[int, int] = {}
    for operation in program.operations:
        reads = _reads_of(problem, operation, held, read)
        stored = [r for r in operation.results if r in held or r in ends or operation.index not in fused]
        for result in operation.results:
            read[result] = reads
        written = sum(program.values[result].total_bytes for result in stored)
        found[operation.index] = written + sum(reads.values()) if stored and not operation.bodies else 0
    return found


def _reads_of(
    problem: Problem, operation: Operation, held: Collection[int], read: Mapping[int, dict[int, int]]
) -> dict[int, int]:
    """The tensors in memory that an operation is computed from, with the bytes that are read of each."""
    values = problem.program.values
    found: dict[int, int] = {}
    for operand in operation.operands:
        if isinstance(operand, int) and operand not in problem.generated:
            here = {operand: values[operand].total_bytes}
            for source, size in (here if operand in held else read.get(operand, here)).items():
                found[source] = max(size, found.get(source, 0))
    if operation.primitive.name in _READS_A_PART:
        part = values[operation.results[0]].total_bytes
        return {source: min(size, part) for source, size in found.items()}
    return found


# ---- what can hide


@dataclass(frozen=True, slots=True)
class _Window:
    """When a value is ready, and when its first reader starts, in seconds of work since its region began.

    ``ends`` tells that only what the region ends with needs it.
    """

    ready: float
    needed: float
    ends: bool


def _values_that_hide(problem: Problem, memory_bytes: Mapping[int, int]) -> frozenset[int]:
    """The values whose collectives can hide: the work meanwhile takes as long as the dearest way to send them.

    Work counts as if it was split over all devices, sending as an all-reduce of the whole over the slowest mesh axis.
    """
    program, mesh, prices = problem.program, problem.space.mesh, time_prices(problem)
    axes = mesh.splitting
    if not axes:
        return frozenset()
    per_byte, fixed = 2 * prices.per_byte(axes), prices.per_collective(CollectiveKind.ALL_REDUCE, axes)
    seconds = {
        index: prices.work(choices.flops, memory_bytes[index], choices.dtype, mesh.device_count)
        for index, choices in problem.choices.items()
    }
    place = {index: n for n, index in enumerate(execution_order(program, whole_kernels(problem).fused))}
    hidden: set[int] = set()
    for region in program.regions:
        operations = sorted((program.operations[index] for index in region.operations), key=lambda o: place[o.index])
        windows = _windows(region, operations, seconds)
        for value, window in windows.items():
            if window.needed - window.ready >= per_byte * program.values[value].total_bytes + fixed:
                hidden.add(value)
        hidden -= _sent_last(problem, windows)
    return frozenset(hidden)


def _windows(region: Region, operations: Sequence[Operation], seconds: Mapping[int, float]) -> dict[int, _Window]:
    """Of a region's values; ``operations`` are in the order in which they run.

    What is no product runs when its results are needed. XLA sends nothing beside a loop but what the loop sends.
    """
    clock, starts = 0.0, {}
    ready: dict[int, float] = dict.fromkeys(region.inputs, 0.0)
    for operation in operations:
        starts[operation.index] = clock
        if not operation.bodies:
            clock += seconds.get(operation.index, 0.0)
        done = max((ready.get(o, 0.0) for o in operation.operands if isinstance(o, int)), default=0.0)
        ready |= dict.fromkeys(operation.results, clock if _is_place(operation) else done)
    needed: dict[int, float] = {}
    for operation in reversed(operations):
        first = min((needed[r] for r in operation.results if r in needed), default=None)
        if _is_place(operation):
            first = starts[operation.index]
        for operand in operation.operands:
            if isinstance(operand, int) and first is not None:
                needed[operand] = min(needed.get(operand, first), first)
    return {value: _Window(at, needed.get(value, clock), value not in needed) for value, at in ready.items()}


def _is_place(operation: Operation) -> bool:
    return operation.primitive.name in _PRODUCTS or bool(operation.bodies)


def _sent_last(problem: Problem, windows: Mapping[int, _Window]) -> set[int]:
    """The values that are sent when no work is left: XLA merges the last reductions, up to a size.

    Which of the gradients are reduced last is XLA's choice; the largest are taken to be. What is computed from one (a
    moment, the new weight) is where it is.
    """
    values = problem.program.values
    groups: dict[float, list[int]] = {}
    for value, window in windows.items():
        if window.ends and window.ready:
            groups.setdefault(window.ready, []).append(value)
    sizes = {ready: max(values[value].total_bytes for value in group) for ready, group in groups.items()}
    found: set[int] = set()
    left = _MERGED_BYTES * problem.space.mesh.device_count
    for ready in sorted(groups, key=lambda at: (-sizes[at], -at)):
        if left <= 0:
            break
        found.update(groups[ready])
        left -= sizes[ready]
    return found
