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
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from shardplan.layout import Layout
from shardplan.memory.accumulation import read_together
from shardplan.memory.fusion import is_view, pointwise_operations, readers_in
from shardplan.memory.order import operands_first, order_of
from shardplan.memory.recomputing import Kernels
from shardplan.memory.repeated import Apart, apart_in, repeated_in
from shardplan.memory.sizes import bytes_in
from shardplan.memory.slicing import is_sliced
from shardplan.once import once
from shardplan.problem import Problem
from shardplan.program import Operation, Program
from shardplan.schedule import REDUCTIONS, Schedule
from shardplan.transition import Step

COMBINED_BYTES = 30 * 2**20
"""XLA:GPU merges all-reduces, or reduce-scatters, up to this size of their results on one device."""

_MOST_PARTNERS = 8
"""Reductions that one kernel reads, of those that are looked at."""

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})

_PLACING = frozenset({"sharding_constraint", "device_put", "layout_constraint", "reshard"})
"""Primitives that say where a value is, and compute nothing."""


@dataclass(frozen=True, slots=True)
class Gather:
    """A value that is brought to a layout, by a gather at last or by reducing a sum that waits: for all who read it
    there, or for one operation, given by its index, that ``alone`` reads this copy."""

    value: int
    layout: Layout
    alone: int | None = None


Reduced = int | Gather
"""What is reduced: a partial result as an operation, by its index, makes it, or a sum that waits as it is read."""


_Others = tuple[tuple[int, tuple[int, ...]], ...]
"""Per operation, by index, others, or values."""


@once
def read_otherwise(schedule: Schedule) -> dict[int, list[tuple[int, Layout]]]:
    """Per operation, by index, the operands that it reads in other layouts than they are stored in, with these: itself,
    or in its bodies."""
    values, found = schedule.assignment.values, dict[int, list[tuple[int, Layout]]]()
    for index, links in schedule.problem.links.items():
        for link in links.enter:
            if isinstance(source := link.source, int) and source in values:
                read = source, schedule.link_layout(link)
                if read[1] != values[source] and read not in found.get(index, ()):
                    found.setdefault(index, []).append(read)
    for index, strategy in schedule.assignment.strategies.items():
        for operand, layout in zip(schedule.program.operations[index].operands, strategy.operands, strict=True):
            if isinstance(operand, int) and layout is not None and values.get(operand, layout) != layout:
                found.setdefault(index, []).append((operand, layout))
    return found


@once
def reducing(schedule: Schedule) -> frozenset[int]:
    """The operations, by index, of which results are summed up over devices as they are made."""
    return frozenset(
        index
        for index in schedule.assignment.strategies
        for position in range(len(schedule.program.operations[index].results))
        if any(step.kind in REDUCTIONS for step in schedule.result_steps(schedule.program.operations[index], position))
    )


def gather_for(schedule: Schedule, operation: Operation, value: int, layout: Layout) -> Gather:
    """The gather that brings a value to the layout that an operation reads, if one does."""
    alone = not operation.bodies and schedule.gathered_anew(value, layout)
    return Gather(value, layout, operation.index if alone else None)


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
    It depends on all that what it is merged with does: after each group XLA looks anew at what leads to what.
    """
    program, groups = schedule.program, list[list[Reduced]]()
    filling: dict[Any, tuple[int, float]] = {}  # per kind, the number of its last group, and the group's size
    behind: dict[int, frozenset[int]] = {}  # per value, the last groups that it depends on
    waiting = Waiting()
    same, numbers, read = repeated_in(program, apart_in(schedule)), dict[Reduced, int](), read_before(schedule)
    sums = read_otherwise(schedule).keys() | reducing(schedule)
    for operation in with_partners(schedule):
        found = frozenset[int]().union(*[behind[o] for o in read[operation.index] if o in behind])
        if not found and operation.index not in sums:
            continue
        repeated = not operation.results or operation.results[0] in same
        for one, value, layout, kind in _reductions_of(schedule, operation, repeated):
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


class Waiting:
    """Which groups of collectives wait for which: each for all that any of its members depends on."""

    def __init__(self) -> None:
        self._before: list[frozenset[int]] = []  # per group
        self._full: set[int] = set()

    def begin(self, last: int) -> int:
        """The number of a new group; the last one of its kind, or -1, takes no more members."""
        self._before.append(frozenset())
        self._full.add(last)
        return len(self._before) - 1

    def join(self, number: int, before: frozenset[int]) -> None:
        """Lets a group have a member that depends on others."""
        self._before[number] |= before - {number}

    def still_open(self, found: frozenset[int]) -> frozenset[int]:
        """Of groups, and of what the full ones among them wait for, those that may take more members."""
        full = found & self._full
        for number in full:
            self._look_through(number)
        return (found - full).union(*[self._before[number] for number in full]) if full else found

    def _look_through(self, number: int) -> None:
        """Lets a group wait for what full ones wait for instead of for these."""
        stack = [number]
        while stack:
            before = self._before[stack[-1]]
            full = before & self._full
            if deeper := [other for other in full if self._before[other] & self._full]:
                stack += deeper
                continue
            self._before[stack.pop()] = (before - full).union(*[self._before[other] for other in full])

    def leads(self, number: int, others: frozenset[int]) -> bool:
        """Whether one of the others is a group that may take more members, or waits for it."""
        seen, stack = set(others), [*others]
        while stack and number not in seen:
            other = stack.pop()
            self._before[other] = self.still_open(self._before[other])
            stack += self._before[other] - seen
            seen |= self._before[other]
        return number in seen


def _reductions_of(
    schedule: Schedule, operation: Operation, repeated: bool
) -> Iterator[tuple[Reduced, int, Layout, object]]:
    """The sums that wait which an operation reads whole, and its own partial result, each with the value, the layout
    to which it is reduced, and what reductions have in common that are merged."""
    for operand, layout in read_otherwise(schedule).get(operation.index, ()):
        steps = schedule.route(operand, layout).steps
        if steps and steps[-1].kind in REDUCTIONS:
            kind = operation.region, *_kind(schedule, operand, steps, "sum")
            yield gather_for(schedule, operation, operand, layout), operand, layout, kind
    if repeated or operation.index not in reducing(schedule):
        return
    steps = tuple(step for step in schedule.result_steps(operation, 0) if step.kind in REDUCTIONS)
    if steps:
        reducer = schedule.assignment.strategies[operation.index].reducers[0]
        kind = operation.region, *_kind(schedule, operation.results[0], steps, reducer)
        yield operation.index, operation.results[0], steps[-1].layout, kind


def _kind(schedule: Schedule, value: int, steps: Sequence[Step], reducer: str | None) -> tuple[object, ...]:
    # what all devices get is the same in whatever order these are named, but not what each gets a part of
    found = [(step.kind, step.axes) for step in steps if step.kind in REDUCTIONS]
    reducing = tuple((kind, tuple(sorted(axes)) if kind == "all-reduce" else axes) for kind, axes in found)
    return reducing, reducer, schedule.program.values[value].dtype


@once
def read_before(schedule: Schedule) -> list[list[int]]:
    """Per operation, the values that are there before it is computed: those that it reads, and for a product that XLA
    merges with others what these read too. Of equal values, it is the first one."""
    apart = apart_in(schedule)
    same, read = repeated_in(schedule.program, apart), [*_values_read(schedule.program, apart)]
    for index, together in read_together(schedule).items():
        read[index] = [same.get(o, o) for o in together]
    return read


@once
def _values_read(program: Program, apart: Apart) -> list[list[int]]:
    """Per operation, the values that it reads; of equal ones, the first, unless they are computed apart."""
    same = repeated_in(program, apart)
    return [[same.get(o, o) for o in operation.operands if isinstance(o, int)] for operation in program.operations]


def with_partners(schedule: Schedule) -> list[Operation]:
    """All operations in their order, but that a reduction over devices is followed by those that a kernel reads
    together with it, element by element: XLA makes one kernel of all that read the same values, are as large and do not
    need each other, so that what needs one of them waits for what any of them reads. The backward pass, which reads the
    exponentials' sums, so waits for the picked logits, from which the loss is computed with these. It does not where
    each device computes the loss of a part of the rows alone; nor do the exponentials then, whose sums the loss needs.
    Nor where the backward pass alone reads a part of the rows. Products that XLA merges stand behind what any of them
    reads."""
    reads = read_together(schedule)
    together = tuple((index, tuple(read)) for index, read in reads.items())
    pointwise, values = pointwise_operations(schedule.problem), schedule.assignment.values
    read = ((index, *pair) for index, pairs in read_otherwise(schedule).items() if index in pointwise for pair in pairs)
    parts = frozenset((index, value) for index, value, layout in read if is_sliced(values[value], layout))
    return _in_order(schedule.program, _partners(schedule.problem, reducing(schedule), parts), together)


@once
def _partners(problem: Problem, reduced: frozenset[int], parts: frozenset[tuple[int, int]]) -> _Others:
    """Per operation, those that a kernel reads together with it, where these are ``reduced`` over devices. What reads
    ``parts`` of a value, as an operation and a value, is smaller than what reads all of it."""
    program, pointwise = problem.program, pointwise_operations(problem)
    sources: dict[int, frozenset[int]] = {}  # per value, the reductions that its kernel reads, all as large
    behind: dict[int, int] = {}  # per value, the reductions that lead to it, as bits
    bits = {index: 1 << number for number, index in enumerate(sorted(reduced))}
    leading = _leading_to(program, bits)
    partners: dict[int, list[int]] = {}
    for operation in program.operations:
        needed = 0
        for operand in operation.operands:
            needed |= behind.get(operand, 0) if isinstance(operand, int) else 0
        behind |= dict.fromkeys(operation.results, needed | bits.get(operation.index, 0))
        if len(operation.results) != 1:
            continue
        result = operation.results[0]
        size = prod(program.values[result].shape)
        if operation.index in reduced:
            sources[result] = frozenset({operation.index})
        elif operation.index in pointwise or is_view(program, operation):
            read = [
                o
                for o in operation.operands
                if isinstance(o, int)
                and o in sources
                and prod(program.values[o].shape) == size
                and (operation.index, o) not in parts
            ]
            found = frozenset[int]().union(*(sources[o] for o in read))
            if 0 < len(found) <= _MOST_PARTNERS:
                sources[result] = found
            if len(found) > max((len(sources[o]) for o in read), default=0):
                for index in found:
                    if not leading[index] & needed:  # else what else reads it leads here
                        partners.setdefault(index, []).extend(sorted(found - {index}))
    several = _read_by_several(program, sources, parts)
    return tuple((index, tuple(others)) for index, others in partners.items() if index in several)


def _read_by_several(
    program: Program, sources: Mapping[int, frozenset[int]], parts: frozenset[tuple[int, int]]
) -> frozenset[int]:
    """The reductions that several kernels read element by element, all of it, where ``sources`` has those that each
    value's kernel reads: what one alone reads waits for no other."""
    inside, ends = set[int](), dict[int, set[int]]()  # per reduction, what others read that is computed from it
    for operation in program.operations:
        made = sources.get(operation.results[0], frozenset()) if len(operation.results) == 1 else frozenset[int]()
        for operand in operation.operands:
            read = sources.get(operand, frozenset()) if isinstance(operand, int) else frozenset[int]()
            if not isinstance(operand, int) or not read or (operation.index, operand) in parts:
                continue
            if read <= made:
                inside.add(operand)
            for index in read:
                ends.setdefault(index, set()).add(operand)
    return frozenset(index for index, values in ends.items() if len(values - inside) > 1)


def _leading_to(program: Program, bits: Mapping[int, int]) -> dict[int, int]:
    """Per operation that has a bit, the bits of those that its results lead to."""
    found: dict[int, int] = {}
    ahead: dict[int, int] = {}  # per value, those that it leads to
    for operation in reversed(program.operations):
        leading = 0
        for result in operation.results:
            leading |= ahead.pop(result, 0)
        if operation.index in bits:
            found[operation.index] = leading
            leading |= bits[operation.index]
        for operand in operation.operands if leading else ():
            if isinstance(operand, int):
                ahead[operand] = ahead.get(operand, 0) | leading
    return found


@once
def _in_order(program: Program, those_of: _Others, reading: _Others) -> list[Operation]:
    """All operations in their order, but that each is followed by its partners (``those_of`` it) and stands behind the
    values that it waits for (``reading``)."""
    order, done, partners = list[Operation](), set[int](), dict(those_of)
    makers = program.makers
    others = {
        index: [makers[o].index for o in read if o in makers and makers[o].region == region]
        for index, read in reading
        for region in [program.operations[index].region]
    }
    for index in order_of(program):
        waiting = [operands_first(program, index, done, others)]
        while waiting:
            following = next(waiting[-1], None)
            if following is None:
                waiting.pop()
                continue
            order.append(following)
            behind = [other for other in partners.get(following.index, ()) if other not in done]
            waiting += [operands_first(program, other, done, others) for other in reversed(behind)]
    return order


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


def ending_at_reductions(schedule: Schedule, kernels: Kernels) -> Kernels:
    """What XLA:GPU fuses with this schedule: what is summed up over devices is stored for that, not computed later.

    Of logits that are split over the vocabulary, so, the picked one of each row is found once, and no kernel that reads
    it later reads all logits. Nor is what collectives bring to other layouts computed in what reads it there: it is
    stored for them, and what it is computed from is not held for its readers.
    """
    moved = frozenset(value for moved in _moved(schedule) for value in _stored_for(schedule.program, kernels, moved))
    return replace(kernels, fused=kernels.fused - reducing(schedule), read=kernels.read | moved)


def _moved(schedule: Schedule) -> Iterator[int]:
    """The values that collectives bring to the layouts in which they are read, as they are made."""
    for pairs in read_otherwise(schedule).values():
        for value, layout in pairs:
            steps = schedule.route(value, layout).steps
            if steps and steps[0].kind != "slice":
                yield value


def _stored_for(program: Program, kernels: Kernels, value: int) -> Iterator[int]:
    """What a kernel stores for a collective that moves a value: this, or what it is another shape of. Another order of
    dimensions is that of what is in memory already, or a copy for the collective where others read it as well."""
    makers, in_memory = program.makers, kernels.read | kernels.stored
    while (maker := makers.get(value)) is not None and (is_view(program, maker) or maker.primitive.name in _PLACING):
        operand = maker.operands[0]
        if not isinstance(operand, int):
            return
        value = operand
    if maker is not None and maker.primitive.name == "transpose":
        operand = maker.operands[0]
        turned = makers.get(operand) if isinstance(operand, int) else None
        computed = turned is not None and turned.index in kernels.fused and operand not in in_memory
        if not computed or len(readers_in(program)[value]) > 1:
            return
    yield value
