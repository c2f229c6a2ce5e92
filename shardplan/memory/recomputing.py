"""What XLA:GPU computes once and stores, though each kernel that reads it could compute it anew.

XLA fuses a value into the kernels that read it where that makes all of them quicker together
(`shardplan.memory.priorities`). A hyperbolic tangent, or what random bits become, takes longer to compute than to read:
the backward pass finds what the forward pass has stored.

>>> import jax, jax.numpy as jnp, shardplan
>>> def stored(function):
...     square = jax.ShapeDtypeStruct((4096, 4096), "bfloat16")
...     problem = shardplan.plan(jax.grad(function), 1, square, square).schedule.problem
...     makers = {operation.results[0]: operation.primitive.name for operation in problem.program.operations}
...     return [makers[value] for value in kernels_of(problem).stored]
>>> stored(lambda w, x: jnp.sum(jax.nn.relu(x @ w) @ w)), stored(lambda w, x: jnp.sum(jax.nn.gelu(x @ w) @ w))
([], ['tanh'])
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from shardplan import _jax
from shardplan.groups import MATRICES, RAGGED, turns_matrices
from shardplan.memory.absorbing import sums_within_rows
from shardplan.memory.accumulation import Accumulation, accumulations, merged_anywhere, own_position
from shardplan.memory.coalescing import is_read_apart
from shardplan.memory.convolutions import CONVOLUTION, forward_convolutions, spread_operands, unreversed
from shardplan.memory.fusion import (
    REDUCTIONS,
    fused_operations,
    fuses_operands,
    is_scatter,
    is_view,
    pointwise_operations,
    readers_in,
)
from shardplan.memory.leaving import transposed_results
from shardplan.memory.lying import lies_in, lying_of
from shardplan.memory.moving import turned_back
from shardplan.memory.padded import turned_before_padding
from shardplan.memory.pooled import added_poolings, rectifiers_of_poolings
from shardplan.memory.priorities import stored_values
from shardplan.memory.products import PRODUCT, is_multiplied, is_outer, loses_batch, product_operands, turned_carries
from shardplan.memory.repeated import Apart, apart_in
from shardplan.memory.rows import made_by_rows
from shardplan.memory.sizes import bytes_in, left_otherwise
from shardplan.memory.sums import adds_many
from shardplan.once import once
from shardplan.problem import Problem
from shardplan.program import Operation, Program
from shardplan.running import running_sums
from shardplan.schedule import Schedule
from shardplan.strategy import operand_type

_MOST_BEFORE = 64
"""Operations that are looked at before a scatter."""


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """What XLA:GPU makes of a program: the operations ``fused`` into the kernels that read them, by index; the values
    that kernels ``read`` from memory or that leave; those that are ``stored`` though each kernel could compute them;
    the operands that convolutions read from ``copied`` memory of their own; the products that are ``adding`` themselves
    to something, by the addition, which is a kernel of which the product is part; what is ``apart`` from what it
    repeats; the operands of products that are ``masked``, since these sum over what is split unevenly; the products
    that are ``reshaped`` (`shardplan.memory.products`); the values that are ``views`` of what is in memory; the
    matrices of rows in groups that products read ``turned``, each with what is in memory of which the kernels compute
    them that transpose them; the results that are ``leaving`` the step from beside the arguments that they replace;
    what loops have ``carried`` in the order in which products read it.
    """

    fused: frozenset[int]
    read: frozenset[int]
    stored: frozenset[int]
    copied: frozenset[tuple[int, int]] = frozenset()
    adding: Mapping[int, Accumulation] = field(default_factory=dict)
    apart: Apart = ()
    masked: frozenset[tuple[int, int]] = frozenset()
    views: frozenset[int] = frozenset()
    turned: Mapping[tuple[int, int], frozenset[int]] = field(default_factory=dict)
    leaving: frozenset[int] = frozenset()
    carried: frozenset[int] = frozenset()
    reshaped: frozenset[int] = frozenset()


def kernels_of(problem: Problem, copied: Collection[tuple[int, int]] = ()) -> Kernels:
    """What XLA:GPU fuses, and what it stores where every value is split over all devices.

    ``copied`` are operands that an operation reads from a copy of its own, by its index and their position.
    """
    split = (float(problem.space.mesh.device_count),) * len(problem.program.values)
    return _kernels_of(problem, frozenset(copied), split, frozenset(), (), frozenset(), frozenset())


def kernels_in(schedule: Schedule, copied: Collection[tuple[int, int]] = ()) -> Kernels:
    """The same where values are split as in a schedule: what devices repeat takes longer to compute and to read."""
    problem, found = schedule.problem, [float(schedule.problem.space.mesh.device_count)] * len(schedule.program.values)
    for value, layout in schedule.assignment.values.items():
        found[value] = problem.domain(value).parts[layout]
    partial = set[int]()
    for operation, result, left in left_otherwise(schedule):
        partial.update((result,) if operation.primitive.name in REDUCTIONS else ())
        if adds_many(problem.program, operation):  # its kernel makes parts of sums, whatever is kept of these then
            found[result] = problem.domain(result).parts[left]
    running = running_sums(schedule)
    added = running.union(problem.program.operations[index].results[0] for index in accumulations(schedule))
    added |= _images_added_to(schedule)
    buffers = tuple(_merged_buffers(schedule))
    reshaped = frozenset(_reshaped(schedule))
    apart = apart_in(schedule)
    kernels = _kernels_of(problem, frozenset(copied), tuple(found), added, buffers, reshaped, frozenset(partial), apart)
    read = (kernels.read | running) - _beside_alone(schedule, kernels)
    kernels = replace(kernels, read=read, masked=frozenset(_masked(schedule)))
    turned = dict(_turned_matrices(schedule, kernels))
    carried = frozenset[int]() if schedule.running else turned_carries(schedule.program)
    return replace(kernels, views=frozenset(_views(schedule, kernels)), turned=turned, carried=carried)


def _images_added_to(schedule: Schedule) -> frozenset[int]:
    """The images that convolutions add themselves to: XLA has cuDNN read these before it fuses anything."""
    program, convolutions = schedule.program, forward_convolutions(schedule.program)
    adding = accumulations(schedule).values() if convolutions else ()
    images = (one.onto for one in adding if one.product in convolutions and one.onto >= 0)
    return frozenset(image for image in images if len(program.values[image].shape) > 1)


def _views(schedule: Schedule, kernels: Kernels) -> Iterator[int]:
    """The values that are in memory as another shape of an argument, or of what a kernel stores, in the layout that
    this has: XLA gives them its memory. What leaves a region is none, nor what comes out of a library, which may lie
    otherwise."""
    program, values = schedule.program, schedule.assignment.values
    makers = program.makers
    leaving = {o for region in program.regions for o in region.outputs if isinstance(o, int)}
    stored, in_memory = {*program.inputs, *program.captured}, kernels.read | kernels.stored
    for operation in program.operations:
        operand = next(iter(operation.operands), None)
        strategy = schedule.assignment.strategies.get(operation.index)
        if strategy is None or not isinstance(operand, int) or not is_view(program, operation):
            continue
        result, maker = operation.results[0], makers.get(operand)
        fused = maker is not None and maker.index in kernels.fused
        if operand not in stored and not (fused and operand in in_memory):
            continue
        if strategy.operands[0] == values[operand] and strategy.results[0] == values[result] and result not in leaving:
            stored.add(result)
            yield result


def _turned_matrices(schedule: Schedule, kernels: Kernels) -> Iterator[tuple[tuple[int, int], frozenset[int]]]:
    """The matrices of rows in groups that products read transposed as they are stored, see `shardplan.memory.masking`.
    The kernel that transposes them computes them: other products read views of them, for which they are stored."""
    program, pointwise = schedule.program, pointwise_operations(schedule.problem)
    makers = program.makers
    in_memory = kernels.read | kernels.stored
    for operation in program.operations:
        strategy = schedule.assignment.strategies.get(operation.index)
        if operation.primitive.name != RAGGED or strategy is None or not turns_matrices(operation):
            continue
        matrices, sources = operation.operands[MATRICES], set[int]()
        stack = [matrices] if isinstance(matrices, int) else []
        if not stack or strategy.operands[MATRICES] != schedule.assignment.values.get(stack[0]):
            continue
        while stack:
            maker = makers.get(value := stack.pop())
            computed = maker is not None and maker.index in kernels.fused & pointwise
            if maker is None or not computed or (value != matrices and value in in_memory):
                sources.add(value)
            else:
                stack += [operand for operand in maker.operands if isinstance(operand, int)]
        yield (operation.index, MATRICES), frozenset(sources)


def _masked(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """The operands of products that sum over a dimension which is split unevenly, by the operation's index and their
    position: zeros are put where it is padded."""
    mesh = schedule.problem.space.mesh
    for operation in schedule.program.operations:
        strategy = schedule.assignment.strategies.get(operation.index)
        if strategy is not None and is_multiplied(schedule.program, operation):
            contracted, _ = operation.params["dimension_numbers"]
            for position, operand in enumerate(operation.operands):
                layout, shape = strategy.operands[position], operand_type(schedule.program, operand).shape
                if layout and any(shape[dim] % mesh.degree(layout[dim]) for dim in contracted[position]):
                    yield operation.index, position


def _reshaped(schedule: Schedule) -> Iterator[int]:
    """The products that lose dimensions of their batch where these are 1 on each device, by index; its complement,
    where they lose all of them."""
    mesh, strategies = schedule.problem.space.mesh, schedule.assignment.strategies
    for operation in schedule.program.operations:
        batch = operation.params["dimension_numbers"][1][0] if operation.primitive.name == PRODUCT else ()
        if batch and (strategy := strategies.get(operation.index)) and (layout := strategy.operands[0]):
            shape = operand_type(schedule.program, operation.operands[0]).shape
            axes = layout[-len(shape) :]  # behind the parts of a sum that waits, if it is one
            sizes = [shape[dim] / mesh.degree(axes[dim]) for dim in batch]
            if max(sizes) <= 1:
                yield ~operation.index
            elif loses_batch(sizes):
                yield operation.index


def _beside_alone(schedule: Schedule, kernels: Kernels) -> frozenset[int]:
    """What merged products alone read, side by side, and the kernel computes that puts it there: not what is brought to
    another layout before, nor what is made by rows or turned in tiles on the way, which a kernel of its own does."""
    program, found, assignment = schedule.program, set[int](), schedule.assignment
    readers, makers, pointwise = readers_in(program), program.makers, pointwise_operations(schedule.problem)
    by_rows = made_by_rows(program, pointwise, kernels.fused, kernels.read | kernels.stored)
    leaving = {o for region in program.regions for o in region.outputs if isinstance(o, int)}
    for group in merged_anywhere(schedule):
        operations = [program.operations[index] for index in group]
        own = own_position(schedule, operations)
        for value in {o for operation in operations if isinstance(o := operation.operands[own], int)}:
            maker = makers.get(value)
            if maker is None or maker.index not in kernels.fused or value in by_rows or value in leaving:
                continue
            alone = all(
                reader.index in group
                and reader.operands[1 - own] != value
                and assignment.strategies[reader.index].operands[own] == assignment.values.get(value)
                for reader in readers[value]
            )
            if alone and not _is_turned(program, kernels, value):
                found.add(value)
    return frozenset(found)


def _is_turned(program: Program, kernels: Kernels, value: int) -> bool:
    """Whether a value has another dimension innermost than what is in memory that it is but another view of."""
    while (maker := program.makers.get(value)) is not None and maker.index in kernels.fused:
        if maker.primitive.name == "transpose" and _moves_innermost(program, maker):
            return True
        values = [o for o in maker.operands if isinstance(o, int)]
        if len(values) != 1:
            return False
        [value] = values
    return False


def _merged_buffers(schedule: Schedule) -> Iterator[tuple[int, float]]:
    """The results of products that are merged, each with the bytes of the one result of which it is a part."""
    for group in merged_anywhere(schedule):
        operations = [schedule.program.operations[index] for index in group]
        stay = [operation.results[0] for operation in operations if not schedule.result_steps(operation, 0)]
        whole = sum([bytes_in(schedule, value, schedule.assignment.values[value]) for value in stay])
        yield from ((value, whole) for value in stay)


@once
def _kernels_of(
    problem: Problem,
    copied: frozenset[tuple[int, int]],
    degrees: tuple[float, ...],
    added: frozenset[int],
    buffers: tuple[tuple[int, float], ...],
    reshaped: frozenset[int],
    left: frozenset[int],
    apart: Apart = (),
) -> Kernels:
    found = _unfused(problem, copied, reshaped)
    needed = found.read | added
    absorbed = sums_within_rows(problem, found.fused, needed | left)
    fused = found.fused | absorbed
    stored = stored_values(problem, fused, needed, degrees, dict(buffers), reshaped, absorbed, apart)
    makers = problem.program.makers
    alone = {index for value in stored if (index := makers[value].index) in absorbed}
    stored -= {result for index in alone for result in problem.program.operations[index].results}
    return replace(found, fused=fused - alone, stored=stored, apart=apart)


@once
def _unfused(problem: Problem, copied: frozenset[tuple[int, int]], reshaped: frozenset[int] = frozenset()) -> Kernels:
    """What XLA:GPU could fuse, and what is read from memory anyway."""
    spread = spread_operands(problem.program, problem.program.operations, copied)
    fused, read = fused_operations(problem), _read_from_memory(problem, spread.keys() | copied, reshaped)
    read |= {first.results[0] for first, *_ in rectifiers_of_poolings(problem.program).values()}
    read |= {*added_poolings(problem.program).values()}
    read |= _turned(problem, fused, read) | frozenset(_turned_updates(problem, fused))
    return Kernels(fused, read, frozenset(), copied, reshaped=reshaped)


def _read_from_memory(
    problem: Problem, copied: Collection[tuple[int, int]], reshaped: frozenset[int]
) -> frozenset[int]:
    """Values that leave a region, or that an operation reads which computes neither operands nor their copies."""
    program, pointwise = problem.program, pointwise_operations(problem)
    needed = {o for region in program.regions for o in region.outputs if isinstance(o, int)}
    needed |= turned_before_padding(program, pointwise, reshaped) | turned_back(program, pointwise)[1]
    products, filters = product_operands(program, pointwise, reshaped), unreversed(program)
    lying = lying_of(program, pointwise).orders
    for operation in program.operations:
        name = operation.primitive.name
        for position, operand in enumerate(operation.operands):
            read = products.get((operation.index, position))
            apart = (read and read.copied) or (operation.index, position) in copied
            if not isinstance(operand, int) or apart or fuses_operands(problem, operation, position):
                continue
            if read:
                needed.add(read.value)
            elif name == "fft":
                needed.add(lies_in(program, lying, operand))
            else:
                needed.add(filters.get(operand, operand) if name == CONVOLUTION else operand)
    return frozenset(needed)


def _turned(problem: Problem, fused: Collection[int], read: frozenset[int]) -> frozenset[int]:
    """Values that are moved to lie as others do (`shardplan.memory.lying`), and that several kernels read then: after
    what is computed from them alone, element by element, on the way. What is moved in tiles each kernel moves itself,
    but none that adds up: what it is multiplied by first is stored for that."""
    program, pointwise = problem.program, pointwise_operations(problem)
    readers, found = readers_in(program), set[int]()
    for value, order in lying_of(program, pointwise).turned.items():
        shape, tiled = program.values[value].shape, not is_read_apart(program, value, order)
        while len(readers[value]) == 1 and readers[value][0].index in pointwise:
            [reader] = readers[value]
            whole = [o for o in reader.operands if isinstance(o, int) and program.values[o].shape == shape]
            if len(whole) > 1 or reader.results[0] in read or not readers.get(reader.results[0]):
                break
            value = reader.results[0]
        if len(_kernels_reading(value, readers, fused, read)) > 1 and not tiled:
            found.add(value)
        for reader in readers[value] if tiled else ():
            behind = set().union(*(_kernels_reading(result, readers, fused, read, inf) for result in reader.results))
            if reader.index in fused and any(program.operations[i].primitive.name in REDUCTIONS for i in behind):
                found.update(reader.results)
    return frozenset(found)


def _turned_updates(problem: Problem, fused: Collection[int]) -> Iterator[int]:
    """What scatters write that is computed from something transposed: a kernel that goes through that in tiles stores
    it. What multiplies without adding up, in numbers of 32 bits, is computed transposed instead."""
    program, makers = problem.program, problem.program.makers
    for scatter in program.operations:
        updates = scatter.operands[2:3] if is_scatter(program, scatter) else ()
        stack, seen = [o for o in updates if isinstance(o, int)], set[int]()
        while stack and len(seen) < _MOST_BEFORE:
            maker = makers.get(stack.pop())
            if maker is None or maker.index not in fused or maker.index in seen:
                continue
            seen.add(maker.index)
            read = [operand for operand in maker.operands if isinstance(operand, int)]
            if maker.primitive.name == "transpose" and _moves_innermost(program, maker):
                source = makers.get(read[0])
                outer = source is not None and is_outer(program, source)
                if not outer or _jax.item_bytes(program.values[read[0]].dtype) < 4:
                    yield from (operand for operand in updates if isinstance(operand, int))
                    break
            elif maker.index in pointwise_operations(problem) or is_view(program, maker):
                stack += read


def _moves_innermost(program: Program, transposition: Operation) -> bool:
    """Whether another dimension than before lies innermost, of those that are larger than 1."""
    shape = operand_type(program, transposition.operands[0]).shape
    moved = [dim for dim in transposition.params["permutation"] if shape[dim] > 1]
    return bool(moved) and moved[-1] != max(moved)


def _kernels_reading(
    value: int,
    readers: Mapping[int, Sequence[Operation]],
    fused: Collection[int],
    read: frozenset[int],
    most: float = 2,
) -> set[int]:
    """Operations, by index, that end kernels which read a value: so many of them, if there are more."""
    found, seen, stack = set[int](), {value}, [value]
    while stack and len(found) < most:
        for reader in readers.get(stack.pop(), ()):
            if reader.index not in fused or not read.isdisjoint(reader.results):
                found.add(reader.index)
            else:
                stack += [result for result in reader.results if result not in seen]
                seen.update(reader.results)
    return found


def adding_products(schedule: Schedule, kernels: Kernels) -> Kernels:
    """What XLA:GPU fuses with this schedule, where products are added to what is in memory."""
    adding = accumulations(schedule)
    products = {found.product for found in adding.values()}
    fused = (kernels.fused | products) - adding.keys()
    read = kernels.read | {found.onto for found in adding.values() if found.onto >= 0}
    return replace(kernels, fused=fused, read=read, adding=adding, leaving=transposed_results(schedule, kernels))
