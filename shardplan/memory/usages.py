"""Usages: what `shardplan.memory` counts of a schedule, as usages of the network that a search within a limit solves.

A search adds usages up over variables, and over pairs of them (`shardplan.search.pairs`):

| memory | usage of |
|---|---|
| a held value | its variable; where a copy in another layout takes over, up to the copy's first reader |
| the copy that several readers share | the value and its copy: a copy in the value's own layout takes none |
| what a loop alone reads, while it runs | its variable and the loop's: of what is gathered there is the copy alone |
| an operand that an operation has brought to another layout, a result before it is | the two variables of that table |
| what a library works in, the places that a pooling's gradient looks for | the operation |
| a result, once it is made, and a donated argument until it is read last | the variable of either |
| copies of operands that products read, images spread with zeros, places, sorted keys | the first that reads them |
| the copies of images with rows of neighbours | the convolution |
| what is gathered at the end and then copied | the output and the input that it replaces |

A limit is short of memory at few places of the order. So a search is held to it there alone, and where what it finds
exceeds the limit elsewhere, that place is added: everything that is not alive at one of them has no usage, and is
eliminated as without a limit. What is never counted (reshards that XLA merges and keeps), and what other places need,
can only raise the peak: a bound of the network's cost, or of its peak, is one of the schedules'. Which products XLA
merges depends on their sizes, and what it reduces or gathers together depends on what is sent: those that it merges,
reduces or gathers together in the schedule found before are taken as such. What a kernel brings to another layout,
which that schedule does not, is taken to be there until the last kernel that may compute it on the way: less where one
reads it otherwise, so that bounds within a limit are those of this count.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from shardplan.control import layouts_read
from shardplan.groups import RAGGED
from shardplan.layout import Layout
from shardplan.memory.besides import stored_beside
from shardplan.memory.bringing import Sending, brought_spans, brought_until, gathered_from, reduced_at
from shardplan.memory.brought import Brought, brought_by, own_variable
from shardplan.memory.convolutions import CONVOLUTION, POOLING_GRADIENT, neighbour_bytes
from shardplan.memory.copies import exponentials_in_parts
from shardplan.memory.exchanging import any_within, sent_beside
from shardplan.memory.fusion import pointwise_operations
from shardplan.memory.gathering import gathered_at_the_end, held_whole
from shardplan.memory.held import Lifetime
from shardplan.memory.liveness import Lifetimes
from shardplan.memory.masking import masked_bytes, masked_positions
from shardplan.memory.merging import merged_lifetimes
from shardplan.memory.narrower import narrower_copies
from shardplan.memory.pipelining import held_twice
from shardplan.memory.poolings import IMAGE, times_padded, zeros_of_poolings
from shardplan.memory.rows import weighted_rows
from shardplan.memory.sizes import bytes_in
from shardplan.memory.workspaces import WORKSPACE_BYTES, window_bytes
from shardplan.once import once
from shardplan.problem import Problem
from shardplan.program import Operation
from shardplan.schedule import Schedule
from shardplan.search import Network, PairUsage, Part, Usage, with_pairs

Array = NDArray[np.float64]

_NEGLIGIBLE = 1e-6
"""The smallest values, which together have this share of the limit, are not counted: most of a program's values."""


class Usages:
    """The usages of one order of operations, as `memory_held` counts them."""

    def __init__(
        self,
        lifetimes: Lifetimes,
        problem: Problem,
        donated: frozenset[int],
        excess: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        """``excess``: per operation, by index, bytes in use while it runs besides what is counted."""
        self.lifetimes, self.problem, self.donated = lifetimes, problem, donated
        self._excess = {lifetimes.place[index]: size for index, size in excess.items()}
        self.program = problem.program
        outputs = [(number, o) for number, o in enumerate(self.program.outputs) if isinstance(o, int)]
        self._lifetimes = lifetimes.held
        self._reduced: dict[int, int] = {}
        self._begun: dict[int, int] = {}
        self._twice: dict[int, tuple[int, int]] = {}
        self._turned: dict[int, int] = {}
        self._last = frozenset[tuple[int, int]]()
        self._spans: dict[tuple[int, int], Lifetime] = {}
        self._inputs = lifetimes.arguments
        self._leaving = {output for number, output in outputs if number not in self.program.ties}
        beside = frozenset(lifetimes.beside) if donated else frozenset[int]()
        self._replaced = {output for number, output in outputs if number in self.program.ties} - beside

    def network(
        self, limit: float, places: Collection[int], beyond: Mapping[int, float] | None = None, part: Part | None = None
    ) -> Network:
        """The problem's network, or a part of it, held to a limit at some places of the order alone.

        Its variables come first, then those of pairs. Times of the network are positions among ``places``, ascending.
        ``beyond``: bytes that are in use at some of these places besides, whatever is chosen.
        """
        moments, part = sorted(places), part or Part(self.problem.network)

        def within(start: int, end: int) -> tuple[int, int]:  # a span as positions among the moments
            return bisect_left(moments, start), bisect_left(moments, end)

        counted = self._counted_values(limit)
        used = [*self._held_values(counted), *self._working(moments), *self._product_copies(), *self._generated()]
        pairs = [
            *self._of_copies(counted, moments),
            *self._reordered(),
            *self._brought(moments),
            *self._leaving_copies(),
        ]
        network = with_pairs(
            part.network,
            [
                replace(part.pair(pair), start=span[0], end=span[1])
                for pair, span in ((pair, within(pair.start, pair.end)) for pair in pairs)
                if span[0] < span[1]
            ],
        )
        network.usage_limit = limit
        for usage in used:
            start, end = within(usage.start, usage.end)
            if start < end:
                network.add_usage(usage.variable, part.amounts(usage.variable, usage.amounts), start, end)
        working = network.add_variable([0.0], name="libraries")
        for moment, place in enumerate(moments):
            always = WORKSPACE_BYTES if place in self.lifetimes.in_libraries else 0.0
            always += (beyond or {}).get(place, 0.0) + self._excess.get(place, 0.0)
            if always:
                network.add_usage(working, [always], moment, moment + 1)
        return network

    def follow(self, schedule: Schedule) -> bool:
        """Lets results of products that XLA merges, partial results that it reduces together and what is brought to
        other layouts live as long as with this schedule; True where that is another."""
        before = self._lifetimes, self._reduced, self._begun, {**self._twice}, {**self._turned}, self._spans, self._last
        self._lifetimes = self.lifetimes.held | merged_lifetimes(self.lifetimes, schedule)
        self._reduced = reduced_at(self.lifetimes, schedule, Sending())
        together = gathered_from(self.lifetimes, schedule, Sending())
        self._begun = {gather.value: place for gather, place in together.items() if gather.alone is None}
        spans = brought_spans(self.lifetimes, schedule, together).items()
        self._spans = {(gather.value, index): Lifetime(*span) for gather, (index, *span) in spans if span[0] < span[1]}
        held, values = held_twice(self.lifetimes, schedule), schedule.assignment.values
        twice = {gather.value: span for gather, span in held.items() if gather.layout != values[gather.value]}
        self._turned |= {gather.value: place for gather, (place, _) in held.items() if gather.value not in twice}
        alone = {span for span in twice.values() if span[0] == span[1]}  # before a loop, one stack is at a time
        self._twice = {value: span for value, span in self._twice.items() if span not in alone} | twice
        self._last |= self._largest_copied(schedule)  # these and others twice stay: else schedules alternate
        after = self._lifetimes, self._reduced, self._begun, self._twice, self._turned, self._spans, self._last
        return before != after

    def follow_besides(self, schedule: Schedule, sending: Sending) -> None:
        """Lets what collectives bring, and what they reduce, live as long as with this schedule too, where that is
        longer, with its collectives under way as they are in its own order."""
        place = self.lifetimes.place
        together = gathered_from(self.lifetimes, schedule, sending)
        for index, last in reduced_at(self.lifetimes, schedule, sending).items():
            self._reduced[index] = max(last, self._reduced.get(index, last))
        for index, before in sending.ends.items():
            self._reduced[index] = max(place[before], self._reduced.get(index, place[before]))
        for gather, first in together.items():
            if gather.alone is None:
                self._begun[gather.value] = min(first, self._begun.get(gather.value, first))
        for gather, (index, first, last) in brought_spans(self.lifetimes, schedule, together).items():
            if first < last:
                known = self._spans.get((gather.value, index), Lifetime(first, last))
                self._spans[gather.value, index] = Lifetime(min(first, known.start), max(last, known.end))

    def _largest_copied(self, schedule: Schedule) -> frozenset[tuple[int, int]]:
        """The output of which the largest result of a gather at the end is copied, and the input that it replaces."""
        sizes = dict[float, tuple[int, int]]()
        for number, copied in gathered_at_the_end(schedule).items():
            output, position = self.program.outputs[number], self.program.ties.get(number)
            if copied and position is not None and isinstance(output, int):
                pair = output, self.program.inputs[position]
                sizes.setdefault(bytes_in(schedule, output, schedule.layout_of_output(number)), pair)
        return frozenset({sizes[max(sizes)]} if sizes else ())

    def _leaving_copies(self) -> Iterator[PairUsage]:
        """What a loop makes of which parts leave, and results of gathers at the end, of outputs of which one was the
        largest: where what is split of them is not the first dimension."""
        yield from held_whole(self.problem, self._lifetimes, self.lifetimes.end)
        for output, state in sorted(self._last):
            gathered, sizes = self._gathered_behind(output, self.problem.domain(state).layouts), self._sizes(state)
            ends = self.problem.variables.values[output], self.problem.variables.values[state]
            yield PairUsage(*ends, np.where(gathered, sizes[None, :], 0.0), self.lifetimes.end, self.lifetimes.end + 1)

    def _counted_values(self, limit: float) -> frozenset[int]:
        """All values but the smallest."""
        total, found = 0.0, set()
        for value in sorted(self.program.values, key=lambda value: value.total_bytes):
            total += value.total_bytes
            if total > _NEGLIGIBLE * limit:
                found.add(value.index)
        return frozenset(found)

    def _held_values(self, counted: frozenset[int]) -> Iterator[Usage]:
        """Values in their own layouts."""
        program = self.program
        results = {program.inputs[p]: (program.outputs[n], p in self.donated) for n, p in program.ties.items()}
        for index in sorted(counted):
            variable, _ = self.problem.variables_of(index)
            lifetime = self._held(index)
            if variable is not None and lifetime is not None:
                # of what is sent narrow no more than that, though it may be read as it is stored, too
                amounts = narrower_copies(self.problem).get(index, 1.0) * self._sizes(index)
                result, replaced = results.get(index, (None, False))
                until = self._taken_over(index, lifetime) + 1
                made = self._lifetimes.get(result) if isinstance(result, int) else None
                if made is not None and result not in self._inputs:
                    until = min(until, self.lifetimes.unread_from(index)) if replaced else until
                    first = max(made.start, until) if replaced else made.start
                    yield Usage(variable, amounts, first, self.lifetimes.end + 1)
                yield Usage(variable, amounts, lifetime.start, until)
                if index in self._turned:
                    yield Usage(variable, amounts, self._turned[index], self._turned[index] + 1)

    def _held(self, value: int) -> Lifetime | None:
        """When a value is in memory; None where it is not, or lies in the memory of an argument."""
        if value in self._replaced:
            return None
        lifetime = self._lifetimes.get(value)
        return Lifetime(lifetime.start, self.lifetimes.end) if value in self._leaving and lifetime else lifetime

    def _taken_over(self, value: int, lifetime: Lifetime) -> int:
        """Until when a value is in memory whatever the layout of its copy is."""
        _, copy = self.problem.variables_of(value)
        if value in self._leaving or value in self._inputs:
            return lifetime.end
        if copy is not None:
            return min(lifetime.end, max(lifetime.start, self.lifetimes.reads[value][0]))
        return min(lifetime.end, max(lifetime.start, self.lifetimes.handed.get(value, (None, lifetime.end))[1]))

    def _of_copies(self, counted: frozenset[int], moments: Sequence[int]) -> Iterator[PairUsage]:
        """Copies that several readers share, at these moments."""
        for value in sorted(counted):
            variable, copy = self.problem.variables_of(value)
            if variable is None or copy is None or value not in self.lifetimes.reads:
                continue
            sizes, narrow = self._sizes(value), narrower_copies(self.problem).get(value, 1.0)
            equal = np.eye(len(sizes), dtype=bool)
            first, last = self.lifetimes.copied[value]
            reader, first = self.lifetimes.order[first], min(first, self._begun.get(value, first))
            layouts = self.problem.domain(value).layouts
            brought = Brought(value, variable, copy, layouts, layouts)
            if span := self._twice.get(value):
                yield self._left_by_a_gather(brought, Lifetime(min(first, span[0]), span[1]))
            if value in self._inputs and any_within(moments, first, last):
                yield from sent_beside(self.lifetimes, self.problem, brought, reader, first, moments)
            if any_within(moments, first, last):
                yield PairUsage(variable, copy, np.where(equal, 0.0, narrow * sizes), first, last + 1)
            lifetime = self._held(value)
            if lifetime is not None:
                behind = self._taken_over(value, lifetime) + 1
                if any_within(moments, behind, lifetime.end):
                    yield PairUsage(variable, copy, np.where(equal, narrow * sizes, 0.0), behind, lifetime.end + 1)

    def _reordered(self) -> Iterator[PairUsage]:
        """Transposed copies of arguments that convolutions read as they are stored."""
        problem, lifetimes = self.problem, self.lifetimes
        for value, (reader, position) in lifetimes.reordered.items():
            source, own = problem.variables.values.get(value), own_variable(self.problem, reader)
            if source is not None and own is not None:
                layouts = tuple([strategy.operands[position] for strategy in problem.choices[reader.index].strategies])
                _, wanted = Brought(value, source, own, (), layouts).places(problem)
                sizes = self._sizes(value)
                equal = np.arange(len(sizes))[:, None] == wanted[None, :]
                last = lifetimes.reads[value][1]
                yield PairUsage(source, own, sizes[:, None] * equal, lifetimes.place[reader.index], last + 1)

    def _generated(self) -> Iterator[Usage]:
        """What the program makes from nothing, while loops read it."""
        for place, operation in enumerate(self.lifetimes.order):
            for link, value in self.lifetimes.kept_around(operation) if operation.bodies else ():
                if value in self.problem.generated and self.program.values[value].total_bytes:
                    slices = self.program.values[value].total_bytes / self.program.values[link.target].total_bytes
                    start, variable = self.lifetimes.start(operation), self.problem.variables.values[link.target]
                    until = self._spans.get((value, operation.index), Lifetime(start, place)).end
                    yield Usage(variable, slices * self._sizes(link.target), start, until + 1)

    def _brought(self, moments: Sequence[int]) -> Iterator[PairUsage]:
        """Operands and results on their way, at these moments."""
        problem, variables, lifetimes = self.problem, self.problem.variables, self.lifetimes
        longer = {index for _, index in self._spans}
        spans: dict[int, list[Lifetime]] = {}
        for (value, _), span in self._spans.items():
            spans.setdefault(value, []).append(span)
        for place, operation in enumerate(lifetimes.order):
            for link, value in lifetimes.kept_around(operation) if operation.bodies else ():
                if value in variables.values:
                    target = problem.domain(link.target)
                    wanted = layouts_read(link, target.layouts, len(self.program.values[link.target].shape))
                    start = lifetimes.start(operation)
                    first = min(start, self._begun.get(value, start))
                    ends = variables.read(value), variables.values[link.target]
                    brought = Brought(value, *ends, problem.domain(value).layouts, wanted)
                    amounts = brought.amounts(problem)
                    yield PairUsage(*ends, amounts, first, place + 1)
                    stored = self._held(value)
                    if value in lifetimes.handed and stored is not None:
                        amounts, behind = brought.remaining(problem), max(start, stored.start + 1)
                        yield PairUsage(*ends, amounts, behind, stored.end + 1)
                    if value in self._twice and self._twice[value][1] < start:
                        yield self._left_by_a_gather(brought, Lifetime(*self._twice[value]))
        for place, index, until, *alike in _moving(lifetimes, problem):
            last = self._reduced.get(index, place)
            counts = index in longer or any_within(moments, place, max(last, until))
            for brought, amounts in brought_by(problem, index, *alike) if counts else ():
                own = self._spans.get((brought.value, index))
                if brought.result:
                    during = Lifetime(place, last)
                elif own is not None:
                    during = own
                elif not any(s.start <= place <= s.end for s in spans.get(brought.value, ())):
                    during = Lifetime(place, until)
                else:  # it is there
                    continue
                if any_within(moments, *during):
                    yield PairUsage(brought.source, brought.target, amounts, during.start, during.end + 1)
                if not brought.result:
                    reader = lifetimes.order[place]
                    yield from sent_beside(lifetimes, problem, brought, reader, during.start, moments)

    def _left_by_a_gather(self, brought: Brought, during: Lifetime) -> PairUsage:
        """What a gather leaves beside its copy: where it goes over another dimension than the first."""
        behind = self._gathered_behind(brought.value, brought.wanted)
        amounts = np.where(behind, brought.amounts(self.problem), 0.0)
        return PairUsage(brought.source, brought.target, amounts, during.start, during.end + 1)

    def _gathered_behind(self, value: int, wanted: Sequence[Layout | None]) -> NDArray[np.bool_]:
        """bool [layouts of the value, those that are wanted]: whether a gather over another dimension than the first
        brings it there at last."""
        domain, shape = self.problem.domain(value), self.program.values[value].shape
        dims = self.problem.moving(value).gathered_last(domain)
        first = next((dim for dim, size in enumerate(shape) if size > 1), 0)
        places = np.array([-1 if layout is None else domain.position.get(layout, -1) for layout in wanted])
        return (dims[:, places] > first) & (places >= 0)

    def _working(self, moments: Sequence[int]) -> Iterator[Usage]:
        """What operations need while they run, beside operands and results, at these moments."""
        running, beside = {*moments}, self.lifetimes.put_beside
        for place, operation in enumerate(self.lifetimes.order):
            variable, runs = own_variable(self.problem, operation), place in running
            if variable is not None and operation.primitive.name == POOLING_GRADIENT:
                strategies = self.problem.choices[operation.index].strategies
                places, largest = np.array([window_bytes(operation, self.problem, s) for s in strategies]).T
                first = beside.get((operation.index, IMAGE), place)
                yield Usage(variable, places, first, place + 1)
                yield Usage(variable, largest, first, first + 1)
            elif variable is not None and operation.primitive.name == RAGGED:
                strategies = self.problem.choices[operation.index].strategies
                for position in masked_positions(operation):
                    amounts = [masked_bytes(operation, self.problem, strategy, position) for strategy in strategies]
                    first = beside.get((operation.index, position), place)
                    yield Usage(variable, np.array(amounts), first, place + 1)
            elif variable is not None and runs and operation.primitive.name == CONVOLUTION:
                strategies = self.problem.choices[operation.index].strategies
                amounts = [neighbour_bytes(self.problem, operation, strategy) for strategy in strategies]
                if any(amounts):
                    yield Usage(variable, np.array(amounts), place, place + 1)
        for index, (position, _) in weighted_rows(self.program, pointwise_operations(self.problem)).items():
            place = self.lifetimes.place[index]
            yield from self._operand_copy(self.program.operations[index], position, 1.0, (place, place))
        for reader, position, times, first, last in self.lifetimes.spread:
            yield from self._operand_copy(reader, position, times, (first, last))
        for gradient, first, last in zeros_of_poolings(self.lifetimes, self.program):
            yield from self._operand_copy(gradient, IMAGE, times_padded(gradient, self.program), (first, last))
        for stored in stored_beside(self.lifetimes, self.program):
            yield from self._operand_copy(*stored)
        for operation, times in exponentials_in_parts(self.lifetimes, self.problem):
            place = self.lifetimes.place[operation.index]
            yield from self._operand_copy(operation, 0, times, (place, place))

    def _product_copies(self) -> Iterator[Usage]:
        for operand, copy in self.lifetimes.copies.items():
            yield from self._operand_copy(copy.reader, copy.position, operand.padding, (copy.first, copy.last))

    def _operand_copy(self, reader: Operation, position: int, times: float, span: tuple[int, int]) -> Iterator[Usage]:
        """A copy of an operand, so many times as large, in the layout that the first operation reads which needs it."""
        variable, operand = own_variable(self.problem, reader), reader.operands[position]
        if variable is not None and isinstance(operand, int):
            places, sizes = self.problem.domain(operand).position, times * self._sizes(operand)
            layouts = [strategy.operands[position] for strategy in self.problem.choices[reader.index].strategies]
            amounts = [0.0 if layout is None else sizes[places[layout]] for layout in layouts]
            yield Usage(variable, np.array(amounts), span[0], span[1] + 1)

    def _sizes(self, value: int) -> Array:
        """Bytes on one device, per layout."""
        return self.program.values[value].total_bytes / self.problem.domain(value).degrees


@once
def _moving(lifetimes: Lifetimes, problem: Problem) -> list[tuple[int, int, int, bool, bool]]:
    """The operations that may bring something to other layouts: the place, the index, the last place where one may be
    computed on the way, and what else `brought_by` asks for."""
    found = []
    for place, operation in enumerate(lifetimes.order):
        index, generates = operation.index, not operation.results or operation.results[0] in problem.generated
        if index in problem.choices and not generates:
            until = brought_until(lifetimes, operation)
            found.append((place, index, until, index in lifetimes.updating, index in lifetimes.fused))
    return found
