"""Parts of a value that collectives bring to other layouts: each is cut out by a kernel of its own.

What else is taken from the value, kernels compute on the way. So of the gradient of what was put together from tables'
rows and an argument, the parts whose tables have their columns split are cut out for an all-to-all each, long after
the kernels have run that read the other parts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from shardplan.memory.sizes import bytes_in, layout_left, left_otherwise
from shardplan.memory.times import BYTES_MOVED
from shardplan.schedule import Schedule
from shardplan.steps import Step

if TYPE_CHECKING:
    from shardplan.memory.graph import Graph


def moved_results(schedule: Schedule) -> list[int]:
    """The results that collectives bring to the layouts in which they are stored."""
    found = list[int]()
    for operation, result, _ in left_otherwise(schedule):
        steps = schedule.result_steps(operation, operation.results.index(result))
        found += [result] if any(step.kind != "slice" for step in steps) else []
    return found


def moved_parts(schedule: Schedule, fused: Collection[int]) -> list[int]:
    """Those of them that are parts which operations (``fused``) cut out on the way."""
    makers = schedule.program.makers
    moved = (value for value in moved_results(schedule) if makers[value].primitive.name == "split")
    return [value for value in moved if makers[value].index in fused]


def last_sent(steps: Sequence[Step]) -> Step:
    """The last collective of a transition."""
    return next(step for step in reversed(steps) if step.kind != "slice")


def send_parts(graph: Graph) -> None:
    """Adds a collective to a graph for each part that one brings to another layout."""
    schedule, program = graph.schedule, graph.program
    for value in graph.cut:
        operation = program.makers[value]
        strategy, position = schedule.assignment.strategies[operation.index], operation.results.index(value)
        left = layout_left(schedule.problem, operation, strategy, position)
        sent = last_sent(schedule.result_steps(operation, position)), bytes_in(schedule, value, left)
        graph.sent[value] = graph.collective(("result", value), sent, operation.index)


def cut_parts(graph: Graph) -> None:
    """Adds the kernels to a graph that cut these parts out, for which the collectives wait."""
    for value in graph.cut:
        operation, needs, values = graph.program.makers[value], set[int](), set[int]()
        source = operation.operands[0]
        for read in graph.sources(source) if isinstance(source, int) else ():
            maker = graph.maker(read)
            if maker is not None:
                needs.add(graph.sent.get(read, maker))
                values |= set() if read in graph.sent else {read}
        takes = 2 * bytes_in(graph.schedule, value, graph.schedule.assignment.values[value]) / BYTES_MOVED
        graph.cut[value] = graph.add(operation.index, needs, values, takes)
        graph.needs[graph.starts[graph.sent[value]]].add(graph.cut[value])
