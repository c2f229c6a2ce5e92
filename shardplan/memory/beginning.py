"""What the stacks of loops begin with, from when to when it is in memory.

A kernel makes it for each stack, and waits for what the loop reads of which a number is taken (`shardplan.stacking`),
or for nothing. XLA's last scheduler puts it where it fills a wait, which may be while another loop runs. Where the
first iteration of a loop runs apart, that makes all stacks but those of what is sent while the next one computes.

>>> import jax, jax.numpy as jnp, shardplan
>>> def step(x):
...     return jax.lax.scan(lambda x, _: (jnp.tanh(x), x), x, length=4)[1]
>>> schedule = shardplan.plan(step, 1, jax.ShapeDtypeStruct((8, 8), "float32")).schedule
>>> [(value, size) for operation in schedule.program.operations for value, size in stacks_begun(schedule, operation)]
[(4, 1024.0)]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from shardplan.control import Link
from shardplan.memory.combining import gather_for
from shardplan.memory.held import Held, Lifetime
from shardplan.memory.pipelining import sent_late
from shardplan.memory.sizes import bytes_in
from shardplan.memory.times import BYTES_MOVED
from shardplan.program import Operation
from shardplan.schedule import Schedule
from shardplan.stacking import begun_apart

if TYPE_CHECKING:
    from shardplan.memory.graph import Graph
    from shardplan.memory.liveness import Lifetimes


def stacks_begun(schedule: Schedule, loop: Operation) -> Iterator[tuple[int, float]]:
    """The stacks that kernels begin for a loop, with the bytes that they take on one device."""
    sent = sent_late(schedule).get(loop.index)
    for link in schedule.problem.links[loop.index].inside if loop.bodies else ():
        if link.stacked == "target" and (sent is None or link.target in sent):
            yield link.target, bytes_in(schedule, link.target, schedule.assignment.values[link.target])


def begin_stacks(graph: Graph) -> None:
    """Adds the kernels to a graph that make what stacks begin with."""
    schedule = graph.schedule
    for index in [*graph.reads]:
        loop = graph.program.operations[index]
        for stack, size in stacks_begun(schedule, loop):
            place = begun_apart(schedule).get(index)
            needs = set[int]() if place is None else _makers(graph, loop, schedule.problem.links[index].enter[place])
            graph.begun[stack] = graph.add(index - 0.5, needs, set(), size / BYTES_MOVED)
            graph.needs[index].add(graph.begun[stack])


def _makers(graph: Graph, loop: Operation, link: Link) -> set[int]:
    """The nodes that make, or bring, what enters a loop through a link."""
    value, layout = link.source, graph.schedule.link_layout(link)
    if not isinstance(value, int):
        return set()
    end = graph.gathers.get(gather_for(graph.schedule, loop, value, layout))
    return graph.made_by(value) if end is None else {end}


def held_before(lifetimes: Lifetimes, schedule: Schedule, begun: Mapping[int, int]) -> Iterator[Held]:
    """The stacks that lie there before their loops begin. ``begun``: per stack, the operation before which what it
    begins with is made."""
    for loop in (operation for operation in lifetimes.order if operation.bodies):
        start = lifetimes.start(loop)
        for stack, size in stacks_begun(schedule, loop):
            first = lifetimes.place[begun[stack]] if stack in begun else start
            if first < start:
                yield Held(stack, schedule.assignment.values[stack], size, Lifetime(first, start - 1))
