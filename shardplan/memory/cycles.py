"""How long an H100 computes one element of what an operation makes, as XLA's performance model counts it.

>>> import jax, jax.numpy as jnp
>>> from shardplan.tracing import trace_program
>>> program = trace_program(lambda x, y: (jnp.tanh(x) / y) / 2, (jax.ShapeDtypeStruct((8,), "float32"),) * 2, {})
>>> [(operation.primitive.name, cycles_of(program, operation)) for operation in program.operations]
[('tanh', 430), ('div', 19), ('div', 5)]
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np

from shardplan.program import Constant, Operation, Program
from shardplan.strategy import operand_type

_CYCLES = {
    "digamma": 2870, "lgamma": 1970, "sin": 970, "cos": 970, "erfc": 620, "pow": 510, "erf_inv": 470, "atan2": 431,
    "atan": 431, "tanh": 430, "random_bits": 360, "log1p": 229, "expm1": 190, "cbrt": 178, "log": 166,
    "logistic": 105, "exp": 79, "exp2": 79, "rsqrt": 75, "sqrt": 75, "div": 19, "concatenate": 6,
}  # fmt: skip
"""Clock cycles that an H100 takes for one element in float32, as XLA's performance model counts them. What XLA puts
together from other operations counts as these do together, in the kernels that it puts together step by step: it
divides by the square that `erfc` is a series of in each term anew. What is in no table there (`erf`, `tan`, `sinh`,
`asin` and the like) takes no longer than an addition. A hyperbolic tangent,
467 there, was compiled stored in bfloat16 and computed anew in float32, and what a gate multiplies, computed from it,
stored in float32: 430 is chosen between what these say."""

_IN_KERNELS = {
    "digamma": 1807, "lgamma": 1570, "pow": 926, "cbrt": 868, "sin": 663, "cos": 663, "atan2": 490, "atan": 490,
    "erf_inv": 449, "expm1": 382, "random_bits": 360, "erfc": 266, "log1p": 262, "log": 244, "tanh": 190,
    "logistic": 94, "exp": 79, "exp2": 79, "rsqrt": 75, "sqrt": 75,
}  # fmt: skip
"""The same as XLA's last scheduler counts a kernel that computes this alone, by its log: it knows the whole kernel."""

CYCLES_PER_BYTE = 20.0
"""What an H100 computes in the time in which it reads or writes one byte."""

BESIDE = 0.95
"""How much of the shorter one of computing and of reading and writing runs beside the longer one."""

_OTHER_CYCLES, REDUCING_CYCLES = 5, 3
_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1}
_COMPLEX_CYCLES = {"exp": 2020, "log": 600, "sqrt": 500, "div": 70, "mul": 30}
"""The same for complex numbers: an exponential takes an exponential, a sine and a cosine. Others take twice as long."""


def cycles_of(program: Program, operation: Operation) -> int:
    """The clock cycles for one element of an operation that computes."""
    name = operation.primitive.name
    if any(is_complex(program, operand) for operand in operation.operands):
        return _COMPLEX_CYCLES.get(name, 2 * _CYCLES.get(name, _OTHER_CYCLES))
    if _changes_nothing(operation):
        return 0
    if name == "div" and isinstance(operation.operands[1], Constant):  # a product with what is one over it
        return _OTHER_CYCLES
    return _CYCLES.get(name, _OTHER_CYCLES)


def _changes_nothing(operation: Operation) -> bool:
    """Whether XLA leaves an operation out, which adds zero, or multiplies by one, as a softplus does."""
    neutral = _NEUTRAL.get(operation.primitive.name)
    if neutral is None:
        return False
    operands = operation.operands if operation.primitive.name in ("add", "mul") else operation.operands[1:]
    return any(isinstance(o, Constant) and not np.ndim(o.value) and bool(o.value == neutral) for o in operands)


def is_complex(program: Program, operand: int | Constant) -> bool:
    """Whether an operand has complex numbers."""
    return _is_complex(operand_type(program, operand).dtype)


@cache
def _is_complex(dtype: Any) -> bool:
    return bool(jax.dtypes.issubdtype(dtype, np.complexfloating))


def cycles_in_kernel(operation: Operation) -> int:
    """The clock cycles for one element of what may take longer than reading an operand and writing a result, as XLA's
    last scheduler counts them; else 0."""
    return _IN_KERNELS.get(operation.primitive.name, 0)
