"""The clock cycles of an H100 per element of an operation's result, by XLA's performance model.

>>> import jax, jax.numpy as jnp
>>> from shardplan.program.tracing import trace_program
>>> program = trace_program(lambda x, y: (jnp.tanh(x) / y) / 2, (jax.ShapeDtypeStruct((8,), "float32"),) * 2, {})
>>> [(operation.primitive.name, cycles_of(program, operation)) for operation in program.operations]
[('tanh', 430), ('div', 19), ('div', 5)]
"""

from __future__ import annotations

from functools import cache
from typing import Any

from shardplan.memory.gpu import H100
from shardplan.program.program import Constant, Operation, Program, operand_type

_MOVING = frozenset(
    {"broadcast_in_dim", "transpose", "rev", "pad", "iota", "slice", "dynamic_slice", "split", "gather", "squeeze"}
    | {"reshape", "expand_dims", "copy", "copy_p", "stop_gradient"}
)


def cycles_of(program: Program, operation: Operation) -> int:
    """The clock cycles of one element of an operation's result. Data movement takes none."""
    name = operation.primitive.name
    if name in _MOVING:
        return 0
    if name == "div" and isinstance(operation.operands[1], Constant):  # a multiplication by the reciprocal
        return H100.cycles["other"]
    known = H100.cycles.get(name, H100.cycles["other"])
    kinds = [operand_type(program, operand).dtype for operand in operation.operands]
    return known * H100.cycles["complex"] if any(map(_is_complex, kinds)) else known


@cache
def _is_complex(dtype: Any) -> bool:
    return str(dtype).startswith("complex")
