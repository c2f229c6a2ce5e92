"""What the compiled program's collectives cost beside its work, in seconds, by the rates of a hardware profile.

XLA's schedule says which kernels run between the start and the end of a collective, and their metadata which operations
of the plan these compute. So much of the collective's time is hidden as these operations take on each device; the rest
makes the step longer. Nothing is run: both times are the model's, what runs beside what is the compiler's.
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
    """Seconds of a step on each device: of its work, of its collectives beside it, and of those that it waits for."""

    work: float
    hidden: float
    exposed: float

    @property
    def seconds(self) -> float:
        """Of the step."""
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
        beside = min(each, sum(turns.get(operation, 0.0) for operation in meanwhile))
        hidden += beside * one.times
        exposed += (each - beside) * one.times
    return CompiledTime(plan.step_time.work, hidden, exposed)


def _seconds(prices: Prices, one: CompiledCollective, report: CompiledReport) -> float:
    names = one.axes(report.mesh_axes) or prices.mesh.names
    axes = tuple(prices.mesh.names.index(name) for name in names)
    return one.bytes_sent * prices.per_byte(axes) + prices.per_collective(one.kind, axes)
