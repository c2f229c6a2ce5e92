"""How long an H100 computes one element of an operation's result, as XLA's performance model counts it.

>>> import jax, jax.numpy as jnp
>>> from shardplan.tracing import trace_program
>>> program = trace_program(lambda x, y: (jnp.tanh(x) / y) / 2, (jax.ShapeDtypeStruct((8,), "float32"),) * 2, {})
>>> [(operation.primitive.name, cycles_of(program, operation)) for operation in program.operations]
[('tanh', 430), ('div', 19), ('div', 5)]
"""

from __future__ import annotations

from shardplan.program import Constant, Operation, Program
from shardplan.strategy import operand_type

_CYCLES = {
    "digamma": 2870, "lgamma": 1970, "sin": 970, "cos": 970, "erfc": 620, "pow": 510, "erf_inv": 470, "atan2": 431,
    "atan": 431, "tanh": 430, "random_bits": 360, "log1p": 229, "expm1": 190, "cbrt": 178, "log": 166,
    "logistic": 105, "exp": 79, "exp2": 79, "rsqrt": 75, "sqrt": 75, "div": 19, "concatenate": 6,
}  # fmt: skip
"""Clock cycles of one element in float32. What XLA puts together from other operations counts as these do together."""

_MOVING = frozenset(
    {"broadcast_in_dim", "transpose", "rev", "pad", "iota", "slice", "dynamic_slice", "split", "gather", "squeeze"}
    | {"reshape", "expand_dims", "copy", "copy_p", "stop_gradient"}
)
_OTHER, _COMPLEX = 5, 4
"""Cycles of what is not in the table, and how many times as many complex numbers take."""

CYCLES_PER_BYTE = 20.0
"""What an H100 computes in the time in which it reads or writes one byte."""

OVERLAP = 0.95
"""The share of the shorter one of computing and moving bytes that runs during the longer one, by XLA's model."""

BYTES_PER_LAUNCH = 3.35e6
"""Bytes that an H100 reads in the microsecond in which a kernel starts."""


def cycles_of(program: Program, operation: Operation) -> int:
    """The clock cycles of one element of what an operation computes; moving it takes none."""
    name = operation.primitive.name
    if name in _MOVING:
        return 0
    if name == "div" and isinstance(operation.operands[1], Constant):  # a product with the reciprocal
        return _OTHER
    known = _CYCLES.get(name, _OTHER)
    kinds = (operand_type(program, operand).dtype for operand in operation.operands)
    return known * _COMPLEX if any(str(kind).startswith("complex") for kind in kinds) else known
