"""Carries that loops begin with what is made from nothing: each is made for its own loop, and not before that can run.

The gradient of weights that all timesteps read is a sum, which the backward loop begins with zeros. These wait for
nothing, so that XLA:GPU makes them where they fill a wait, and those of all loops that are as large in one kernel,
before the first: of a recurrent translator, the sums of three loops lay in memory where the loss is computed, and its
peak was a seventh higher. So the number that fills such a carry passes a barrier, together with one number of what the
loop reads, the last of these that is made.

>>> import jax, jax.numpy as jnp, shardplan
>>> def total(weight, xs):
...     def step(h, x):
...         h = jnp.tanh(x + h @ weight)
...         return h, h
...     return jnp.sum(jax.lax.scan(step, xs[0], xs)[1])
>>> shapes = jax.ShapeDtypeStruct((16, 16), "float32"), jax.ShapeDtypeStruct((8, 4, 16), "float32")
>>> plan = shardplan.plan(jax.grad(total), 1, *shapes)
>>> [(plan.program.operations[index].primitive.name, len(found)) for index, found in filled_late(plan.schedule).items()]
[('scan', 2)]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from shardplan.apply.workarounds.loop_stack_init import block_of_entering, made_last
from shardplan.layout.layout import to_spec
from shardplan.memoize import memoize
from shardplan.problem.schedule import Schedule
from shardplan.program.program import Constant, Operation


@memoize
def filled_late(schedule: Schedule) -> dict[int, dict[int, Any]]:
    """Per loop, by index, the places, among what enters it, of carries that one number fills, with that number; where
    the loop reads something that the program makes."""
    found = dict[int, dict[int, Any]]()
    for operation in schedule.program.operations:
        if operation.primitive.name in ("scan", "while"):
            links = schedule.problem.links[operation.index].enter
            numbers = {place: _number(schedule, link.source) for place, link in enumerate(links) if link.begins}
            filled = {place: number for place, number in numbers.items() if number is not None}
            if filled and made_last(schedule, operation) is not None:
                found[operation.index] = filled
    return found


def _number(schedule: Schedule, value: int | Constant) -> Any:
    """The number that fills a value of several, if one does."""
    maker = schedule.program.makers.get(value) if isinstance(value, int) else None
    if maker is None or value not in schedule.assignment.generated or maker.primitive.name != "broadcast_in_dim":
        return None
    source = maker.operands[0]
    if not isinstance(source, Constant) or jax.dtypes.issubdtype(source.aval.dtype, jax.dtypes.extended):
        return None
    return source.value if schedule.program.values[maker.results[0]].elements > 1 else None


def fill_late(schedule: Schedule, mesh: Mesh, operation: Operation, operands: Sequence[Any]) -> Sequence[Any]:
    """What enters a loop or a branch, where carries that are `filled_late` are filled once the loop can run."""
    numbers, place = filled_late(schedule).get(operation.index, {}), made_last(schedule, operation)
    if not numbers or place is None:
        return operands
    links, space = schedule.problem.links[operation.index].enter, schedule.space.mesh
    layouts = [schedule.assignment.values.get(links[place].target, ()) for place in numbers]
    sizes = [
        tuple(size // space.degree(axes) for size, axes in zip(operands[place].shape, layout, strict=True))
        for place, layout in zip(numbers, layouts, strict=True)
    ]

    def fill(block: Any) -> list[Any]:
        number = jax.lax.slice(block, (0,) * block.ndim, (1,) * block.ndim).reshape(())
        types = [operands[place].dtype for place in numbers]
        scalars = [jax.numpy.asarray(number, dtype) for number, dtype in zip(numbers.values(), types, strict=True)]
        # XLA leaves out of a barrier what nobody reads behind it, and does not see that both choices are equal
        ones, others, number = jax.lax.optimization_barrier((scalars, scalars, number))
        chosen = [jax.lax.select(number.astype(bool), *either) for either in zip(ones, others, strict=True)]
        return [jax.lax.broadcast(scalar, size) for scalar, size in zip(chosen, sizes, strict=True)]

    specs = [to_spec(space, layout) for layout in layouts]
    spec = block_of_entering(schedule, links[place])
    made = jax.shard_map(fill, mesh=mesh, in_specs=spec, out_specs=specs, check_vma=False)(operands[place])
    found = dict(zip(numbers, made, strict=True))
    return [found.get(place, operand) for place, operand in enumerate(operands)]
