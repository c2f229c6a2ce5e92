"""The price of repeated work, which includes memory traffic where devices would mostly do the same work.

The objective ``"bytes"`` prices repeated work by its FLOPs alone. That is right for steps bound by products. Their
repeated work, an update or a normalization, is a small part of the step and not worth a collective. It is wrong for
steps bound by memory, such as sorts along one dimension after another. Their operations have hardly any FLOPs, so a
plan would repeat all of them, send nothing, and run as slowly on eight devices as on one.

So the planner estimates the step of a plan. A kernel takes the longer time of its FLOPs and of its memory traffic,
divided by the devices that share it. A collective takes the time of its bytes and its latency. If sharing all work
would save more than half of the step, the program is planned once more, with repeated work priced at that time. The
second plan is kept if its estimated step is shorter.

>>> import jax, jax.numpy as jnp, shardplan
>>> def ordered(x):
...     return jnp.sort(jnp.sort(x, 0), 1)
>>> mesh = jax.sharding.AbstractMesh((8,), ("x",))
>>> large, small = (jax.ShapeDtypeStruct((n, n), "float32") for n in (8192, 512))
>>> plan = shardplan.plan(ordered, mesh, large)
>>> [(sent.kind, sent.bytes) for sent in plan.collectives], plan.layouts
([('all-to-all', 29360128.0)], {'0': P(None, 'x')})
>>> shardplan.plan(ordered, mesh, small).communication_bytes  # latency is longer than its work
0.0
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from shardplan.errors import InfeasibleError
from shardplan.optimize.solve_once import FoundSchedule, Search
from shardplan.optimize.within_memory import search_within
from shardplan.problem.cost_network import Problem
from shardplan.problem.schedule import Schedule
from shardplan.timing.step_time import memory_traffic, sent_seconds, time_prices


@dataclass(frozen=True, slots=True)
class _Step:
    """The seconds of a step: those that sharing all work would save, and the others."""

    repeated: float
    left: float

    @property
    def seconds(self) -> float:
        return self.repeated + self.left


def search_with_repeated_work(
    problem: Problem, search: Search, rebuild: Callable[..., Problem] | None
) -> FoundSchedule:
    """The best schedule for the objective "bytes". ``rebuild`` builds the problem again with memory traffic.

    Without ``rebuild`` the result is that of the first search.
    """
    deadline = time.perf_counter() + search.seconds
    found = search_within(problem, search)
    traffic = _significant_traffic(found.schedule) if rebuild is not None else {}
    left = deadline - time.perf_counter()
    if rebuild is None or not traffic or left <= 0:
        return found
    repriced = rebuild(traffic=traffic)
    left = deadline - time.perf_counter()
    if left <= 0:
        return found
    try:
        other = search_within(repriced, replace(search, seconds=left))
    except InfeasibleError:  # nothing found within the limit at these prices: the first plan is kept
        return found
    fitting = [one for one in (found, other) if one.peak_bytes <= search.limit_bytes]
    return min(fitting or (found, other), key=lambda one: _step(one.schedule, traffic, traffic).seconds)


def _significant_traffic(schedule: Schedule) -> Mapping[int, int]:
    """The memory traffic of each operation, in bytes of whole tensors, for a step of mostly repeated work. Else empty.

    The traffic of unfused operations is an upper bound of that of kernels. It decides most programs.
    """
    unfused = {index: choices.memory_bytes for index, choices in schedule.problem.choices.items()}
    step = _step(schedule, unfused, dict.fromkeys(unfused, 0))
    if step.repeated <= step.left:
        return {}
    traffic = memory_traffic(schedule.problem)
    step = _step(schedule, traffic, traffic)
    return traffic if step.repeated > step.left else {}


def _step(schedule: Schedule, traffic: Mapping[int, int], shared: Mapping[int, int]) -> _Step:
    """The time of a step. ``traffic`` is the memory traffic of repeated work, ``shared`` that of shared work."""
    problem = schedule.problem
    prices, devices = time_prices(problem), problem.space.mesh.device_count
    left = sum(sent_seconds(prices, sent) for sent in schedule.collectives())
    work, repeated = cache(prices.work), 0.0  # the work of repeated layers is computed once
    for index, strategy in schedule.assignment.strategies.items():
        operation, choices = problem.program.operations[index], problem.choices.get(index)
        if choices is not None and operation.results and operation.results[0] not in problem.generated:
            times = problem.times(operation)
            left += times * work(choices.flops, shared[index], choices.dtype, devices)
            alone = times * work(choices.flops, traffic[index], choices.dtype, 1)
            repeated += alone * (1 / strategy.degree - 1 / devices)
    return _Step(repeated, left)


def repeated_work(schedule: Schedule) -> dict[str, float]:
    """The repeated work of a step: its ``share`` of the time that a device works, its ``flops``, its ``seconds`` by the
    hardware profile, and ``split``, the most devices that share an operation.

    Memory traffic counts in a plan that is priced with it.
    """
    problem, devices = schedule.problem, schedule.space.mesh.device_count
    work, seconds, flops, repeated, split = cache(time_prices(problem).work), 0.0, 0.0, 0.0, 1.0
    for index, strategy in schedule.assignment.strategies.items():
        operation, choices = problem.program.operations[index], problem.choices.get(index)
        if choices is not None and operation.results and operation.results[0] not in problem.generated:
            times, more = problem.times(operation), 1 / strategy.degree - 1 / devices
            alone = times * work(choices.flops, problem.traffic.get(index, 0), choices.dtype, 1)
            seconds += alone / strategy.degree
            repeated, flops = repeated + alone * more, flops + times * choices.flops * more
            split = max(split, float(strategy.degree))
    return {"share": repeated / seconds if seconds else 0.0, "flops": flops, "seconds": repeated, "split": split}
