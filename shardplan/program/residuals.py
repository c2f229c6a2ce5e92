"""Residuals: what the forward part of a step makes, and its backward part reads.

The border between the two parts is found by dependence alone: it is the operation behind which most bytes wait for a
further reader. Values in memory are *materialised*: results of products, convolutions, gathers, scatters and
reductions, operands of products, and sums of two tensors that are read several times (a residual stream). What is
computed element by element from them follows them: kernels that read it compute it.

>>> import jax, jax.numpy as jnp
>>> from shardplan.program.tracing import trace_program
>>> def loss(w, x):
...     return jnp.sum(jnp.tanh(x @ w) @ w)
>>> program = trace_program(jax.grad(loss), (jnp.ones((8, 8)), jnp.ones((64, 8))))
>>> [program.makers[value].primitive.name for value in residuals(program)]
['dot_general', 'tanh', 'broadcast_in_dim']
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from shardplan import rules
from shardplan.memoize import memoize
from shardplan.program.operation_kinds import VIEWS, is_outer_product, is_product, is_view, readers_in
from shardplan.program.program import Operation, Program, operand_type
from shardplan.program.recompute_scans import is_fixed

_ADDITIONS = frozenset({"add", "add_any"})
_MOVES = VIEWS | {"broadcast_in_dim", "transpose", "slice", "rev", "pad", "select_n", "iota", "dynamic_slice", "split"}
_MOVES |= {"concatenate", "copy", "random_bits", "convert_element_type", "sharding_constraint", "device_put"}
"""What kernels do to what they read, on the way."""


def residuals(program: Program) -> tuple[int, ...]:
    """The materialised values of the forward part that can be made again, in the order of the program."""
    return tuple(r for index in sorted(early(program)) for r in _recomputable(program, program.operations[index]))


def _recomputable(program: Program, operation: Operation) -> Iterator[int]:
    if not is_fixed(operation):
        yield from (result for result in operation.results if result in materialised(program))


@memoize
def materialised(program: Program) -> frozenset[int]:
    """The results of operations of the whole program that are in memory."""
    found, readers = set[int](), readers_in(program)
    for index in program.regions[0].operations:
        operation = program.operations[index]
        if is_fixed(operation) or not is_fused(program, operation):
            found.update(operation.results)
        elif operation.primitive.name in _ADDITIONS and len(readers.get(operation.results[0], ())) > 1:
            size = program.values[operation.results[0]].elements
            sizes = [program.values[o].elements for o in operation.read]
            found.update(operation.results if sizes == [size, size] else ())
        if is_product(program, operation):
            found.update(_shown(program, o) for o in operation.read)
    return frozenset(value for value in found if value in program.makers)


def is_fused(program: Program, operation: Operation) -> bool:
    """Whether kernels that read the result compute it: element by element, or as a move of data."""
    if operation.primitive.name in _MOVES or is_view(program, operation) or is_outer_product(program, operation):
        return True
    types = [operand_type(program, operand) for operand in operation.operands]
    results = [program.values[result] for result in operation.results]
    return rules.derive(operation.primitive, operation.params, types, results).single


def _shown(program: Program, value: int) -> int:
    """What a value shows in another shape or order."""
    while (maker := program.makers.get(value)) is not None:
        moved = is_view(program, maker) or maker.primitive.name == "transpose"
        if not moved or not isinstance(maker.operands[0], int):
            break
        value = maker.operands[0]
    return value


def border(program: Program) -> int:
    """The operation, by index, behind which most bytes wait for a further reader."""
    waiting = waiting_bytes(program)
    return waiting.index(max(waiting))


@memoize
def waiting_bytes(program: Program) -> list[int]:
    """The bytes that wait for a further reader behind each operation: those that lead to a product or a loop, which
    gradients of weights do not. What has one reader alone does not wait."""
    makers, values, leading = program.makers, program.values, set[int]()
    for index in reversed(program.regions[0].operations):
        operation = program.operations[index]
        if operation.bodies or is_product(program, operation) or not leading.isdisjoint(operation.results):
            leading.update(operation.read)
    change = [0] * (len(program.operations) + 1)
    first, last = dict[int, int](), dict[int, int]()
    for index in program.regions[0].operations:
        for value in program.operations[index].read:
            first.setdefault(value, index)
            last[value] = index
    for value in materialised(program) & leading:
        if makers[value].region == 0 and first.get(value) != last.get(value):
            change[makers[value].index] += values[value].total_bytes
            change[last[value]] -= values[value].total_bytes
    return list(accumulate(change))


@memoize
def early(program: Program) -> frozenset[int]:
    """The operations of the forward part, by index: those before the border, and what is computed of their results
    alone, element by element, behind it."""
    ends, found, made = border(program), set[int](), materialised(program)
    for index in program.regions[0].operations:
        operation = program.operations[index]
        read = [program.makers[o] for o in operation.read if o in program.makers]
        follows = bool(read) and made.isdisjoint(operation.results) and all(maker.index in found for maker in read)
        if index <= ends or follows:
            found.add(index)
    return frozenset(found)
