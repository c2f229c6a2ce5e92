"""Dimension orders that are pinned: of gathered values, and of a loop's slices that are gathered.

XLA:GPU gathers along the outermost dimension in memory, and layout assignment spreads that order to where the gathered
value is made. Where a loop gathers each slice of a stack (the weights of one layer) along a later dimension, XLA takes
the slices from a transposed copy of the whole stack, which is live from before the first loop to the end of the last.
A slice that is pinned to the order of its stack is transposed alone, in its iteration.

Layout assignment also spreads the order to what is computed element by element from the gathered value. Of a softmax's
maxima that are gathered along their second dimension, the gradients of the logits then have the second dimension
outermost too, and products read transposed copies of these. So a value that is gathered along a later dimension than
its first, and then repeated, is transposed where it is gathered: it is the smaller of the two.

An image that is gathered along its channels is transposed for convolutions, and is in memory in both orders until its
last reader that is no convolution (a sum for a bias). So it is transposed where it is gathered as well.

>>> import jax, jax.numpy as jnp, shardplan
>>> def step(w, x):
...     return jax.lax.scan(lambda x, one: (jnp.tanh(x @ one.astype(x.dtype)), None), x, w)[0]
>>> w, x = jax.ShapeDtypeStruct((4, 64, 64), "float32"), jax.ShapeDtypeStruct((4096, 64), "bfloat16")
>>> mesh = jax.sharding.AbstractMesh((8,), ("x",))
>>> def gathered(spec):
...     plan = shardplan.plan(step, mesh, w, x, pins={"0": spec, "1": jax.P("x")})
...     return [plan.program.values[value].shape for value in gathered_slices(plan.schedule)]
>>> gathered(jax.P(None, None, "x")), gathered(jax.P(None, "x")), gathered(jax.P())
([(64, 64)], [], [])

>>> def scaled(scale, x):
...     return x * scale[:, :, None]
>>> scale, x = jax.ShapeDtypeStruct((16, 64), "float32"), jax.ShapeDtypeStruct((16, 64, 4096), "float32")
>>> def repeated(spec):
...     plan = shardplan.plan(scaled, mesh, scale, x, pins={"0": spec, "1": jax.P(None, None, "x")})
...     return is_gathered_out_of_order(plan.schedule, plan.program.inputs[0], ((), ()))
>>> repeated(jax.P(None, "x")), repeated(jax.P("x"))
(True, False)
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import jax
from jax.experimental.layout import Layout as Order
from jax.experimental.layout import with_layout_constraint
from jax.sharding import Mesh

from shardplan import _jax
from shardplan.layout.collectives import CollectiveKind
from shardplan.layout.layout import Layout, to_spec
from shardplan.memoize import memoize
from shardplan.problem.schedule import Schedule
from shardplan.program.operation_kinds import CONVOLUTION, readers_in
from shardplan.program.program import Operation

_KEEPS_ORDER = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "stop_gradient", "copy", "copy_p"})
"""Operations whose results have the dimension order of their operand, as those have that work element by element."""


def gathered_slices(schedule: Schedule) -> frozenset[int]:
    """The slices of stacks, as values of loops' bodies, that are gathered along another dimension than their first."""
    readers, found = readers_in(schedule.program), set[int]()
    for links in schedule.problem.links.values() if schedule.problem.islands else ():
        for link in links.enter:
            if link.stacked == "source" and isinstance(link.source, int):
                stack = [link.target]
                while stack and link.target not in found:
                    value = stack.pop()
                    for reader in readers.get(value, ()):
                        if _is_gathered_by(schedule, value, reader):
                            found.add(link.target)
                        stack += _results_in_order(schedule, value, reader)
    return frozenset(found)


def _is_gathered_by(schedule: Schedule, value: int, reader: Operation) -> bool:
    """Whether an operation reads a value that is gathered along a later dimension than its first."""
    strategy, stored = schedule.assignment.strategies.get(reader.index), schedule.assignment.values.get(value)
    if strategy is None or stored is None or schedule.is_partial(value, stored):
        return False
    return any(
        not {*axes} <= {*wanted[dim]}
        for operand, wanted in zip(reader.operands, strategy.operands, strict=True)
        if operand == value and wanted is not None
        for dim, axes in enumerate(stored)
        if dim
    )


def _results_in_order(schedule: Schedule, value: int, reader: Operation) -> Iterator[int]:
    """The results of an operation that layout assignment gives the order of an operand: they are computed from it
    element by element, or are the same value."""
    if reader.primitive is _jax.optimization_barrier:
        yield from (r for o, r in zip(reader.operands, reader.results, strict=True) if o == value)
    elif (choices := schedule.choices.get(reader.index)) and choices.pointwise:
        sizes = schedule.program.values
        yield from (r for r in reader.results if sizes[r].shape == sizes[value].shape)


def is_gathered_out_of_order(schedule: Schedule, value: int, layout: Layout) -> bool:
    """Whether a value comes to this layout by a gather along another dimension than its first, and is then repeated, or
    an image that a convolution reads."""
    domain = schedule.problem.domain(value)
    if layout in domain.padded or not schedule.problem.islands or value not in _read_in_order(schedule):
        return False
    gathered = _last_gathered(schedule, value, layout)
    return gathered is not None and gathered[1] > 0


def _last_gathered(schedule: Schedule, value: int, layout: Layout) -> tuple[tuple[int, ...], int] | None:
    """Where a gather brings a value to a layout at last: the mesh axes that it goes over, and the dimension that these
    split, counted without those of size 1."""
    route = schedule.route(value, layout)
    if not route.steps or route.steps[-1].kind != CollectiveKind.ALL_GATHER:
        return None
    before = route.steps[-2].layout if len(route.steps) > 1 else route.source
    shape = schedule.program.values[value].shape
    gathered = [old != new for old, new, size in zip(before, layout, shape, strict=True) if size > 1]
    return route.steps[-1].axes, gathered.index(True)


def _outer(convolution: Operation) -> tuple[int, ...]:
    """The dimensions of a convolution's image that are not of space."""
    return tuple(convolution.params["dimension_numbers"].lhs_spec[:2])


@memoize
def _read_in_order(schedule: Schedule) -> frozenset[int]:
    """What goes into something larger, element by element, and images of which channels or batch lie innermost."""
    program, found = schedule.program, set[int]()
    sizes = [prod(value.shape) for value in program.values]
    for operation in reversed(program.operations):
        choices = schedule.choices.get(operation.index)
        image = operation.operands[0] if operation.primitive.name == CONVOLUTION else None
        if isinstance(image, int) and len(program.values[image].shape) - 1 in _outer(operation):
            found.add(image)
        if operation.primitive.name in _KEEPS_ORDER or (choices and choices.pointwise):
            for operand in operation.operands:
                if isinstance(operand, int) and any(
                    result in found or sizes[result] > sizes[operand] > 1 for result in operation.results
                ):
                    found.add(operand)
    return frozenset(found)


def in_order(array: Any, layout: Layout, schedule: Schedule, mesh: Mesh) -> Any:
    """An array of this layout, each block of which lies in memory with its first dimension outermost."""
    spec = to_spec(schedule.space.mesh, layout)  # the constraint is a call that XLA would not partition

    return jax.shard_map(ordered, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(array)


def ordered(block: Any) -> Any:
    """A block of one device, inside of a ``shard_map``, which lies in memory with its first dimension outermost."""
    return with_layout_constraint(block, Order(tuple(range(block.ndim))))
