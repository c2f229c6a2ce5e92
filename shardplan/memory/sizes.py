"""What one device holds of a value, in bytes, and the layout in which an operation leaves a result in memory."""

from __future__ import annotations

from shardplan.layout import Layout
from shardplan.problem import Problem
from shardplan.program import Operation
from shardplan.schedule import Schedule
from shardplan.strategy import Strategy


def bytes_in(schedule: Schedule, value: int, layout: Layout) -> float:
    """Bytes of a value on one device, in a layout."""
    domain = schedule.problem.domain(value)
    return schedule.program.values[value].total_bytes / float(domain.degrees[domain.position[layout]])


def layout_left(problem: Problem, operation: Operation, strategy: Strategy, position: int) -> Layout:
    """The layout of the memory in which an operation leaves a result: where it can, that of a sum that waits."""
    partial = problem.partial(operation, strategy, position)
    waits = partial.pending and partial.kept in problem.domain(operation.results[position]).position
    return partial.kept if waits else partial.layout
