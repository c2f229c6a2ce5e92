"""The model of step time: the collectives that can overlap with work, and the time of the step with them.

XLA:GPU makes every collective asynchronous. Its latency-hiding scheduler fills the gap between start and end of one
collective at a time with independent work (docs/xla/overlap.md). So a collective *can hide* where enough work is
independent of the tensor that it moves. A weight is gathered while the layers before it compute, and a gradient is
reduced while the layers before it are differentiated. No work is independent of an activation in the forward pass: the
step waits for it.

All collectives that can hide share the same work, and slow it down, since they read and write the same memory. The time
of a step is the waiting for the other collectives, plus a maximum. Its first argument is the work, with the time that
collectives take from it. Its second one is the collectives that can hide:

>>> StepTime(work=10e-3, waiting=1e-3, overlappable=4e-3, taken=1e-3).seconds
0.012
>>> StepTime(work=10e-3, waiting=1e-3, overlappable=15e-3, taken=1e-3).seconds
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
from shardplan.memoize import memoize
from shardplan.memory import whole_kernels
from shardplan.problem.cost_network import Problem
from shardplan.problem.schedule import Schedule, Sent
from shardplan.program.operation_kinds import PRODUCTS, moves_between_memories
from shardplan.program.program import Operation, Program, Region
from shardplan.timing.execution_order import execution_order
from shardplan.timing.host_copies import seconds_of_copies
from shardplan.timing.stack_traffic import stack_traffic

_MERGED_BYTES = 30 * 2**20
"""XLA:GPU merges reduce-scatters until a device gets so many bytes."""

_READS_A_PART = frozenset({"slice", "dynamic_slice", "gather"})


@dataclass(frozen=True, slots=True)
class StepTime:
    """The parts of a step's time by the planner's model, in seconds on each device.

    Attributes:
        work: of the operations.
        waiting: of the collectives that cannot overlap with work, and of copies from and to the host that outlast it.
        overlappable: of those that can.
        taken: by which these make the work longer.
    """

    work: float
    waiting: float
    overlappable: float
    taken: float

    @property
    def excess(self) -> float:
        """The time by which the collectives that can hide exceed the work that they overlap with."""
        return self.overlappable - self.work - self.taken

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.waiting + max(self.work + self.taken, self.overlappable)

    @property
    def exposed(self) -> float:
        """The time by which the step exceeds its work: that of collectives it waits for."""
        return self.seconds - self.work

    @property
    def hidden(self) -> float:
        """The time of collectives that work hides."""
        return self.waiting + self.overlappable - self.exposed


@memoize
def step_time(schedule: Schedule) -> StepTime:
    """The seconds of a schedule: its operations, its collectives that can hide, the others, and copies to the host."""
    problem, seconds = schedule.problem, _work(schedule)
    prices, hidden = time_prices(problem), timing_of(problem).hidden
    left_out = regions_left_out(problem.program, seconds)
    work = sum(s for index, s in seconds.items() if problem.program.operations[index].region not in left_out)
    waiting, overlappable, taken = seconds_of_copies(schedule, seconds), 0.0, 0.0
    for sent in schedule.collectives():
        if sent.tensor.index in hidden:
            overlappable += sent_seconds(prices, sent)
            taken += sent.times * sent.bytes * prices.memory_seconds_per_byte
        else:
            waiting += sent_seconds(prices, sent)
    return StepTime(work, waiting, overlappable, taken)


def waiting_for_copies(schedule: Schedule) -> float:
    """The seconds of a step that are copies from and to the host which outlast its work."""
    return seconds_of_copies(schedule, _work(schedule))


def _work(schedule: Schedule) -> dict[int, float]:
    """The seconds of each operation, by index."""
    problem, strategies = schedule.problem, schedule.assignment.strategies
    prices = time_prices(problem)
    return {
        operation.index: work_seconds(problem, prices, operation, strategies[operation.index].degree)
        for operation in problem.program.operations
        if operation.index in strategies
    }


def time_prices(problem: Problem, hardware: HardwareProfile | str | Path | None = None) -> Prices:
    """The prices in seconds on a problem's mesh, by default of the hardware that it is planned for."""
    return StepSeconds(problem.prices.hardware if hardware is None else load(hardware), problem.space.mesh)


def work_seconds(problem: Problem, prices: Prices, operation: Operation, degree: float = 1) -> float:
    """The seconds of an operation on one of ``degree`` devices that share it, in all iterations of its loops. A loop
    has none of its own, and a copy between memories runs while kernels run."""
    choices = problem.choices.get(operation.index)
    if choices is None or moves_between_memories(problem.program, operation):
        return 0.0
    if operation.results and operation.results[0] in problem.generated:
        return 0.0
    once = prices.work(choices.flops, timing_of(problem).memory_bytes[operation.index], choices.dtype, degree)
    return once * problem.times(operation)


def regions_left_out(program: Program, seconds: Mapping[int, float]) -> set[int]:
    """The branches, and regions inside them, that are not the longest of their conditional. ``seconds`` are those of
    each operation, by index."""
    regions = program.regions
    return program.regions_left_out({r.index: sum(seconds.get(o, 0.0) for o in r.operations) for r in regions})


def sent_seconds(prices: Prices, sent: Sent) -> float:
    """The seconds of a collective per step, in all iterations of its loops."""
    axes = tuple(sent.step.axes)
    return sent.times * (sent.bytes * prices.per_byte(axes) + prices.per_collective(sent.step.kind, axes))


def timing_of(problem: Problem) -> Timing:
    """The figures that the step time of a problem's plans depends on. They are computed once."""
    if problem.timing is None:
        memory_bytes = memory_traffic(problem)
        problem.timing = Timing(memory_bytes, _values_that_hide(problem, memory_bytes))
    return problem.timing


# ---- memory traffic


def memory_traffic(problem: Problem) -> dict[int, int]:
    """Per operation, the bytes of whole tensors that its kernel reads and writes.

    An operation that is fused into its readers moves nothing itself: these read its operands.
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
    for operation in program.operations:
        if operation.primitive.name == "scan":
            for index, moved in stack_traffic(program, operation):
                found[index] += moved
    return found


def _reads_of(
    problem: Problem, operation: Operation, held: Collection[int], read: Mapping[int, dict[int, int]]
) -> dict[int, int]:
    """The materialised tensors that an operation is computed from, with the bytes that it reads of each."""
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
    """The gap between a value and its first reader, in seconds of work since its region began.

    ``ends`` tells that only the end of the region needs it.
    """

    ready: float
    needed: float
    ends: bool


def _values_that_hide(problem: Problem, memory_bytes: Mapping[int, int]) -> frozenset[int]:
    """The values whose collectives can hide: the work in the gap takes as long as the dearest collective of the value.

    The work counts as split over all devices. The collective is an all-reduce of the whole over the slowest mesh axis.
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
    """The windows of a region's values. ``operations`` are in their execution order.

    Operations other than products run when their results are needed. No collective overlaps with a loop, except those
    of its body.
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
    return operation.primitive.name in PRODUCTS or bool(operation.bodies)


def _sent_last(problem: Problem, windows: Mapping[int, _Window]) -> set[int]:
    """The values that are sent when no work is left: XLA merges the last reductions, up to a size.

    XLA chooses the gradients that are reduced last. The model assumes the largest ones. Values computed from one, such
    as a moment or the new weight, are sent with it.
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
