"""Where the stacks of loops begin: each with its own loop, though many are as large.

A scan stacks its results into zeros. These wait for nothing, so that XLA:GPU makes them where they fill a wait, long
before the loop; and equal zeros are one value to it, whose copies, one for each loop, one kernel makes before the first
loop. Of layers that are computed again for their gradients, each with a scan of its own, the stacks of all lie in
memory while the first runs. What a stack begins with is never read, so it begins with one number of what its loop
reads, the last of these that is made, if only as parts of a sum: it cannot be made before.

>>> import jax, jax.numpy as jnp, shardplan
>>> def twice(x):
...     for _ in range(2):
...         x = jnp.sin(jax.lax.scan(lambda carry, one: (carry + one, carry * one), x[0], x)[1])
...     return x
>>> plan = shardplan.plan(twice, 1, jax.ShapeDtypeStruct((8, 64), "float32"))
>>> {index: plan.program.operations[index].primitive.name for index in begun_apart(plan.schedule)}
{4: 'scan', 10: 'scan'}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from shardplan.layout.layout import to_spec
from shardplan.memoize import memoize
from shardplan.problem.schedule import Schedule
from shardplan.program.control_flow import Link
from shardplan.program.program import Operation, Value

_REAL = jax.numpy.floating, jax.numpy.integer, jax.numpy.bool_
"""The kinds of element types whose numbers can be converted to all others."""

Body = Callable[[Sequence[Any], Sequence[Any]], tuple[Any, Any]]


@memoize
def begun_apart(schedule: Schedule) -> dict[int, int]:
    """The scans that stack something, by index, each with the place among what enters it of the value from whose
    numbers its stacks begin. Not where all that enters is there from the step's first operation on."""
    values, found = schedule.program.values, dict[int, int]()
    for operation in schedule.program.operations:
        if operation.primitive.name == "scan" and operation.params["unroll"] == 1 and operation.params["length"]:
            stacks = [values[result] for result in operation.results[operation.params["num_carry"] :]]
            if stacks and all(map(_has_numbers_here, stacks)) and (place := made_last(schedule, operation)) is not None:
                found[operation.index] = place
    return found


def _has_numbers_here(stack: Value) -> bool:
    """Whether a stack is filled in the memory of the devices, with numbers: keys have none."""
    return stack.memory_kind is None and not jax.dtypes.issubdtype(stack.dtype, jax.dtypes.extended)


def made_last(schedule: Schedule, operation: Operation) -> int | None:
    """The place, among what enters a loop, of what the program makes last, if any of it can give a number."""
    makers, found = schedule.program.makers, dict[int, int]()
    for place, link in enumerate(schedule.problem.links[operation.index].enter):
        value = link.source
        if not isinstance(value, int) or value not in makers or value in schedule.assignment.generated:
            continue
        tensor, layout = schedule.program.values[value], schedule.link_layout(link)
        in_parts = link.begins and schedule.is_partial(link.target, schedule.assignment.values.get(link.target, ()))
        even = not in_parts and layout not in schedule.problem.domain(value).padded
        if even and 0 not in tensor.shape and any(jax.dtypes.issubdtype(tensor.dtype, kind) for kind in _REAL):
            found[makers[value].index] = place
    return found[max(found)] if found else None


def scan_begun(schedule: Schedule, mesh: Mesh, operation: Operation, operands: Sequence[Any], body: Body) -> Any:
    """``jax.lax.scan`` of a loop that is `begun_apart`, over what enters it."""
    params, place = operation.params, begun_apart(schedule)[operation.index]
    constants, length, reverse = params["num_consts"], params["length"], params["reverse"]
    stacked_from = constants + params["num_carry"]
    stacks = _begun(schedule, mesh, operation, operands[place], place)

    def step(state: Any, ones: Sequence[Any]) -> Any:
        index, carry, stacks = state
        carry, results = body(carry, ones)
        place = length - 1 - index if reverse else index
        update = jax.lax.dynamic_update_index_in_dim
        updated = [update(*one, place, 0, allow_negative_indices=False) for one in zip(stacks, results, strict=True)]
        return (index + 1, carry, updated), None

    state = jax.numpy.int32(0), tuple(operands[constants:stacked_from]), stacks
    (_, carry, stacks), _ = jax.lax.scan(step, state, tuple(operands[stacked_from:]), length=length, reverse=reverse)
    return (*carry, *stacks)


def _begun(schedule: Schedule, mesh: Mesh, operation: Operation, array: Any, place: int) -> list[Any]:
    """A scan's stacks, full of the first number of each device's block of an array that enters the loop."""
    links, space = schedule.problem.links[operation.index], schedule.space.mesh
    specs, blocks = [], []
    for link in links.inside[operation.params["num_carry"] :]:
        stack, layout = schedule.program.values[link.target], schedule.link_layout(link)
        parts = [1] * (len(layout) - len(stack.shape) + 1)  # of a sum, a device's part lies in front
        degrees = map(space.degree, layout[len(parts) :])
        sizes = (size // degree for size, degree in zip(stack.shape[1:], degrees, strict=True))
        blocks.append(((stack.shape[0], *parts, *sizes), stack.dtype))
        specs.append(PartitionSpec(None, *to_spec(space, layout)))

    def fill(block: Any) -> list[Any]:
        number = jax.lax.slice(block, (0,) * block.ndim, (1,) * block.ndim).reshape(())
        return [jax.lax.broadcast(jax.lax.convert_element_type(number, dtype), shape) for shape, dtype in blocks]

    spec = block_of_entering(schedule, links.enter[place])
    return jax.shard_map(fill, mesh=mesh, in_specs=spec, out_specs=specs, check_vma=False)(array)


def block_of_entering(schedule: Schedule, link: Link) -> PartitionSpec:
    """How what enters a loop lies on the devices."""
    layout = schedule.link_layout(link)
    if link.stacked and isinstance(link.source, int) and schedule.is_partial(link.source, layout):
        layout = (layout[1], layout[0], *layout[2:])  # slices lie in front of the parts
    return to_spec(schedule.space.mesh, layout)
