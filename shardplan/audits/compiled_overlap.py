"""The step time of a compiled program: the model's times with the overlap of XLA's schedule.

XLA's schedule has the kernels between the start and the end of a collective, and their metadata the operations of the
plan. The time of these operations hides as much time of the collective. The rest makes the step longer. Nothing runs:
all times come from the hardware profile, and only the overlap from the compiler.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardplan.compiled.hlo.collectives import CompiledCollective
from shardplan.compiled.program import CompiledReport, operations_of
from shardplan.layout.objectives import Prices
from shardplan.plans.plan_data import PlanData
from shardplan.timing.step_time import time_prices, work_seconds


@dataclass(frozen=True, slots=True)
class CompiledTime:
    """Seconds of a step on each device: its work, its hidden collectives, and those that it waits for."""

    work: float
    hidden: float
    exposed: float

    @property
    def seconds(self) -> float:
        """The seconds of the step."""
        return self.work + self.exposed


def compiled_time(plan: PlanData, report: CompiledReport) -> CompiledTime:
    """The seconds of a compiled plan."""
    problem, program = plan.schedule.problem, plan.program
    prices, turns = time_prices(problem), {}
    for operation in program.operations:
        strategy = plan.schedule.assignment.strategies.get(operation.index)
        if strategy is not None:
            seconds = work_seconds(problem, prices, operation, strategy.degree)
            turns[operation.index] = seconds / problem.times(operation)
    hidden = exposed = 0.0
    for one in report.collectives:
        each = _seconds(prices, one, report)
        meanwhile = {o for name in one.meanwhile for o in operations_of(name)} if one.overlapped else set()
        overlapped = min(each, sum(turns.get(operation, 0.0) for operation in meanwhile))
        hidden += overlapped * one.times
        exposed += (each - overlapped) * one.times
    return CompiledTime(plan.step_time.work, hidden, exposed)


def _seconds(prices: Prices, one: CompiledCollective, report: CompiledReport) -> float:
    names = one.axes(report.mesh_axes) or prices.mesh.names
    axes = tuple(prices.mesh.names.index(name) for name in names)
    return one.bytes_sent * prices.per_byte(axes) + prices.per_collective(one.kind, axes)
