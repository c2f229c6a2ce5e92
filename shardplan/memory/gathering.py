"""Gathers over the same devices, which XLA merges into one collective, up to 30 MiB of results.

It goes from what the step gives back to what it is computed from, operands first, as it does with reductions
(`shardplan.memory.reductions`): a gather joins those before it, whatever dimension these go over, until one depends on
another one, or they are too large. Weights that are stored in parts depend on nothing: they are gathered together. So
do parts of activations that the backward pass gathers anew, once all are there. What merged products read is gathered
with the first of them. What is gathered together is in memory from the first of its readers on.

>>> import jax, jax.numpy as jnp, shardplan
>>> def loss(weights, x):
...     for w in weights:
...         x = jnp.tanh(x @ w)
...     return jnp.sum(x)
>>> weights, x = [jax.ShapeDtypeStruct((64, 64), "float32")] * 3, jax.ShapeDtypeStruct((4096, 64), "float32")
>>> pins, mesh = {"0/*": jax.P("x"), "1": jax.P("x", None)}, jax.sharding.AbstractMesh((2,), ("x",))
>>> plan = shardplan.plan(loss, mesh, weights, x, pins=pins)
>>> [[plan.program.values[gather.value].name for gather in group] for group in combined_gathers(plan.schedule)]
[['0/0', '0/1', '0/2']]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardplan.anew import Awaited, awaited
from shardplan.layout import Layout
from shardplan.memory.accumulation import merged_anywhere
from shardplan.memory.combining import (
    COMBINED_BYTES,
    Collective,
    Gather,
    Joined,
    gather_for,
    read_before,
    read_otherwise,
    with_partners,
)
from shardplan.memory.held import Held, Lifetime
from shardplan.memory.narrower import bytes_brought
from shardplan.memory.sizes import bytes_in
from shardplan.memory.waiting import Waiting
from shardplan.once import once
from shardplan.problem import Problem
from shardplan.program import Operation, Program
from shardplan.schedule import Schedule
from shardplan.search import PairUsage

if TYPE_CHECKING:
    from shardplan.memory.liveness import Lifetimes

_Kind = tuple[int, tuple[int, ...]]
"""What is gathered together is alike in the region, and in the mesh axes that it goes over; not in the dimension that
these split."""


class _OneGather(NamedTuple):
    """A gather, with what it brings, the layout to which it does, its kind, and the one of the same before it."""

    one: Collective
    gather: Gather
    layout: Layout
    kind: _Kind
    before: Collective | None


@once
def combined_gathers(schedule: Schedule, joined: tuple[Joined, ...] | None = None) -> list[list[Gather]]:
    """What is brought together by the last gather that it takes: groups of two and more."""
    groups = ([one for one in group if isinstance(one, Gather)] for group in gathered_together(schedule, joined))
    return [group for group in groups if len(group) > 1]


@once
def gathered_together(schedule: Schedule, joined: tuple[Joined, ...] | None = None) -> list[list[Collective]]:
    """What is gathered together, in each region by itself: groups of two and more; where the kernels are known that are
    ``joined``, with these. Of what takes several gathers, over some mesh axes each, each is for itself."""
    groups = list[list[Collective]]()
    filling: dict[_Kind, tuple[int, float]] = {}  # per kind, the number of its last group, and the group's size
    numbers: dict[Collective, int] = {}
    behind: dict[int, int] = {}  # per value, the last groups that it depends on
    waiting = Waiting()
    read, gathers = read_before(schedule, joined), _gathers(schedule)
    left = len({found.one for some in gathers.values() for found in some})
    together = {index: group for group in merged_anywhere(schedule) for index in group} if left else {}
    for operation in with_partners(schedule, joined) if left else ():
        found = 0
        for value in read[operation.index]:
            found |= behind.get(value, 0)
        merged = together.get(operation.index, (operation.index,))  # one product reads what all of them do
        here = [one for index in merged for one in gathers.get(index, ())]
        if not found and not here:
            continue
        for one, gather, layout, kind, earlier in here:
            if one not in numbers:
                size = bytes_brought(schedule, gather.value, layout)
                number, filled = filling.get(kind, (-1, math.inf))
                before = behind.get(gather.value, 0)
                for other in waits_for(schedule, gather):
                    before |= behind.get(other.value, 0)
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
    return [group for group in groups if len(group) > 1]


def _gathers(schedule: Schedule) -> dict[int, list[_OneGather]]:
    """The gathers that operations read, by the index of each that reads any."""
    found = dict[int, list[_OneGather]]()
    for index, pairs in read_otherwise(schedule).items():
        operation = schedule.program.operations[index]
        for operand, layout in pairs:
            steps = schedule.route(operand, layout).steps
            if not steps or steps[-1].kind != "all-gather":
                continue
            gather, before = gather_for(schedule, operation, operand, layout), None
            for number, step in enumerate(steps):
                if step.kind == "all-gather":
                    one = gather if number == len(steps) - 1 else (gather, number)
                    kind = operation.region, step.axes
                    found.setdefault(index, []).append(_OneGather(one, gather, step.layout, kind, before))
                    before = one
    return found


def waits_for(schedule: Schedule, gather: Gather) -> tuple[Awaited, ...]:
    """What a gather for a further reader waits for, beside what it gathers."""
    alone = gather.alone
    return () if alone is None else awaited(schedule, schedule.program.operations[alone], gather.value)


def last_gathered(schedule: Schedule, value: int, layout: Layout) -> tuple[tuple[int, ...], int] | None:
    """Where a gather brings a value to a layout at last: the mesh axes that it goes over, and the dimension that these
    split, counted without those of size 1."""
    route = schedule.route(value, layout)
    if not route.steps or route.steps[-1].kind != "all-gather":
        return None
    before = route.steps[-2].layout if len(route.steps) > 1 else route.source
    shape = schedule.program.values[value].shape
    gathered = [old != new for old, new, size in zip(before, layout, shape, strict=True) if size > 1]
    return route.steps[-1].axes, gathered.index(True)


def gathered_at_the_end(schedule: Schedule) -> dict[int, bool]:
    """The outputs that leave in another layout than they are computed in, by a gather, by their numbers: one after
    another at the end. A gather leaves the dimension that it gathers first, so that what leaves is a copy of its
    result, unless that dimension is the first one: True where it is."""
    found = dict[int, bool]()
    for number, output in enumerate(schedule.program.outputs):
        layout = schedule.layout_of_output(number)
        if isinstance(output, int) and schedule.assignment.values.get(output, layout) != layout:
            gathered = last_gathered(schedule, output, layout)
            if gathered is not None:
                found[number] = gathered[1] > 0
    return found


def sliced_at_the_end(schedule: Schedule) -> list[int]:
    """The outputs that leave in parts of what a loop or a branch makes, by their numbers: its result is there whole
    while that runs."""
    program, gathered = schedule.program, gathered_at_the_end(schedule)
    found = {output for output, _ in results_of_bodies(program)}
    return [
        number
        for number, output in enumerate(program.outputs)
        if isinstance(output, int) and output in found and number not in gathered
        if schedule.layout_of_output(number) != schedule.assignment.values[output]
    ]


def held_at_the_end(lifetimes: Lifetimes, schedule: Schedule, leaving: float = 0.0) -> Iterator[Held]:
    """What leaves in another layout than it is computed in, see `gathered_at_the_end` and `sliced_at_the_end`: in that
    one until then, and the results of gathers that are copied, ``leaving`` bytes at once or the largest."""
    sizes = []
    for number, copied in (gathered_at_the_end(schedule) | dict.fromkeys(sliced_at_the_end(schedule), False)).items():
        output, layout = schedule.program.outputs[number], schedule.layout_of_output(number)
        if isinstance(output, int) and output in lifetimes.held:
            own = schedule.assignment.values[output]
            yield Held(output, own, bytes_in(schedule, output, own), lifetimes.held[output])
            sizes += [bytes_in(schedule, output, layout)] * copied
    if sizes:
        yield Held(None, (), max(*sizes, leaving), Lifetime(lifetimes.end, lifetimes.end))


def held_whole(problem: Problem, held: Mapping[int, Lifetime], end: int) -> Iterator[PairUsage]:
    """Bytes of what `sliced_at_the_end` names, per layout of the result and of the input that it replaces; ``held``:
    when results are in memory, until the ``end``."""
    for output, state in results_of_bodies(problem.program):
        result, replaced = (problem.variables.values.get(value) for value in (output, state))
        if output in held and result is not None and replaced is not None:
            sizes = problem.program.values[output].total_bytes / problem.domain(output).degrees
            amounts = np.where(np.eye(len(sizes), dtype=bool), 0.0, sizes[:, None])
            yield PairUsage(result, replaced, amounts, held[output].start, end + 1)


def results_of_bodies(program: Program) -> list[tuple[int, int]]:
    """The results of loops and branches that leave in the layouts of inputs, each with that input."""
    pairs = [(program.outputs[number], program.inputs[position]) for number, position in program.ties.items()]
    makers = program.makers
    return [(output, state) for output, state in pairs if isinstance(output, int) and _has_bodies(makers.get(output))]


def _has_bodies(maker: Operation | None) -> bool:
    return maker is not None and bool(maker.bodies)
