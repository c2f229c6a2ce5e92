"""Reductions of one kind over the same devices, which XLA merges into one collective, up to 30 MiB of results.

>>> import jax, jax.numpy as jnp, shardplan
>>> def loss(weights, x):
...     for w in weights:
...         x = jnp.tanh(x @ w)
...     return jnp.sum(x)
>>> weights, x = [jax.ShapeDtypeStruct((64, 64), "float32")] * 3, jax.ShapeDtypeStruct((4096, 64), "float32")
>>> pins, mesh = {"0/*": jax.P(), "1": jax.P("x", None)}, jax.sharding.AbstractMesh((2,), ("x",))
>>> plan = shardplan.plan(jax.grad(loss), mesh, weights, x, pins=pins)
>>> [[operation.primitive.name for operation in group] for group in combined_reductions(plan.schedule)]
[['dot_general', 'dot_general', 'dot_general']]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from shardplan.layout import Layout
from shardplan.memory.combining import (
    COMBINED_BYTES,
    Gather,
    Waiting,
    brought_by,
    gather_for,
    read_before,
    read_otherwise,
    reducing,
    repeated_of,
    with_partners,
)
from shardplan.memory.gathering import combined_gathers
from shardplan.memory.sizes import bytes_in
from shardplan.once import once
from shardplan.program import Operation
from shardplan.schedule import REDUCTIONS, Schedule
from shardplan.transition import Step

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})

Reduced = int | Gather
"""What is reduced: a partial result as an operation, by its index, makes it, or a sum that waits as it is read."""


@once
def combined_reductions(schedule: Schedule) -> list[list[Operation]]:
    """The operations whose partial results are reduced together as they are made, in the order of the program."""
    indices = (sorted(one for one in group if isinstance(one, int)) for group in reduced_together(schedule))
    return [[schedule.program.operations[index] for index in group] for group in sorted(indices) if group]


@once
def reduced_together(schedule: Schedule) -> list[list[Reduced]]:
    """What is reduced together.

    XLA goes from what the step gives back to what it is computed from, operands first. A reduction joins those of its
    kind before it, until one depends on another one (a gradient's norm on the gradient's sum), or they are too large.
    It depends on all that what it is merged with does: after each group XLA looks anew at what leads to what. It goes
    through all gathers first, then all-reduces, and at last what is scattered: what reads one of several that are
    merged by then stands behind what all of them bring.
    """
    groups = list[list[Reduced]]()
    for scattered in (False, True):
        groups += _merged(schedule, [*combined_gathers(schedule), *groups], scattered)
    return groups


def _merged(schedule: Schedule, merged: Sequence[Sequence[Reduced]], scattered: bool) -> list[list[Reduced]]:
    """What is reduced together of all-reduces, or of what is ``scattered``, where other collectives are ``merged``."""
    groups = list[list[Reduced]]()
    filling: dict[Any, tuple[int, float]] = {}  # per kind, the number of its last group, and the group's size
    behind: dict[int, frozenset[int]] = {}  # per value, the last groups that it depends on
    waiting = Waiting()
    same, numbers = repeated_of(schedule), dict[Reduced, int]()
    read, brought = read_before(schedule, merged), brought_by(schedule, merged)
    sums = read_otherwise(schedule).keys() | reducing(schedule)
    for operation in with_partners(schedule, merged):
        for value in read[operation.index]:
            if value in brought and value not in behind:
                behind[value] = frozenset[int]().union(*[behind[o] for o in brought[value] if o in behind])
        found = frozenset[int]().union(*[behind[o] for o in read[operation.index] if o in behind])
        if not found and operation.index not in sums:
            continue
        repeated = not operation.results or operation.results[0] in same
        for one, value, layout, kind in _reductions_of(schedule, operation, repeated, scattered):
            if one not in numbers:
                size = bytes_in(schedule, value, layout)
                number, filled = filling.get(kind, (-1, math.inf))
                before = found if isinstance(one, int) else behind.get(same.get(value, value), frozenset())
                if filled + size > COMBINED_BYTES or waiting.leads(number, before):
                    number, filled = waiting.begin(number), 0.0
                    groups.append([])
                waiting.join(number, before)
                groups[number].append(one)
                numbers[one], filling[kind] = number, (number, filled + size)
            found |= {numbers[one]}
        behind |= dict.fromkeys(operation.results, waiting.still_open(found))
    return groups


def _reductions_of(
    schedule: Schedule, operation: Operation, repeated: bool, scattered: bool
) -> Iterator[tuple[Reduced, int, Layout, object]]:
    """The sums that wait which an operation reads whole, and its own partial result, each with the value, the layout
    to which it is reduced, and what reductions have in common that are merged: those that are ``scattered``, or not."""
    for operand, layout in read_otherwise(schedule).get(operation.index, ()):
        steps = schedule.route(operand, layout).steps
        if steps and steps[-1].kind in REDUCTIONS and _is_scattered(steps) == scattered:
            kind = operation.region, *_kind(schedule, operand, steps, "sum")
            yield gather_for(schedule, operation, operand, layout), operand, layout, kind
    if repeated or operation.index not in reducing(schedule):
        return
    steps = tuple(step for step in schedule.result_steps(operation, 0) if step.kind in REDUCTIONS)
    if steps and _is_scattered(steps) == scattered:
        reducer = schedule.assignment.strategies[operation.index].reducers[0]
        kind = operation.region, *_kind(schedule, operation.results[0], steps, reducer)
        yield operation.index, operation.results[0], steps[-1].layout, kind


def _is_scattered(steps: Sequence[Step]) -> bool:
    return any(step.kind == "reduce-scatter" for step in steps)


def _kind(schedule: Schedule, value: int, steps: Sequence[Step], reducer: str | None) -> tuple[object, ...]:
    # what all devices get is the same in whatever order these are named, but not what each gets a part of
    found = [(step.kind, step.axes) for step in steps if step.kind in REDUCTIONS]
    reducing = tuple((kind, tuple(sorted(axes)) if kind == "all-reduce" else axes) for kind, axes in found)
    return reducing, reducer, schedule.program.values[value].dtype


def without_leading(schedule: Schedule, groups: Iterable[Sequence[Reduced]]) -> list[list[Reduced]]:
    """Groups of reductions without those from which a product, a loop or a branch is computed."""
    leading: set[int] = set()
    operations = schedule.program.operations
    for operation in reversed(operations):
        if operation.primitive.name in _PRODUCTS or operation.bodies or not leading.isdisjoint(operation.results):
            leading.update(operand for operand in operation.operands if isinstance(operand, int))
    return [
        [one for one in group if leading.isdisjoint(operations[one].results if isinstance(one, int) else (one.value,))]
        for group in groups
    ]
