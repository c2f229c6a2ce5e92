"""Repeating: where devices would mostly do the same work, what that work reads and writes counts as well.

The objective ``"bytes"`` prices work that devices repeat by its operations alone. That is right where products decide
how long a step takes: what is repeated beside them, an update or a normalization, is a small part of it, and is not
worth sending anything. It is wrong where memory decides, as in sorting along one dimension after another: the
operations take no time, so everything is repeated, nothing is sent, and eight devices are as slow as one.

So the step of a plan is estimated: each kernel takes the time of its operations or of its memory traffic, whichever is
longer, divided by the devices that share it; each collective that of its bytes and its latency. Where more than half of
the step would be gone if all devices shared all work, the program is planned once more, with repeated work priced at
that time. The plan that it gives is taken if its step is estimated shorter.

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
from shardplan.optimize.solve_once import Found, Search
from shardplan.optimize.within_memory import search_within
from shardplan.problem.cost_network import Problem
from shardplan.problem.schedule import Schedule
from shardplan.timing.step_time import memory_traffic, sent_seconds, time_prices


@dataclass(frozen=True, slots=True)
class _Step:
    """The seconds of a step: those that would be gone if all devices shared all work, and those that would be left."""

    repeated: float
    left: float

    @property
    def seconds(self) -> float:
        return self.repeated + self.left


def search_sharing(problem: Problem, search: Search, rebuild: Callable[..., Problem] | None) -> Found:
    """The best schedule for the objective "bytes"; ``rebuild`` states the problem anew, with memory traffic.

    Without it the first search has to do.
    """
    deadline = time.perf_counter() + search.seconds
    found = search_within(problem, search)
    traffic = _traffic_that_counts(found.schedule) if rebuild is not None else {}
    left = deadline - time.perf_counter()
    if rebuild is None or not traffic or left <= 0:
        return found
    repriced = rebuild(traffic=traffic)
    left = deadline - time.perf_counter()
    if left <= 0:
        return found
    try:
        other = search_within(repriced, replace(search, seconds=left))
    except InfeasibleError:  # at these prices it has found nothing within the limit, but the first plan is
        return found
    return min(found, other, key=lambda one: _step(one.schedule, traffic, traffic).seconds)


def _traffic_that_counts(schedule: Schedule) -> Mapping[int, int]:
    """The memory traffic of each operation, in bytes of whole tensors, where a step is mostly repeated work; else
    nothing.

    What operations read and write each for itself is more than their kernels do, and enough to tell of most programs.
    """
    unfused = {index: choices.memory_bytes for index, choices in schedule.problem.choices.items()}
    step = _step(schedule, unfused, dict.fromkeys(unfused, 0))
    if step.repeated <= step.left:
        return {}
    traffic = memory_traffic(schedule.problem)
    step = _step(schedule, traffic, traffic)
    return traffic if step.repeated > step.left else {}


def _step(schedule: Schedule, traffic: Mapping[int, int], shared: Mapping[int, int]) -> _Step:
    """How long a step takes; ``traffic`` is that of what is repeated, ``shared`` that of what is left then."""
    problem = schedule.problem
    prices, devices = time_prices(problem), problem.space.mesh.device_count
    left = sum(sent_seconds(prices, sent) for sent in schedule.collectives())
    work, repeated = cache(prices.work), 0.0  # that of repeated layers once
    for index, strategy in schedule.assignment.strategies.items():
        operation, choices = problem.program.operations[index], problem.choices.get(index)
        if choices is not None and operation.results and operation.results[0] not in problem.generated:
            times = problem.times(operation)
            left += times * work(choices.flops, shared[index], choices.dtype, devices)
            alone = times * work(choices.flops, traffic[index], choices.dtype, 1)
            repeated += alone * (1 / strategy.degree - 1 / devices)
    return _Step(repeated, left)


def repeated_work(schedule: Schedule) -> dict[str, float]:
    """What devices repeat of a step's work: its ``share`` of the time that a device works, its ``flops``, its
    ``seconds`` by the hardware profile, and ``split``, the most devices that share an operation.

    Memory traffic counts where the plan is priced with it.
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
