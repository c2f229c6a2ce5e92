"""What all-to-alls send: a device puts the parts for the others one behind the other first, in a copy.

Where the dimension that is split lies behind others, its parts do not lie so in memory. A kernel copies them, which is
the one that computes them where one does element by element: it writes both the value and the copy, if others read
that. What nobody reads but the collective, and nobody keeps, is gone once it is copied, and so is what it is a view of.

>>> exchanged_behind(((0,), (), ()), ((), (), (0,)), (8, 16, 16)), exchanged_behind(((), (0,)), ((0,), ()), (16, 16))
(True, False)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardplan.layout import Domain, Layout
from shardplan.memory.bringing import computed_until
from shardplan.memory.brought import Brought
from shardplan.memory.combining import Gather
from shardplan.memory.fusion import is_view
from shardplan.memory.held import Held, Lifetime
from shardplan.memory.narrower import bytes_brought, narrower_copies
from shardplan.memory.products import is_multiplied
from shardplan.memory.sizes import bytes_in
from shardplan.once import once
from shardplan.problem import Problem
from shardplan.program import Operation, Program
from shardplan.schedule import Schedule
from shardplan.search import PairUsage
from shardplan.transition import Transitions

if TYPE_CHECKING:
    from shardplan.memory.liveness import Lifetimes


def exchanged_behind(before: Layout, after: Layout, sizes: Sequence[int]) -> bool:
    """Whether an all-to-all between two layouts splits a dimension that lies behind another of more than one element.

    ``sizes`` are those that a device has before."""
    split = next(dim for dim, axes in enumerate(after) if len(axes) > len(before[dim]))
    return any(size > 1 for size in sizes[:split])


def exchanged_copies(
    lifetimes: Lifetimes, schedule: Schedule, brought: Iterable[tuple[Gather, int, int]]
) -> Iterator[Held]:
    """The copies that are sent while what they are of stays, and those that products read of what came in parts.
    ``brought``: what is brought to other layouts, the first place where it is in memory, and that of the first
    operation that reads it."""
    for gather, first, reader in brought:
        if gather.value not in schedule.assignment.values:
            continue
        source, operation = schedule.route(gather.value, gather.layout).source, lifetimes.order[reader]
        sent, received = _sent_bytes(schedule, gather, source), 0.0
        if is_multiplied(schedule.program, operation) and lies_apart(schedule, gather):
            received = bytes_brought(schedule, gather.value, gather.layout)
        if not sent and not received:
            continue
        until = _needed_until(lifetimes, schedule, gather, source, operation) if sent else -1
        kernel = first_kernel(lifetimes, operation)
        span = sent_during(kernel, _made_at(lifetimes, schedule, gather.value, source, first), until)
        if span is not None and span.start < kernel:
            yield Held(gather.value, source, sent, span)
        at_once = max(received, sent if span is not None and span.start == kernel else 0.0)
        made = lifetimes.held.keys() & lifetimes.order[kernel].results if at_once else ()  # there after the copy
        at_once -= sum(bytes_in(schedule, result, schedule.assignment.values[result]) for result in made)
        if at_once > 0:
            yield Held(gather.value, gather.layout, at_once, Lifetime(kernel, kernel))


def lies_apart(schedule: Schedule, gather: Gather) -> bool:
    """Whether what an all-to-all brings at last lies in parts, of which each has some of a dimension within others."""
    route = schedule.route(gather.value, gather.layout)
    if not route.steps or route.steps[-1].kind != "all-to-all":
        return False
    before = route.steps[-2].layout if len(route.steps) > 1 else route.source  # perhaps a copy, not the value itself
    gathered = [dim for dim, axes in enumerate(gather.layout) if {*before[dim]} - {*axes}]
    sizes, degree = schedule.program.values[gather.value].shape, schedule.space.mesh.degree
    return any(sizes[dim] > degree(gather.layout[dim]) for dim in range(min(gathered)))


def sent_during(kernel: int, start: int, until: int) -> Lifetime | None:
    """When a copy that the kernel at a place is sent is in memory, from ``start`` on, beside what it is of, up to
    ``until``: where nothing runs before, at that place, before it has its results."""
    if start <= min(kernel - 1, until):
        return Lifetime(start, min(kernel - 1, until))
    return Lifetime(kernel, kernel) if until > kernel else None


def sent_beside(
    lifetimes: Lifetimes, problem: Problem, brought: Brought, reader: Operation, begins: int, moments: Sequence[int]
) -> Iterator[PairUsage]:
    """Likewise for a search, which does not know who reads the value as it is, at some moments, which ascend: where
    that is there in any case."""
    shares = _shares_of(problem, brought.value)
    if not shares.any():
        return
    held = lifetimes.held.get(_memory_of(lifetimes, problem.program, brought.value))
    kernel, until = first_kernel(lifetimes, reader), lifetimes.end
    if brought.value not in lifetimes.arguments and held is not None:
        until = min(held.end, lifetimes.copied[brought.value][1])
        until = until if until > computed_until(lifetimes, reader) else -1
    span = sent_during(kernel, begins, until)
    if span is not None and any_within(moments, span.start, span.end):
        values, (there, wanted) = problem.program.values, brought.places(problem)
        total = values[brought.value].total_bytes * narrower_copies(problem).get(brought.value, 1.0)
        sizes = np.where(wanted < 0, 0.0, total * shares[np.ix_(there, wanted)])
        if span.start == kernel:
            made = lifetimes.held.keys() & lifetimes.order[kernel].results
            sizes -= sum(values[result].total_bytes for result in made)
        if (sizes > 0).any():
            yield PairUsage(brought.source, brought.target, np.maximum(sizes, 0.0), span.start, span.end + 1)


def _sent_bytes(schedule: Schedule, gather: Gather, source: Layout) -> float:
    """The bytes of the largest copy that is sent on the way from a layout."""
    position, value = schedule.problem.domain(gather.value).position, schedule.program.values[gather.value]
    shares = _shares_of(schedule.problem, gather.value)
    narrow = narrower_copies(schedule.problem).get(gather.value, 1.0)
    return narrow * value.total_bytes * float(shares[position[source], position[gather.layout]])


def _shares_of(problem: Problem, value: int) -> NDArray[np.float64]:
    """float [layouts of a value, layouts]: the share of it that is the largest copy that is sent on the way."""
    return _shares(problem, problem.moving(value), problem.domain(value), problem.program.values[value].shape)


@once
def _shares(problem: Problem, moving: Transitions, domain: Domain, shape: tuple[int, ...]) -> NDArray[np.float64]:
    def behind(before: Layout, after: Layout) -> bool:
        sizes = [size // problem.space.mesh.degree(axes) for size, axes in zip(shape, before, strict=True)]
        return exchanged_behind(before, after, sizes)

    return moving.exchanged(domain, behind)


def _made_at(lifetimes: Lifetimes, schedule: Schedule, value: int, source: Layout, begins: int) -> int:
    """The place of the kernel that writes a copy: the value's own, where that computes element by element."""
    maker, held = schedule.program.makers.get(value), lifetimes.held.get(value)
    if maker is None or held is None or source != schedule.assignment.values[value]:
        return begins
    return held.start if maker.index in lifetimes.fused else begins


def _needed_until(lifetimes: Lifetimes, schedule: Schedule, gather: Gather, source: Layout, first: Operation) -> int:
    """The last place where others than all-to-alls, for ``first`` and later operations, need what one sends a copy of,
    or -1: a value that is in memory only where it is sent is needed there for longer, one that a copy takes over from
    is not needed."""
    value = gather.value
    stored, copy = schedule.assignment.values[value], schedule.copy(value)
    held = lifetimes.held.get(_memory_of(lifetimes, schedule.program, value))
    if value in lifetimes.arguments:
        return lifetimes.end
    if source == stored != copy == gather.layout:
        return -1
    if held is None:
        return lifetimes.end
    end = held.end if source == stored else lifetimes.copied[value][1]
    if end > computed_until(lifetimes, first):
        return end
    places = [-1]
    for reader in lifetimes.readers.get(value, ()):
        strategy = schedule.assignment.strategies.get(reader.index)
        read = zip(reader.operands, strategy.operands if strategy else (), strict=strategy is not None)
        if strategy is None or any(operand == value and layout == source for operand, layout in read):
            places.append(computed_until(lifetimes, reader))
    return max(places)


def _memory_of(lifetimes: Lifetimes, program: Program, value: int) -> int:
    """The value in whose memory one is that is a view of it, and all that is read of it."""
    found = value
    while found not in lifetimes.held and found in program.makers and is_view(program, program.makers[found]):
        operand = program.makers[found].operands[0]
        if not isinstance(operand, int) or len(lifetimes.readers[operand]) > 1 or operand in program.outputs:
            return value
        found = operand
    return found


def first_kernel(lifetimes: Lifetimes, operation: Operation) -> int:
    """The place of the first kernel that computes an operation; of a loop, of the first in its body."""
    return lifetimes.start(operation) if operation.bodies else _first_kernel(lifetimes, operation.index)


@once
def _first_kernel(lifetimes: Lifetimes, index: int) -> int:
    operation = lifetimes.order[lifetimes.place[index]]
    found, seen, stack = list[int](), {index}, [operation]
    while stack:
        made = stack.pop()
        if made.index not in lifetimes.fused or not lifetimes.held.keys().isdisjoint(made.results):
            found.append(lifetimes.place[made.index])
            continue
        readers = [reader for result in made.results for reader in lifetimes.readers.get(result, ())]
        stack += (reader for reader in readers if reader.index not in seen)
        seen.update(reader.index for reader in readers)
    return min(found, default=lifetimes.place[index])


def any_within(moments: Sequence[int], first: int, last: int) -> bool:
    """Whether any of the moments, which ascend, is one of these places."""
    return bisect_left(moments, first) < bisect_right(moments, last)
