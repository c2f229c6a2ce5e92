"""Reductions of rows that XLA:GPU computes within the kernels that read them: those that go through these rows again.

A kernel that goes through rows which it has reduced (`shardplan.memory.rows`) is written in tiles of whole rows. So it
takes in other reductions of such rows, and what these are computed from: the mean, the variance, and all sums of a
normalization's gradient are computed by one kernel, which reads each row once, and what it computes for a row alone it
computes once. Where any other kernel reads such a reduction, it is one of its own.

>>> import jax, jax.numpy as jnp, shardplan
>>> from shardplan.memory.recomputing import kernels_of
>>> def absorbed(function):
...     problem = shardplan.plan(function, 1, jax.ShapeDtypeStruct((64, 64), "float32")).schedule.problem
...     fused = [problem.program.operations[index].primitive.name for index in sorted(kernels_of(problem).fused)]
...     return [name for name in fused if "reduce" in name]
>>> absorbed(lambda x: jax.nn.softmax(x, axis=1) @ x), absorbed(lambda x: (x / (1 + jnp.sum(x * x, 1))) @ x)
(['reduce_max', 'reduce_sum'], [])
"""

from __future__ import annotations

from collections.abc import Collection

from shardplan.memory.fusion import is_view, pointwise_operations, readers_in
from shardplan.memory.rows import LONGEST, cuts_tiles, made_by_rows, row_results
from shardplan.memory.sums import REDUCTIONS
from shardplan.once import once
from shardplan.problem import Problem
from shardplan.program import Operation, Program
from shardplan.strategy import operand_type


@once
def sums_within_rows(problem: Problem, fused: frozenset[int], in_memory: frozenset[int]) -> frozenset[int]:
    """The reductions, by index, that kernels can compute which go through these rows, where operations are ``fused``
    into their readers, but for what is ``in_memory``."""
    program, pointwise = problem.program, pointwise_operations(problem)
    rows = row_results(program, pointwise)
    reductions = frozenset(o.index for o in program.operations if rows and _reduces_rows(program, o))
    found = reductions - {o.index for o in program.operations if not in_memory.isdisjoint(o.results)}
    while found:
        by_rows = made_by_rows(program, pointwise, fused | found, in_memory)
        left = found & _Ends(program, fused | found, in_memory, reductions, by_rows).leading_to_rows()
        if left == found:
            break
        found = left
    return found


def _reduces_rows(program: Program, operation: Operation) -> bool:
    if operation.primitive.name not in REDUCTIONS or is_view(program, operation):
        return False
    shape = operand_type(program, operation.operands[0]).shape
    return tuple(operation.params["axes"]) == (len(shape) - 1,) and shape[-1] <= LONGEST


class _Ends:
    """Where kernels end that compute what is ``fused``, of which some go through rows that they have reduced:
    ``by_rows`` are the values that these compute, or make."""

    def __init__(
        self,
        program: Program,
        fused: Collection[int],
        in_memory: frozenset[int],
        reductions: Collection[int],
        by_rows: frozenset[int],
    ) -> None:
        self._program, self._fused, self._in_memory = program, fused, in_memory
        self._reductions, self._by_rows = reductions, by_rows

    def leading_to_rows(self) -> set[int]:
        """The operations, by index, that are computed in kernels alone which go through rows."""
        readers, found = readers_in(self._program), set[int]()
        for operation in reversed(self._program.operations):
            reading = ((reader, result) for result in operation.results for reader in readers.get(result, ()))
            if operation.index in self._fused and all(self._takes(reader, value, found) for reader, value in reading):
                found.add(operation.index)
        return found

    def _takes(self, reader: Operation, value: int, found: Collection[int]) -> bool:
        """Whether an operation is part of such a kernel alone, or reads what one stores."""
        if reader.index not in self._fused:
            return value in self._by_rows and reader.index not in self._reductions
        if self._in_memory.isdisjoint(reader.results):
            return cuts_tiles(reader) and reader.index in found
        return cuts_tiles(reader) and not self._by_rows.isdisjoint(reader.results)


@once
def narrow_values(problem: Problem, absorbed: frozenset[int]) -> frozenset[int]:
    """What is computed of each row alone, of reductions that kernels compute which go through the rows."""
    found, pointwise, values = set[int](), pointwise_operations(problem), problem.program.values
    for operation in problem.program.operations if absorbed else ():
        read = [o for o in operation.operands if isinstance(o, int)]
        rows = [values[o].elements for o in read if o in found]
        computes = operation.index in pointwise or operation.primitive.name == "broadcast_in_dim"
        passes = (computes or is_view(problem.program, operation)) and rows
        if operation.index in absorbed or (passes and values[operation.results[0]].elements == max(rows)):
            found.update(operation.results)
    return frozenset(found)


@once
def own_of_rows(problem: Problem, absorbed: frozenset[int]) -> frozenset[int]:
    """The values that kernels which go through rows read for nothing else: what they have reduced these rows to, of
    reductions that they compute, and what is computed of that on the way."""
    program, narrow = problem.program, narrow_values(problem, absorbed)
    readers, rows = readers_in(program), row_results(program, pointwise_operations(problem))
    found = set[int]()
    for operation in reversed(program.operations if narrow else ()):
        read = {operand for operand in operation.operands if isinstance(operand, int)}
        if len(operation.results) == 1 and not narrow.isdisjoint({*read, *operation.results}):
            [result] = operation.results
            reading = readers.get(result, ())
            own = [reader.results[0] in rows and reader.operands[0] != result for reader in reading]
            inside = [found.issuperset(reader.results) for reader in reading]
            if reading and all(one or other for one, other in zip(own, inside, strict=True)):
                found.add(result)
    return frozenset(found)
