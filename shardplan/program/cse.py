"""Common subexpressions: results that a program computes twice from the same values, and XLA once for all readers.

>>> import jax, jax.numpy as jnp
>>> from shardplan.program.tracing import trace_program
>>> square = jax.ShapeDtypeStruct((8, 8), "float32")
>>> program = trace_program(lambda x, w: jnp.tanh(x @ w) + jnp.tanh(x @ w), (square, square), {})
>>> [operation.primitive.name for operation in program.operations]
['dot_general', 'tanh', 'dot_general', 'tanh', 'add']
>>> repeated_results(program) == {
...     program.operations[2].results[0]: program.operations[0].results[0],
...     program.operations[3].results[0]: program.operations[1].results[0],
... }
True

Two stacks of the same value in one loop are one, also for the loops that read both.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from shardplan import _jax
from shardplan.memoize import memoize
from shardplan.program.control_flow import Links, links_of
from shardplan.program.program import Constant, Program


@memoize
def repeated_results(program: Program) -> dict[int, int]:
    """Values that are equal to an earlier one, with that one: results of operations, and operands of loops.

    Results behind a barrier count as different, so that the recomputation of `jax.checkpoint` stays. Outputs of the
    program or a branch, and carries of a loop, have memory of their own.
    """
    loops = {o.index: links_of(program, o) for o in program.operations if o.primitive.name == "scan"}
    around = {body: operation.index for operation in program.operations for body in operation.bodies}
    inside = [link for links in loops.values() for link in links.inside if isinstance(link.source, int)]
    stacked = {link.source for link in inside if link.stacked} - {link.source for link in inside if not link.stacked}
    leaving = {o for region in program.regions for o in region.outputs if isinstance(o, int) and o not in stacked}
    first: dict[Any, tuple[int, ...]] = {}
    same: dict[int, int] = {}
    entered: set[int] = set()
    computing, literals = _expression_numbers(program), _literals(program)
    for operation in program.operations:
        _enter(operation.region, (program, loops, around), entered, same)
        if operation.index in loops:
            _equal_stacks(loops[operation.index], leaving, same)
        kind = computing.get(operation.index)
        if kind is None or not leaving.isdisjoint(operation.results):
            continue
        operands = [same.get(o, o) if isinstance(o, int) else literals[id(o)] for o in operation.operands]
        found = first.setdefault((kind, *operands), operation.results)
        if found is not operation.results:
            same |= zip(operation.results, found, strict=True)
    return same


@memoize
def _expression_numbers(program: Program) -> dict[int, int]:
    """Per operation, by index, a number that is equal for operations that compute the same of equal operands.

    Equal numbers need the same primitive, parameters and region. Operations with bodies or effects have none.
    """
    numbers: dict[Any, int] = {}
    found = {}
    for operation in program.operations:
        if operation.bodies or operation.primitive is _jax.optimization_barrier or operation.equation.effects:
            continue
        key = operation.region, operation.primitive, tuple(sorted(operation.params.items()))
        with contextlib.suppress(TypeError):  # parameters that are not known to be equal
            found[operation.index] = numbers.setdefault(key, len(numbers))
    return found


@memoize
def _literals(program: Program) -> dict[int, tuple[bytes, Any]]:
    """The bits and the type of each literal, by the identity of the operand. Bits distinguish zeros by their sign, and
    make a NaN equal to itself.
    """
    constants = (o for operation in program.operations for o in operation.operands if isinstance(o, Constant))
    return {id(constant): (np.asarray(constant.value).tobytes(), constant.aval.dtype) for constant in constants}


def _enter(
    region: int,
    program: tuple[Program, dict[int, Links], dict[int, int]],
    entered: set[int],
    same: dict[int, int],
) -> None:
    """Adds values that enter a loop's body twice to ``same``, after those of the loops around it."""
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


def _equal_stacks(links: Links, leaving: set[int], same: dict[int, int]) -> None:
    """Adds stacks of a loop to ``same`` that are equal to another stack of it, except for outputs."""
    first: dict[int, int] = {}
    for link in links.inside:
        if isinstance(link.source, int) and link.stacked and link.target not in leaving:
            found = first.setdefault(same.get(link.source, link.source), link.target)
            if found != link.target:
                same[link.target] = found
