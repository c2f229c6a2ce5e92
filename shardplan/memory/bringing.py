"""What collectives bring to other layouts: from when to when it is in memory, and what they reduce."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from shardplan import _jax
from shardplan.layout import Layout
from shardplan.memory.combining import PLACING, Gather, Joined, gather_for, read_otherwise
from shardplan.memory.fusion import fuses_operands, is_scatter
from shardplan.memory.gathering import combined_gathers, waits_for
from shardplan.memory.outputs import most_leaving
from shardplan.memory.pipelining import gathered_before, peeled_loops
from shardplan.memory.reductions import combined_reductions
from shardplan.memory.repeated import generated_alike
from shardplan.memory.sharing import read_in_kernel
from shardplan.memory.sizes import bytes_in
from shardplan.memory.slicing import is_sliced
from shardplan.once import once
from shardplan.program import Constant, Operation
from shardplan.schedule import Schedule

if TYPE_CHECKING:
    from shardplan.memory.graph import Graph
    from shardplan.memory.liveness import Lifetimes


@dataclass(frozen=True, slots=True)
class Sending:
    """When collectives run that others run beside: per value that is brought to another layout, the operation before
    which that ``begins``, and per operation whose results are, the one behind which that ``ends``; per one of ``parts``
    that are cut out for that, the operations before which it is cut out, and sent, and the one behind which it is gone.
    And per scatter into zeros of which a kernel makes nothing else, the operation before which it is ``filling``
    these; per stack of a loop, the one before which it is ``begun``; per sum that a product writes into a copy, the one
    before which that is made (``copied``); per operand that merged products do not share, as an operation and a
    position, the one before which these are put ``beside`` each other; and per operand that a convolution reads from a
    copy, the one before which, or in which, it is made. ``side_by_side`` are those of merged products: the kernel that
    puts them there is the one that turns them. Regions that are ``still`` have no collectives. ``together``: the
    operations of each kernel with several results, where these kernels are known; and what those read that are
    ``joined`` before collectives are. ``leaving``, per region: the bytes of gathers' results of which copies leave, at
    most."""

    begins: dict[Gather, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    parts: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    filling: dict[int, int] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)
    copied: dict[int, int] = field(default_factory=dict)
    leaving: dict[int, float] = field(default_factory=dict)
    beside: dict[tuple[int, int], int] = field(default_factory=dict)
    side_by_side: set[tuple[int, int]] = field(default_factory=set)
    still: set[int] = field(default_factory=set)
    together: list[tuple[int, ...]] | None = None
    joined: tuple[Joined, ...] | None = None

    def add(self, graph: Graph, placed: Sequence[int], inside: Mapping[int, Sequence[int]]) -> None:
        """Adds when collectives of a graph, of which all nodes are placed, run beside kernels, and kernels that end no
        operation. What a gather brings is there from where that begins to its reader, however many others begin and end
        between: several wait for one another. ``inside``: per operation, those in its bodies, in their order."""
        ran: list[int] = []
        after: dict[int, int] = {}  # per node, how many kernels run before it
        read: set[int] = set()  # ends of collectives
        for node in placed:
            after[node] = len(ran)
            read.update(graph.needs[node] if graph.runs(node) else ())
            if node < len(graph.program.operations):
                ran.append(node)
        before = [inside[index][0] if inside[index] else index for index in ran]  # a loop begins with the first inside
        begun = {gather: after[graph.starts[end]] for gather, end in graph.gathers.items() if end in read}
        self.begins.update({gather: before[place] for gather, place in begun.items()})
        self.ends.update({index: ran[max(0, after[end] - 1)] for index, end in graph.reduced.items()})
        last = len(ran) - 1
        for value, node in sorted(graph.cut.items(), key=lambda cut: after[graph.sent[cut[0]]]):
            end = graph.sent[value]
            begin, gone = before[min(last, after[graph.starts[end]])], ran[max(0, after[end] - 1)]
            self.parts[value] = before[min(last, after[node])], begin, gone
            self.ends[graph.makers[value].index] = gone
        self.filling.update({index: before[after[node]] for index, node in graph.filling.items()})
        self.begun.update({stack: before[after[node]] for stack, node in graph.begun.items()})
        self.copied.update({index: before[after[node]] for index, node in graph.copied.items()})
        self.leaving[graph.region] = most_leaving(graph, placed)
        self.side_by_side.update(graph.side_by_side)
        if self.together is not None:
            self.together.extend(graph.several)
        self.beside.update(
            {operand: before[after[node]] if node in graph.further else node for operand, node in graph.beside.items()}
        )


def reduced_at(lifetimes: Lifetimes, schedule: Schedule, sending: Sending) -> dict[int, int]:
    """The places of the order at which partial results are reduced that XLA reduces together, by the operation: none is
    before all are made."""
    groups = [[lifetimes.place[o.index] for o in group] for group in combined_reductions(schedule, sending.joined)]
    return {lifetimes.order[place].index: max(group) for group in groups for place in group}


def brought_spans(
    lifetimes: Lifetimes, schedule: Schedule, together: Mapping[Gather, int]
) -> dict[Gather, tuple[int, int, int]]:
    """What operations have brought to other layouts, and nobody keeps: per copy the first operation that reads it, by
    its index, and from when to when it is in memory. XLA merges equal ones, and keeps the first for the last reader."""
    found: dict[Gather, tuple[int, int, int]] = {}
    otherwise = _needed_otherwise(schedule)
    for operation in lifetimes.order:
        if operation.index not in otherwise:
            continue
        for value, layout, first, last in brought_for(lifetimes, schedule, operation):
            gather = gather_for(schedule, operation, value, layout)
            known = found.get(gather, (operation.index, first, last))
            found[gather] = known[0], min(known[1], first, together.get(gather, first)), max(known[2], last)
    for gather, kept, until in list(_generated_until(lifetimes, schedule, found)):
        index, first, last = found[kept]
        found[kept] = index, first, max(last, until)
        if kept != gather:
            found.pop(gather, None)
    return found


def _generated_until(
    lifetimes: Lifetimes, schedule: Schedule, brought: Mapping[Gather, tuple[int, int, int]]
) -> Iterator[tuple[Gather, Gather, int]]:
    """What is made from nothing for loops, with what was made before, of equal ones, and is kept for it. Until when
    that is read by others that XLA would else make the same for: those around the loop, and those of iterations that
    run apart there, which read it once."""
    program, generated = schedule.program, schedule.problem.generated
    stored = sorted((g for g in brought if g.value in generated), key=lambda gather: brought[gather][1])
    if not stored:
        return
    alike, makers = generated_alike(program, generated), program.makers
    apart = (program.operations[index] for index in peeled_loops(schedule))
    peeled = {body: loop for loop in apart for body in loop.bodies}
    made: dict[tuple[int, Layout, int], Gather] = {}
    for gather in stored:
        region, equal = makers[gather.value].region, alike.get(gather.value, [gather.value])
        kept = made.setdefault((equal[0], gather.layout, region), gather)
        yield gather, kept, brought[gather][2]
        for value in equal if kept == gather else ():
            loop = peeled.get(makers[value].region)
            if (makers[value].region if loop is None else loop.region) == region:
                for reader in lifetimes.readers.get(value, ()):
                    strategy = schedule.assignment.strategies.get(reader.index)
                    as_stored = strategy and strategy.operands[reader.operands.index(value)] == gather.layout
                    if as_stored and not _is_transposed(lifetimes, makers, generated, reader):
                        first = lifetimes.place[reader.index]  # where what it computes is stored
                        until = computed_until(lifetimes, reader, schedule) if loop is None else first
                        yield gather, gather, until - is_scatter(program, reader)  # whose result takes its memory


def _is_transposed(
    lifetimes: Lifetimes, makers: Mapping[int, Operation], generated: Collection[int], operation: Operation
) -> bool:
    """Whether what an operation computes is transposed on the way to it: XLA transposes the result instead, and what
    is made from nothing is made in the order before."""
    seen, stack = {operation.index}, [operation]
    while stack:
        for operand in stack.pop().operands:
            maker = makers.get(operand) if isinstance(operand, int) and operand not in generated else None
            if maker is None or maker.index in seen or maker.index not in lifetimes.fused:
                continue
            if maker.primitive.name == "transpose":
                return True
            if operand not in lifetimes.held:
                seen.add(maker.index)
                stack.append(maker)
    return False


def gathered_from(lifetimes: Lifetimes, schedule: Schedule, sending: Sending) -> dict[Gather, int]:
    """The places of the order from which on copies are in memory that are so before they are read: what XLA gathers
    together where the first is read, and stacks that loops read."""
    found = gathered_before(lifetimes, schedule)
    for group in combined_gathers(schedule, sending.joined):
        alone = [lifetimes.place[gather.alone] for gather in group if gather.alone is not None]
        read = [lifetimes.reads[gather.value][0] for gather in group if gather.alone is None]
        others = [other for gather in group for other in waits_for(schedule, gather)]
        made = [lifetimes.place[schedule.program.makers[other.value].index] for other in others]
        first = max([min(alone + read), *made])
        found |= {gather: min(first, found.get(gather, first)) for gather in group}
    for gather, index in sending.begins.items():
        found[gather] = min(lifetimes.place[index], found.get(gather, lifetimes.end))
    return found


def brought_for(
    lifetimes: Lifetimes, schedule: Schedule, operation: Operation
) -> Iterator[tuple[int, Layout, int, int]]:
    """Operands in layouts that an operation needs and nobody keeps, and from when to when it needs them."""
    place, values = lifetimes.place[operation.index], schedule.assignment.values
    wanted = [
        (source, schedule.link_layout(link), lifetimes.start(operation))
        for link, source in lifetimes.kept_around(operation)
    ]
    wanted += [(operand, layout, place) for operand, layout in _needed_otherwise(schedule).get(operation.index, ())]
    ends, until = dict[int | Constant, int](), -1
    if operation.primitive is _jax.optimization_barrier:  # what passes it lives on in the same memory
        pairs = zip(operation.operands, operation.results, strict=True)
        ends = {operand: lifetimes.reads[result][1] for operand, result in pairs if result in lifetimes.reads}
    for operand, layout, first in wanted:
        if operand not in values:  # made from nothing, which kernels do on the way
            if operation.bodies:
                yield operand, layout, first, place
            continue
        kept = operation.index not in lifetimes.updating or place <= lifetimes.copied[operand][1]
        copied = layout == schedule.copy(operand) and kept  # also where what a product reads was copied before
        if layout != values[operand] and not copied:
            if operand not in ends and until < 0:
                until = brought_until(lifetimes, operation, schedule)
            last = ends.get(operand, until)
            beside = lifetimes.put_beside.get((operation.index, operation.operands.index(operand)), last)
            yield operand, layout, min(first, beside), min(last, beside)


def brought_until(lifetimes: Lifetimes, operation: Operation, schedule: Schedule | None = None) -> int:
    """The last place at which what an operation brings to another layout is in memory: where it is computed at last,
    see `computed_until`; what only says where its operand is has its result there, in the same memory."""
    placing = operation.primitive.name in PLACING and not lifetimes.held.keys().isdisjoint(operation.results)
    return computed_until(lifetimes, operation, schedule) - placing


@once
def _needed_otherwise(schedule: Schedule) -> dict[int, list[tuple[int, Layout]]]:
    """Per operation that needs something in another layout than it is stored in, or may do so where its bodies read
    it, by index, its operands that it needs so, with these layouts. What it computes on the way, and of which it reads
    but a part of what a device has, it does not; nor what is made from nothing."""
    found: dict[int, list[tuple[int, Layout]]] = {o.index: [] for o in schedule.program.operations if o.bodies}
    moving = found.keys() | read_otherwise(schedule).keys()
    for index, strategy in schedule.assignment.strategies.items():
        if index not in moving:
            continue
        operation = schedule.program.operations[index]
        for position, (operand, layout) in enumerate(zip(operation.operands, strategy.operands, strict=True)):
            if not isinstance(operand, int) or layout is None:
                continue
            stored = schedule.assignment.values.get(operand)
            if stored is None:
                needed = bool(operation.bodies)
            elif layout == stored:
                needed = False
            else:
                needed = not (is_sliced(stored, layout) and fuses_operands(schedule.problem, operation, position))
            if needed:
                found.setdefault(index, []).append((operand, layout))
    return found


def computed_in_parts(lifetimes: Lifetimes, schedule: Schedule) -> tuple[dict[int, int], dict[int, int]]:
    """What kernels compute that a library reads a part of: with the last place that needs the whole (-1: none does),
    and what the parts are computed from, with the last place of these. XLA computes a part from what the whole is
    computed from, if libraries made that, and it is in memory as long as something needs the whole, unless that is
    more."""
    whole, until, program = dict[int, int](), dict[int, int](), schedule.program
    leaving = {output for region in program.regions for output in region.outputs if isinstance(output, int)}
    for value, lifetime in lifetimes.held.items():
        maker = program.makers.get(value)
        if maker is None or maker.index not in lifetimes.fused or value in lifetimes.stored or value in leaving:
            continue
        last = _last_as_whole(lifetimes, schedule, value, maker)
        if last is None or last >= lifetime.end:
            continue
        read = read_in_kernel(schedule.problem, lifetimes.fused, lifetimes.held, maker)
        made = (program.makers[source] for source in read if source in program.makers and source in lifetimes.held)
        if any(one.index in lifetimes.fused for one in made):  # of what a kernel stores, XLA takes a part as it is
            continue
        if any(_held_until(lifetimes, schedule, source) < last for source in read):
            continue
        late = [source for source in read if _held_until(lifetimes, schedule, source) < lifetime.end]
        if sum(bytes_in(schedule, source, schedule.copy(source)) for source in late) <= bytes_in(
            schedule, value, schedule.assignment.values[value]
        ):
            whole[value] = last
            until |= {source: max(until.get(source, 0), lifetime.end) for source in late}
    return whole, until


def _held_until(lifetimes: Lifetimes, schedule: Schedule, value: int) -> float:
    """The last place at which a value, or an argument's copy, is in memory; of what never is, none that ends."""
    if value in schedule.assignment.copies and schedule.copy(value) != schedule.assignment.values[value]:
        return lifetimes.copied[value][1]
    return lifetimes.held[value].end if value in lifetimes.held else inf


def _last_as_whole(lifetimes: Lifetimes, schedule: Schedule, value: int, maker: Operation) -> int | None:
    """The last place at which all that a device has of a value is needed in memory: -1 where nothing needs it; None
    where nothing in particular reads but a part of it from memory, or something reads what a device does not have."""
    stored, wholes, on_the_way, parts = schedule.assignment.values[value], [-1], list[Operation](), False
    if schedule.copy(value) != stored:
        return None
    for reader in lifetimes.readers.get(value, ()):
        strategy = schedule.assignment.strategies.get(reader.index)
        if strategy is None or reader.region != maker.region:
            return None
        added = lifetimes.adding.get(reader.index)
        for position, layout in enumerate(strategy.operands):
            if reader.operands[position] != value or layout is None:
                continue
            if layout != stored and not is_sliced(stored, layout):
                return None
            if fuses_operands(schedule.problem, reader, position) and (added is None or added.onto != value):
                on_the_way.append(reader)
            elif layout == stored or schedule.island_dtype(reader):
                wholes.append(lifetimes.place[reader.index])
            else:
                parts = True
    if len(wholes) > 1:
        wholes += [computed_until(lifetimes, reader, schedule) for reader in on_the_way]
    return max(wholes) if parts else None


def computed_until(lifetimes: Lifetimes, operation: Operation, schedule: Schedule | None = None) -> int:
    """The last place at which an operation is computed: on the way, that of the last kernel of which it is part. Where
    a schedule is given, only what reads results as they are made is taken to be."""
    if schedule is None:
        return _last_computed(lifetimes)[operation.index]
    last, seen, stack = lifetimes.place[operation.index], {operation.index}, [operation]
    while stack:
        made = stack.pop()
        if made.index not in lifetimes.fused or not lifetimes.held.keys().isdisjoint(made.results):
            continue
        for result in made.results:
            for reader in lifetimes.readers.get(result, ()):
                if reader.index not in seen and _reads_as_made(schedule, reader, result):
                    last = max(last, lifetimes.place[reader.index])
                    seen.add(reader.index)
                    stack.append(reader)
    return last


@once
def _last_computed(lifetimes: Lifetimes) -> dict[int, int]:
    """Of all operations, whatever layouts they read results in."""
    until: dict[int, int] = {}
    for place in range(len(lifetimes.order) - 1, -1, -1):
        made = lifetimes.order[place]
        on_the_way = made.index in lifetimes.fused and lifetimes.held.keys().isdisjoint(made.results)
        readers = (reader for result in made.results for reader in lifetimes.readers.get(result, ()))
        until[made.index] = max([place, *(until[reader.index] for reader in readers)]) if on_the_way else place
    return until


def _reads_as_made(schedule: Schedule, reader: Operation, result: int) -> bool:
    strategy = schedule.assignment.strategies.get(reader.index)
    made = schedule.assignment.values.get(result)
    return strategy is None or strategy.operands[reader.operands.index(result)] == made
