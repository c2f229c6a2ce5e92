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
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardplan import _jax
from shardplan.program import Constant, Operation, Program


def repeated_results(program: Program, operations: Iterable[Operation]) -> dict[int, int]:
    """Results that are equal to one of an operation before, with that one.

    What passes a barrier is not known to be equal, so that what `jax.checkpoint` computes anew stays apart. What leaves
    the program, or a loop's body, has memory of its own.
    """
    leaving = {o for region in program.regions for o in region.outputs if isinstance(o, int)}
    first: dict[Any, tuple[int, ...]] = {}
    same: dict[int, int] = {}
    for operation in operations:
        if operation.bodies or operation.primitive is _jax.optimization_barrier or operation.equation.effects:
            continue
        if not operation.results or not leaving.isdisjoint(operation.results):
            continue
        operands = tuple(
            (repr(o.value), str(o.aval)) if isinstance(o, Constant) else same.get(o, o) for o in operation.operands
        )
        try:
            key = operation.region, operation.primitive, operands, tuple(sorted(operation.params.items()))
            found = first.setdefault(key, operation.results)
        except TypeError:  # parameters that are not known to be equal
            continue
        if found is not operation.results:
            same |= zip(operation.results, found, strict=True)
    return same
