"""Sums that a step computes twice from the same values: they are reduced over devices once.

XLA computes equal things once, but every partial result that the partitioner leaves is summed up by a collective of its
own, and XLA merges no two collectives that bring the same: `x.mean()` beside `x.std()`, which computes the mean again,
would send it twice. So a sum of one array's elements (or their largest, and so on) that equals one before is read from
there. Products that are computed twice stay: they are large, and each may suit its readers by a layout of its own. But
what scans of one iteration compute again (`shardplan.program.inline_single_trip_scans`) is one with what they computed
before, all of it: a layout of its own for a little of that would have XLA compute all that follows once more, and keep
it besides.

>>> import jax, jax.numpy as jnp
>>> from shardplan.program.tracing import trace_program
>>> program = trace_program(lambda x: (x - x.mean()) / x.std(), (jax.ShapeDtypeStruct((8, 8), "float32"),))
>>> [operation.primitive.name for operation in program.operations].count("reduce_sum")
2
"""

from __future__ import annotations

from dataclasses import replace

from shardplan import rules
from shardplan.program.cse import repeated_results
from shardplan.program.program import Constant, Operation, Program


def reuse_results(program: Program, every: bool) -> Program:
    """The program whose operations read each sum where it was computed first, or ``every`` result; what nobody reads
    any more is there."""
    same, makers = repeated_results(program), program.makers
    made = {value: found for value, found in same.items() if value in makers}
    first = {value: found for value, found in made.items() if every or _sums(program, makers[value])}

    def reading(operation: Operation) -> Operation:
        if not any(isinstance(operand, int) and operand in first for operand in operation.operands):
            return operation
        operands = (first.get(o, o) if isinstance(o, int) else o for o in operation.operands)
        return replace(operation, operands=tuple(operands))

    return replace(program, operations=tuple(map(reading, program.operations))) if first else program


def _sums(program: Program, operation: Operation) -> bool:
    """Whether it reduces one array, so that devices may each compute a part of its sums (or largest elements)."""
    if len(operation.operands) != 1:
        return False
    operands = [o.aval if isinstance(o, Constant) else program.values[o] for o in operation.operands]
    results = [program.values[result] for result in operation.results]
    rule = rules.derive(operation.primitive, operation.params, operands, results)
    return rule.known and any(slot.reducer for split in rule.padded_splits for slot in split.results)
