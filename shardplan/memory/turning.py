"""The kernels that copy what convolutions read: with zeros, or with the batch in the place of the channels.

They stand in the order by themselves, before the first convolution that reads the copy: what is copied need not be in
memory when that runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardplan.memory.combining import Gather
from shardplan.memory.convolutions import spread_operands
from shardplan.memory.recomputing import Kernels
from shardplan.memory.sizes import bytes_in
from shardplan.memory.times import BYTES_MOVED
from shardplan.program import Operation

if TYPE_CHECKING:
    from shardplan.memory.hiding import Graph


def turn_operands(graph: Graph, kernels: Kernels) -> None:
    """Adds a kernel to a graph for each copy that convolutions read (`shardplan.memory.convolutions`): these need that
    instead of what it is made from. A copy that is only transposed is written by the kernel that makes what is copied,
    where that computes element by element."""
    spread = spread_operands(graph.program, graph.program.operations, kernels.copied)
    nodes: dict[tuple[int, float], int] = {}
    for index in sorted({index for index, _ in spread} & graph.reads.keys()):
        operation, strategy = graph.program.operations[index], graph.schedule.assignment.strategies.get(index)
        copies, needed = set[int](), set[int]()
        for position, operand in enumerate(operation.operands):
            times, layout = spread.get((index, position)), strategy.operands[position] if strategy is not None else None
            if not isinstance(operand, int):
                continue
            if times is None or layout is None:
                needed |= graph.sources(operand)
                continue
            maker = graph.maker(operand)
            if times == 1 and maker in kernels.fused and maker in graph.needs[index]:
                needed |= graph.sources(operand)
                graph.beside[index, position] = maker
                continue
            if (operand, times) not in nodes:
                moved = (1 + times) * bytes_in(graph.schedule, operand, layout)
                nodes[operand, times] = _copying(graph, operation, Gather(operand, layout), moved / BYTES_MOVED)
            copies.add(nodes[operand, times])
            graph.beside[index, position] = nodes[operand, times]
        gone = graph.reads[index] - needed
        graph.needs[index] -= {maker for value in gone if (maker := graph.maker(value)) is not None}
        graph.needs[index] |= copies
        graph.values[index] -= gone


def _copying(graph: Graph, operation: Operation, read: Gather, takes: float) -> int:
    """The kernel that copies what a convolution reads, as a node."""
    sources = graph.sources(read.value)
    makers = {maker for value in sources if (maker := graph.maker(value)) is not None}
    ends = {graph.reduced[maker] for maker in makers & graph.reduced.keys()}
    needs, values = graph.needs[operation.index] & (makers | ends), graph.values[operation.index] & sources
    brought = (read, replace(read, alone=operation.index), *graph.brought(read.value))
    needs |= {graph.gathers[gather] for gather in brought if gather in graph.gathers}
    return graph.add(operation.index - 0.5, needs, values, takes)
