"""Memory: which tensors a device holds, when, and how many bytes that is.

Operations run in the order of `shardplan.memory.order`. What XLA fuses never exists in memory: a value is *held* where
the operation that makes it cannot be fused into its readers (contractions, convolutions, gathers, sorts), where a
reader needs it in memory (an operand of a contraction), and where it enters or leaves the step. The readers of a fused
value read what it is computed from instead, so these live longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from shardplan import _jax
from shardplan.control import Link
from shardplan.layout import Layout
from shardplan.memory.accumulation import with_products_late
from shardplan.memory.beginning import held_before
from shardplan.memory.bringing import Sending, brought_spans, computed_in_parts, gathered_from, reduced_at
from shardplan.memory.combining import Gather
from shardplan.memory.convolutions import reading_copies, reordered_in, spread_copies, spread_until
from shardplan.memory.copies import beside_kernels
from shardplan.memory.copying import product_copies, written_otherwise
from shardplan.memory.exchanging import exchanged_copies
from shardplan.memory.fusion import pointwise_operations, readers_of, updates_of
from shardplan.memory.gathering import held_at_the_end
from shardplan.memory.held import Held, Lifetime
from shardplan.memory.masking import masked_rows
from shardplan.memory.merging import beside_merged, merged_lifetimes
from shardplan.memory.narrower import bytes_brought, sent_narrow
from shardplan.memory.padded import padded_results
from shardplan.memory.pipelining import held_twice
from shardplan.memory.products import copied_operands, is_multiplied
from shardplan.memory.recomputing import Kernels, kernels_of
from shardplan.memory.repeated import repeated_results
from shardplan.memory.results import beside_results, copied_after, unused_results
from shardplan.memory.sharing import UPDATES, overwritten, read_by_element, read_in_kernel
from shardplan.memory.sizes import bytes_in, left_otherwise
from shardplan.memory.slicing import is_sliced, sliced_on_the_way
from shardplan.memory.workspaces import WORKSPACE_BYTES
from shardplan.memory.zeros import filled_before
from shardplan.problem import Problem
from shardplan.program import Operation
from shardplan.schedule import Schedule


class Lifetimes:
    """The lifetimes of a program's held values, whatever the layouts are, in an ``order`` with what runs beside it."""

    def __init__(
        self, problem: Problem, order: Sequence[int], kernels: Kernels | None = None, sending: Sending | None = None
    ) -> None:
        self._problem, program = problem, problem.program
        self.known: dict[object, object] = {}
        kernels, sending = kernels or kernels_of(problem), sending or Sending()
        self.order = [program.operations[index] for index in with_products_late(order, kernels.adding)]
        self.place = {operation.index: place for place, operation in enumerate(self.order)}
        self.put_beside = {key: min(self.place[key[0]], self.place[o]) for key, o in sending.beside.items()}
        self.cut = {value: self.place[before] for value, (before, *_) in sending.parts.items()}
        self.adding, self.turned, self.fused = kernels.adding, kernels.turned, kernels.fused
        self.filled = {index: self.place[before] for index, before in sending.filling.items()}
        self.copied_sums = {index: self.place[before] for index, before in sending.copied.items()}
        self.end, self.stored = len(program.operations), kernels.stored
        outputs = {o for o in program.outputs if isinstance(o, int)}
        self.readers = readers = readers_of(self.order)
        self.in_libraries = {self.place[o.index] for o in self.order if is_multiplied(program, o)}
        reading = reading_copies(program, self.order, kernels.copied)
        self.spread = list(spread_copies(self.order, reading, self.put_beside))
        self._spread = spread_until(self.order, reading)
        reading_copied = kernels.masked, kernels.carried, kernels.reshaped
        pointwise = pointwise_operations(problem)
        self.padded = padded_results(program, pointwise, kernels.reshaped)
        copied = copied_operands(program, pointwise, *reading_copied)
        self.from_copies = {read: copy for read, copy in copied.items() if read not in sending.side_by_side}
        self.copies = product_copies(problem, self.order, self.from_copies, kernels, self.put_beside)
        copying = (self.from_copies, self._spread, self.put_beside, self.turned)
        self._copying = {index for some in copying for index, _ in some}  # operations that read copies
        self.held: dict[int, Lifetime] = {}
        self.carried: dict[int, Lifetime] = {}  # what lies in a carry, with where it is made
        last_read = dict.fromkeys(outputs, self.end)
        self.updating = updates_of(program, kernels.fused)
        leaving = self._leaving_bodies()
        outputs |= leaving.keys()
        last_read |= leaving
        same = repeated_results(program, self.order, kernels.apart)
        last_copy = self._hold_made(kernels, frozenset(outputs) | kernels.stored, same, last_read)
        self._hold_slices(same, last_read)
        self.arguments = frozenset((*program.inputs, *program.captured))
        for index in self.arguments:
            self.held[index] = Lifetime(0, self.end)
        self._overwrite(kernels, sending.together)
        self._share_with_results(last_read)
        # what links alone read (a body's result that is carry and stack) is read where the loop ends
        self.reads: dict[int, tuple[int, int]] = {value: (place, place) for value, place in last_read.items()}
        for value, found in readers.items():
            first = self.start(found[0])
            self.reads[value] = (first, max(last_read.get(value, first), first))  # what is repeated is not read
        self.copied = self.reads | self._read_before_updates(last_copy)
        self.reordered = reordered_in(problem, self.order, kernels.copied)
        beside = self._made_beside_arguments(kernels.carried) | kernels.leaving
        self.beside = copied_after(self, program, beside, sending)
        self.handed = dict(self._handed_over())

    def _hold_made(
        self, kernels: Kernels, stored: frozenset[int], same: Mapping[int, int], last_read: dict[int, int]
    ) -> dict[int, int]:
        """Holds what operations make, from the last one back; finds where each value is read last, and gives where
        copies of it are: not by updates of a state."""
        apart, in_memory = self._problem.generated | same.keys() | kernels.views, stored | kernels.read
        last_copy: dict[int, int] = {}
        for operation in reversed(self.order):
            if not same.keys().isdisjoint(operation.results):
                for result in (result for result in operation.results if result in same):
                    last_read[same[result]] = max(last_read.get(same[result], 0), last_read.get(result, 0))
                if same.keys() >= {*operation.results}:
                    continue
            needed = stored if operation.primitive is _jax.optimization_barrier else in_memory
            if operation.index not in self.fused or not needed.isdisjoint(operation.results):
                place, fused = self.place[operation.index], operation.index in self.fused
                for result, start in zip(operation.results, self._starts(operation), strict=True):
                    if (not fused or result in needed) and result not in apart:
                        self.held[result] = Lifetime(start, last_read.get(result, place))
            updates = operation.index in self.updating
            for operand, until in self._needed_until(operation, last_read):
                if last_read.get(operand, -1) < until:
                    last_read[operand] = until
                if not updates and last_copy.get(operand, -1) < until:
                    last_copy[operand] = until
        return last_copy

    def _overwrite(self, kernels: Kernels, together: Collection[Sequence[int]] | None) -> None:
        """Gives results the memory of what their kernels read last."""
        spans = {value: (lifetime.start, lifetime.end) for value, lifetime in self.held.items()}
        apart = written_otherwise(self._problem, self.place, self.copies)
        for value, span in overwritten(self._problem, self.order, kernels, spans, together, apart):
            self.held[value] = Lifetime(*span)

    def _handed_over(self) -> Iterator[tuple[int, tuple[Link, int]]]:
        """What one loop alone reads, through one link, with that and the last place before the loop: in the layout in
        which it was made it is there no longer than that, if it is gathered for the loop."""
        for operation in self.order:
            found = [*self.kept_around(operation)] if operation.bodies else []
            sources = Counter(source for _, source in found)
            for link, source in found:
                only = sources[source] == 1 == len(self.readers[source]) and source not in self._problem.program.outputs
                if only and self.held.get(source, Lifetime(0, 0)).end == self.place[operation.index]:
                    yield source, (link, self.start(operation) - 1)

    def _leaving_bodies(self) -> dict[int, int]:
        """What leaves a body, with the place of its loop or branch, where it is read."""
        leaving, regions = dict[int, int](), self._problem.program.regions
        for operation in self.order:
            outputs = (output for body in operation.bodies for output in regions[body].outputs)
            leaving |= {output: self.place[operation.index] for output in outputs if isinstance(output, int)}
        return leaving

    def _hold_slices(self, same: Mapping[int, int], last_read: dict[int, int]) -> None:
        """Slices of stacks are held from their first reader on; other operands of bodies are outer ones, or carries."""
        for link in (link for links in self._problem.links.values() for link in links.enter if link.stacked):
            if link.target in self.readers and link.target in last_read:  # what only repeated operations read is not
                first, sliced = self.place[self.readers[link.target][0].index], same.get(link.target, link.target)
                before = self.held.get(sliced, Lifetime(first, 0))
                last_read[sliced] = max(last_read[link.target], before.end)
                self.held[sliced] = Lifetime(min(first, before.start), last_read[sliced])

    def _read_before_updates(self, last_read: dict[int, int]) -> dict[int, tuple[int, int]]:
        """When copies of the state in other layouts are read: updates read it in its own layout."""
        program = self._problem.program
        states = {program.inputs[position] for position in program.ties.values()} & self.reads.keys()
        spans = {state: self.reads[state] for state in sorted(states)}
        return {state: (first, max(first, last_read.get(state, last))) for state, (first, last) in spans.items()}

    def _needed_until(self, operation: Operation, last_read: dict[int, int]) -> Iterable[tuple[int, int]]:
        """The operands of an operation, with the last place that reads them, or what is computed from them on the way.

        What passes a barrier is each operand's own memory. A copy of an operand is made for its first reader.
        """
        cut = operation.primitive.name == "split"
        if operation.index in self._copying or operation.bodies or cut or len(operation.results) > 1:
            return self._needed_for_copies(operation, last_read)
        until = self.place[operation.index]
        for result in operation.results:
            until = until if result in self.held else max(until, last_read.get(result, 0))
        return [(operand, until) for operand in operation.operands if isinstance(operand, int)]

    def _needed_for_copies(self, operation: Operation, last_read: dict[int, int]) -> Iterator[tuple[int, int]]:
        place = self.place[operation.index]
        cut = operation.primitive.name == "split"
        results = () if operation.bodies else operation.results  # a loop computes none on the way
        ends = [self.held[r].start * cut if r in self.held else last_read.get(r, place) for r in results]
        passed = operation.primitive is _jax.optimization_barrier
        initial = self._becoming_carries(operation)
        for position, operand in enumerate(operation.operands):
            if isinstance(operand, int):
                copy = self.from_copies.get((operation.index, position))
                if copy is not None:  # perhaps one that another reader's kernel has written
                    first = self._until_copied(operand, self.copies[copy].first)
                else:
                    first = self._spread.get((operation.index, position), place)
                    first = self.put_beside.get((operation.index, position), first)
                if operand in initial:  # from the loop's start on, its memory is the carry's
                    yield operand, max(0, self.start(operation) - 1)
                else:
                    until = max(first, ends[position] if passed else max(ends, default=0))
                    yield from ((read, until) for read in self.turned.get((operation.index, position), (operand,)))

    def _until_copied(self, operand: int, first: int) -> int:
        """The last place where a value is in memory that is copied at place ``first``: before the product there runs,
        which is what takes more where its result is at least as large."""
        values = self._problem.program.values
        result = self.order[first].results[0]
        return first - (first in self.in_libraries and values[operand].total_bytes <= values[result].total_bytes)

    def _becoming_carries(self, operation: Operation) -> frozenset[int]:
        """The values that enter a loop as carries alone."""
        links = self._problem.links.get(operation.index)
        if links is None:
            return frozenset()
        carried = {link.target for link in links.inside}
        entering = [(link.source, link.target in carried) for link in links.enter]
        others = {source for source, becomes in entering if isinstance(source, int) and not becomes}
        return frozenset(source for source, becomes in entering if isinstance(source, int) and becomes) - others

    def _share_with_results(self, last_read: dict[int, int]) -> None:
        """Lets what leaves a branch lie in the memory of the branch's result, and what goes round a loop in that of
        the carry, which is the loop's result: there once nothing reads the carry of the iteration before."""
        problem, makers = self._problem, self._problem.program.makers
        for operation in self.order:
            for link in problem.links[operation.index].inside if operation.bodies else ():
                source = link.source if isinstance(link.source, int) else -1
                maker = makers.get(source)
                if maker is None or maker.region not in operation.bodies or link.stacked:
                    continue
                added = self.adding.get(maker.index)
                in_place = maker.primitive.name in UPDATES or (added is not None and added.onto == link.target)
                if maker.index in self.fused and not in_place:  # kernels that read neighbours cannot overwrite these
                    in_place = link.target in read_by_element(problem, self.fused, self.held, maker)
                read = last_read.get(link.target, -1) if link.target not in operation.results else -1
                if read < self.place[maker.index] + in_place:
                    own = self.held.pop(source, None)
                    if own is not None:
                        self.carried[source] = Lifetime(own.start, own.start)
                    product = self._transposed_product(maker)
                    if product is not None and read < self.place[product.index]:
                        self.held.pop(product.results[0], None)

    def _transposed_product(self, operation: Operation) -> Operation | None:
        """The product of which an operation is the transposition, if nothing else reads it: it writes that itself."""
        operand = next((o for o in operation.operands if isinstance(o, int)), -1)
        maker = self._problem.program.makers.get(operand)
        if operation.primitive.name != "transpose" or maker is None or len(self.readers[operand]) > 1:
            return None
        return maker if is_multiplied(self._problem.program, maker) else None

    def _made_beside_arguments(self, carried: Collection[int]) -> frozenset[int]:
        """Results that cannot lie in the memory of the arguments tied to them: those of loops that read these, and not
        as carries (the caches of all layers, which a scan reads and stacks), or where what comes later does, or turned;
        those of kernels that read these at other places than they write (a cache put in the order of the beams)."""
        program, found = self._problem.program, set[int]()
        for number, position in program.ties.items():
            output, state = program.outputs[number], program.inputs[position]
            maker = program.makers.get(output) if isinstance(output, int) else None
            if maker is None or not isinstance(output, int):
                continue
            if maker.bodies:  # what becomes a carry is read where the loop starts
                turned = self._problem.links[maker.index].same.get(output) in carried
                beside = turned or self.reads.get(state, (0, -1))[1] > self.start(maker)
            else:
                read = read_in_kernel(self._problem, self.fused, self.held, maker)
                beside = maker.index in self.fused and not read.get(state, True)
            found.update({output} if beside else ())
        return frozenset(found)

    def unread_from(self, value: int) -> int:
        """The first place from which on nothing reads a value."""
        return self.reads[value][1] + 1 if value in self.reads else 0

    def kept_around(self, operation: Operation) -> Iterator[tuple[Link, int]]:
        """The links through which a loop or a branch reads values, without carries (which are its results), each with
        the value that it reads: one that the program makes from nothing is stored for them too."""
        links = self._problem.links.get(operation.index)
        if links is not None:
            carried = {link.target for link in links.inside}
            for link in links.enter:
                if isinstance(source := link.source, int) and link.target in self.reads and link.target not in carried:
                    yield link, source

    def _starts(self, operation: Operation) -> list[int]:
        """When each result of an operation takes memory: parts of what is in memory are cut out by kernels for
        the first operation that reads them."""
        first = self.start(operation)
        if operation.primitive.name != "split" or operation.index not in self.fused:
            return [first] * len(operation.results)
        found = []
        for result in operation.results:
            places = [self.place[o.index] for o in self.readers.get(result, ()) if o.region == operation.region]
            found.append(self.cut.get(result, places[0] if places else first))
        return found

    def start(self, operation: Operation) -> int:
        """When the results of an operation take memory: a loop's carries and stacks before its first iteration, a sum
        that a product writes while that runs."""
        regions, added = self._problem.program.regions, self.adding.get(operation.index)
        if added is not None and not added.in_place:
            return min(self.place[added.product], self.copied_sums.get(operation.index, self.end))
        inside = [self.place[index] for body in operation.bodies for index in regions[body].operations]
        return min(inside, default=self.place[operation.index])


def memory_profile(
    lifetimes: Lifetimes, schedule: Schedule, donated: frozenset[int], sending: Sending | None = None
) -> np.ndarray:
    """float [operations + 1]: bytes that one device holds while each operation runs, in their order, and at the end.

    ``donated`` are the positions of the inputs whose memory the outputs tied to them take. Where ``sending`` does not
    say otherwise, collectives begin and end with the operations that need them.
    """
    ends, results = np.zeros(lifetimes.end + 2), [*unused_results(lifetimes, schedule, donated)]
    for held in beside_results(memory_held(lifetimes, schedule, donated, sending), results):
        ends[held.lifetime.start] += held.size
        ends[held.lifetime.end + 1] -= held.size
    return np.cumsum(ends)[:-1]


def memory_held(
    lifetimes: Lifetimes, schedule: Schedule, donated: frozenset[int], sending: Sending | None = None
) -> Iterator[Held]:
    """Everything that a device holds at some time, as `memory_profile` adds it up, but for what lies in the memory of
    results until these are made."""
    program, sending, padded = schedule.program, sending or Sending(), lifetimes.padded

    def hold(value: int, layout: Layout, start: int, end: int, copied: bool = False) -> Held:
        size = (bytes_brought if copied else bytes_in)(schedule, value, layout)
        return Held(value, layout, padded.get(value, 1.0) * size, Lifetime(start, end))

    merged, sliced = merged_lifetimes(lifetimes, schedule), sliced_on_the_way(schedule, lifetimes.fused)
    inputs, narrow = lifetimes.arguments, sent_narrow(schedule)
    leaving = {output for output in program.outputs if isinstance(output, int)} - inputs
    whole, until = computed_in_parts(lifetimes, schedule)
    for value, lifetime in (lifetimes.held | merged).items():
        end = min(max(lifetime.end, until.get(value, 0)), whole.get(value, lifetimes.end))
        if value in leaving or end < 0:
            continue
        layout, copy = schedule.assignment.values[value], schedule.copy(value)
        if copy != layout and value not in inputs:
            end = min(end, max(lifetime.start, lifetimes.reads[value][0]))
        elif value in lifetimes.handed and value not in inputs:
            link, before = lifetimes.handed[value]
            gathered = is_sliced(schedule.link_layout(link), layout)
            end = min(end, max(lifetime.start, before)) if gathered else end
        start = lifetimes.place[sending.parts[value][1]] if value in sending.parts else lifetime.start
        if value in sliced and value in lifetimes.reads:  # what is read once more later is stored as a slice
            first = min(end, max(start, lifetimes.reads[value][0]))
            yield hold(value, sliced[value], start, first)
            start = first + 1
        yield hold(value, layout, start, end, copied=value in narrow)
    for number, output in enumerate(program.outputs):
        # the caller's memory for results is there from the start; a donated argument's is the result's
        if isinstance(output, int) and program.ties.get(number) not in donated:
            yield hold(output, schedule.layout_of_output(number), 0, lifetimes.end)
        elif isinstance(output, int) and output in lifetimes.beside:
            layout, first = schedule.assignment.values[output], lifetimes.held[output].start
            yield hold(output, layout, first, lifetimes.beside[output])
    yield from held_at_the_end(lifetimes, schedule, sending.leaving.get(0, 0.0))
    together, exchanged = gathered_from(lifetimes, schedule, sending), list[tuple[Gather, int, int]]()
    for value in schedule.assignment.copies:
        copy = schedule.copy(value)
        if copy != schedule.assignment.values[value]:
            first, last = lifetimes.copied[value]
            reader, first = first, min(first, together.get(Gather(value, copy), first))
            exchanged.append((Gather(value, copy), first, reader))
            yield hold(value, copy, first, max(last, until.get(value, last)), copied=True)
    for gather, (first, last) in held_twice(lifetimes, schedule).items():
        yield hold(gather.value, gather.layout, min(first, together.get(gather, first)), last, copied=True)
    for gather, (index, first, last) in brought_spans(lifetimes, schedule, together).items():
        exchanged.append((gather, first, lifetimes.place[index]))
        yield hold(gather.value, gather.layout, first, last, copied=True)
    yield from (*exchanged_copies(lifetimes, schedule, exchanged), *held_before(lifetimes, schedule, sending.begun))
    yield from (Held(None, (), WORKSPACE_BYTES, Lifetime(place, place)) for place in sorted(lifetimes.in_libraries))
    yield from (*_left(lifetimes, schedule, sliced, sending), *beside_kernels(lifetimes, schedule))
    for size, first, last in (*masked_rows(lifetimes, schedule, donated), *beside_merged(lifetimes, schedule)):
        yield Held(None, (), size, Lifetime(first, last))
    for layout, size, first, last in filled_before(schedule, lifetimes, sending.filling):
        yield Held(None, layout, size, Lifetime(first, last))


def _left(lifetimes: Lifetimes, schedule: Schedule, sliced: Mapping[int, Layout], sending: Sending) -> Iterator[Held]:
    """Results in the layouts that operations leave, from where parts are cut out until they are in those stored."""
    reduced = reduced_at(lifetimes, schedule, sending)
    for operation, result, left in left_otherwise(schedule):
        part = operation.index in lifetimes.fused and is_sliced(left, schedule.assignment.values[result])
        if result not in sliced and not part:  # a kernel that takes part of what it computes computes that part alone
            ends = sending.ends.get(operation.index, operation.index)
            cut, _, gone = sending.parts.get(result, (operation.index, operation.index, ends))
            place = max(lifetimes.place[cut], lifetimes.held.get(result, Lifetime(0, 0)).start)
            last = max(lifetimes.place[gone], reduced.get(operation.index, place), place)
            yield Held(result, left, bytes_in(schedule, result, left), Lifetime(place, last))
