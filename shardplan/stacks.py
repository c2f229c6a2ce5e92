"""Orders in memory to which values are held: that of a stack for its slices, that in which what is gathered is read.

XLA:GPU gathers along the dimension that lies outermost in memory, and lets what is gathered lie so from where it is
made. Where a loop gathers each slice of a stack (the weights of one layer) along a later dimension, XLA so takes the
slices from a transposed copy of the whole stack, made before the first loop and kept until the last one ends. A slice
that is held to the order of its stack is transposed alone, in its iteration. Products that read the same are merged,
and what else they read is put side by side, all of it as the gathered one lies: so are slices that no loop gathers.

What is computed element by element from what is gathered lies so as well. Of a softmax's maxima that are gathered along
their second dimension, all that meets them lies with the second dimension outermost: the gradients of the logits, of
which products then read transposed copies, and from which each is made where it is read. So what is gathered behind
its first dimension and then repeated, the smaller of the two, is transposed where it is gathered.

What a loop stacks lies in the stack as it was made, and the loop that reads the stack going backward may want another
order, in which XLA copies all of it before. So what is stacked is held to the order of its stack as well.

An image that is gathered along its channels is transposed for convolutions, and lies in both orders until the last
reader that is no convolution (a sum for a bias). So it is transposed where it is gathered, and all read that.

What is written into an argument, or into a loop's carry, and leaves in its place (keys and values that a step adds to
its caches) lies as the products that read it want it: XLA updates a transposed copy of the whole cache, which it turns
back at the end. Held to its own order, it is updated in place, and products read a copy that is gone behind them. Where
a library's products read it in a loop, each iteration would make that copy: there it is left to XLA.

>>> import jax, jax.numpy as jnp, shardplan
>>> def step(w, x):
...     return jax.lax.scan(lambda x, one: (jnp.tanh(x @ one.astype(x.dtype)), None), x, w)[0]
>>> w, x = jax.ShapeDtypeStruct((4, 64, 64), "float32"), jax.ShapeDtypeStruct((4096, 64), "bfloat16")
>>> mesh = jax.sharding.AbstractMesh((8,), ("x",))
>>> def gathered(spec):
...     plan = shardplan.plan(step, mesh, w, x, pins={"0": spec, "1": jax.P("x")})
...     return [plan.program.values[value].shape for value in slices_gathered_behind(plan.schedule)]
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

>>> def decode(cache, new, queries):
...     cache = jax.lax.dynamic_update_slice(cache, new, (0, 3, 0))
...     return cache, jnp.einsum("bqd,btd->bqt", queries, cache)
>>> cache, new = (jax.ShapeDtypeStruct((8, length, 64), "float32") for length in (512, 4))
>>> plan = shardplan.plan(decode, mesh, cache, new, new)
>>> [plan.program.makers[value].primitive.name for value in updated_in_place(plan.schedule)]
['dynamic_update_slice']
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import jax
from jax.experimental.layout import Layout as Order
from jax.experimental.layout import with_layout_constraint
from jax.sharding import Mesh

from shardplan import _jax
from shardplan.collectives import CollectiveKind
from shardplan.control import Link
from shardplan.layout import Layout, to_spec
from shardplan.memory.merging import merged_anywhere
from shardplan.memory.operations import CONVOLUTION, readers_in
from shardplan.memory.products import product_operands
from shardplan.once import once
from shardplan.program import Operation, Program, Region
from shardplan.schedule import Schedule

_UPDATES = frozenset({"dynamic_update_slice", "scatter"})

_ALIKE = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "stop_gradient", "copy", "copy_p"})
"""Besides what is computed element by element, operations whose results lie as their operand does."""


def held_in_order(schedule: Schedule) -> frozenset[int]:
    """The values that are held to the order in which they are written, but for what is gathered and what is stacked."""
    return slices_gathered_behind(schedule) | updated_in_place(schedule) if schedule.problem.islands else frozenset()


def updated_in_place(schedule: Schedule) -> frozenset[int]:
    """The values that updates write into an argument, or into what a body is given, and that leave in its place; but
    for what products read turned in bodies, where the step fits with that turned before them."""
    program, domains, planned = schedule.program, schedule.problem.domain, schedule.assignment.values
    outputs = [(region, o) for region in program.regions for o in region.outputs if isinstance(o, int)]
    found = {value for region, output in outputs for value in updates_of_inputs(program, region, output)}
    found -= _read_transposed(program)
    return frozenset(v for v in found if planned[v] not in domains(v).padded and not schedule.is_partial(v, planned[v]))


def updates_of_inputs(program: Program, region: Region, value: int) -> list[int]:
    """A value of three or more dimensions and what it is an update of, each an update itself, down to an input of its
    region; nothing where it is no such update."""
    found, makers = list[int](), program.makers
    given = {*region.inputs} if region.index else {*program.inputs, *program.captured}
    while value not in given:
        maker = makers.get(value)
        operand = maker.operands[0] if maker is not None and maker.operands else None
        updates = maker is not None and maker.primitive.name in _UPDATES and maker.region == region.index
        if not updates or not isinstance(operand, int) or len(program.values[value].shape) < 3:
            return []
        found.append(value)
        value = operand
    return found


@once
def _read_transposed(program: Program) -> frozenset[int]:
    """The values that a body writes into what it is given, of which products read transposed copies; and what it is
    given. XLA transposes that before the loop, and back behind it."""
    if len(program.regions) == 1:
        return frozenset()
    read = {one.value for one in product_operands(program).values() if [*one.order] != sorted(one.order)}
    found = set[int]()
    for region in program.regions[1:]:
        for output in region.outputs:
            updates = updates_of_inputs(program, region, output) if isinstance(output, int) else []
            if read.intersection(updates):
                found.update(updates, (o for o in program.makers[updates[-1]].operands[:1] if isinstance(o, int)))
    return frozenset(found)


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


def slices_gathered_behind(schedule: Schedule) -> frozenset[int]:
    """The slices of stacks, as values of loops' bodies, that are gathered along another dimension than their first, or
    put beside such for merged products."""
    readers, beside = readers_in(schedule.program), _beside_gathered(schedule)
    found = set()
    for links in schedule.problem.links.values():
        for link in links.enter:
            if link.stacked == "source" and isinstance(link.source, int):
                stack = [link.target]
                while stack and link.target not in found:
                    value = stack.pop()
                    for reader in readers.get(value, ()):
                        if reader.index in beside or _is_gathered_behind(schedule, value, reader):
                            found.add(link.target)
                        stack += _results_in_order(schedule, value, reader)
    return frozenset(found)


def is_gathered_out_of_order(schedule: Schedule, value: int, layout: Layout) -> bool:
    """Whether a value comes to this layout by a gather along another dimension than its first, and is then repeated, or
    an image that a convolution reads."""
    domain = schedule.problem.domain(value)
    if layout in domain.padded or not schedule.problem.islands or value not in _read_in_order(schedule):
        return False
    gathered = _last_gathered(schedule, value, layout)
    return gathered is not None and gathered[1] > 0


def _outer(convolution: Operation) -> tuple[int, ...]:
    """The dimensions of a convolution's image that are not of space."""
    return tuple(convolution.params["dimension_numbers"].lhs_spec[:2])


@once
def _read_in_order(schedule: Schedule) -> frozenset[int]:
    """What goes into something larger, element by element, and images of which channels or batch lie innermost."""
    program, found = schedule.program, set[int]()
    sizes = [prod(value.shape) for value in program.values]
    for operation in reversed(program.operations):
        choices = schedule.choices.get(operation.index)
        image = operation.operands[0] if operation.primitive.name == CONVOLUTION else None
        if isinstance(image, int) and len(program.values[image].shape) - 1 in _outer(operation):
            found.add(image)
        if operation.primitive.name in _ALIKE or (choices and choices.pointwise):
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


def stacked_in_order(links: Sequence[Link], results: Sequence[Any], schedule: Schedule, mesh: Mesh) -> Iterator[Any]:
    """What a scan's body gives for stacks, held to the order of these; parts of sums, and vectors, are as they are."""
    for link, one in zip(links, results, strict=True):
        layout, source = schedule.link_layout(link), link.source
        whole = isinstance(source, int) and not schedule.is_partial(source, layout)
        yield in_order(one, layout, schedule, mesh) if whole and one.ndim > 2 and schedule.problem.islands else one


def ordered(block: Any) -> Any:
    """A block of one device, inside of a ``shard_map``, which lies in memory with its first dimension outermost."""
    return with_layout_constraint(block, Order(tuple(range(block.ndim))))


def _beside_gathered(schedule: Schedule) -> frozenset[int]:
    """The merged products, by index, of which one reads something of its own that is gathered along another dimension
    than its first: XLA puts what they read side by side, and all of it lies as that does."""
    operations, makers, found = schedule.program.operations, schedule.program.makers, set[int]()
    for group in merged_anywhere(schedule):
        products = [operations[index] for index in group if operations[index].region]  # bodies alone have slices
        if not products:
            continue
        shared = set.intersection(*[{o for o in product.operands if isinstance(o, int)} for product in products])
        own = [(o, product) for product in products for o in product.operands if isinstance(o, int) and o not in shared]
        seen = set[int]()
        while own:
            value, reader = own.pop()
            if _is_gathered_behind(schedule, value, reader):
                found.update(group)
                break
            maker = makers.get(value)
            if maker is not None and value not in seen:
                seen.add(value)
                operands = [operand for operand in maker.operands if isinstance(operand, int)]
                own += [(o, maker) for o in operands if value in _results_in_order(schedule, o, maker)]
    return frozenset(found)


def _is_gathered_behind(schedule: Schedule, value: int, reader: Operation) -> bool:
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
    """What an operation computes element by element, or lets pass, and so lets lie in memory as what it reads."""
    if reader.primitive is _jax.optimization_barrier:
        yield from (r for o, r in zip(reader.operands, reader.results, strict=True) if o == value)
    elif (choices := schedule.choices.get(reader.index)) and choices.pointwise:
        sizes = schedule.program.values
        yield from (r for r in reader.results if sizes[r].shape == sizes[value].shape)
