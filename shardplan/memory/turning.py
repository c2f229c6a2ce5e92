"""The kernels that copy what convolutions read: with zeros, or with the batch in the place of the channels.

They stand in the order by themselves, before the first convolution that reads the copy: what is copied need not be in
memory when that runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardplan.memory.convolutions import spread_operands
from shardplan.memory.recomputing import Kernels
from shardplan.memory.sizes import bytes_in
from shardplan.memory.times import BYTES_MOVED
from shardplan.program import Operation

if TYPE_CHECKING:
    from shardplan.memory.hiding import Graph


def turn_operands(graph: Graph, kernels: Kernels) -> None:
    """Adds a kernel to a graph for each copy that convolutions read (`shardplan.memory.convolutions`): these need that
    instead of what it is made from."""
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
            if (operand, times) not in nodes:
                moved = (1 + times) * bytes_in(graph.schedule, operand, layout)
                nodes[operand, times] = _copying(graph, operation, operand, moved / BYTES_MOVED)
            copies.add(nodes[operand, times])
        gone = graph.reads[index] - needed
        graph.needs[index] -= {maker for value in gone if (maker := graph.maker(value)) is not None}
        graph.needs[index] |= copies
        graph.values[index] -= gone


def _copying(graph: Graph, operation: Operation, operand: int, takes: float) -> int:
    """The kernel that copies what a convolution reads, as a node."""
    sources = graph.sources(operand)
    makers = {maker for value in sources if (maker := graph.maker(value)) is not None}
    needs, values = graph.needs[operation.index] & makers, graph.values[operation.index] & sources
    return graph.add(operation.index - 0.5, needs, values, takes)
