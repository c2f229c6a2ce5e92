"""Products that XLA:GPU merges into one: they run together, once all that they read is there.

Their other operands are put side by side by a kernel before, which computes what is read there alone, element by
element: what nobody else reads then is not in memory while the product runs. Its result is one buffer, which lives
until nothing reads any of its parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from shardplan.memory.accumulation import (
    merged_anywhere,
    merged_in,
    own_position,
    waiting_for_sums,
)
from shardplan.memory.combining import Gather, gather_for, reducing
from shardplan.memory.fusion import readers_in
from shardplan.memory.products import PRODUCT, leaving_products
from shardplan.memory.recomputing import Kernels
from shardplan.memory.sizes import bytes_in, layout_left, left_otherwise
from shardplan.memory.times import BYTES_MOVED, merged_microseconds
from shardplan.memory.unshared import read_behind_sum
from shardplan.memory.workspaces import WORKSPACE_BYTES
from shardplan.once import once
from shardplan.program import Operation, Program
from shardplan.schedule import Schedule
from shardplan.strategy import operand_type

if TYPE_CHECKING:
    from shardplan.memory.graph import Graph
    from shardplan.memory.held import Lifetime
    from shardplan.memory.liveness import Lifetimes

_VIEWS = frozenset({"reshape", "squeeze", "expand_dims", "stop_gradient", "transpose"})

_MATRIX = 2

_SHORT = 4.0
"""Microseconds: what takes columns out of merged products in less runs with what takes out the others, before all that
reads them, and what takes longer just before what reads the part (compiled, of four parts: all together where each
takes 2.5, and only the last two where it takes 5)."""


def merged_lifetimes(lifetimes: Lifetimes, schedule: Schedule) -> dict[int, Lifetime]:
    """The results of products that XLA merges, and what these read as long as it is put side by side alone."""
    found: dict[int, Lifetime] = {}
    leaving = leaving_products(schedule.program)
    for group in _groups(schedule, lifetimes):
        results = [schedule.program.operations[index].results[0] for index in group]
        spans = [_span(lifetimes, result) for result in results]
        last = (
            lifetimes.end
            if leaving.intersection(results)
            else max(_until_taken_out(lifetimes, schedule, results).values())
        )
        whole = spans[0]._replace(start=min(span.start for span in spans), end=last)
        first, until = _run(lifetimes, group)
        if until > first:
            whole = whole._replace(start=first + 1)
            for operand in _others(schedule, group):
                span = found.get(operand, lifetimes.held.get(operand))
                if span is not None and first < span.end <= until and span.start <= first:
                    found[operand] = span._replace(end=first)
        for result, span in zip(results, spans, strict=True):
            found[result] = whole._replace(end=max(last, span.end))
    return found


def taken_out(lifetimes: Lifetimes, schedule: Schedule) -> Iterator[tuple[float, int, int]]:
    """The bytes of parts of merged products that are copied for other products, and from where to where they lie beside
    the merged ones."""
    added_to = {found.onto for found in lifetimes.adding.values()}
    for group in _groups(schedule, lifetimes):
        results = [schedule.program.operations[index].results[0] for index in group]
        until = _until_taken_out(lifetimes, schedule, results)
        last = max(until.values())
        for result in results:
            first = until[result]
            if first < _span(lifetimes, result).end and (first < last or result in added_to):
                yield bytes_in(schedule, result, schedule.assignment.values[result]), first, last


def _until_taken_out(lifetimes: Lifetimes, schedule: Schedule, results: Sequence[int]) -> dict[int, int]:
    """The last place where something reads each of these results from the merged product's: of one that only products
    read, as it is, a kernel makes a copy for the first of them, from which all read. Those that products add themselves
    to are taken out together, for the first of these, where they are rows of the merged one, or that is short: then it
    fills waits, of which there are many."""
    found, together = dict[int, int](), set[int]()
    makers = [schedule.program.makers[result] for result in results]
    rows = own_position(schedule, makers) == 0
    added_to = {one.onto: addition for addition, one in lifetimes.adding.items()}
    for result in results:
        reading, stack = list[int](), [result]
        while stack:
            value = stack.pop()
            for operation in lifetimes.readers.get(value, ()):
                if operation.primitive.name in _VIEWS:
                    stack += operation.results
                    continue
                apart = (operation.index, operation.operands.index(value)) in lifetimes.from_copies
                place = lifetimes.place[operation.index]
                library = place in lifetimes.in_libraries or added_to.get(result) == operation.index
                reading.append(place if library and not apart else -1)
        copied = min(reading, default=-1) >= 0
        found[result] = min(reading) if copied else _span(lifetimes, result).end
        size = bytes_in(schedule, result, schedule.assignment.values[result])
        soon = rows or 2 * size / BYTES_MOVED < _SHORT
        together |= {result} if copied and soon and result in added_to else set()
    return found | dict.fromkeys(together, min((found[result] for result in together), default=0))


def beside_merged(lifetimes: Lifetimes, schedule: Schedule) -> Iterator[tuple[float, int, int]]:
    """What merged products take besides operands and results, in bytes, and from where to where."""
    yield from side_by_side(lifetimes, schedule)
    yield from taken_out(lifetimes, schedule)
    yield from cut_for_reductions(lifetimes, schedule)


def cut_for_reductions(lifetimes: Lifetimes, schedule: Schedule) -> Iterator[tuple[float, int, int]]:
    """The bytes of parts of merged products that are reduced over devices, where a kernel cuts these out: each is in
    memory of its own then, beside the merged one, and what the product has read and worked in is gone."""
    gone = {group[0]: sum(_sizes(schedule, group)) for group in _groups(schedule, lifetimes)}
    left = {operation.index: (result, layout) for operation, result, layout in left_otherwise(schedule)}
    sent = reducing(schedule)
    for group in merged_anywhere(schedule):
        parts = [bytes_in(schedule, *left[index]) for index in group if index in left and index in sent]
        place = max(lifetimes.place[index] for index in group)
        yield max(0.0, sum(parts) - gone.get(group[0], 0.0) - WORKSPACE_BYTES), place, place


def side_by_side(lifetimes: Lifetimes, schedule: Schedule) -> Iterator[tuple[float, int, int]]:
    """The bytes of the operands that are put side by side for merged products, and from where to where they are: the
    same ones once (two weights that each timestep of a recurrent net multiplies by)."""
    found = dict[object, tuple[float, int, int]]()
    for group in _groups(schedule, lifetimes):
        first, until = _run(lifetimes, group)
        if until > first:
            places = [
                lifetimes.put_beside.get((o.index, position), first) for o, position in _positions(schedule, group)
            ]
            key, size = _put_beside(schedule, group), sum(_sizes(schedule, group))
            _, before, after = found.get(key, (size, min(places), until))
            found[key] = size, min(before, *places), max(after, until)
    yield from found.values()


@once
def _groups(schedule: Schedule, lifetimes: Lifetimes) -> list[list[int]]:
    return merged_in(schedule, lifetimes.order, lifetimes.held | lifetimes.carried)


def _span(lifetimes: Lifetimes, result: int) -> Lifetime:
    """When a product's result is in memory; where it is merged with others, a part of these is copied to a carry."""
    return lifetimes.held.get(result) or lifetimes.carried[result]


def _run(lifetimes: Lifetimes, group: Sequence[int]) -> tuple[int, int]:
    """The first and the last place of products that run together; nothing else is made between them but on the way."""
    places = sorted(lifetimes.place[index] for index in group)
    between = (lifetimes.order[place] for place in range(places[0], places[-1] + 1))
    apart = any(o.index not in group and not lifetimes.held.keys().isdisjoint(o.results) for o in between)
    return places[0], places[0] if apart else places[-1]


def _positions(schedule: Schedule, group: Sequence[int]) -> Iterator[tuple[Operation, int]]:
    """The products of a group, each with the position of the operand that they do not share."""
    operations = [schedule.program.operations[index] for index in group]
    own = own_position(schedule, operations)
    yield from ((operation, own) for operation in operations)


def _put_beside(schedule: Schedule, group: Sequence[int]) -> tuple[Gather | int, ...]:
    """What is put side by side for merged products: values in the layouts in which these read them, or what is made for
    one of them, and the sums that they wait for."""
    found, waiting = list[Gather | int](), waiting_for_sums(schedule)
    for operation, position in _positions(schedule, group):
        operand, layout = operation.operands[position], schedule.assignment.strategies[operation.index].operands
        if isinstance(operand, int) and (own := layout[position]) is not None:
            moved = own != schedule.assignment.values.get(operand, own)
            found.append(gather_for(schedule, operation, operand, own) if moved else Gather(operand, own))
            found += [waiting[operation.index]] if operation.index in waiting else []
        else:
            found.append(operation.index)
    return tuple(found)


def _others(schedule: Schedule, group: Sequence[int]) -> list[int]:
    """What merged products read that they do not share; what one of them multiplies by itself they do."""
    positions = list(_positions(schedule, group))
    shared = [operation.operands[1 - position] for operation, position in positions[:1]]
    found = [operation.operands[position] for operation, position in positions]
    return [operand for operand in found if isinstance(operand, int) and operand not in shared]


def _sizes(schedule: Schedule, group: Sequence[int]) -> Iterator[float]:
    for operation, position in _positions(schedule, group):
        operand, layout = (
            operation.operands[position],
            schedule.assignment.strategies[operation.index].operands[position],
        )
        if isinstance(operand, int) and layout is not None:
            yield bytes_in(schedule, operand, layout)


def merge_nodes(graph: Graph) -> None:
    """Lets products that XLA merges be one node of the order, unless one of them then waits for itself."""
    owner = {part: node for node, parts in graph.joined.items() for part in parts}
    groups = [
        [index for index in group if index in graph.needs and index not in owner]
        for group in merged_anywhere(graph.schedule)
    ]
    waiting = [[group for group in groups if len(group) > 1]]
    while waiting:
        some = waiting.pop()
        owner = {index: group[0] for group in some for index in group[1:]}
        needs = graph.joining(owner)
        if len(graph.in_order_of(needs)) == len(needs):
            graph.needs = needs
            graph.take_in(owner)
            for group in some:
                apart, merged = merged_microseconds(
                    graph.schedule, [graph.program.operations[index] for index in group]
                )
                graph.takes[group[0]] += merged - apart
            for index, other in owner.items():
                graph.joined.setdefault(other, []).extend([index, *graph.joined.pop(index, ())])
            parts = {part: node for node, parts in graph.joined.items() for part in parts}
            made = dict[object, int]()
            for group in some:
                _put_side_by_side(graph, group, parts, made)
                _cut_out(graph, group)
        elif len(some) > 1:
            waiting += [some[len(some) // 2 :], some[: len(some) // 2]]


def _put_side_by_side(graph: Graph, group: Sequence[int], owner: Mapping[int, int], made: dict[object, int]) -> None:
    """Adds the kernel to a graph that puts side by side what merged products do not share, which these need instead,
    unless it was ``made`` for others."""
    node, others = group[0], list(_positions(graph.schedule, group))
    shared = [(operation, 1 - position) for operation, position in others]
    needs, values = _needed_for(graph, owner, others)
    kept = _needed_for(graph, owner, shared)
    needs, values = needs & graph.needs[node], values & graph.values[node]
    takes = 2 * sum(_sizes(graph.schedule, group)) / BYTES_MOVED
    key = _put_beside(graph.schedule, group)
    beside = made[key] = made[key] if key in made else graph.add(node - 0.5, needs, values, takes)
    graph.needs[node] = graph.needs[node] - (needs - kept[0]) | {beside}
    graph.values[node] = graph.values[node] - (values - kept[1])
    graph.beside |= {(operation.index, position): beside for operation, position in others}
    graph.side_by_side |= {(operation.index, position) for operation, position in others}


def _cut_out(graph: Graph, group: Sequence[int]) -> None:
    """Adds the kernels to a graph that cut out of merged products what is reduced, which waits for them: one for each
    of these, or for all together that are as large, where XLA turns the whole first."""
    starts = {index: graph.starts[graph.reduced[index]] for index in group if index in graph.reduced}
    for start in starts.values():
        graph.needs[start].discard(group[0])
    turned, together = turned_results(graph.program), dict[float, int]()
    for index, start in starts.items():
        operation, strategy = graph.program.operations[index], graph.schedule.assignment.strategies[index]
        [result] = operation.results
        size = bytes_in(graph.schedule, result, layout_left(graph.schedule.problem, operation, strategy, 0))
        node = together.get(size)
        if node is None:
            node = graph.add(index + 0.2, {group[0]}, {result}, 0.0)
            together |= {size: node} if result in turned else {}
        graph.takes[node] += 2 * size / BYTES_MOVED
        graph.needs[start].add(node)
        graph.values[start].discard(result)


@once
def turned_results(program: Program) -> frozenset[int]:
    """Results of products that are transposed as a matrix: what the second operand keeps comes first then. XLA turns
    those of merged products before it takes out parts; of two matrices it multiplies the second one by the first one
    instead."""
    readers, found = readers_in(program), set[int]()
    for operation in program.operations:
        if operation.primitive.name == PRODUCT:
            (contracted, _), (batch, _) = operation.params["dimension_numbers"]
            [result] = operation.results
            rank = len(program.values[result].shape)
            kept = len(operand_type(program, operation.operands[0]).shape) - len(contracted)
            turned, reading = (*range(kept, rank), *range(kept)), readers.get(result, ())
            matrices = len(contracted) == 1 and rank <= _MATRIX
            alike = reading and all(reader.params.get("permutation") == turned for reader in reading)
            if alike and not matrices and not batch:
                found.add(result)
    return frozenset(found)


def _needed_for(
    graph: Graph, owner: Mapping[int, int], some: Iterable[tuple[Operation, int]]
) -> tuple[set[int], set[int]]:
    """The nodes and the values that operands of operations need, also where one is read behind a sum."""
    needs, values, waiting = set[int](), set[int](), waiting_for_sums(graph.schedule)
    for operation, position in some:
        operand, layout = operation.operands[position], graph.schedule.assignment.strategies[operation.index].operands
        if isinstance(operand, int) and (own := layout[position]) is not None:
            brought = (Gather(operand, own), Gather(operand, own, operation.index))
            needs |= {graph.gathers[gather] for gather in brought if gather in graph.gathers}
            values |= graph.sources(operand)
        if operation.index in waiting and position == read_behind_sum(graph.program, operation):
            values |= graph.sources(waiting[operation.index])
    makers = {maker for value in values if (maker := graph.maker(value)) is not None}
    needs |= {owner.get(maker, maker) for maker in makers} | {graph.reduced[m] for m in makers & graph.reduced.keys()}
    return needs, values


def wait_for_slices(graph: Graph, kernels: Kernels) -> None:
    """Lets a product that is added to one of merged products wait for the kernel that takes this one out of them:
    it is one with the first kernel as large that reads another one, such as a sum of many, where that can be."""
    owner = {part: node for node, parts in graph.joined.items() for part in parts}
    operations = graph.program.operations
    added = {found.onto: index for index, found in kernels.adding.items() if index in graph.needs}
    reading: dict[int, list[int]] = {}
    for node in sorted(graph.reads.keys() & kernels.fused):
        for value in graph.reads[node]:
            reading.setdefault(value, []).append(node)
    for group in merged_anywhere(graph.schedule):
        results = [operations[index].results[0] for index in group]
        nodes = sorted({node for result in results for node in reading.get(result, ())})
        for index in (added[result] for result in results if result in added):
            elements = graph.elements(operations[index])
            alike = (owner.get(node, node) for node in nodes if graph.elements(operations[node]) == elements)
            first = next(alike, None)
            if first is not None and not needs_any(graph.needs, first, index):
                graph.needs[index].add(first)


def needs_any(needs: Mapping[int, set[int]], node: int, wanted: int) -> bool:
    """Whether a node needs another one, directly or not."""
    seen = {*needs[node]}
    stack = [*seen]
    while stack:
        other = stack.pop()
        if other == wanted:
            return True
        found = needs[other] - seen
        seen |= found
        stack += found
    return False
