"""Loops of which XLA:GPU takes the first iteration out, so that reductions run beside the iteration after, and the
stacks that are gathered for loops.

A reduce-scatter that an island states, and whose result a scan stacks, is sent while the next iteration computes: that
of a product, or of what stays partial until it is put into the form that is stacked, or is stacked (the gradient of a
weight that another loop inside reads in each iteration). So the first iteration runs before the loop, as part of what
is around it. It takes its slices from stacks as a gather leaves them, the gathered dimension first. The loop reads a
copy of that in the usual order, so that both are in memory from the gather up to that iteration. So are weights that
lie along another dimension than the first, and that the program turns for its loops. Reduce-scatters that XLA makes of
all-reduces come too late for this. Loops that stay whole read nothing but the copy: each stack is copied before the
next one is gathered. So do the loops of a backward pass where the forward loop's gathers have what it stacks in such an
order.

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
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardplan.layout import Layout
from shardplan.memory.combining import Gather
from shardplan.memory.fusion import is_view, pointwise_operations
from shardplan.memory.gathering import last_gathered
from shardplan.memory.narrower import bytes_brought
from shardplan.memory.relaid import lies_turned
from shardplan.memory.sizes import bytes_in, layout_left
from shardplan.once import once
from shardplan.program import Operation, Program
from shardplan.schedule import Schedule
from shardplan.steps import Step

if TYPE_CHECKING:
    from shardplan.memory.graph import Graph
    from shardplan.memory.liveness import Lifetimes

_FORMATTING = frozenset({"convert_element_type", "transpose", "reshape", "squeeze", "expand_dims", "neg", "copy"})


@once
def peeled_loops(schedule: Schedule) -> frozenset[int]:
    """The scans whose first iteration runs apart, by index."""
    return frozenset(sent_late(schedule))


@once
def sent_late(schedule: Schedule) -> dict[int, dict[int, tuple[Step, float]]]:
    """What scans send while their next iteration computes, and of the last one once they are over: per scan, by index,
    the stacks into which that goes, each with the collective and the bytes that this scatters."""
    program, links = schedule.program, schedule.problem.links
    scattered = {
        operation.results[0]: sent
        for operation in program.operations
        if operation.region and operation.results and operation.index in schedule.assignment.strategies
        if (sent := _scattered_itself(schedule, operation)) is not None
    }
    makers = program.makers
    reads = Counter(o for operation in program.operations for o in operation.operands if isinstance(o, int))
    found: dict[int, dict[int, tuple[Step, float]]] = {}
    for loop in program.operations:
        for link in links[loop.index].inside if loop.bodies else ():
            source = link.source
            if not link.stacked or not isinstance(source, int):
                continue
            sent = _scattered(schedule, source, schedule.link_layout(link))
            value = source
            while value in makers and value not in scattered and _is_formatting(program, makers[value]):
                operand = makers[value].operands[0]
                value = operand if isinstance(operand, int) and reads[operand] == 1 else -1
            if value in scattered and makers[value].region in loop.bodies:
                sent = scattered[value]
            if sent is not None:
                found.setdefault(loop.index, {})[link.target] = sent
    return found


def send_last_iterations(graph: Graph) -> None:
    """Adds the collectives to a graph that send what was not yet sent once loops are over: one for each loop."""
    for loop, stacks in sent_late(graph.schedule).items():
        for stack, sent in stacks.items() if loop in graph.reads else ():
            end = graph.sent[stack] = graph.collective(("last iteration", loop), sent, loop)
            graph.needs[graph.starts[end]].add(loop)


def _scattered_itself(schedule: Schedule, operation: Operation) -> tuple[Step, float] | None:
    """What an island reduces and scatters of the result of an operation, or what that changes no more than the form of:
    a value that stays partial until it is read."""
    strategy, steps = schedule.assignment.strategies[operation.index], schedule.result_steps(operation, 0)
    if any(step.kind == "reduce-scatter" for step in steps):
        left = layout_left(schedule.problem, operation, strategy, 0)
        passed_on = schedule.is_partial(operation.results[0], strategy.results[0])  # a sum, by a linear operation
        stated = passed_on or schedule.island_dtype(operation) is not None
        return _of_scatter(schedule, operation.results[0], left, steps) if stated else None
    if not _is_formatting(schedule.program, operation) or not isinstance(operation.operands[0], int):
        return None
    return _scattered(schedule, operation.operands[0], strategy.operands[0])


def _is_formatting(program: Program, operation: Operation) -> bool:
    """Whether an operation changes no more than the form of what it reads: also a sum along what has one element."""
    return operation.primitive.name in _FORMATTING or is_view(program, operation)


def _scattered(schedule: Schedule, value: int, layout: Layout | None) -> tuple[Step, float] | None:
    """What is scattered of a value that stays partial where it is read in a layout."""
    if layout is None or layout == schedule.assignment.values.get(value, layout):
        return None
    route = schedule.route(value, layout)
    return _of_scatter(schedule, value, route.source, route.steps)


def _of_scatter(schedule: Schedule, value: int, source: Layout, steps: Sequence[Step]) -> tuple[Step, float] | None:
    """The reduce-scatter on the way from a layout, with its bytes on one device."""
    for step, before in zip(steps, (source, *(step.layout for step in steps)), strict=False):
        if step.kind == "reduce-scatter":
            return step, bytes_brought(schedule, value, before)
    return None


def held_twice(lifetimes: Lifetimes, schedule: Schedule) -> dict[Gather, tuple[int, int]]:
    """The stacks that loops read of which another copy is in memory, with the places from and up to which it is.

    What a gather leaves is, beside the copy that loops read, up to where the first of the iterations that run apart
    begins. Where none does, each stack is copied before the next one is gathered: then it is the largest alone, before
    the loop (XLA may gather any of them last). So is the largest of those that are copied because the loop that stacks
    them gathers what it stacks.
    """
    found = dict[Gather, tuple[int, int]]()
    for loop in (schedule.program.operations[index] for index in sorted(peeled_loops(schedule))):
        start = lifetimes.start(loop)
        for stack, first in _gathered_for(lifetimes, schedule, loop):
            if _is_copied(schedule, stack) and first < start:
                found[stack] = first, max(found.get(stack, (first, start))[1], start)
        turned = _turned_for(lifetimes, schedule, loop)  # there for what turns it anyhow
        found |= {stack: (place + 1, start) for stack, place in turned if place < start}
    largest: dict[int, tuple[float, Gather]] = {}
    for stack, place in gathered_before(lifetimes, schedule).items():
        size = bytes_in(schedule, stack.value, stack.layout)
        if _is_copied(schedule, stack) and size > largest.get(place, (0.0, stack))[0]:
            largest[place] = size, stack
    for place, (_, stack) in largest.items():
        found.setdefault(stack, (place, place))
    return found | _stacked_otherwise(lifetimes, schedule)


def _stacked_otherwise(lifetimes: Lifetimes, schedule: Schedule) -> dict[Gather, tuple[int, int]]:
    """For each loop the largest of the stacks that it reads in another order of dimensions in memory than that in which
    another loop stacks them: one gathers over another dimension than the first what it stacks, or what it computes of
    each element of that, and both are in the order in which a gather leaves them; or its products read what it computes
    of them in another order (`shardplan.memory.relaid`)."""
    pointwise = pointwise_operations(schedule.problem)
    links, found = schedule.problem.links, dict[Gather, tuple[int, int]]()
    loops = [operation for operation in lifetimes.order if operation.bodies]
    sources = {link.target: link.source for loop in loops for link in links[loop.index].inside if link.stacked}
    for loop in loops:
        start, copied = lifetimes.start(loop), list[tuple[float, int]]()
        for link, value in lifetimes.kept_around(loop):
            source = sources.get(value) if link.stacked else None
            turned = isinstance(source, int) and lies_turned(schedule.program, pointwise, link.target)
            if isinstance(source, int) and (turned or _is_gathered(lifetimes, schedule, source)):
                copied.append((bytes_in(schedule, value, schedule.assignment.values[value]), value))
        apart = loop.index in peeled_loops(schedule)
        for _, value in copied if apart else sorted(copied)[-1:]:
            place = max(start - 1, 0)
            found[Gather(value, schedule.assignment.values[value])] = place, start if apart else place
    return found


def _is_gathered(lifetimes: Lifetimes, schedule: Schedule, value: int) -> bool:
    """Whether a value, or what is computed of each of its elements, is gathered over another dimension than the first
    by what reads it."""
    choices, values = schedule.problem.choices, schedule.assignment.values
    seen, stack = {value}, [value]
    while stack:
        made = stack.pop()
        for reader in lifetimes.readers.get(made, ()):
            strategy = schedule.assignment.strategies.get(reader.index)
            layout = strategy.operands[reader.operands.index(made)] if strategy is not None else None
            if layout is not None and layout != values.get(made, layout):
                if _is_copied(schedule, Gather(made, layout)):
                    return True
            elif reader.index in choices and choices[reader.index].pointwise:
                stack += (result for result in reader.results if result not in seen)
                seen.update(reader.results)
    return False


def gathered_before(lifetimes: Lifetimes, schedule: Schedule) -> dict[Gather, int]:
    """The stacks that are gathered for loops that no iteration is taken out of, with the places before these."""
    found, peeled = dict[Gather, int](), peeled_loops(schedule)
    for loop in (operation for operation in lifetimes.order if operation.bodies and operation.index not in peeled):
        start = lifetimes.start(loop)
        for stack, first in _gathered_for(lifetimes, schedule, loop):
            if first == start:
                found.setdefault(stack, max(start - 1, 0))
    return found


def _gathered_for(lifetimes: Lifetimes, schedule: Schedule, loop: Operation) -> Iterator[tuple[Gather, int]]:
    """The stacks that are gathered for a loop, with the place of their first reader: others may read them too."""
    values = schedule.assignment.values
    for link, value in lifetimes.kept_around(loop):
        layout = schedule.link_layout(link)
        if link.stacked and layout != values.get(value, layout) and last_gathered(schedule, value, layout) is not None:
            shared = layout == schedule.copy(value)
            yield Gather(value, layout), lifetimes.copied[value][0] if shared else lifetimes.start(loop)


def _turned_for(lifetimes: Lifetimes, schedule: Schedule, loop: Operation) -> Iterator[tuple[Gather, int]]:
    """What the program turns into stacks for a loop, where it is gathered for that, with the place where it is turned:
    the iteration that runs apart takes its slices from what is not turned."""
    program, assignment = schedule.program, schedule.assignment
    for link, value in lifetimes.kept_around(loop):
        maker = turned = program.makers.get(value)
        if not link.stacked or turned is None or turned.primitive.name != "transpose":
            continue
        while maker is not None and (maker is turned or maker.primitive.name == "sharding_constraint"):
            [operand], [layout] = maker.operands, assignment.strategies[maker.index].operands
            if not isinstance(operand, int) or layout is None:
                break
            if layout != assignment.values[operand]:
                yield Gather(operand, layout), lifetimes.place[turned.index]
                break
            maker = program.makers.get(operand)


def _is_copied(schedule: Schedule, stack: Gather) -> bool:
    """Whether loops read a copy of what a gather leaves: it leaves the dimension that it gathers first."""
    gathered = last_gathered(schedule, stack.value, stack.layout)
    return gathered is not None and gathered[1] > 0
