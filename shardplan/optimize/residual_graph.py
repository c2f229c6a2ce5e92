"""What recomputation and host memory change, on a graph of materialised residuals alone, fast enough to be asked a
thousand times.

A residual is made of others and of arguments: between them are operations that kernels compute on the way. A late
operation reads residuals in the same way. For any set of residuals that are recomputed, one walk over the late uses
says which of them are made again and when, which others must be kept longer, and what that costs. A residual that waits
in host memory is made again of nothing.

A set of fates has the number of each residual that is recomputed, and the complement `~value` of each that waits in
host memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from shardplan.memory import Lifetimes
from shardplan.optimize.host_lane import Copied, HostLane, Staying
from shardplan.problem.schedule import Schedule
from shardplan.program.operation_kinds import PRODUCT, PRODUCTS, is_product
from shardplan.program.program import Operation, Program
from shardplan.program.recompute import ties
from shardplan.program.recompute_scans import Stack, chain, is_fixed, remakeable, stacks
from shardplan.program.residuals import early, materialised, residuals
from shardplan.timing.step_time import sent_seconds, time_prices

Array = NDArray[np.float64]

_MOST_KNOWN = 4096
"""The sets of fates whose changes are kept."""


@dataclass(frozen=True, slots=True)
class _Use:
    """A late operation reads a residual, or what kernels compute of some: ``value``, from ``sources``, at a place."""

    value: int
    sources: tuple[int, ...]
    place: int


@dataclass(slots=True)
class Effect:
    """What a set of fates does: when each of its residuals is there again (``first``), and read last; until when others
    are kept."""

    first: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)


class ResidualGraph:
    """The residuals of a schedule, with their bytes over time, and the seconds that making each again takes."""

    def __init__(self, schedule: Schedule, lifetimes: Lifetimes, donated: Collection[int] = ()) -> None:
        self.program: Program = schedule.program
        self._schedule, self._place = schedule, lifetimes.place
        self._choices = schedule.problem.encode(schedule.assignment)
        self.profile: Array = lifetimes.profile(self._choices)
        self.stacks = _late_stacks(self.program)
        self.residuals = (*_worth_making_again(schedule), *self.stacks)
        self._known = frozenset(self.residuals)
        self.sources = {**_sources(self.program), **{v: _slices(self.program, s) for v, s in self.stacks.items()}}
        self.unread = frozenset(value for value, stack in self.stacks.items() if not stack.is_read(self.program))
        """What scans stack for others to be made of alone."""
        self._uses = self._late_uses()
        self._uses_of: dict[int, list[int]] = {}  # the numbers of those that a residual has a part in
        for number, use in enumerate(self._uses):
            for value in (use.value,) if use.value in self._known else dict.fromkeys(use.sources):
                self._uses_of.setdefault(value, []).append(number)
        self._spans = self._spans_of(lifetimes)
        self._carries = self._stacked_carries()
        self._until, self._late = self._last_early_reads(), self._first_late_reads()
        self._waiting = {value: [*self._waits(value)] for value in self._spans}
        for value in self.stacks:  # from the beginning of the loop that fills it
            self._waiting[value] = [(start - 1, end, size) for start, end, size in self._spans.get(value, ())]
        self._waits_along = [v for v, w in self._waiting.items() if w and v not in self._known and v in self._late]
        self._following: dict[int, list[int]] = {}  # their numbers, by the residuals that they are computed of
        for number, value in enumerate(self._waits_along):
            for source in self.sources[value]:
                self._following.setdefault(source, []).append(number)
        self.sizes = {value: self._size(value) for value in self.residuals}
        self.cheap = set[int]()  # what no large product makes: what checkpoint policies by hand compute again
        self._read: dict[int, list[tuple[int, float]]] = {}  # of slices, the seconds of reading others
        self.flops, self.seconds = self._costs()
        problem = schedule.problem
        self._host_seconds_per_byte = 1 / (problem.prices.hardware.host_bytes_per_second or np.inf)
        values, assigned = self.program.values, schedule.assignment.values
        self.movable = frozenset(  # what may wait in host memory, whose tensors are split evenly
            v
            for v in self.residuals
            if v not in self.unread and self._waiting.get(v) and v in assigned and values[v].memory_kind is None
            if assigned[v] not in problem.domain(v).padded and not schedule.is_partial(v, assigned[v])
        )
        self.host_sizes = {
            v: self.sizes[v] * (self.stacks[v].length(self.program) if v in self.stacks else 1) for v in self.movable
        }
        self._stacking = {value: self._stacking_seconds(stack) for value, stack in self.stacks.items()}
        self._known_changes = lru_cache(_MOST_KNOWN)(self._changes)  # choices for several limits ask for the same

    @cached_property
    def _lane(self) -> HostLane:
        return HostLane(self._schedule, self._place)

    # ---- what is asked

    def effect(self, fates: Collection[int]) -> Effect:
        """What is there again, and what is kept longer."""
        found, gone = Effect(), {max(fate, ~fate) for fate in fates}
        for number in sorted({number for value in gone for number in self._uses_of.get(value, ())}):
            use = self._uses[number]
            for value in (use.value,) if use.value in self._known else use.sources:
                self._make(value, use.place, fates, gone, found)
        return found

    def _make(self, value: int, place: int, fates: Collection[int], gone: Collection[int], found: Effect) -> None:
        if value in found.first:
            found.last[value] = max(found.last[value], place)
            return
        stack = [value]
        while stack:
            one = stack.pop()
            if one in gone:
                if one not in found.first:
                    found.first[one] = place
                    stack += self.sources.get(one, ()) if one in fates else ()
                found.last[one] = max(found.last.get(one, 0), place)
            else:
                found.kept[one] = max(found.kept.get(one, 0), place)

    def copies(self, fates: Collection[int], effect: Effect | None = None) -> dict[int, Copied]:
        """The copies of what waits in host memory, by value."""
        first = (self.effect(fates) if effect is None else effect).first
        gone = [value for value in first if ~value in fates]
        if not gone:
            return {}
        staying = [Staying(v, self.sizes[v], self._place_of(v), first[v]) for v in gone if v not in self.stacks]
        stacked = {v: (self.stacks[v].maker, self.host_sizes[v]) for v in gone if v in self.stacks}
        copies = [*self._lane.copies(staying), *self._lane.copies_of_stacks(stacked)]
        return {one.offloaded.value: one for one in copies}

    def host_bytes(self, fates: Collection[int]) -> float:
        """The bytes of a device's share of host memory."""
        return sum(self.host_sizes[~fate] for fate in fates if fate < 0)

    def estimate(self, fates: Collection[int]) -> tuple[Array, float]:
        """The bytes of a device over time, and the seconds that are added."""
        places, amounts, seconds = self._known_changes(frozenset(fates))
        return self.profile + np.cumsum(np.bincount(places, amounts, len(self.profile) + 1))[:-1], seconds

    def _changes(self, fates: frozenset[int]) -> tuple[NDArray[np.int64], Array, float]:
        """Where the bytes of a device change, and by how many, and the seconds that are added."""
        found = self.effect(fates)
        copies, change = self.copies(fates, found), list[tuple[int, float]]()
        for value in (*found.first, *(self.unread.intersection(fates) - found.first.keys())):
            away = copies[value].away if value in copies else 0
            for until, end, size in self._waiting.get(value, ()):
                gone = max(until, away)
                if gone < end:
                    change += (gone + 1, -size), (end + 1, size)
        for value, place in found.first.items():
            begins = min(copies[value].back, place) if value in copies else place
            change += (begins, self.sizes[value]), (max(found.last[value], place) + 1, -self.sizes[value])
        numbers = {number for source in found.first for number in self._following.get(source, ())}
        for value in map(self._waits_along.__getitem__, sorted(numbers)):
            for until, _, size in self._waiting[value]:
                change += (until + 1, -size), (self._late[value], size)
        for value, place in found.kept.items():
            if value in self._known:
                start = max((end + 1 for _, end, _ in self._spans.get(value, ())), default=self._place_of(value))
                if place >= start:
                    change += (start, self.sizes[value]), (place + 1, -self.sizes[value])
            elif value in self._carries:
                start, end, size = self._carries[value]
                change += (start, size), (end + 1, -size)
        seconds = sum(self._seconds_among(v, found.first) if v in fates else copies[v].seconds for v in found.first)
        seconds -= sum(size for value, size in self._stacking.items() if value in fates)
        return np.array([place for place, _ in change], np.int64), np.array([size for _, size in change]), seconds

    def _seconds_among(self, value: int, recomputed: Collection[int]) -> float:
        """The seconds of making a residual again: kernels compute on the way what they would have read else."""
        return self.seconds[value] - sum(size for source, size in self._read.get(value, ()) if source in recomputed)

    def figures(self, value: int, fates: Collection[int]) -> tuple[int, float, float, float]:
        """1, the bytes that wait for the backward part, and the operations and seconds of making a residual again,
        among others, less those of stacking it. What is made for others alone waits nowhere."""
        seconds = self._seconds_among(value, fates)
        if value in self.unread:
            return 1, 0.0, self.flops[value], seconds
        waiting = sum(size for _, _, size in self._waiting.get(value, ()))
        return 1, waiting, self.flops[value], seconds - self._stacking.get(value, 0.0)

    def stacked(self, value: int) -> tuple[int, float, float, float]:
        """The figures of a value that is stacked for others to be made of: 0, the bytes that wait, less than zero, and
        the operations and seconds of stacking it."""
        return 0, -sum(size for _, _, size in self._waiting.get(value, ())), 0.0, self._stacking[value]

    def useful(self, fates: Collection[int]) -> frozenset[int]:
        """The fates of residuals, with the stacks that nothing would be made of."""
        return frozenset({*fates, *(self.unread - self.effect(fates).kept.keys())})

    def cost(self, fate: int) -> float:
        """The seconds of one fate alone: those of making a residual again, or of the longer copy of it."""
        return self.seconds[fate] if fate >= 0 else self.host_sizes[~fate] * self._host_seconds_per_byte

    def least_seconds(self, value: int, recompute: bool, host: bool) -> float:
        """The seconds of the cheapest fate of a residual that is not kept, among any others: below zero where it saves
        more than it takes. Infinite where it has no other fate."""
        again = 0.0 if value in self.unread else self.seconds[value] - sum(s for _, s in self._read.get(value, ()))
        found = [max(0.0, again) - self._stacking.get(value, 0.0)] if recompute else []
        return min([*found, *([0.0] if host and value in self.movable else [])], default=np.inf)

    def waiting_at(self, place: int) -> dict[int, float]:
        """Per residual, the bytes at a place that wait for the backward part if it is kept: its own, and those of what
        kernels compute of it."""
        found = dict.fromkeys(self.residuals, 0.0)
        for value in found:
            found[value] += sum(size for until, end, size in self._waiting.get(value, ()) if until < place <= end)
        for value in self._waits_along:
            size = sum(size for until, _, size in self._waiting[value] if until < place < self._late[value])
            for source in found.keys() & self.sources[value]:
                found[source] += size
        return found

    def fresh_sources(self, values: Iterable[int], fates: Collection[int]) -> set[int]:
        """The residuals that some are made of which nothing late reads otherwise, and theirs."""
        read = {source for use in self._uses for source in (use.value, *use.sources)}
        found, stack = set[int](), [*values]
        while stack:
            fresh = [s for s in self.sources.get(stack.pop(), ()) if s in self._known and s not in read]
            fresh = [s for s in fresh if s not in found and s not in fates and ~s not in fates]
            found.update(fresh)
            stack += fresh
        return found

    # ---- what is known of the schedule

    def _late_uses(self) -> list[_Use]:
        found, forward, tied, made = list[_Use](), early(self.program), ties(self.program), materialised(self.program)
        for index in self.program.regions[0].operations:
            if index in forward or index not in tied:
                continue
            for value in self.program.operations[index].read:
                maker = self.program.makers.get(value)
                if maker is not None and maker.index in forward and not is_fixed(maker):
                    sources = (value,) if value in made else self.sources.get(value, ())
                    found.append(_Use(value, sources, self._place[index]))
        read = {value: stack.reader for value, stack in self.stacks.items() if value not in self.unread}
        return [*found, *(_Use(value, (value,), self._place[reader]) for value, reader in read.items())]

    def _stacked_carries(self) -> dict[int, tuple[int, int, float]]:
        """From when to when the carry of a scan is stacked where slices are made of it, and its bytes."""
        found = dict[int, tuple[int, int, float]]()
        for value, stack in self.stacks.items():
            spans = self._spans.get(value, ())
            for carry in self.sources[value]:
                if carry < 0 and spans:
                    size = self._size(-1 - carry) * stack.length(self.program)
                    found[carry] = (min(start for start, _, _ in spans), max(end for _, end, _ in spans), size)
        return found

    def _last_early_reads(self) -> dict[int, int]:
        """Per value of the forward part, the last place before the border where a kernel reads it that stores what it
        makes: kernels behind the border compute the rest."""
        found, made = dict[int, int](), materialised(self.program)
        ends = min((use.place for use in self._uses), default=0)
        for index in sorted(early(self.program), reverse=True):
            operation, own = self.program.operations[index], -1
            if is_fixed(operation) or not made.isdisjoint(operation.results):
                own = self._place[index] if self._place[index] < ends else -1
            else:
                own = max(found.get(result, -1) for result in operation.results)
            for value in operation.read:
                found[value] = max(found.get(value, -1), own)
            for result in operation.results:
                if self._place[index] < ends:
                    found[result] = max(found.get(result, -1), self._place[index])
        return found

    def _first_late_reads(self) -> dict[int, int]:
        """Per value of the forward part, the first place where a late operation reads it, or what kernels compute of
        it."""
        found = dict[int, int]()
        for use in self._uses:
            found[use.value] = min(found.get(use.value, use.place), use.place)
        for index in sorted(early(self.program), reverse=True):
            operation = self.program.operations[index]
            read = [found[r] for r in operation.results if r in found and r not in self._known]
            for value in operation.read if read else ():
                found[value] = min(found.get(value, read[0]), *read)
        return found

    def _waits(self, value: int) -> Iterator[tuple[int, int, float]]:
        """From when to when a value waits for the backward part, and its bytes, for each of its buffers."""
        until = self._until.get(value, -1)
        for start, end, size in self._spans[value]:
            if start <= until < end and end >= self._late.get(value, end):
                yield until, end, size

    def _spans_of(self, lifetimes: Lifetimes) -> dict[int, list[tuple[int, int, float]]]:
        found: dict[int, list[tuple[int, int, float]]] = {}
        for buffer in lifetimes.buffers:
            maker = self.program.makers.get(buffer.value) if buffer.value is not None else None
            size = buffer.size(self._choices)
            if buffer.value is not None and maker is not None and size and maker.index in early(self.program):
                found.setdefault(buffer.value, []).append((buffer.start, buffer.end, size))
        return found

    def _stacking_seconds(self, stack: Stack) -> float:
        """The seconds of writing a stack and of reading it, which are saved where its slices are made again. What XLA
        moves in addition, to fill stacks and to copy slices, is not counted on: versions differ."""
        moved = 2 * self._size(stack.made) * stack.length(self.program)
        return moved / self._schedule.problem.prices.hardware.memory_bytes_per_second

    def _place_of(self, value: int) -> int:
        return self._place[self.program.makers[value].index]

    def _size(self, value: int) -> float:
        if value in self.stacks:
            return self._size(self.stacks[value].made)  # one slice
        stored = [size for _, _, size in self._spans.get(value, ())]
        layout = self._schedule.assignment.values.get(value)
        parts = self._schedule.problem.domain(value).parts
        own = self.program.values[value].total_bytes / parts[layout] if layout in parts else 0.0
        return max([own, *stored])

    def _costs(self) -> tuple[dict[int, float], dict[int, float]]:
        """The operations and the seconds of making each residual again from the residuals that it is made of.

        What is sent for it is sent again."""
        problem, prices, sending = self._schedule.problem, time_prices(self._schedule.problem), dict[int, float]()
        for sent in self._schedule.collectives():
            sending[sent.tensor.index] = sending.get(sent.tensor.index, 0.0) + sent_seconds(prices, sent)
        strategies, flops, seconds = self._schedule.assignment.strategies, dict[int, float](), dict[int, float]()
        for value in self.residuals:
            made, times = [self.program.makers[value]], 1
            if value in self.stacks:
                stack = self.stacks[value]
                stays = {one.made for one in stacks(self.program).values()} - {stack.made}
                made, times = chain(self.program, [stack.made], stays)[0], stack.length(self.program)
            run = [(problem.choices[o.index], strategies[o.index]) for o in made if o.index in strategies]
            if not any(_is_large_product(o) for o in made):
                self.cheap.add(value)
            moved = self.sizes[value] + sum(self.sizes.get(source, 0.0) for source in self.sources[value])
            flops[value] = times * sum(choices.flops / strategy.degree for choices, strategy in run)
            seconds[value] = times * prices.work(flops[value] / times, moved, self.program.values[value].dtype, 1)
            if value in self.stacks and not any(is_product(self.program, o) for o in made):
                rate = times / prices.hardware.memory_bytes_per_second
                self._read[value] = [(s, rate * self.sizes[s]) for s in self.sources[value] if s in self.sizes]
            moved_again = {v for o in made for v in (*o.read, *o.results)}.difference(self.sources[value])
            seconds[value] += sum(sending.get(v, 0.0) for v in moved_again)
        return flops, seconds


def _is_large_product(operation: Operation) -> bool:
    """Whether an operation is a product without batch dimensions, or a convolution."""
    if operation.primitive.name == PRODUCT:
        return not operation.params["dimension_numbers"][1][0]
    return operation.primitive.name in PRODUCTS


def _late_stacks(program: Program) -> dict[int, Stack]:
    """What a scan of the forward part stacks for one of the backward part, and can be made again there."""
    forward, found = early(program), stacks(program)
    return {v: found[v] for v in remakeable(program) if found[v].maker in forward and found[v].reader not in forward}


def _slices(program: Program, stack: Stack) -> tuple[int, ...]:
    """The stacks whose slices one is made of; a carry that is not stacked is its number, negated, less one."""
    others = {one.made: value for value, one in stacks(program).items() if one.reader == stack.reader}
    scan = program.operations[stack.maker]
    constants, carries = scan.params["num_consts"], scan.params["num_carry"]
    entering = program.regions[scan.bodies[0]].inputs[constants : constants + carries]
    _, leaves = chain(program, [stack.made], others.keys() - {stack.made})
    return tuple(others.get(leaf, -1 - leaf) for leaf in leaves if leaf in others or leaf in entering)


def _worth_making_again(schedule: Schedule) -> tuple[int, ...]:
    """The residuals that may be recomputed. What is made of the state alone, such as weights in a narrower type, is
    not where devices share it: it would be gathered again, which layouts decide."""
    program = schedule.program
    if schedule.space.mesh.device_count == 1:
        return residuals(program)
    state = {program.inputs[position] for position in program.ties.values()}
    for index in sorted(early(program)):
        operation = program.operations[index]
        if state.issuperset(operation.read):
            state.update(operation.results)
    return tuple(value for value in residuals(program) if value not in state)


def _sources(program: Program) -> Mapping[int, tuple[int, ...]]:
    """Per value of the forward part, the materialised ones that it is made of."""
    made, found = materialised(program), dict[int, tuple[int, ...]]()
    for index in sorted(early(program)):
        operation = program.operations[index]
        read = dict.fromkeys(
            source
            for value in operation.read
            for source in ((value,) if value in made else found.get(value, ()))
            if value in program.makers
        )
        found |= dict.fromkeys(operation.results, tuple(read))
    return found
