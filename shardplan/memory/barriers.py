"""Barriers that gathers for further readers stand behind (`shardplan.anew`), in the order that hides collectives.

XLA's last scheduler still has them: what comes out of a barrier is taken from it at once, and then the barrier and the
tuple that it reads are placed one after the other, like kernels that take no time. Each can only be placed a
microsecond after what reads it, and what nothing waits for fills these gaps, however long it takes and whatever it
holds. A barrier that takes in nothing else reads no tuple.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardplan.anew import BARRIERS
from shardplan.memory.gathering import waits_for

if TYPE_CHECKING:
    from shardplan.memory.graph import Graph


def put_barriers(graph: Graph) -> None:
    """Adds the barriers to a graph between the starts of such gathers and what these need."""
    first = len(graph.program.values) + len(graph.program.operations)  # behind values, and zeros for scatters
    for gather, (needs, values) in graph.guarded.items():
        start, waiting = graph.first_start(gather), waits_for(graph.schedule, gather)
        for _ in range(BARRIERS if waiting else 0):
            read = graph.add(graph.place[start] - 0.2, needs, values, 0.0)
            barrier = graph.add(graph.place[start] - 0.1, {read}, set(), 0.0)
            graph.barriers[barrier] = first + barrier
            needs, values = {barrier}, set()
        graph.needs[start] |= needs if waiting else {graph.add(graph.place[start] - 0.1, needs, values, 0.0)}
