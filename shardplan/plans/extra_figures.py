"""Additional figures of a plan: reductions in other precisions, and the price of pins."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp

from shardplan import _jax
from shardplan.layout.objectives import OBJECTIVES
from shardplan.options import Options
from shardplan.plans.pipeline import plan_problem, plan_program
from shardplan.plans.plan_data import PlanData
from shardplan.problem.hard_layouts import hard_layouts
from shardplan.problem.schedule import Schedule, Sent
from shardplan.problem.sum_dtypes import deferred_dtype
from shardplan.program.program import Program

COMPARED = ("bfloat16", "float32")
"""The element types in which the reductions of a plan are also counted."""


def reduction_bytes(schedule: Schedule) -> dict[str, float]:
    """Bytes that one device sends per step in reductions: as planned, and with each type as ``reduce_dtype``.

    The plan stays the same. A plan for that type can send less.
    """
    sent = [found for found in schedule.collectives() if found.step.kind.reduces]
    found = {"as planned": float(sum(one.bytes * one.times for one in sent))}
    return found | {name: float(sum(_bytes_in(schedule, one, name) for one in sent)) for name in COMPARED}


def _bytes_in(schedule: Schedule, sent: Sent, name: str) -> float:
    """Bytes of one reduction per step with the named type as ``reduce_dtype``."""
    tensor, operation, problem, wanted = sent.tensor, sent.operation, schedule.problem, jnp.dtype(name)
    if operation is not None and tensor.index in operation.results:
        strategy, position = schedule.assignment.strategies[operation.index], operation.results.index(tensor.index)
        travelling = problem.reduced_in(operation, strategy, position, wanted)
    else:  # a deferred sum
        travelling = deferred_dtype(tensor, wanted)
    elements = tensor.total_bytes / _jax.item_bytes(tensor.dtype)
    return sent.step.fraction * elements * _jax.item_bytes(travelling) * sent.times


def with_reports(plan: PlanData, program: Program, options: Options) -> PlanData:
    """The plan, its statistics with ``reductions`` (bytes by precision) and, where there are pins, their price.

    The price is the extra cost over the best plan without pins, in ``communication_bytes`` and in the unit of the
    ``objective``. It takes a second search, of a problem that shares the tables of the first.
    """
    statistics = {**plan.statistics, "reductions": reduction_bytes(plan.schedule)}
    if options.pins:
        free = _without_pins(plan, plan.program, replace(options, pins=None))
        statistics["pins"] = {
            "objective": max(0.0, plan.objective - free.objective),
            "communication_bytes": plan.communication_bytes - free.communication_bytes,
        }
    return replace(plan, statistics=statistics)


def _without_pins(plan: PlanData, program: Program, options: Options) -> PlanData:
    """The plan of the same program without pins."""
    if OBJECTIVES[options.objective].counts_time:  # the present problem may be priced at another share
        return plan_program(program, plan.mesh, options)
    problem = plan.schedule.problem
    return plan_problem(problem.freed(hard_layouts(program, problem.space, None).layouts), plan.mesh, options)
