"""Reuse of repeated sums: a sum that a step computes twice from the same values is reduced over devices once.

XLA merges equal operations, but it reduces every partial result by a collective of its own, and does not merge
collectives with equal results. `x.std()` computes `x.mean()` again: the mean would be sent twice. A reduction of one
array (a sum, a maximum) that is equal to an earlier one is therefore replaced by it. Repeated dots stay: they are
large, and each can have the layout of its readers.

All results that scans of one iteration recompute (`shardplan.program.inline_single_trip_scans`) are merged with the
first ones. A second layout for a few of them would make XLA compute and store all later results twice.

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
    """The program whose operations read each repeated sum where it was computed first, or ``every`` repeated result.

    Operations that have lost all readers stay in the program.
    """
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
    """Whether an operation reduces one array, so that each device may compute a partial sum (or maximum)."""
    if len(operation.operands) != 1:
        return False
    operands = [o.aval if isinstance(o, Constant) else program.values[o] for o in operation.operands]
    results = [program.values[result] for result in operation.results]
    rule = rules.derive(operation.primitive, operation.params, operands, results)
    return rule.known and any(slot.reducer for split in rule.padded_splits for slot in split.results)
