"""Bytes of a value on one device, and the layout of an operation's result in memory."""

from __future__ import annotations

from shardplan.layout.layout import Layout
from shardplan.problem.cost_network import Problem
from shardplan.problem.schedule import Schedule
from shardplan.problem.strategy import Strategy
from shardplan.program.program import Operation


def bytes_in(schedule: Schedule, value: int, layout: Layout) -> float:
    """Bytes of a value on one device, in a layout."""
    return schedule.program.values[value].total_bytes / schedule.problem.domain(value).parts[layout]


def layout_left(problem: Problem, operation: Operation, strategy: Strategy, position: int) -> Layout:
    """The layout of an operation's result in memory: the partial one if the sum can be deferred."""
    left, pending = strategy.results[position], strategy.pending[position]
    if not pending:
        return left
    kept = problem.partial(operation, strategy, position).kept
    return kept if kept in problem.domain(operation.results[position]).position else left
