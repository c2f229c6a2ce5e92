"""New state that XLA:GPU cannot write over the old one: what kernels make that transpose a gradient.

Of a gradient that is scattered over devices along one of its dimensions, that dimension lies outermost in memory. Where
it is not the parameter's first one, the kernel of the update goes through the gradient in tiles, and such a kernel
writes over nothing that it reads: the new parameter, and its moments, lie beside the old ones until the end of the
step, where they are copied.

>>> import jax, jax.numpy as jnp, shardplan
>>> from shardplan.memory.recomputing import kernels_in
>>> def step(state, x):
...     gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(state["w"])
...     return {"w": state["w"] - gradient}
>>> w, x = (jax.ShapeDtypeStruct((rows, 64), "float32") for rows in (64, 4096))
>>> mesh = jax.sharding.AbstractMesh((2,), ("x",))
>>> def copied(spec):
...     pins = {"0/w": spec, "1": jax.P("x")}
...     schedule = shardplan.plan(step, mesh, {"w": w}, x, pins=pins).schedule
...     return len(transposed_results(schedule, kernels_in(schedule)))
>>> copied(jax.P("x")), copied(jax.P(None, "x"))
(0, 1)
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from shardplan.memory.sizes import bytes_in
from shardplan.memory.times import BYTES_MOVED
from shardplan.program import Operation
from shardplan.schedule import Schedule

if TYPE_CHECKING:
    from shardplan.memory.graph import Graph
    from shardplan.memory.recomputing import Kernels

_LOOKED_AT = 64
"""Values that a kernel of an update computes on the way, of those that are looked at."""


def transposed_results(schedule: Schedule, kernels: Kernels) -> frozenset[int]:
    """The values that leave a step as its new state, of which kernels are made that transpose what they read."""
    program, found, in_memory = schedule.program, set[int](), kernels.read | kernels.stored
    for number in program.ties:
        output = program.outputs[number]
        maker = program.makers.get(output) if isinstance(output, int) else None
        if not isinstance(output, int) or maker is None or maker.index not in kernels.fused or maker.region:
            continue
        if _transposes(schedule, kernels.fused, in_memory, output):
            found.add(output)
    return frozenset(found)


def _transposes(schedule: Schedule, fused: Collection[int], in_memory: Collection[int], output: int) -> bool:
    """Whether the kernel that makes a value reads a scattered one with another dimension outermost."""
    program = schedule.program
    rank = len(program.values[output].shape)
    stack, seen = [(output, tuple(range(rank)))], {output}
    while stack and len(seen) <= _LOOKED_AT:
        value, dims = stack.pop()
        maker = program.makers.get(value)
        if maker is None:
            continue
        if maker.index not in fused or (value in in_memory and value != output):
            outermost = _scattered(schedule, maker, value)
            if outermost is not None and dims[:1] and dims[0] != outermost:
                return True
            continue
        for operand in maker.operands:
            if isinstance(operand, int) and operand not in seen and len(program.values[operand].shape) == rank:
                turned = maker.primitive.name == "transpose"
                seen.add(operand)
                stack.append((operand, tuple(maker.params["permutation"][d] for d in dims) if turned else dims))
    return False


def _scattered(schedule: Schedule, operation: Operation, value: int) -> int | None:
    """The dimension along which a result is scattered over devices, if one is."""
    if operation.index not in schedule.assignment.strategies:
        return None
    for step in schedule.result_steps(operation, operation.results.index(value)):
        if step.kind == "reduce-scatter":
            along = [d for d, axes in enumerate(step.layout) if not set(axes).isdisjoint(step.axes)]
            return along[0] if len(along) == 1 else None
    return None


def copy_at_the_end(graph: Graph, kernels: Kernels) -> None:
    """Adds a kernel to a graph for each result that is copied to where the old state lies."""
    schedule = graph.schedule
    owner = {part: node for node, parts in graph.joined.items() for part in parts}
    for output in sorted(kernels.leaving):
        maker = graph.maker(output)
        node = owner.get(maker, maker) if maker is not None else None
        if node is not None and node in graph.needs:
            size = bytes_in(schedule, output, schedule.assignment.values[output])
            graph.add(node + 0.5, {node}, {output}, 2 * size / BYTES_MOVED)
