"""What a program computes twice from the same values: XLA computes it once, and keeps the first result for all readers.

>>> import jax, jax.numpy as jnp
>>> from shardplan.tracing import trace_program
>>> square = jax.ShapeDtypeStruct((8, 8), "float32")
>>> program = trace_program(lambda x, w: jnp.tanh(x @ w) + jnp.tanh(x @ w), (square, square), {})
>>> [operation.primitive.name for operation in program.operations]
['dot_general', 'tanh', 'dot_general', 'tanh', 'add']
>>> repeated_results(program, program.operations) == {
...     program.operations[2].results[0]: program.operations[0].results[0],
...     program.operations[3].results[0]: program.operations[1].results[0],
... }
True

A loop that stacks the same value twice stacks it once, and so do the loops that read both stacks.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from shardplan import _jax
from shardplan.control import Links, links_of
from shardplan.memory.convolutions import spread_once
from shardplan.once import once
from shardplan.program import Constant, Operation, Program
from shardplan.schedule import Schedule

Apart = tuple[tuple[int, int], ...]
"""Operations, by index, that are computed in other layouts than equal ones, each with the number of its own way; and
stacks that lie otherwise than equal ones, by the complement of the value."""


def repeated_results(program: Program, operations: Iterable[Operation], apart: Apart = ()) -> dict[int, int]:
    """Values that are equal to one before, with that one: results of ``operations``, and what enters loops.

    Operations that are ``apart`` are computed once more, and so is what is computed from them.

    What passes a barrier is not known to be equal, so that what `jax.checkpoint` computes anew stays apart. What leaves
    the program or a branch, and what a loop carries, has memory of its own.
    """
    loops = {o.index: links_of(program, o) for o in program.operations if o.primitive.name == "scan"}
    around = {body: operation.index for operation in program.operations for body in operation.bodies}
    inside = [link for links in loops.values() for link in links.inside if isinstance(link.source, int)]
    stacked = {link.source for link in inside if link.stacked} - {link.source for link in inside if not link.stacked}
    leaving = {o for region in program.regions for o in region.outputs if isinstance(o, int) and o not in stacked}
    first: dict[Any, tuple[int, ...]] = {}
    same: dict[int, int] = {}
    entered: set[int] = set()
    computing, literals, ways = _computing(program), _literals(program), dict(apart)
    for operation in operations:
        _enter(operation.region, (program, loops, around), entered, same)
        if operation.index in loops:
            _equal_stacks(loops[operation.index], leaving, same, ways)
        kind = computing.get(operation.index)
        if kind is None or not leaving.isdisjoint(operation.results):
            continue
        operands = [same.get(o, o) if isinstance(o, int) else literals[id(o)] for o in operation.operands]
        found = first.setdefault((kind, ways.get(operation.index), *operands), operation.results)
        if found is not operation.results:
            same |= zip(operation.results, found, strict=True)
    return same


@once
def repeated_in(program: Program, apart: Apart = ()) -> dict[int, int]:
    """Those of a program, in its own order."""
    return repeated_results(program, program.operations, apart)


@once
def apart_in(schedule: Schedule) -> Apart:
    """The operations that a schedule computes in other layouts than the first one that is equal."""
    program, assignment, found = schedule.program, schedule.assignment, list[tuple[int, int]]()
    same, makers = repeated_in(program, ()), program.makers
    ways: dict[int, list[object]] = {}
    for operation in program.operations:
        strategy = assignment.strategies.get(operation.index)
        if strategy is None or not same.keys() >= {*operation.results}:
            continue
        maker = makers.get(same[operation.results[0]]) if operation.results else None
        first = maker.index if maker is not None else None
        other = assignment.strategies.get(first) if first is not None else None
        if first is None or other is None:
            continue
        left = [assignment.values.get(result) for result in operation.results]
        before = [assignment.values.get(result) for result in program.operations[first].results]
        known = ways.setdefault(first, [(other.operands, other.results, before)])
        way = strategy.operands, strategy.results, left
        if way not in known:
            known.append(way)
        if known.index(way):
            found.append((operation.index, known.index(way)))
    lying: dict[int, list[object]] = {}
    stacks = [link.target for links in schedule.problem.links.values() for link in links.inside if link.stacked]
    for stack in (stack for stack in stacks if stack in same):
        known = lying.setdefault(same[stack], [assignment.values.get(same[stack])])
        if (layout := assignment.values.get(stack)) not in known:
            known.append(layout)
        if known.index(layout):
            found.append((~stack, known.index(layout)))
    return tuple(found)


@once
def read_counts(program: Program) -> Counter[int]:
    """How often each value is read, by operations or as what leaves a region."""
    counts = Counter(o for operation in program.operations for o in operation.operands if isinstance(o, int))
    counts.update(o for region in program.regions for o in region.outputs if isinstance(o, int))
    return counts


@once
def read_as_one(schedule: Schedule) -> Counter[int]:
    """The same where repeated values are the first ones, and nothing computes them again."""
    program, same = schedule.program, repeated_in(schedule.program, apart_in(schedule))
    computed = (o for o in program.operations if not o.results or not same.keys() >= {*o.results})
    counts = Counter(same.get(o, o) for operation in computed for o in operation.operands if isinstance(o, int))
    counts.update(o for region in program.regions for o in region.outputs if isinstance(o, int))
    return counts


@once
def padded_together(schedule: Schedule) -> dict[int, list[int]]:
    """What convolutions wait for that are computed twice, in other layouts, and whose images one kernel pads: either's
    image, besides their own filters."""
    program, found = schedule.program, dict[int, list[int]]()
    apart = apart_in(schedule)
    equal, same = repeated_in(program, ()), repeated_in(program, apart)
    for index, position in sorted(spread_once(program)) if apart else ():
        twice = program.operations[index]
        if not position and twice.results[0] in equal and twice.results[0] not in same:
            first = program.makers[equal[twice.results[0]]]
            images = [o for one in (first, twice) for o in one.operands[:1] if isinstance(o, int)]
            for one in (first, twice):
                found[one.index] = [*images, *(o for o in one.operands[1:] if isinstance(o, int))]
    return found


@once
def _computing(program: Program) -> dict[int, int]:
    """Per operation that gives equal results for equal operands, by index: a number, equal where what is computed
    (a primitive with parameters, in one region) is known to be equal."""
    numbers: dict[Any, int] = {}
    found = {}
    for operation in program.operations:
        if operation.bodies or operation.primitive is _jax.optimization_barrier or operation.equation.effects:
            continue
        key = operation.region, operation.primitive, tuple(sorted(operation.params.items()))
        with contextlib.suppress(TypeError):  # parameters that are not known to be equal
            found[operation.index] = numbers.setdefault(key, len(numbers))
    return found


@once
def generated_alike(program: Program, generated: frozenset[int]) -> dict[int, list[int]]:
    """Per value that is ``generated`` from nothing, those that are known to be equal, in any region."""
    first: dict[Any, int] = {}
    same: dict[int, int] = {}
    found: dict[int, list[int]] = {}
    literals = _literals(program)
    for operation in program.operations:
        if len(operation.results) == 1 and operation.results[0] in generated and not operation.equation.effects:
            [result] = operation.results
            operands = [same.get(o, o) if isinstance(o, int) else literals[id(o)] for o in operation.operands]
            key = operation.primitive, tuple(sorted(operation.params.items())), *operands
            with contextlib.suppress(TypeError):  # parameters that are not known to be equal
                same[result] = first.setdefault(key, result)
                found[result] = found.setdefault(same[result], [])
                found[result].append(result)
    return found


@once
def _literals(program: Program) -> dict[int, tuple[bytes, Any]]:
    """The bits and the type of each literal, by the identity of the operand. By their bits, zeros with signs are told
    apart, and what is no number is equal to itself."""
    constants = (o for operation in program.operations for o in operation.operands if isinstance(o, Constant))
    return {id(constant): (np.asarray(constant.value).tobytes(), constant.aval.dtype) for constant in constants}


def _enter(
    region: int,
    program: tuple[Program, dict[int, Links], dict[int, int]],
    entered: set[int],
    same: dict[int, int],
) -> None:
    """Adds what enters a loop's body twice to ``same``, and before that what enters the loops around it."""
    whole, loops, around = program
    if region in entered:
        return
    entered.add(region)
    index = around.get(region)
    if index is None:
        return
    _enter(whole.operations[index].region, program, entered, same)
    if index not in loops:
        return
    carried = {link.target for link in loops[index].inside}
    first: dict[tuple[int, str | None], int] = {}
    for link in loops[index].enter:
        if isinstance(link.source, int) and link.target not in carried:
            found = first.setdefault((same.get(link.source, link.source), link.stacked), link.target)
            if found != link.target:
                same[link.target] = found


def _equal_stacks(links: Links, leaving: set[int], same: dict[int, int], ways: Mapping[int, int]) -> None:
    """Adds the results of a loop to ``same`` that stack what another one stacks, and do not leave."""
    first: dict[tuple[int, int | None], int] = {}
    for link in links.inside:
        if isinstance(link.source, int) and link.stacked and link.target not in leaving:
            key = same.get(link.source, link.source), ways.get(~link.target)
            found = first.setdefault(key, link.target)
            if found != link.target:
                same[link.target] = found
