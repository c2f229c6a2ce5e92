"""Rectifiers, and Gaussian error units by a hyperbolic tangent, that cuBLAS applies to a product as it writes it.
cuDNN applies rectifiers to convolutions.

XLA:GPU makes one part of a product where nothing else reads that, also behind a bias, or where the product is seen in
another shape: what only the forward pass computes (of a step that samples, of a network that is not trained). The
product's own result is then never in memory. It looks for `x * (0.5 * (1 + tanh(0.798 * (x + 0.0447 * x ** 3))))`, in
this order, and for a maximum with zero; the unit by an error function and others stay kernels of their own.

>>> import jax
>>> from shardplan.tracing import trace_program
>>> program = trace_program(lambda x, w: (jax.nn.relu(x @ w), jax.nn.gelu(x @ w), jax.nn.silu(x @ w)),
...                         [jax.ShapeDtypeStruct((64, 64), "float32")] * 2, {})
>>> [(found[0], len(found[1])) for o in program.operations if (found := activated(program, o)) is not None]
[(2, 0), (4, 7)]
"""

from __future__ import annotations

from math import isclose, pi, sqrt

from shardplan import _jax
from shardplan.program import Constant, Operation, Program

_CUBE = 0.044715
_TOLERANCE = 1e-2
"""The numbers are rounded to bfloat16 in a step that computes in it."""


def activated(program: Program, operation: Operation) -> tuple[int, tuple[int, ...]] | None:
    """The value to which an operation is the end of applying such a unit, and the operations between; None if it is
    the end of none."""
    if operation.primitive.name == "max":
        rectified = _beside(program, operation, "max", 0.0)
        return None if rectified is None else (rectified, ())
    if operation.primitive.name != "mul":
        return None
    for value, factor in (operation.operands, operation.operands[::-1]):
        between = _factor(program, value, factor) if isinstance(value, int) and isinstance(factor, int) else None
        if isinstance(value, int) and between is not None:
            return value, between
    return None


def _factor(program: Program, value: int, factor: int) -> tuple[int, ...] | None:
    """The operations that make a value's factor of it, in the order of the program; None where it is another one."""
    steps: tuple[tuple[str, float | int | None], ...] = (
        ("mul", 0.5),
        ("add", 1.0),
        ("tanh", None),
        ("mul", sqrt(2 / pi)),
        ("add", value),
        ("mul", _CUBE),
    )
    found = list[int]()
    for name, other in steps:
        maker = program.makers.get(factor)
        before = None if maker is None else _beside(program, maker, name, other)
        if maker is None or before is None:
            return None
        found.append(maker.index)
        factor = before
    cube = program.makers.get(factor)
    if cube is None or cube.primitive.name != "integer_pow" or cube.params["y"] != 3 or cube.operands != (value,):
        return None
    return cube.index, *reversed(found)


def _beside(program: Program, operation: Operation, name: str, other: float | int | None) -> int | None:
    """The operand of an operation beside another one, a value or a number, if the operation is so called."""
    if operation.primitive.name != name:
        return None
    for position, operand in enumerate(operation.operands):
        rest = operation.operands[:position] + operation.operands[position + 1 :]
        if isinstance(operand, int) and (not rest if other is None else _is(program, rest[0], other)):
            return operand
    return None


def _is(program: Program, operand: int | Constant, wanted: float) -> bool:
    """Whether an operand is this value, or this number, which may be repeated along dimensions."""
    if isinstance(wanted, int):
        return operand == wanted
    maker = program.makers.get(operand) if isinstance(operand, int) else None
    if maker is not None and maker.primitive.name in ("broadcast_in_dim", "convert_element_type"):
        return _is(program, maker.operands[0], wanted)
    if not isinstance(operand, Constant) or not _jax.is_float(operand.aval.dtype):
        return False
    return isclose(float(operand.value), wanted, rel_tol=_TOLERANCE)
