"""What lies in the memory of a step's results before they are made.

A result that takes no argument's place has memory of its own, which the caller gets; that of a donated argument is the
result's once nothing reads the argument any more. Until the result is made, XLA puts there what is in memory for a
while and not larger: it goes through all that a program stores, the largest first, and gives each the smallest memory
of a result that is free from its start to its end. So the new state of a step that does not donate its old one costs
less than it takes: what an activation needs meanwhile is there already.

>>> from shardplan.memory.held import Held, Lifetime
>>> needed = (8.0, (0, 4)), (8.0, (5, 7)), (9.0, (1, 2))
>>> held = [Held(number, (), size, Lifetime(*span)) for number, (size, span) in enumerate(needed)]
>>> [one.value for one in beside_results(held, [Unused(8.0, 0, 5), Unused(4.0, 0, 8)])]
[2, 1]
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shardplan.memory.bringing import Sending, computed_until
from shardplan.memory.held import Held
from shardplan.memory.sizes import bytes_in
from shardplan.program import Program
from shardplan.schedule import Schedule

if TYPE_CHECKING:
    from shardplan.memory.liveness import Lifetimes

_LEAST = 1e-4
"""The share of all results' bytes that is worth a look: what is smaller stays beside them."""

_MOST_TRIED = 64
"""Results whose memory one value is tried to be put into."""


class Unused(NamedTuple):
    """Bytes of memory of a result, with the first and the last place at which it is neither an argument's nor made."""

    size: float
    first: int
    last: int


def beside_results(held: Iterable[Held], results: Sequence[Unused]) -> Iterator[Held]:
    """What does not lie in the memory of results."""
    least = _LEAST * sum(one.size for one in results)
    memory = sorted(one for one in results if one.first <= one.last and one.size > least)
    sizes, taken = [one.size for one in memory], [list[tuple[int, int]]() for _ in memory]
    largest = max(sizes, default=0.0)
    looked_at = list[Held]()
    for one in held:
        if least < one.size <= largest:
            looked_at.append(one)
        else:
            yield one
    for one in sorted(looked_at, key=lambda one: (-one.size, one.lifetime.start)):
        start, end, first = one.lifetime.start, one.lifetime.end, bisect_left(sizes, one.size)
        for number in range(first, min(first + _MOST_TRIED, len(memory))):
            if start < memory[number].first or end > memory[number].last:
                continue
            spans, at = taken[number], bisect_left(taken[number], (start, end))
            if (not at or spans[at - 1][1] < start) and (at == len(spans) or end < spans[at][0]):
                spans.insert(at, (start, end))
                break
        else:
            yield one


def unused_results(lifetimes: Lifetimes, schedule: Schedule, donated: frozenset[int]) -> Iterator[Unused]:
    """The memory of results until these are made, from where no argument is there."""
    program = schedule.program
    for number, output in enumerate(program.outputs):
        if isinstance(output, int) and output in lifetimes.held:
            layout, position = schedule.layout_of_output(number), program.ties.get(number)
            first = lifetimes.unread_from(program.inputs[position]) if position in donated else 0
            made, copied = lifetimes.held[output].start, lifetimes.beside if position in donated else {}
            last = copied.get(output, made) if layout == schedule.assignment.values[output] else lifetimes.end
            yield Unused(bytes_in(schedule, output, layout), first, last - 1)


def copied_after(lifetimes: Lifetimes, program: Program, beside: Collection[int], sending: Sending) -> dict[int, int]:
    """Results beside the arguments that they replace, with the last place where they lie in memory of their own: where
    collectives hide, they are copied at the end, else as soon as nothing reads the argument, nor them."""
    found = dict.fromkeys(beside, lifetimes.end)
    for number, position in program.ties.items() if 0 in sending.still else ():
        output, state = program.outputs[number], program.inputs[position]
        if isinstance(output, int) and output in found:
            read = [computed_until(lifetimes, reader) for reader in lifetimes.readers.get(output, ())]
            made = lifetimes.place[program.makers[output].index]
            found[output] = max([made, lifetimes.unread_from(state) - 1, *read])
    return found
