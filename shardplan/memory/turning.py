"""The kernels that copy what convolutions and products read: with zeros, or with dimensions in other places.

They stand in the order by themselves, before the first operation that reads the copy: what is copied need not be in
memory when that runs. Where the copy is much larger (outer products, one gradient of a weight for each example, that
products then weigh and add up), several are in memory at once: each fills a wait, such as that for a collective. What
is computed row by row on the way (a softmax, `shardplan.memory.rows`) fills the shortest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shardplan.layout import Layout
from shardplan.memory.accumulation import merged_anywhere
from shardplan.memory.coalescing import bytes_apart, moves_apart
from shardplan.memory.combining import Gather, gather_for, read_otherwise
from shardplan.memory.convolutions import spread_operands
from shardplan.memory.copying import copying_kernel, written_by
from shardplan.memory.exchanging import lies_apart
from shardplan.memory.fusion import REDUCTIONS, pointwise_operations
from shardplan.memory.lying import lying_of
from shardplan.memory.masking import mask_rows
from shardplan.memory.merging import needs_any
from shardplan.memory.products import ProductOperand, copied_operands, is_multiplied
from shardplan.memory.recomputing import Kernels
from shardplan.memory.sizes import bytes_in
from shardplan.memory.slicing import scattered_behind
from shardplan.memory.times import BYTES_MOVED, UNKNOWN
from shardplan.memory.zeros import kernels_with
from shardplan.once import once
from shardplan.program import Operation
from shardplan.schedule import Schedule

if TYPE_CHECKING:
    from shardplan.memory.graph import Graph


def turn_operands(graph: Graph, kernels: Kernels) -> None:
    """Adds a kernel to a graph for each copy that convolutions read (`shardplan.memory.convolutions`), and products,
    also those of rows in groups (`shardplan.memory.masking`), or of parts that an all-to-all brings: these need that
    instead of what it is made from. A copy for convolutions that is only transposed is written by the kernel that makes
    what is copied, where that computes element by element."""
    spread = _spread(graph.schedule, kernels)
    nodes: dict[tuple[int, float], int] = {}
    adding = {found.product: index for index, found in kernels.adding.items()}
    for index in sorted({index for index, _ in spread}):
        node, operation = adding.get(index, index), graph.program.operations[index]  # which adds a bias, say
        strategy = graph.schedule.assignment.strategies.get(index)
        if node not in graph.reads:
            continue
        copies, needed = set[int](), set[int]()
        for position, operand in enumerate(operation.operands):
            times, layout = spread.get((index, position)), strategy.operands[position] if strategy is not None else None
            if not isinstance(operand, int):
                continue
            if times is None or layout is None:
                needed |= graph.sources(operand)
                continue
            maker = graph.maker(operand)
            if times == 1 and maker in kernels.fused and maker in graph.needs[node]:
                needed |= graph.sources(operand)
                graph.beside[index, position] = maker
                continue
            if (operand, times) not in nodes:
                moved = (1 + times) * bytes_in(graph.schedule, operand, layout)
                nodes[operand, times] = copying_kernel(
                    graph, (node, operation), Gather(operand, layout), moved / BYTES_MOVED
                )
            copies.add(nodes[operand, times])
            graph.beside[index, position] = nodes[operand, times]
        added = graph.program.operations[node].operands if node != index else ()
        needed = needed.union(*(graph.sources(o) for o in added if isinstance(o, int) and o not in operation.results))
        gone = graph.reads[node] - needed
        graph.needs[node] -= {maker for value in gone if (maker := graph.maker(value)) is not None}
        graph.needs[node] |= copies
        graph.values[node] -= gone
    _spread_together(graph, nodes)
    _turn_products(graph, kernels)
    _unpack_exchanged(graph, kernels)
    _turn_sent(graph)
    read_slices(graph, read_otherwise(graph.schedule))
    mask_rows(graph, kernels)


@once
def _spread(schedule: Schedule, kernels: Kernels) -> dict[tuple[int, int], float]:
    """The operands of convolutions that are copied, see `spread_operands`; in all regions, each of which reads it."""
    return spread_operands(schedule.program, schedule.program.operations, kernels.copied)


@once
def _copied_for_products(
    schedule: Schedule, kernels: Kernels
) -> tuple[dict[tuple[int, int], ProductOperand], dict[ProductOperand, Operation | None]]:
    """The operands that products read from copies, but for merged ones, and what writes these; likewise."""
    program, reading = schedule.program, (kernels.masked, kernels.carried, kernels.reshaped)
    operands = copied_operands(program, pointwise_operations(schedule.problem), *reading)
    merged = {index for group in merged_anywhere(schedule) for index in group}
    alone = {place: read for place, read in operands.items() if place[0] not in merged}
    return alone, written_by(schedule.problem, program.operations, alone, kernels)


def _turn_sent(graph: Graph) -> None:
    """Takes in that what is sent lies as it is written: a kernel that computes it from what was scattered along another
    dimension than its first, which lies outermost then, turns that in tiles."""
    scattered, operations = scattered_behind(graph.schedule), graph.program.operations
    lying = {result for index in scattered for result in operations[index].results}
    makers = (graph.maker(gather.value) for gather in graph.gathers if lying)
    graph.tiled.update(maker for maker in makers if maker is not None and not lying.isdisjoint(graph.reads[maker]))


def read_slices(graph: Graph, read: Mapping[int, Sequence[tuple[int, Layout]]]) -> None:
    """Takes in that kernels which read a slice of what is stored read no more than that. ``read``: per operation, by
    index, what it reads in other layouts than it is stored in."""
    schedule, slices = graph.schedule, dict[tuple[int, Layout], int]()
    here = {index: read[index] for index in graph.program.regions[graph.region].operations if index in read}
    for index, value, layout in ((index, *pair) for index, pairs in here.items() for pair in pairs):
        if any(step.kind != "slice" for step in schedule.route(value, layout).steps):
            continue
        part = slices.setdefault((value, layout), -1 - len(slices))
        graph.filled[part] = bytes_in(schedule, value, layout)
        for node in kernels_with(graph, index):
            reads, made = graph.moves.get(node, (set[int](), set[int]()))
            if value in reads:
                graph.moves[node] = {part, *reads} - {value}, made
                graph.takes[node] = graph.busy(graph.computing.get(node, 0.0), node)


def _spread_together(graph: Graph, nodes: Mapping[tuple[int, float], int]) -> None:
    """Makes kernels one that copy as many elements with zeros, read a vector in common, and do not need each other: a
    generator that runs twice with one bias, of images that are trained with and of images that it learns from."""
    values, kept = graph.program.values, dict[float, list[tuple[int, frozenset[int]]]]()
    for (operand, times), node in nodes.items():
        vectors = frozenset(v for v in graph.sources(operand) if values[v].elements > 1)
        alike = kept.setdefault(times * values[operand].elements, [])
        for other, read in alike:
            if not vectors.isdisjoint(read) and not graph.leads(other, node) and not graph.leads(node, other):
                graph.needs[other] |= graph.needs.pop(node)
                graph.values[other] |= graph.values.pop(node)
                graph.takes[other] += graph.takes.pop(node)
                graph.place[other] = max(graph.place[other], graph.place.pop(node))
                for needs in graph.needs.values():
                    if node in needs:
                        needs -= {node}
                        needs.add(other)
                graph.beside.update({operand: other for operand, made in graph.beside.items() if made == node})
                break
        else:
            alike.append((node, vectors))


def _turn_products(graph: Graph, kernels: Kernels) -> None:
    """Adds a kernel to a graph for each copy of an operand that products read (`shardplan.memory.copying`): not where
    the kernel writes it that makes what is copied, nor for merged products, for which one puts operands side by side.
    """
    schedule, program, assignment = graph.schedule, graph.program, graph.schedule.assignment
    adding = {found.product: index for index, found in kernels.adding.items()}
    alone, writing = _copied_for_products(schedule, kernels)
    _take_apart(graph, alone, writing)
    nodes = dict[ProductOperand, int]()
    summing = _summing(graph)
    read_by = {(index, read.value): read for (index, _), read in alone.items()}
    for (index, position), read in alone.items():
        node, product, strategy = adding.get(index, index), program.operations[index], assignment.strategies.get(index)
        operand, layout = product.operands[position], strategy.operands[position] if strategy is not None else None
        if node not in graph.needs or layout is None or not isinstance(operand, int):
            continue
        size, writer = read.padding * bytes_in(schedule, operand, layout), writing[read]
        if read not in nodes:
            sources, as_it_lies = graph.sources(read.value), [*read.order] == sorted(read.order)
            summed = summing.get((sources, program.values[read.value].shape)) if as_it_lies else None
            other = summed if writer is None else nodes.get(read_by.get((writer.index, read.value), read))
            if other is not None and read.value not in sources and not needs_any(graph.needs, other, node):
                # a kernel that computes the same, for a sum or another product, writes this as well
                nodes[read] = other
                graph.takes[other] += size / BYTES_MOVED
                graph.parts.add(other)
            elif writer is not None:
                continue
            else:
                takes = UNKNOWN if read.value in graph.rows else _copying_microseconds(graph, read, size)
                nodes[read] = copying_kernel(graph, (node, product), Gather(operand, layout), takes)
        others = {o for n in {node, index} for o in program.operations[n].operands if isinstance(o, int)} - {operand}
        gone = graph.sources(operand).difference(*map(graph.sources, others - {product.results[0]}))
        graph.needs[node] -= {maker for value in gone if (maker := graph.maker(value)) is not None}
        graph.needs[node].add(nodes[read])
        graph.values[node] -= gone
        graph.beside[index, position] = nodes[read]


def _summing(graph: Graph) -> dict[tuple[frozenset[int], tuple[int, ...]], int]:
    """The kernels that add up what they compute element by element, by what they read and the shape of what they add
    up: they write copies of that, as it lies, too."""
    program, found = graph.program, dict[tuple[frozenset[int], tuple[int, ...]], int]()
    for index in sorted(graph.reads.keys() - graph.by_rows):
        operation = program.operations[index]
        shapes = {program.values[o].shape for o in operation.operands if isinstance(o, int)}
        if operation.primitive.name in REDUCTIONS and len(shapes) == 1:
            found.setdefault((graph.reads[index], shapes.pop()), index)
    return found


def _copying_microseconds(graph: Graph, read: ProductOperand, written: float) -> float:
    """Microseconds in which a kernel writes a copy of these bytes, and reads what it is made from."""
    schedule = graph.schedule
    values, lying = schedule.assignment.values, lying_of(graph.program, pointwise_operations(schedule.problem)).orders
    stored = values.keys() & graph.sources(read.value)  # besides what is made from nothing where it is read
    apart = read.value in values and moves_apart(schedule, read.value, lying.get(read.value), read.order)
    made_from = sum((bytes_apart if apart else bytes_in)(schedule, value, values[value]) for value in stored)
    return (made_from + written) / BYTES_MOVED


def _take_apart(
    graph: Graph, copied: Mapping[tuple[int, int], ProductOperand], writing: Mapping[ProductOperand, Operation | None]
) -> None:
    """Has what kernels make taken from several results, where they write several copies, or one beside a value that is
    read as well."""
    written = {writer.index: set[ProductOperand]() for writer in writing.values() if writer is not None}
    for read, writer in writing.items():
        if writer is not None:
            written[writer.index].add(read)
    copying: dict[ProductOperand, set[int]] = {}
    for (index, _), read in copied.items():
        copying.setdefault(read, set()).add(index)
    readers: dict[int, set[int]] = {}
    for node, reads in graph.reads.items():
        for value in reads:
            readers.setdefault(value, set()).add(node)
    for index, copies in written.items():
        results = graph.program.operations[index].results
        others = set[int]().union(*(readers.get(value, set()) for value in results))
        if len(copies) + bool(others.difference(*(copying[read] for read in copies))) > 1:
            graph.parts.add(index)


def _unpack_exchanged(graph: Graph, kernels: Kernels) -> None:
    """Adds a kernel to a graph for each operand of products whose parts an all-to-all brings one behind the other, but
    that are to lie side by side: of columns that are gathered, say."""
    schedule, nodes = graph.schedule, dict[Gather, int]()
    for index in sorted(graph.reads):
        added = kernels.adding.get(index)
        product = graph.program.operations[index if added is None else added.product]
        for operand, layout in read_otherwise(schedule).get(product.index, ()):
            gather = gather_for(schedule, product, operand, layout)
            end = graph.gathers.get(gather)
            exchanged = end in graph.needs[index] and is_multiplied(graph.program, product)
            if end is None or not exchanged or not lies_apart(schedule, gather):
                continue
            if gather not in nodes:
                takes = 2 * bytes_in(schedule, operand, layout) / BYTES_MOVED
                nodes[gather] = copying_kernel(graph, (index, product), gather, takes)
            graph.needs[index] -= {end}
            graph.needs[index].add(nodes[gather])
