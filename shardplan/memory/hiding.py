"""The order of XLA's last scheduler, which hides collectives, and every short wait, behind work that nothing waits for.

It goes through the program from its end. Next (which means: before all that is placed) comes an operation whose readers
are placed. An operation can start a microsecond after the one that it needs, by its model, and a collective takes
its time; what fills such a wait is placed first, and of that what fits the wait best. So weights' gradients and sums
for biases, whose merged reductions come last, are placed one by one behind the kernels of the backward pass, the last
ones first, whatever that holds in memory. Bodies of loops and branches are put in order like the program itself.
Below, two kernels of a layer run between one weight's gradient and the next.

>>> import jax, jax.numpy as jnp, shardplan
>>> from shardplan.memory.recomputing import kernels_of
>>> def loss(weights, x, mixing):
...     for w in weights:
...         x = mixing @ (x @ w)
...     return jnp.sum(x)
>>> square, weights = jax.ShapeDtypeStruct((64, 64), "float32"), [jax.ShapeDtypeStruct((64, 64), "float32")] * 3
>>> x, mesh = jax.ShapeDtypeStruct((4096, 64, 64), "float32"), jax.sharding.AbstractMesh((2,), ("x",))
>>> pins = {"0/*": jax.P(), "1": jax.P("x", None, None), "2": jax.P()}
>>> plan = shardplan.plan(jax.grad(loss), mesh, weights, x, square, pins=pins)
>>> [late] = reduced_together(plan.schedule)
>>> order = hiding_order(plan.schedule, kernels_of(plan.schedule.problem))[0]
>>> [order.index(index) > index for index in sorted(late)]
[True, False, False]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shardplan.memory.beginning import begin_stacks
from shardplan.memory.bringing import Sending
from shardplan.memory.combining import Collective, brought_in
from shardplan.memory.copied_sums import copy_sums
from shardplan.memory.finishing import finish_reductions
from shardplan.memory.gathering import gathered_at_the_end, gathered_together
from shardplan.memory.graph import Graph
from shardplan.memory.joining import join_as, join_kernels, joined_in
from shardplan.memory.leaving import copy_at_the_end
from shardplan.memory.merging import merge_nodes, wait_for_slices
from shardplan.memory.order import operands_first
from shardplan.memory.pipelining import peeled_loops
from shardplan.memory.placing import Placing, through_values
from shardplan.memory.poolings import take_poolings_apart
from shardplan.memory.recomputing import Kernels
from shardplan.memory.reductions import reduced_together, without_leading
from shardplan.memory.turning import turn_operands
from shardplan.memory.zeros import copy_for_poolings, fill_apart
from shardplan.schedule import Schedule


def hiding_order(schedule: Schedule, kernels: Kernels) -> tuple[list[int], Sending]:
    """The indices of all operations in the order in which they run, a loop's body before the loop, and when collectives
    run beside them. Each body is put in order by itself."""
    regions = {region: _Apart(schedule, kernels, region) for region in _regions_run(schedule)}
    joined = tuple(one for apart in regions.values() for one in joined_in(apart.graph))
    merged, gathers = reduced_together(schedule, joined), gathered_together(schedule, joined)
    graphs = {region: apart.merged(schedule, kernels, merged, gathers) for region, apart in regions.items()}
    sending = Sending(together=[], joined=joined)
    return _order_in(schedule, kernels, 0, graphs, sending), sending


class _Apart:
    """A region's graph before XLA merges collectives. By then kernels are one that become so: which are is found here,
    and what leads to what by them decides what is merged."""

    def __init__(self, schedule: Schedule, kernels: Kernels, region: int) -> None:
        self.graph = Graph(schedule, kernels, [], [], region)
        _prepare(self.graph, kernels)
        self.joining = join_kernels(self.graph, kernels)

    def merged(
        self, schedule: Schedule, kernels: Kernels, merged: list[list[Collective]], gathers: list[list[Collective]]
    ) -> Graph:
        """The same graph where collectives are merged: what is reduced together, and gathered together."""
        groups: Iterable[Sequence[Collective]] = (*merged, *gathers)
        if not any(sum(map(self._has, group)) > 1 for group in groups):
            return self.graph
        for some in ((merged, gathers), (merged, []), (without_leading(schedule, merged), gathers)):
            graph = Graph(schedule, kernels, *some, self.graph.region, self.graph.endings)
            if len(graph.in_order()) == len(graph.needs):
                _prepare(graph, kernels)
                join_as(graph, self.joining)
                if len(graph.in_order()) == len(graph.needs):
                    return graph
        return self.graph  # else two merged collectives wait for each other

    def _has(self, one: Collective) -> bool:
        reduced = brought_in(one)
        return reduced in self.graph.reduced if isinstance(reduced, int) else reduced in self.graph.gathers


def _regions_run(schedule: Schedule) -> list[int]:
    """The regions of a program that run, from the outermost on."""
    operations, found = schedule.program.operations, [0]
    for region in found:
        found += [body for index in schedule.program.regions[region].operations for body in operations[index].bodies]
    return found


def _prepare(graph: Graph, kernels: Kernels) -> None:
    turn_operands(graph, kernels)
    fill_apart(graph, kernels.fused)
    begin_stacks(graph)
    copy_for_poolings(graph)
    take_poolings_apart(graph)


def _order_in(
    schedule: Schedule, kernels: Kernels, region: int, graphs: Mapping[int, Graph], sending: Sending
) -> list[int]:
    """The order of a region, with what runs in its operations' bodies; when its collectives run is added."""
    graph = graphs[region]
    merge_nodes(graph)
    wait_for_slices(graph, kernels)
    finish_reductions(graph)
    copy_sums(graph)
    copy_at_the_end(graph, kernels)
    operations = schedule.program.operations
    bodies = {
        index: [
            inner for body in operations[index].bodies for inner in _order_in(schedule, kernels, body, graphs, sending)
        ]
        for index in schedule.program.regions[region].operations
    }
    order: list[int] = []
    done: set[int] = set()
    for loop in peeled_loops(schedule) & graph.needs.keys():
        graph.sends[loop] = max(graphs[body].deepest for body in operations[loop].bodies)
    placing = Placing(graph, through_values(graph))
    graph.deepest, placed = placing.deepest, list(reversed(placing.run()))
    nodes = (index for node in placed if node < len(operations) for index in (node, *graph.joined.get(node, ())))
    for wanted in (*nodes, *schedule.program.regions[region].operations):
        for operation in operands_first(schedule.program, wanted, done) if wanted not in done else ():
            order += [*bodies[operation.index], operation.index]
    sending.add(graph, placed, bodies)
    if not graph.starts and (region or not gathered_at_the_end(schedule)):
        sending.still.add(region)
    return order
