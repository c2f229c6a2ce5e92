"""Outputs that leave a step in another layout than they are computed in, as collectives of XLA's last scheduler.

New weights that are updated in parts, as their moments are, and leave whole, are gathered at the end of a step: one
after another, or, where they are small, some together. While one is gathered, others are updated, and what else nothing
waits for runs beside: it is not there to fill the waits of the backward pass, whose order it so changes.

>>> import jax, jax.numpy as jnp, shardplan
>>> def step(weights, momenta, x):
...     loss = lambda weights: jnp.sum(jnp.tanh(x @ weights[0]) @ weights[1])
...     momenta = [0.9 * m + g for m, g in zip(momenta, jax.grad(loss)(weights))]
...     return [w - m for w, m in zip(weights, momenta)], momenta
>>> weights, x = [jax.ShapeDtypeStruct((64, 64), "float32")] * 2, jax.ShapeDtypeStruct((4096, 64), "float32")
>>> mesh, pins = jax.sharding.AbstractMesh((2,), ("x",)), {"0/*": jax.P(), "1/*": jax.P("x"), "2": jax.P("x")}
>>> schedule = shardplan.plan(step, mesh, weights, weights, x, pins=pins, donate_argnums=(0, 1)).schedule
>>> [len(group) for group in sent_at_the_end(schedule)]
[2]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardplan.memory.combining import COMBINED_BYTES, Gather
from shardplan.memory.cutting import last_sent
from shardplan.memory.gathering import last_gathered
from shardplan.memory.sizes import bytes_in
from shardplan.memory.times import BYTES_MOVED
from shardplan.schedule import Schedule

if TYPE_CHECKING:
    from shardplan.memory.graph import Graph


def sent_at_the_end(schedule: Schedule) -> list[list[Gather]]:
    """The outputs that collectives bring to the layouts in which they leave, with those that are gathered together."""
    groups, filling = list[list[Gather]](), dict[tuple[int, ...], tuple[int, float]]()
    for number, output in enumerate(schedule.program.outputs):
        layout = schedule.layout_of_output(number)
        if not isinstance(output, int) or schedule.assignment.values.get(output, layout) == layout:
            continue
        if all(step.kind == "slice" for step in schedule.route(output, layout).steps):
            continue
        gathered, size = last_gathered(schedule, output, layout), bytes_in(schedule, output, layout)
        group, filled = filling.get(gathered[0], (-1, math.inf)) if gathered is not None else (-1, math.inf)
        if filled + size > COMBINED_BYTES:
            group, filled = len(groups), 0.0
            groups.append([])
        groups[group].append(Gather(output, layout))
        if gathered is not None:
            filling[gathered[0]] = group, filled + size
    return groups


def send_at_the_end(graph: Graph) -> None:
    """Adds a collective to a graph for what is brought to the layouts in which it leaves the step, unless something
    reads it there as well."""
    schedule = graph.schedule
    for group in sent_at_the_end(schedule):
        for gather in (gather for gather in group if gather not in graph.gathers):
            last = last_sent(schedule.route(gather.value, gather.layout).steps)
            sent = last, bytes_in(schedule, gather.value, gather.layout)
            end = graph.collective(("leaving", group[0]), sent, len(schedule.program.operations))
            start = graph.starts[end]
            for value in graph.sources(gather.value):
                maker = graph.maker(value)
                if maker is not None:
                    graph.needs[start].add(graph.sent.get(value, maker))
                    graph.values[start].update(() if value in graph.sent else (value,))
            graph.leaving[gather] = start, end, sent[1]


def copy_leaving(graph: Graph) -> None:
    """Adds the kernels to a graph, once it has all collectives, that copy what gathers leave in another order."""
    for gather, (start, end, size) in [*graph.leaving.items()]:
        gathered = last_gathered(graph.schedule, gather.value, gather.layout)
        if gathered is None or not gathered[1]:
            graph.leaving.pop(gather)
        else:
            place = len(graph.program.operations) + len(graph.further)
            graph.leaving[gather] = start, graph.add(place, {end}, set(), 2 * size / BYTES_MOVED), size


def most_leaving(graph: Graph, placed: Sequence[int]) -> float:
    """The bytes of results of gathers of which copies leave that are in memory together: each from where its gather
    begins until it is copied, and copies fill the waits of the gathers that come last."""
    place = {node: number for number, node in enumerate(placed)}
    ends = [(float(place[start]), -size) for start, _, size in graph.leaving.values()]  # beginnings first
    ends += [(place[copy] + 0.5, size) for _, copy, size in graph.leaving.values()]
    held = most = 0.0
    for _, size in sorted(ends):
        held -= size
        most = max(most, held)
    return most
