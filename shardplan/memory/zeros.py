"""Zeros that scatters write into: made all at once, long before they are needed.

A scatter into zeros needs them in memory; of several that are added, and nothing else, XLA makes one. Equal zeros are
one value to XLA:GPU, which each scatter but writes into a copy of its own; and one kernel, that of the first operation
that computes with such zeros, makes all of these. So the gradients of a table that was read twice exist from the first
scatter on, or from where the kernel stands in the order of `shardplan.memory.hiding`, which puts it where it fills a
wait. Rectifiers compare with zeros as well: where one has the size of what is scatters into later, the zeros for the
backward pass are made in the forward pass, one more than there are scatters, which the gradients of rectifiers read.

>>> import jax, jax.numpy as jnp, shardplan
>>> def step(table, ids, others):
...     return jnp.sum(jax.nn.relu(table)[ids] * jax.nn.relu(table)[others])
>>> table, ids = jax.ShapeDtypeStruct((64, 8), "float32"), jax.ShapeDtypeStruct((16,), "int32")
>>> problem = shardplan.plan(jax.grad(step), 1, table, ids, ids).schedule.problem
>>> [filling] = fillings_of(problem)
>>> [[operation.primitive.name for operation in part] for part in (filling.readers, filling.scatters, filling.behind)]
[['max', 'gt', 'max', 'gt'], ['scatter-add', 'scatter-add'], ['select_n', 'select_n']]
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardplan.layout import Layout
from shardplan.memory.fusion import is_scatter, readers_in, scatters_as_one
from shardplan.memory.pipelining import peeled_loops
from shardplan.memory.pooled import rectifiers_of_poolings
from shardplan.memory.repeated import generated_alike
from shardplan.memory.sizes import bytes_in, layout_left
from shardplan.memory.times import BYTES_MOVED
from shardplan.once import once
from shardplan.problem import Problem
from shardplan.program import Constant, Operation
from shardplan.schedule import Schedule

if TYPE_CHECKING:
    from shardplan.memory.graph import Graph
    from shardplan.memory.liveness import Lifetimes


_ADDITIONS = frozenset({"add", "add_any"})


@dataclass(frozen=True, slots=True)
class Filling:
    """Operations that use tensors of one shape filled with one number: scatters that write into them, and kernels that
    read them (``readers``), of which some are computed from a scatter's result (``behind``)."""

    scatters: list[Operation] = field(default_factory=list)
    readers: list[Operation] = field(default_factory=list)
    behind: list[Operation] = field(default_factory=list)


@once
def fillings_of(problem: Problem) -> list[Filling]:
    """What operations use, a scatter among them, in the order of the program."""
    numbers: dict[int, Any] = {}
    for operation in problem.program.operations:
        if operation.primitive.name == "broadcast_in_dim" and isinstance(operation.operands[0], Constant):
            numbers[operation.results[0]] = operation.operands[0].value
    values, found = problem.program.values, dict[tuple[object, ...], Filling]()
    filled = {values[v].shape for o in problem.program.operations if (v := _filled_by(problem, o, numbers)) is not None}
    one = scatters_as_one(problem)
    for operation in problem.program.operations if filled else ():
        first = problem.program.operations[one.get(operation.index, [operation.index])[0]]
        if not operation.results or values[operation.results[0]].shape not in filled:
            continue
        scatters = is_scatter(problem.program, first)
        for number, value in _numbers_in(problem, first, numbers):
            tensor = values[value]
            filling = found.setdefault((str(number), tensor.shape, tensor.dtype, operation.region), Filling())
            (filling.scatters if scatters else filling.readers).append(operation)
    return [_parted(problem, filling) for filling in found.values() if filling.scatters]


def _parted(problem: Problem, filling: Filling) -> Filling:
    """A filling with the readers apart that are computed from what its scatters make."""
    behind = {result for scatter in filling.scatters for result in scatter.results}
    for operation in problem.program.operations[filling.scatters[0].index :]:
        if not behind.isdisjoint([o for o in operation.operands if isinstance(o, int)]):
            behind.update(operation.results)
    parts: tuple[list[Operation], list[Operation]] = [], []
    for reader in filling.readers:
        parts[not behind.isdisjoint(reader.results)].append(reader)
    return Filling(filling.scatters, *parts)


def _numbers_in(problem: Problem, operation: Operation, numbers: Mapping[int, Any]) -> Iterator[tuple[Any, int]]:
    """The numbers with which an operation computes at each element, or into which it scatters, each with a value of the
    shape and type of what is filled with it."""
    values, choices = problem.program.values, problem.choices.get(operation.index)
    if is_scatter(problem.program, operation):
        filled = _filled_by(problem, operation, numbers)
        if filled is not None:
            yield numbers[filled], filled
    elif choices is not None and choices.pointwise and not _adds_nothing(operation):
        shape = values[operation.results[0]].shape
        whole = [o for o in operation.operands if isinstance(o, int) and values[o].shape == shape]
        found = {(str(numbers[o]), values[o].dtype): (numbers[o], o) for o in whole if o in numbers}
        if whole:
            constants = (o.value for o in operation.operands if isinstance(o, Constant))
            found |= {(str(number), values[whole[0]].dtype): (number, whole[0]) for number in constants}
        yield from found.values()


def _adds_nothing(operation: Operation) -> bool:
    """Whether an operation adds the constant zero, as optimizers do to what they take roots of: XLA leaves that out."""
    added = operation.operands if operation.primitive.name in _ADDITIONS else operation.operands[1:]
    sums = operation.primitive.name in _ADDITIONS | {"sub"}
    return sums and any(isinstance(o, Constant) and o.value == 0 for o in added)


def _filled_by(problem: Problem, operation: Operation, numbers: Container[int]) -> int | None:
    """The value into which an operation scatters, where it is filled with one of the numbers."""
    into = operation.operands[0] if is_scatter(problem.program, operation) else None
    return into if isinstance(into, int) and into in numbers else None


def fill_apart(graph: Graph, fused: Collection[int]) -> None:
    """Adds a kernel to a graph for the scatters into equal zeros that no other kernel reads before, or for the only
    one. Of its results, numbered after all values, each scatter writes into one. All kernels read what is filled with
    which they compute, and so do scatters: what they write nothing to they copy."""
    schedule = graph.schedule
    for filling in fillings_of(schedule.problem):
        for (_, degree), (scatters, readers, behind) in _alike(schedule, filling, fused).items():
            here = [index for index in scatters if index in graph.reads]
            size = schedule.program.values[filling.scatters[0].results[0]].total_bytes / degree
            for index in here:
                _read_filled(graph, index, index, size)
            for index in behind if here else ():
                for node in kernels_with(graph, index):
                    _read_filled(graph, node, here[0], size)
            if here and not readers:
                made = len(here) + bool(behind)
                node = graph.add(here[0] - 0.5, set(), set(), made * size / BYTES_MOVED)
                graph.parts |= {node} if made > 1 else set()
                for index in here:
                    graph.filling[index] = node
                    graph.needs[index].add(node)
                    graph.values[index].add(len(schedule.program.values) + index)


def _read_filled(graph: Graph, node: int, scatter: int, size: float) -> None:
    """Lets a kernel that is bound by memory read as many bytes of what is filled, as the value that a scatter reads."""
    if node in graph.moves:
        value = len(graph.program.values) + scatter
        graph.filled[value] = size
        graph.moves[node][0].add(value)
        graph.takes[node] = graph.busy(graph.computing.get(node, 0.0), node)


def kernels_with(graph: Graph, index: int) -> set[int]:
    """The kernels of a graph that compute an operation, on the way or at last."""
    found, seen, stack = set[int](), set[int](), [index]
    while stack:
        index = stack.pop()
        if index in graph.reads:
            found.add(index)
        elif index not in seen:
            seen.add(index)
            readers = (
                reader
                for value in graph.program.operations[index].results
                for reader in readers_in(graph.program).get(value, ())
            )
            stack += [reader.index for reader in readers]
    return found


def copy_for_poolings(graph: Graph) -> None:
    """Adds a kernel to a graph for each copy of zeros that a pooling's gradient scatters into, where others read these
    zeros after it."""
    for index, (rectifier, *others) in rectifiers_of_poolings(graph.program).items():
        strategy = graph.schedule.assignment.strategies.get(index)
        if index in graph.reads and others and strategy is not None:
            result = graph.program.operations[index].results[0]
            left = layout_left(graph.schedule.problem, graph.program.operations[index], strategy, 0)
            takes = 2 * bytes_in(graph.schedule, result, left) / BYTES_MOVED
            maker = graph.maker(rectifier.results[0])
            graph.filling[index] = graph.add(index - 0.5, set() if maker is None else {maker}, set(), takes)
            graph.needs[index].add(graph.filling[index])


def _alike(
    schedule: Schedule, filling: Filling, fused: Collection[int]
) -> dict[tuple[Layout, float], tuple[list[int], list[int], list[int]]]:
    """The scatters and the readers of a filling, and those behind a scatter, by their indices, per layout and number of
    parts.

    What is added to something is scattered into that instead (such scatters are ``fused``), but where the sum of all
    devices' parts comes in between.
    """
    problem, one, fused = schedule.problem, scatters_as_one(schedule.problem), frozenset(fused)
    alike: dict[tuple[Layout, float], tuple[list[int], list[int], list[int]]] = {}
    for kind, operations in enumerate((filling.scatters, filling.readers, filling.behind)):
        for operation in operations:
            strategy = schedule.assignment.strategies.get(operation.index)
            if strategy is None:
                continue
            merged = not kind and operation.index in fused and not schedule.result_steps(operation, 0)
            parts = one.get(operation.index, ())  # of which some may be reduced before they are added
            if not merged and fused.issuperset(parts):
                layout, domain = layout_left(problem, operation, strategy, 0), problem.domain(operation.results[0])
                degree = domain.parts[layout]
                alike.setdefault((layout, degree), ([], [], []))[kind].append(operation.index)
    return alike


def filled_before(
    schedule: Schedule, lifetimes: Lifetimes, begins: Mapping[int, int]
) -> Iterator[tuple[Layout, float, int, int]]:
    """The layouts and bytes of fillings, each with the places of the order from which to which they are in memory: up
    to the scatter whose result takes their place, or to the last kernel that reads them, which may compute anew what
    an operation made of them long before. Where a kernel makes nothing else, it runs before the operation at which the
    filling of a scatter ``begins``."""
    place, there = lifetimes.place, _kept_for(schedule)
    for filling in fillings_of(schedule.problem):
        whole = schedule.program.values[filling.scatters[0].results[0]].total_bytes
        for (layout, degree), (scatters, before, behind) in _alike(schedule, filling, lifetimes.fused).items():
            readers = before + behind
            first = min(place[begins.get(index, index)] for index in scatters + readers)
            own = [index for index in scatters if index not in there]
            for last in own:
                yield layout, whole / degree, first, place[last] - 1
            if own and readers:
                until = max(_computed_until(schedule, lifetimes, index) for index in readers)
                yield layout, whole / degree, first, until


@once
def _kept_for(schedule: Schedule) -> set[int]:
    """The scatters into zeros that are kept for loops before: those of iterations that run apart, to which equal values
    around them are one."""
    program, generated, links = schedule.program, schedule.problem.generated, schedule.problem.links
    around = {body: index for index in peeled_loops(schedule) for body in program.operations[index].bodies}
    scatters = [o for o in program.operations if o.region in around and is_scatter(program, o)] if around else []
    kept = {
        (link.source, loop.region)
        for loop in (program.operations if scatters else ())
        for link in (links[loop.index].enter if loop.bodies else ())
        if isinstance(link.source, int) and link.source in generated
    }
    alike = generated_alike(program, generated) if kept else {}
    found = set[int]()
    for scatter in scatters:
        into, region = scatter.operands[0], program.operations[around[scatter.region]].region
        if isinstance(into, int) and any((equal, region) in kept for equal in alike.get(into, ())):
            found.add(scatter.index)
    return found


def _computed_until(schedule: Schedule, lifetimes: Lifetimes, index: int) -> int:
    """The last place where an operation is computed: that of a kernel that reads it, if none stores its result."""
    results = (result for result in schedule.program.operations[index].results if result not in lifetimes.held)
    read = (lifetimes.reads[result][1] for result in results if result in lifetimes.reads)
    return max(lifetimes.place[index], *read, 0)
