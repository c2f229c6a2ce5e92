"""Reductions in several steps: the kernel of the last one makes the result of what the first one has reduced.

Where neither what is reduced lies together nor what is kept (`shardplan.memory.sums`), XLA reduces the largest
dimension first, and of many numbers parts. Kernels are joined with that first step, which reads all there is to read;
what reads the result waits for a last one, which is soon done, but is a wait that something fills: with norms over
groups of channels, or over images, the gradients of filters. So does what puts the sums side by side that one
all-reduce sends, before that starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardplan.memory.fusion import REDUCTIONS
from shardplan.memory.sums import adds_few, reduced_in
from shardplan.memory.times import BYTES_MOVED, UNKNOWN, finishing_microseconds
from shardplan.steps import Step

if TYPE_CHECKING:
    from shardplan.memory.graph import Graph


def finish_reductions(graph: Graph) -> None:
    """Adds a kernel to a graph for the last step of each reduction that takes several, and for what puts sums side by
    side."""
    program = graph.program
    owner = {part: node for node, parts in graph.joined.items() for part in parts}
    last = dict[int, int]()
    for index in sorted(graph.reads):
        operation, node = program.operations[index], owner.get(index, index)
        reduces = operation.primitive.name in REDUCTIONS and not adds_few(program, operation)
        takes = finishing_microseconds(graph.schedule, operation) if reduces and node in graph.needs else 0.0
        several = takes or (reduces and len(reduced_in(program, operation)) > 1)
        if several and node in graph.needs:
            last[operation.results[0]] = graph.add(index + 0.1, {node}, set(), max(takes, UNKNOWN))
    for node, needs in graph.needs.items():
        for value in graph.values[node] & last.keys():
            maker = graph.maker(value)
            first = owner.get(maker, maker) if maker is not None else None
            others = (graph.maker(other) for other in graph.values[node] - last.keys())
            if first not in {owner.get(other, other) for other in others if other is not None} | {node}:
                needs -= {first}
            needs |= {last[value]} - {node}
    graph.finished.update(last)
    _put_side_by_side(graph)


def _put_side_by_side(graph: Graph) -> None:
    """Adds a kernel to a graph for each all-reduce of several values, which makes one of them."""
    schedule, kinds = graph.schedule, dict[int, set[str]]()
    for index, end in graph.reduced.items():
        operation = graph.program.operations[index]
        for position in range(len(operation.results)):
            _add_kind(kinds, end, schedule.result_steps(operation, position))
    for gather, end in graph.gathers.items():
        _add_kind(kinds, end, schedule.route(gather.value, gather.layout).steps)
    for end in sorted(graph.merged):
        start = graph.starts[end]
        if kinds.get(end) == {"all-reduce"} and graph.needs[start]:
            last = max(graph.place[need] for need in graph.needs[start])
            takes = 2 * sum(graph.size_of(value) for value in graph.values[start]) / BYTES_MOVED
            node = graph.add(last + 0.1, graph.needs[start], graph.values[start], takes)
            graph.needs[start], graph.values[start] = {node}, set()
            graph.place[start], graph.place[end] = last + 0.3, last + 0.6


def _add_kind(kinds: dict[int, set[str]], end: int, steps: Sequence[Step]) -> None:
    """Adds what kind of collective sends something last."""
    sent = [step.kind for step in steps if step.kind != "slice"]
    kinds.setdefault(end, set()).update(sent[-1:])
