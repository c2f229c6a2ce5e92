"""The masked copies of rows in groups that `jax.lax.ragged_dot` reads (`shardplan.groups`).

XLA:GPU multiplies the rows by the matrices of all groups at once: it makes a copy of the rows for each group, zero
where the row is not of that group. The gradient of the matrices masks both of its operands so; others read a
transposition of the copy, which is made from the rows in one kernel where nothing else reads it as it is. It merges
equal copies: those of the forward pass live until the gradient of the matrices. Kernels that mask others by the same
groups, as large, are one where none needs what another is read for: then all these copies are there at once.

The gradient of the rows reads the matrices transposed. The kernel that transposes them is one with another one that
goes through them, such as their update, for which the product then waits: so the copies of one layer are gone before
those of the next are made. Other products read matrices in another shape, a view of these. Where a kernel computes
matrices, such as parameters in another element type, that view alone needs them in memory: what transposes them
computes them anew, so that they are gone when the last of the other products has run.

>>> import jax, jax.numpy as jnp, shardplan
>>> def of_matrices(x, y, z, sizes):
...     numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
...     return [jax.lax.ragged_dot_general(x, rows, sizes, numbers) for rows in (y, z)]
>>> x, sizes = jax.ShapeDtypeStruct((8192, 64), "float32"), jax.ShapeDtypeStruct((32,), "int32")
>>> plan = shardplan.plan(of_matrices, 1, x, x, x, sizes)
>>> round(plan.peak_bytes / (32 * 8192 * 64 * 4))  # of three copies
3
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardplan.groups import MATRICES, RAGGED, axes_of_groups, sums_rows
from shardplan.layout import Layout
from shardplan.memory.combining import Gather
from shardplan.memory.copying import copying_kernel
from shardplan.memory.fusion import pointwise_operations
from shardplan.memory.merging import needs_any
from shardplan.memory.sizes import bytes_in
from shardplan.memory.times import BYTES_MOVED
from shardplan.once import once
from shardplan.problem import Problem
from shardplan.program import Constant, Operation
from shardplan.schedule import Schedule
from shardplan.strategy import Strategy, bytes_of, operand_type

if TYPE_CHECKING:
    from shardplan.memory.graph import Graph
    from shardplan.memory.liveness import Lifetimes
    from shardplan.memory.recomputing import Kernels

_SIZES = 2
"""The position of the sizes of groups among a product's operands."""


@dataclass(frozen=True, slots=True)
class _Masked:
    """A copy of rows, in a layout, masked by the groups of some ``sizes`` that a device has, and maybe transposed."""

    rows: int
    sizes: int | Constant
    layout: Layout | None
    groups: tuple[int, ...]
    transposed: bool


@dataclass(frozen=True, slots=True)
class _Copy:
    """A masked copy: its bytes, the dimensions of its rows, and the operations that read it, each with the position of
    the rows; that of what is read transposed as well reads it where the transposition is made."""

    size: float
    shape: tuple[float, ...]
    readers: list[tuple[Operation, int]]


def masked_bytes(operation: Operation, problem: Problem, strategy: Strategy, position: int) -> float:
    """Bytes of the copy of an operand that one device makes for all of the groups that it has."""
    rows, sizes = (operand_type(problem.program, operation.operands[place]) for place in (position, _SIZES))
    axes = {axis for axes in strategy.operands[position] or () for axis in axes}
    axes |= {*axes_of_groups(operation, strategy)}
    return sizes.shape[-1] * bytes_of(rows) / problem.space.mesh.degree(tuple(axes))


def masked_positions(operation: Operation) -> tuple[int, ...]:
    """The positions of the operands of which a product reads masked copies."""
    return (0, 1) if sums_rows(operation) else (0,)


@once
def _copies(schedule: Schedule) -> dict[_Masked, _Copy]:
    """All masked copies that are in memory, in the order of the program."""
    strategies, found = schedule.assignment.strategies, dict[_Masked, _Copy]()
    products = [o for o in schedule.program.operations if o.primitive.name == RAGGED and o.index in strategies]
    reading = [(o, position) for o in products for position in masked_positions(o)]
    as_they_are = {_masked(schedule, o, position) for o, position in reading if sums_rows(o)}
    for operation, position in reading:
        masked = _masked(schedule, operation, position)
        kinds = (False,) if sums_rows(operation) else (False, True) if masked in as_they_are else (True,)
        size = masked_bytes(operation, schedule.problem, strategies[operation.index], position)
        for transposed in kinds:
            key = replace(masked, transposed=transposed)
            found.setdefault(key, _Copy(size, _block(schedule, masked), [])).readers.append((operation, position))
    return found


def _masked(schedule: Schedule, operation: Operation, position: int) -> _Masked:
    strategy = schedule.assignment.strategies[operation.index]
    rows, sizes = operation.operands[position], operation.operands[_SIZES]
    assert isinstance(rows, int)
    return _Masked(rows, sizes, strategy.operands[position], axes_of_groups(operation, strategy), transposed=False)


def _block(schedule: Schedule, masked: _Masked) -> tuple[float, ...]:
    """The rows that one device masks, in each dimension, and the degree in which groups are split."""
    mesh, axes = schedule.problem.space.mesh, masked.layout
    shape = schedule.program.values[masked.rows].shape
    sides = [side / mesh.degree(axes[place]) if axes is not None else side for place, side in enumerate(shape)]
    return *sides, mesh.degree(masked.groups)


def masked_rows(lifetimes: Lifetimes, schedule: Schedule, donated: Collection[int]) -> Iterator[tuple[float, int, int]]:
    """The bytes of the masked copies, and of transposed matrices, each with the places of the order from which to which
    it is in memory; and of a new value of these, which the kernel that transposes the old one cannot write over it."""
    for copy in _copies(schedule).values():
        places = [(lifetimes.place[operation.index], operation, position) for operation, position in copy.readers]
        first = min(lifetimes.put_beside.get((o.index, position), place) for place, o, position in places)
        yield copy.size, first, max(place for place, _, _ in places)
    program, layouts = schedule.program, schedule.assignment.values
    tied = {program.outputs[number]: program.inputs[p] for number, p in program.ties.items() if p in donated}
    for (index, position), sources in lifetimes.turned.items():
        read, place = program.operations[index].operands[position], lifetimes.place[index]
        begins = lifetimes.put_beside.get((index, position), place)
        if isinstance(read, int):
            yield bytes_in(schedule, read, layouts[read]), begins, place
        for result in lifetimes.order[begins].results:
            if tied.get(result) in sources:
                yield bytes_in(schedule, result, layouts[result]), begins, begins


def mask_rows(graph: Graph, kernels: Kernels) -> None:
    """Adds the kernels to a graph that make masked copies, which products then need instead of the rows."""
    copies = {key: copy for key, copy in _copies(graph.schedule).items() if copy.readers[0][0].index in graph.needs}
    nodes: dict[_Masked, int] = {}
    for masked, copy in sorted(copies.items(), key=lambda item: item[0].transposed):
        operation, position = copy.readers[0]
        own, read = replace(masked, transposed=False), Gather(masked.rows, masked.layout or ())
        node = nodes[masked] = copying_kernel(graph, (operation.index, operation), read, copy.size / BYTES_MOVED)
        if masked.transposed and own in nodes:
            graph.needs[node], graph.values[node] = {nodes[own]}, set()
            graph.takes[node] *= 2
    products: dict[int, Operation] = {}
    views: dict[tuple[int, int], int] = {}
    for masked, copy in copies.items():
        view = node = nodes[masked]
        if masked.transposed:  # products read a view of it
            view = graph.add(graph.place[node], {node}, set(), 0.0)
        for operation, position in copy.readers:
            products[operation.index] = operation
            if masked.transposed or sums_rows(operation):
                graph.beside[operation.index, position], views[operation.index, position] = node, view
    for index, operation in products.items():
        positions = masked_positions(operation)
        others = {o for n, o in enumerate(operation.operands) if n not in positions and isinstance(o, int)}
        gone = graph.reads[index].difference(*map(graph.sources, others))
        graph.needs[index] -= {maker for value in gone if (maker := graph.maker(value)) is not None}
        graph.needs[index] |= {views[index, position] for position in positions}
        graph.values[index] -= gone
    readers = _readers(graph) if kernels.turned else {}
    for index, operation in products.items():
        if (index, MATRICES) in kernels.turned:
            _turn_matrices(graph, operation, kernels.turned[index, MATRICES], readers)
    into = _together(graph, copies, nodes)
    graph.beside |= {read: into[node] for read, node in graph.beside.items() if node in into}


def _readers(graph: Graph) -> dict[int, list[int]]:
    """Per value, the kernels that read it."""
    found = dict[int, list[int]]()
    for node, reads in graph.reads.items():
        for value in reads:
            found.setdefault(value, []).append(node)
    return found


def _turn_matrices(
    graph: Graph, operation: Operation, sources: Collection[int], readers: Mapping[int, Sequence[int]]
) -> None:
    """Lets a product that reads matrices transposed wait for the kernel that writes the transposition with what it
    computes of them, or else for what they are computed from, instead of for these."""
    index, matrices = operation.index, operation.operands[MATRICES]
    others = {o for n, o in enumerate(operation.operands) if n != MATRICES and isinstance(o, int)}
    gone = (graph.reads[index] & {matrices}).difference(sources, *map(graph.sources, others))
    graph.needs[index] -= {maker for value in gone if (maker := graph.maker(value)) is not None}
    graph.values[index] -= gone
    node = _turned_by(graph, operation, sources, readers)
    if node is not None:
        view = graph.add(graph.place[node], {node}, set(), 0.0)  # one of that kernel's results, in another shape
        graph.needs[index].add(graph.add(graph.place[node], {view}, set(), 0.0))
        graph.beside[index, MATRICES] = node
    else:
        graph.needs[index] |= {maker for value in sources if (maker := graph.maker(value)) is not None}


def _turned_by(
    graph: Graph, operation: Operation, sources: Collection[int], readers: Mapping[int, Sequence[int]]
) -> int | None:
    """The kernel that writes the transposition of a product's matrices with what it computes of them: one that goes
    through the same values element by element, and neither needs the product nor is needed for it."""
    values, matrices, index = graph.program.values, operation.operands[MATRICES], operation.index
    assert isinstance(matrices, int)
    shape, pointwise = values[matrices].shape, pointwise_operations(graph.schedule.problem)
    whole = [value for value in sources if values[value].shape == shape]
    for node in sorted({node for value in whole for node in readers.get(value, ())} & pointwise):
        made = graph.program.operations[node].results
        if node == index or not made or values[made[0]].shape != shape:
            continue
        if not needs_any(graph.needs, node, index) and not needs_any(graph.needs, index, node):
            return node
    return None


def _together(graph: Graph, copies: Mapping[_Masked, _Copy], nodes: Mapping[_Masked, int]) -> dict[int, int]:
    """Lets kernels be one that mask as many rows by the same groups, and do not need each other: per kernel that is
    part of another one now, that."""
    into, leaders = dict[int, int](), dict[object, list[int]]()
    for masked, copy in copies.items():
        node = nodes[masked]
        if masked.transposed:
            continue
        alike = leaders.setdefault((masked.sizes, masked.groups, copy.shape), [])
        apart = (o for o in alike if not needs_any(graph.needs, node, o) and not needs_any(graph.needs, o, node))
        other = next(apart, None)
        if other is None:
            alike.append(node)
            continue
        into[node] = other
        graph.needs[other] |= graph.needs.pop(node)
        for needs in (needs for needs in graph.needs.values() if node in needs):
            needs.remove(node)
            needs.add(other)
        graph.take_in({node: other})
    return into
