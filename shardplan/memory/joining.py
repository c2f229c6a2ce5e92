"""Kernels that XLA:GPU makes one, with several results: those that go through as many elements and read the same value.

A sum is part of one before it, or of the next one behind that does not need it, though others that do stand before:
a loss of which rows' means are part (label smoothing) is computed when the gradients of all logits are. A kernel that
goes through rows which it has reduced is written in tiles (`shardplan.memory.rows`), and has one result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shardplan.memory.fusion import REDUCTIONS
from shardplan.memory.recomputing import Kernels

if TYPE_CHECKING:
    from shardplan.memory.hiding import Graph

_MOST_TOUCHING = 64
"""Kernels that read the same value, of those that are looked at."""

_MOST_BEHIND = 64
"""Kernels and collectives that need a sum, of those that are looked at."""


def join_kernels(graph: Graph, kernels: Kernels) -> None:
    """Lets reductions be part of a kernel before them, of as many elements, that reads what is reduced, or makes it
    for others too, or else of the next one behind, and what is computed element by element of one before it that is as
    large and reads the same value, if only a bias, but no single number: that one makes several results, and each is
    taken from them.

    What they need stands before that kernel, and what needs them behind, so that nothing waits for itself.
    """
    touching: dict[int, list[int]] = {}
    place = {node: number for number, node in enumerate(graph.in_order())}
    owner: dict[int, int] = {}
    read = Counter(value for reads in graph.reads.values() for value in reads)
    for index in sorted(graph.reads.keys() - graph.by_rows):
        sums = _is_sum(graph, index)
        if not sums and index not in kernels.fused:
            continue
        other = _before(graph, index, touching, place, owner)
        if other is not None:
            owner[index] = other
            graph.parts |= set() if sums else {other}
        else:
            made = graph.program.operations[index].results
            for value in {*graph.reads[index], *(v for v in made if read[v] > 1 or v in kernels.read)}:
                touching.setdefault(value, []).append(index)
    _join(graph, owner)
    _join(graph, _behind(graph, touching, place, owner))


def _is_sum(graph: Graph, index: int) -> bool:
    return graph.program.operations[index].primitive.name in REDUCTIONS


def _join(graph: Graph, owner: Mapping[int, int]) -> None:
    """Makes nodes part of others."""
    for index, other in owner.items():
        graph.joined.setdefault(other, []).append(index)
    graph.needs = graph.joining(owner)
    graph.take_in(owner)


def _before(
    graph: Graph,
    index: int,
    touching: Mapping[int, Sequence[int]],
    place: Mapping[int, int],
    owner: Mapping[int, int],
) -> int | None:
    """The kernel before an operation that takes it in, if there is one."""
    operation, values = graph.program.operations[index], graph.program.values
    sums, elements = _is_sum(graph, index), graph.elements(operation)
    reads = sorted(graph.reads[index], key=lambda value: (-values[value].total_bytes, value))
    shared = reads[:1] if sums else [value for value in reads if values[value].elements > 1]
    needs = [(need, owner.get(need, need)) for need in graph.needs[index]]
    for value in shared:
        for other in reversed(touching.get(value, [])[-_MOST_TOUCHING:]):
            if place[other] >= place[index] or graph.elements(graph.program.operations[other]) != elements:
                continue
            reads_it = value in graph.reads[other] or (sums and values[value].elements == elements)
            leads = not _is_sum(graph, other)  # in one kernel nothing is computed of a sum that it makes
            if (
                reads_it
                and all([(leads and need == other) or place[own] < place[other] for need, own in needs])
                and not _turns(graph, index, other)
            ):
                return other
    return None


def _turns(graph: Graph, index: int, other: int) -> bool:
    """Whether two kernels stay apart since one turns what it reads: in tiles, or each element by itself, where one of
    them makes what the other reads, and that takes longer for all that they read."""
    if not graph.tiled.isdisjoint({index, other}):
        return True
    if graph.scattered.isdisjoint({index, other}) or not graph.moves.keys() >= {index, other}:
        return False
    leads = not graph.moves[other][1].isdisjoint(graph.moves[index][0])
    return leads and graph.moving(index, other) > graph.moving(index) + graph.moving(other)


def _behind(
    graph: Graph, touching: Mapping[int, Sequence[int]], place: Mapping[int, int], owner: Mapping[int, int]
) -> dict[int, int]:
    """Reductions that no kernel before them takes in, with the next one that reads a value as large as what is
    reduced that they read too, which does not need them: a loss is summed up in the kernel in which the backward pass
    begins."""
    readers: dict[int, set[int]] = {node: set() for node in graph.needs}
    for node, needs in graph.needs.items():
        for need in needs:
            readers[need].add(node)
    found, values = dict[int, int](), graph.program.values
    behind = set[int]()  # what stands before the kernel with a sum that it waits for
    for index in sorted(graph.reads.keys() - owner.keys() - graph.joined.keys()):
        if not _is_sum(graph, index) or index in found.values() or index in behind:
            continue
        elements = graph.elements(graph.program.operations[index])
        reads = sorted(graph.reads[index], key=lambda value: (-values[value].total_bytes, value))
        for value in reads:
            if value != reads[0] and values[value].elements != elements:
                continue
            later = (
                other
                for other in touching.get(value, ())
                if place[index] < place[other]
                and not (other in found or other in behind)
                and graph.elements(graph.program.operations[other]) == elements
            )
            other = min(later, key=place.__getitem__, default=None)
            moved = None if other is None else _between(readers, found, place, index, other)
            if other is not None and moved is not None:
                found[index] = other
                behind |= moved
                readers[other] |= readers.pop(index)
                break
    return found


def _between(
    readers: Mapping[int, set[int]], found: Mapping[int, int], place: Mapping[int, int], index: int, other: int
) -> set[int] | None:
    """What needs a node and stands before another one, with what needs that: it comes behind the other one where this
    takes in the node. None where that is much, or where the other one is of it."""
    first = {found.get(node, node) for node in readers[index]}
    if all(place[node] > place[other] for node in first):
        return set()
    seen, stack = {*first}, [*first]
    while stack:
        if other in seen or len(seen) > _MOST_BEHIND:
            return None
        more = {found.get(node, node) for node in readers[stack.pop()]} - seen
        seen |= more
        stack += more
    return seen
