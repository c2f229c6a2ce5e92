"""What operations read otherwise than it is stored, and the order in which XLA looks at them to merge collectives.

>>> import jax, jax.numpy as jnp, shardplan
>>> step, square = lambda w, x: jnp.tanh(x @ w) @ w, jax.ShapeDtypeStruct((64, 64), "float32")
>>> pins, mesh = {"0": jax.P("x", None), "1": jax.P()}, jax.sharding.AbstractMesh((2,), ("x",))
>>> schedule = shardplan.plan(step, mesh, square, square, pins=pins).schedule
>>> [operation.primitive.name for operation in with_partners(schedule)]
['dot_general', 'tanh', 'dot_general']
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from shardplan.layout import Layout
from shardplan.memory.accumulation import read_together
from shardplan.memory.consumers import read_with_consumer
from shardplan.memory.cutting import moved_results
from shardplan.memory.fusion import is_scatter, is_view, pointwise_operations, readers_in
from shardplan.memory.order import operands_first, operands_made, order_of, read_in_order
from shardplan.memory.recomputing import Kernels
from shardplan.memory.repeated import Apart, apart_in, padded_together, repeated_in
from shardplan.memory.slicing import is_sliced, scattered_behind
from shardplan.once import once
from shardplan.problem import Problem
from shardplan.program import Operation, Program
from shardplan.schedule import REDUCTIONS, Schedule

COMBINED_BYTES = 30 * 2**20
"""XLA:GPU merges all-reduces, or reduce-scatters, up to this size of their results on one device."""

_MOST_PARTNERS = 8
"""Reductions that one kernel reads, of those that are looked at."""

PLACING = frozenset({"sharding_constraint", "device_put", "layout_constraint", "reshard"})
"""Primitives that say where a value is, and compute nothing."""


@dataclass(frozen=True, slots=True)
class Gather:
    """A value that is brought to a layout, by a gather at last or by reducing a sum that waits: for all who read it
    there, or for one operation, given by its index, that ``alone`` reads this copy."""

    value: int
    layout: Layout
    alone: int | None = None


Collective = int | Gather | tuple[int | Gather, int]
"""What brings a partial result, by the index of the operation that makes it, or another value to its layout: the last
collective that this takes, or one before, by its number among the steps."""


def brought_in(one: Collective) -> int | Gather:
    """What a collective brings."""
    return one if isinstance(one, int | Gather) else one[0]


class Joined(NamedTuple):
    """Kernels that XLA makes one: the operations, by index, that end them, and the values that they read from memory,
    in the order in which these are computed from them."""

    operations: tuple[int, ...]
    read: tuple[int, ...]


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
def read_before(schedule: Schedule, joined: tuple[Joined, ...] | None = None) -> list[list[int]]:
    """Per operation, the values that are there before it is computed: those that it reads, and for a product that XLA
    merges with others, and for one that ends kernels which are ``joined``, what these read too. Of equal values, it is
    the first one."""
    apart = apart_in(schedule)
    same, read = repeated_in(schedule.program, apart), [*_values_read(schedule.program, apart)]
    for index, together in (read_with_consumer(schedule.problem) | read_together(schedule)).items():
        read[index] = [same.get(o, o) for o in together]
    for kernel in joined or ():
        before = [same.get(value, value) for value in kernel.read]
        for index in kernel.operations:
            read[index] = [*dict.fromkeys((*before, *read[index]))]
    return read


def read_of_merged(
    schedule: Schedule, merged: Sequence[Sequence[Collective]], joined: tuple[Joined, ...] | None = None
) -> dict[int, list[int]]:
    """The same of the operations, by index, that read what collectives bring which are ``merged``: with the numbers of
    their groups, counted from behind all values, before each of these."""
    read, otherwise = read_before(schedule, joined), read_otherwise(schedule)
    operations, same, first = schedule.program.operations, repeated_of(schedule), len(schedule.program.values)
    groups = dict[int | Gather, list[int]]()
    for number, one in ((number, one) for number, group in enumerate(merged) if len(group) > 1 for one in group):
        groups.setdefault(brought_in(one), []).append(first + number)
    made = {operations[one].results[0]: numbers for one, numbers in groups.items() if isinstance(one, int)}
    reading = {index for index, values in enumerate(read) if not made.keys().isdisjoint(values)} if made else set()
    changed = dict[int, list[int]]()
    for index in sorted(reading | otherwise.keys()) if groups else ():
        found = dict[int, list[int]]()
        for operand, layout in otherwise.get(index, ()):
            numbers = groups.get(gather_for(schedule, operations[index], operand, layout))
            if numbers is not None:
                found[same.get(operand, operand)] = numbers
        if found or index in reading:
            brought = ((*found.get(value, made.get(value, ())), value) for value in read[index])
            changed[index] = [*dict.fromkeys(one for some in brought for one in some)]
    return changed


def repeated_of(schedule: Schedule) -> dict[int, int]:
    """The values that repeat another one, with the first of these."""
    return repeated_in(schedule.program, apart_in(schedule))


def brought_by(schedule: Schedule, merged: Sequence[Sequence[Collective]]) -> dict[int, list[int]]:
    """Per group of ``merged`` collectives, by the number that `read_of_merged` gives it, what these bring."""
    operations, same, first = schedule.program.operations, repeated_of(schedule), len(schedule.program.values)
    brought = {
        first + number: [operations[one].results[0] if isinstance(one, int) else one.value for one in ones]
        for number, ones in enumerate([[brought_in(one) for one in group] for group in merged])
    }
    return {number: [same.get(value, value) for value in values] for number, values in brought.items()}


@once
def _values_read(program: Program, apart: Apart) -> list[list[int]]:
    """Per operation, the values that it reads; of equal ones, the first, unless they are computed apart."""
    same = repeated_in(program, apart)
    return [[same.get(o, o) for o in values] for values in read_in_order(program)]


def with_partners(
    schedule: Schedule,
    joined: tuple[Joined, ...] | None = None,
    changed: Mapping[int, Sequence[int]] = MappingProxyType({}),
    brought: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> list[Operation]:
    """All operations in their order, but that one which ends kernels that are ``joined`` stands behind all that these
    read, and is followed by those that end the others, but for what is reduced over devices then. XLA makes one kernel
    of all that read the same values, are as large and do not need each other, so that what needs one of them waits for
    what any of them reads. The backward pass, which reads the exponentials' sums, so waits for the picked logits, from
    which the loss is computed with these. It does not where each device computes the loss of a part of the rows alone;
    nor do the exponentials then, whose sums the loss needs. Nor where the backward pass alone reads a part of the rows.
    Where these kernels are not known, so it is with reductions over devices and those that a kernel reads together with
    them, element by element.

    Products that XLA merges stand behind what any of them reads, so do convolutions whose images one kernel pads, and
    what reads one of several collectives that are merged already (``changed``, by `read_of_merged`) behind what all of
    these bring (``brought``)."""
    together = {**padded_together(schedule), **read_with_consumer(schedule.problem), **read_together(schedule)}
    read, same = read_before(schedule, joined), repeated_of(schedule)
    for operation in (reader for value in same for reader in readers_in(schedule.program).get(value, ())):
        together.setdefault(operation.index, read[operation.index])
    if joined is None:
        partners = _reduced_with(schedule)
    else:
        reduced = reducing(schedule)
        ending = [(kernel, tuple(index for index in kernel.operations if index not in reduced)) for kernel in joined]
        partners = tuple((index, others) for kernel, others in ending for index in kernel.operations)
        together |= {index: read[index] for index, _ in partners}
    if not changed:
        return _in_order(schedule.program, partners, tuple((index, tuple(some)) for index, some in together.items()))
    return _ordered(schedule.program, partners, {**together, **changed}, brought)


def _reduced_with(schedule: Schedule) -> _Others:
    """Per operation, those that a kernel reads together with it, where these are reduced over devices."""
    pointwise, values = pointwise_operations(schedule.problem), schedule.assignment.values
    read = ((index, *pair) for index, pairs in read_otherwise(schedule).items() if index in pointwise for pair in pairs)
    parts = frozenset((index, value) for index, value, layout in read if is_sliced(values[value], layout))
    return _partners(schedule.problem, reducing(schedule), parts, scattered_behind(schedule))


@once
def _partners(
    problem: Problem,
    reduced: frozenset[int],
    parts: frozenset[tuple[int, int]],
    turned: frozenset[int],
) -> _Others:
    """Per operation, those that a kernel reads together with it, where these are ``reduced`` over devices: not those
    whose results lie ``turned``, which kernels of their own turn back. What reads ``parts`` of a value, as an operation
    and a value, is smaller than what reads all of it."""
    program, pointwise = problem.program, pointwise_operations(problem)
    sources: dict[int, frozenset[int]] = {}  # per value, the reductions that its kernel reads, all as large
    behind: dict[int, int] = {}  # per value, the reductions that lead to it, as bits
    bits = {index: 1 << number for number, index in enumerate(sorted(reduced))}
    leading = _leading_to(program, bits)
    partners: dict[int, list[int]] = {}
    for operation in program.operations:
        needed, near = 0, list[int]()
        for operand in operation.operands:
            if isinstance(operand, int):
                needed |= behind.get(operand, 0)
                near += [operand] if operand in sources else []
        if leads := needed | bits.get(operation.index, 0):
            behind |= dict.fromkeys(operation.results, leads)
        if len(operation.results) != 1:
            continue
        result = operation.results[0]
        if operation.index in reduced:
            if operation.index not in turned:
                sources[result] = frozenset({operation.index})
        elif near and (operation.index in pointwise or is_view(program, operation)):
            size = program.values[result].elements
            if size == 1:  # the order has what one kernel reads of these, one after another
                continue
            read = [o for o in near if program.values[o].elements == size and (operation.index, o) not in parts]
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
        for operand in operation.operands:
            read = sources.get(operand) if isinstance(operand, int) else None
            if not isinstance(operand, int) or not read or (operation.index, operand) in parts:
                continue
            made = sources.get(operation.results[0], frozenset()) if len(operation.results) == 1 else frozenset[int]()
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
    return _ordered(program, those_of, dict(reading))


def _ordered(
    program: Program,
    those_of: _Others,
    reading: Mapping[int, Sequence[int]],
    brought: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> list[Operation]:
    order, done, partners = list[Operation](), set[int](), dict(those_of)
    makers, further = program.makers, len(program.operations) - len(program.values)
    before: dict[int, list[int]] = {}
    for index, read in reading.items():
        region = program.operations[index].region
        groups = [o for o in read if o in brought]
        for some, values in ((index, read), *((further + group, brought[group]) for group in groups)):
            if some not in before:
                made = (makers[o].index if o in makers else further + o for o in values if o in makers or o in brought)
                before[some] = [
                    o for o in made if o >= len(program.operations) or program.operations[o].region == region
                ]
    needed = operands_made(program)
    for index in order_of(program):
        if index in done:
            continue
        if index not in partners and done.issuperset(before.get(index, needed[index])):
            done.add(index)
            order.append(program.operations[index])
            continue
        waiting = [operands_first(program, index, done, before)]
        while waiting:
            following = next(waiting[-1], None)
            if following is None:
                waiting.pop()
                continue
            order.append(following)
            if following.index in partners:
                behind = [other for other in partners[following.index] if other not in done]
                waiting += [operands_first(program, other, done, before) for other in reversed(behind)]
    return order


def ending_at_reductions(schedule: Schedule, kernels: Kernels) -> Kernels:
    """What XLA:GPU fuses with this schedule: what is summed up over devices is stored for that, not computed later.

    Of logits that are split over the vocabulary, so, the picked one of each row is found once, and no kernel that reads
    it later reads all logits. Nor is what collectives bring to other layouts computed in what reads it there: it is
    stored for them, and what it is computed from is not held for its readers. A scatter of which the result is brought
    elsewhere writes into zeros, not into what that is added to.
    """
    program = schedule.program
    moved = frozenset(value for moved in _moved(schedule) for value in _stored_for(program, kernels, moved))
    makers = [program.makers[value] for value in moved if value in program.makers]
    scatters = {maker.index for maker in makers if is_scatter(program, maker)}
    return replace(kernels, fused=kernels.fused - reducing(schedule) - scatters, read=kernels.read | moved)


def _moved(schedule: Schedule) -> Iterator[int]:
    """The values that collectives bring to the layouts in which they are stored, or read, as they are made."""
    yield from moved_results(schedule)
    for pairs in read_otherwise(schedule).values():
        for value, layout in pairs:
            steps = schedule.route(value, layout).steps
            if steps and steps[0].kind != "slice":
                yield value


def _stored_for(program: Program, kernels: Kernels, value: int) -> Iterator[int]:
    """What a kernel stores for a collective that moves a value: this, or what it is another shape of. Another order of
    dimensions is that of what is in memory already, or a copy for the collective where others read it as well."""
    makers, in_memory = program.makers, kernels.read | kernels.stored
    while (maker := makers.get(value)) is not None and (is_view(program, maker) or maker.primitive.name in PLACING):
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
