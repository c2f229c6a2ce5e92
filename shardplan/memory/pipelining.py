"""Loops of which XLA:GPU takes the first iteration out, so that reductions run beside the iteration after.

A reduce-scatter that an island states, and whose result a scan stacks, is sent while the next iteration computes: that
of a product, or of what stays partial until it is put into the form that is stacked. So the first iteration runs before
the loop, as part of what is around it. It takes its slices from stacks as a gather leaves them, the gathered dimension
first. The loop reads a copy of that in the usual order, so that both are in memory from the gather up to that
iteration. Reduce-scatters that XLA makes of all-reduces come too late for this.

>>> import jax, jax.numpy as jnp, shardplan
>>> def step(weights, x):
...     def loss(weights):
...         return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0] ** 2)
...     return weights - 0.1 * jax.grad(loss)(weights)
>>> weights, x = jax.ShapeDtypeStruct((8, 64, 64), "float32"), jax.ShapeDtypeStruct((4096, 64), "float32")
>>> mesh = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
>>> for rows in (("y", "x"), ("x", "y")):  # only what is in another order than that of the weights needs islands
...     pins = {"0": jax.P(None, None, ("x", "y")), "1": jax.P(rows, None)}
...     plan = shardplan.plan(step, mesh, weights, x, pins=pins)
...     [plan.program.operations[index].primitive.name for index in peeled_loops(plan.schedule)]
['scan']
[]
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from shardplan.memory.gathering import last_gathered
from shardplan.once import once
from shardplan.program import Operation
from shardplan.schedule import Schedule

if TYPE_CHECKING:
    from shardplan.memory.liveness import Lifetimes

_FORMATTING = frozenset({"convert_element_type", "transpose", "reshape", "squeeze", "expand_dims", "neg", "copy"})


@once
def peeled_loops(schedule: Schedule) -> frozenset[int]:
    """The scans whose first iteration runs apart, by index."""
    program, links = schedule.program, schedule.problem.links
    scattered = {
        operation.results[0]
        for operation in program.operations
        if operation.region and operation.results and operation.index in schedule.assignment.strategies
        if _scatters_itself(schedule, operation)
    }
    if not scattered:
        return frozenset()
    makers = {result: operation for operation in program.operations for result in operation.results}
    reads = Counter(o for operation in program.operations for o in operation.operands if isinstance(o, int))
    found = set[int]()
    for loop in program.operations:
        stacked = (link.source for link in links[loop.index].inside if link.stacked) if loop.bodies else ()
        for source in stacked:
            value = source if isinstance(source, int) else -1
            while value in makers and value not in scattered and makers[value].primitive.name in _FORMATTING:
                operand = makers[value].operands[0]
                value = operand if isinstance(operand, int) and reads[operand] == 1 else -1
            if value in scattered and makers[value].region in loop.bodies:
                found.add(loop.index)
    return frozenset(found)


def _scatters_itself(schedule: Schedule, operation: Operation) -> bool:
    """Whether an island reduces and scatters the result of an operation, or what it changes no more than the form of:
    a value that stays partial until it is read."""
    if any(step.kind == "reduce-scatter" for step in schedule.result_steps(operation, 0)):
        return schedule.island_dtype(operation) is not None
    if operation.primitive.name not in _FORMATTING or not isinstance(operation.operands[0], int):
        return False
    layout = schedule.assignment.strategies[operation.index].operands[0]
    if layout is None or layout == schedule.assignment.values.get(operation.operands[0], layout):
        return False
    return any(step.kind == "reduce-scatter" for step in schedule.route(operation.operands[0], layout).steps)


def gathered_until(lifetimes: Lifetimes, schedule: Schedule) -> dict[int, int]:
    """The stacks of which what a gather leaves is kept beside the copy that loops read, with the place up to which it
    is: where the first of the iterations that run apart begins."""
    program, found = schedule.program, dict[int, int]()
    for index in sorted(peeled_loops(schedule)):
        loop = program.operations[index]
        for link, value in lifetimes.kept_around(loop):
            copy = schedule.copy(value) if value in schedule.assignment.values else None
            if copy is None or not link.stacked or schedule.link_layout(link) != copy:
                continue
            gathered, start = last_gathered(schedule, value, copy), lifetimes.start(loop)
            if gathered is not None and gathered[1] and lifetimes.copied[value][0] < start:
                found[value] = max(found.get(value, 0), start)
    return found
