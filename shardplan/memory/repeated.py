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

import contextlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from shardplan import _jax
from shardplan.once import once
from shardplan.program import Constant, Operation, Program


def repeated_results(program: Program, operations: Iterable[Operation]) -> dict[int, int]:
    """Results that are equal to one of an operation before, with that one.

    What passes a barrier is not known to be equal, so that what `jax.checkpoint` computes anew stays apart. What leaves
    the program, or a loop's body, has memory of its own.
    """
    leaving = {o for region in program.regions for o in region.outputs if isinstance(o, int)}
    first: dict[Any, tuple[int, ...]] = {}
    same: dict[int, int] = {}
    computing, literals = _computing(program), _literals(program)
    for operation in operations:
        kind = computing.get(operation.index)
        if kind is None or not leaving.isdisjoint(operation.results):
            continue
        operands = [same.get(o, o) if isinstance(o, int) else literals[id(o)] for o in operation.operands]
        found = first.setdefault((kind, *operands), operation.results)
        if found is not operation.results:
            same |= zip(operation.results, found, strict=True)
    return same


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
def _literals(program: Program) -> dict[int, tuple[bytes, Any]]:
    """The bits and the type of each literal, by the identity of the operand. By their bits, zeros with signs are told
    apart, and what is no number is equal to itself."""
    constants = (o for operation in program.operations for o in operation.operands if isinstance(o, Constant))
    return {id(constant): (np.asarray(constant.value).tobytes(), constant.aval.dtype) for constant in constants}
