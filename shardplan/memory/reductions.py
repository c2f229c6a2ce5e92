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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from shardplan.layout import Layout
from shardplan.memory.combining import (
    COMBINED_BYTES,
    Collective,
    Gather,
    Joined,
    brought_by,
    brought_in,
    gather_for,
    read_before,
    read_of_merged,
    read_otherwise,
    reducing,
    repeated_of,
    with_partners,
)
from shardplan.memory.cutting import last_sent
from shardplan.memory.gathering import gathered_together
from shardplan.memory.sizes import bytes_in
from shardplan.memory.waiting import Waiting
from shardplan.once import once
from shardplan.partitioner import order_of_devices
from shardplan.program import Operation
from shardplan.schedule import REDUCTIONS, Schedule
from shardplan.steps import Step

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})


class _Reduction(NamedTuple):
    """A reduction, with the value, the layout to which it is, what those have in common that are merged, and the
    reduction of the same before it."""

    one: Collective
    value: int
    layout: Layout
    kind: object
    before: Collective | None


@once
def combined_reductions(schedule: Schedule, joined: tuple[Joined, ...] | None = None) -> list[list[Operation]]:
    """The operations whose partial results are reduced together as they are made, in the order of the program."""
    groups = reduced_together(schedule, joined)
    earlier = sorted((one for group in groups for one in group if isinstance(one, tuple)), key=lambda one: -one[1])
    first: dict[int | Gather, Collective] = {one[0]: one for one in earlier}  # a partial result is gone after it
    made = ([(brought_in(one), one) for one in group] for group in groups)
    indices = (sorted(of for of, one in group if isinstance(of, int) and first.get(of, of) == one) for group in made)
    return [[schedule.program.operations[index] for index in group] for group in sorted(indices) if group]


@once
def reduced_together(schedule: Schedule, joined: tuple[Joined, ...] | None = None) -> list[list[Collective]]:
    """What is reduced together: of what takes several reductions, over some mesh axes each, each for itself.

    XLA goes from what the step gives back to what it is computed from, operands first. A reduction joins those of its
    kind before it, until one depends on another one (a gradient's norm on the gradient's sum), or they are too large.
    It depends on all that what it is merged with does: after each group XLA looks anew at what leads to what. It goes
    through all gathers first, then all-reduces, and at last what is scattered: what reads one of several that are
    merged by then stands behind what all of them bring, and one of kernels that are ``joined``, where these are known,
    behind what all of them read.
    """
    groups, reductions = list[list[Collective]](), _reductions(schedule)
    for scattered in (False, True):
        if some := {index: found[scattered] for index, found in reductions.items() if found[scattered]}:
            groups += _merged(schedule, joined, [*gathered_together(schedule, joined), *groups], some)
    return groups


def _merged(
    schedule: Schedule,
    joined: tuple[Joined, ...] | None,
    merged: Sequence[Sequence[Collective]],
    reductions: Mapping[int, Sequence[_Reduction]],
) -> list[list[Collective]]:
    """What is reduced together of these, by the operation, where other collectives are ``merged``."""
    groups = list[list[Collective]]()
    filling: dict[Any, tuple[int, float]] = {}  # per kind, the number of its last group, and the group's size
    behind: dict[int, int] = {}  # per value, the last groups that it depends on
    waiting = Waiting()
    same, numbers = repeated_of(schedule), dict[Collective, int]()
    read, brought = read_before(schedule, joined), brought_by(schedule, merged)
    changed = read_of_merged(schedule, merged, joined)
    left, bringing = len({found.one for some in reductions.values() for found in some}), len(schedule.program.values)
    for operation in with_partners(schedule, joined, changed, brought):
        found = 0
        for value in changed.get(operation.index, read[operation.index]):
            if value >= bringing and value not in behind:
                behind[value] = 0
                for other in brought[value]:
                    behind[value] |= behind.get(other, 0)
            found |= behind.get(value, 0)
        here = reductions.get(operation.index, ())
        if not found and not here:
            continue
        for one, value, layout, kind, earlier in here:
            if one not in numbers:
                size = bytes_in(schedule, value, layout)
                number, filled = filling.get(kind, (-1, math.inf))
                before = found if isinstance(brought_in(one), int) else behind.get(same.get(value, value), 0)
                before |= 1 << numbers[earlier] if earlier is not None else 0
                if filled + size > COMBINED_BYTES or waiting.leads(number, before):
                    number, filled = waiting.begin(number), 0.0
                    groups.append([])
                waiting.join(number, before)
                groups[number].append(one)
                numbers[one], filling[kind] = number, (number, filled + size)
            found |= 1 << numbers[one]
        if len(numbers) == left:
            break
        behind |= dict.fromkeys(operation.results, waiting.still_open(found))
    return groups


def _reductions(schedule: Schedule) -> dict[int, tuple[list[_Reduction], list[_Reduction]]]:
    """Per operation, by index, the sums that wait which it reads whole, and its own partial result: those that are
    reduced for all devices, and those that are scattered."""
    found, operations = dict[int, tuple[list[_Reduction], list[_Reduction]]](), schedule.program.operations
    same, otherwise, made = repeated_of(schedule), read_otherwise(schedule), reducing(schedule)
    for operation in (operations[index] for index in sorted(otherwise.keys() | made)):
        here = found[operation.index] = list[_Reduction](), list[_Reduction]()
        for operand, layout in otherwise.get(operation.index, ()):
            steps = schedule.route(operand, layout).steps
            if any(step.kind in REDUCTIONS for step in steps):
                gather = gather_for(schedule, operation, operand, layout)
                sent = _each(schedule, gather, operand, steps, (operation.region, "sum"))
                here[_is_scattered(steps)].extend(sent)
        if operation.index in made and operation.results[0] not in same:
            steps, strategy = schedule.result_steps(operation, 0), schedule.assignment.strategies[operation.index]
            if schedule.island_dtype(operation) is None:
                steps = tuple(replace(step, axes=order_of_devices(operation, strategy, step.axes)) for step in steps)
            shared = operation.region, strategy.reducers[0] or "sum"  # what passes a sum on has none
            sent = _each(schedule, operation.index, operation.results[0], steps, shared)
            here[_is_scattered(steps)].extend(sent)
    return found


def _each(
    schedule: Schedule, reduced: int | Gather, value: int, steps: Sequence[Step], shared: tuple[object, ...]
) -> Iterator[_Reduction]:
    """The reductions among the steps that bring a value to a layout, from the first on."""
    before = None
    for number, step in enumerate(steps):
        if step.kind not in REDUCTIONS:
            continue
        one = reduced if step is last_sent(steps) else (reduced, number)
        kind = *shared, step.kind, step.axes, schedule.program.values[value].dtype
        yield _Reduction(one, value, step.layout, kind, before)
        before = one


def _is_scattered(steps: Sequence[Step]) -> bool:
    return any(step.kind == "reduce-scatter" for step in steps)


def without_leading(schedule: Schedule, groups: Iterable[Sequence[Collective]]) -> list[list[Collective]]:
    """Groups of reductions without those from which a product, a loop or a branch is computed."""
    leading: set[int] = set()
    operations = schedule.program.operations
    for operation in reversed(operations):
        if operation.primitive.name in _PRODUCTS or operation.bodies or not leading.isdisjoint(operation.results):
            leading.update(operand for operand in operation.operands if isinstance(operand, int))

    def leads(one: Collective) -> bool:
        reduced = brought_in(one)
        return not leading.isdisjoint(operations[reduced].results if isinstance(reduced, int) else (reduced.value,))

    return [[one for one in group if not leads(one)] for group in groups]
