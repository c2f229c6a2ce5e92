"""A program run operation by operation, as it was traced."""

from __future__ import annotations

from typing import Any

import jax

from shardplan import _jax
from shardplan.program.program import Constant, Program


def run_program(program: Program, arguments: Any) -> list[Any]:
    """The outputs of a program that was traced with these arguments."""

    def run(arrays: list[Any]) -> list[Any]:
        captured = (value for value in program.captured if value not in program.inputs)
        held = [*arrays, *(program.captured[value] for value in captured)]
        values = dict(
            zip((*program.inputs, *(v for v in program.captured if v not in program.inputs)), held, strict=True)
        )
        for index in program.regions[0].operations:
            operation = program.operations[index]
            operands = [o.value if isinstance(o, Constant) else values[o] for o in operation.operands]
            results = _jax.bind_as_traced(operation.equation, operation.primitive, operation.params, operands)
            values |= zip(operation.results, results, strict=True)
        return [o.value if isinstance(o, Constant) else values[o] for o in program.outputs]

    return jax.jit(run)(jax.tree.leaves(arguments))
