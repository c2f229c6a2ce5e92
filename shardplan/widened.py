"""In how many bytes XLA sends what has been converted to a wider type: in those that it had before.

XLA moves a conversion behind the collective that brings its result elsewhere (CollectiveQuantizer), also where only
views, slices, or a multiplication with one number are in between, and puts several conversions behind their
concatenation first. Sums of several devices' parts are made in the wider type.

>>> import jax, jax.numpy as jnp
>>> from shardplan.tracing import trace_program
>>> weights = jax.ShapeDtypeStruct((4, 8), "bfloat16")
>>> program = trace_program(lambda w: 3 * w.T.astype("float32") + 1, (weights,), {})
>>> widened = widened_from(program)
>>> [(o.primitive.name, widened[o.results[0]].dtype.name) for o in program.operations if o.results[0] in widened]
[('convert_element_type', 'bfloat16'), ('mul', 'bfloat16')]
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from shardplan import _jax
from shardplan.once import once
from shardplan.program import Constant, Operation, Program
from shardplan.strategy import operand_type

_PASSED = frozenset(
    {"reshape", "squeeze", "expand_dims", "stop_gradient", "transpose", "slice"}
    | {"copy", "copy_p", "sharding_constraint"}
)
_SCALING = frozenset({"mul", "div"})


class Widened(NamedTuple):
    """The type that a value had before it was converted to a wider one, and whether it still holds the same numbers."""

    dtype: Any
    same: bool


def sent_bytes(program: Program, sums: Container[int]) -> list[int]:
    """Per value, the bytes of the whole tensor in the type in which parts of it are sent, where some are ``sums``."""
    found = [value.total_bytes for value in program.values]
    for value, widened in widened_from(program).items():
        narrow = program.values[value].elements * _jax.item_bytes(widened.dtype)
        found[value] = found[value] if value in sums else narrow
    return found


@once
def widened_from(program: Program) -> dict[int, Widened]:
    """Per value that comes from a conversion to a wider type, what it was before."""
    found: dict[int, Widened] = {}
    for operation in program.operations:
        ways = set(_ways(program, operation, found))
        if len(ways) == 1 and (widened := ways.pop()) is not None:
            found[operation.results[0]] = widened
    return found


def _ways(program: Program, operation: Operation, found: Mapping[int, Widened]) -> Iterator[Widened | None]:
    """From what each operand was converted that an operation passes on, None where from nothing."""
    name, operands = operation.primitive.name, operation.operands
    if name == "convert_element_type":
        narrow, wide = operand_type(program, operands[0]).dtype, program.values[operation.results[0]].dtype
        yield Widened(narrow, True) if _jax.item_bytes(narrow) < _jax.item_bytes(wide) else None
    elif name in _PASSED or name == "concatenate":
        yield from (found.get(operand) if isinstance(operand, int) else None for operand in operands)
    elif name in _SCALING:
        scaled = operands[0] if name == "div" or _is_number(program, operands[1]) else operands[1]
        numbers = [operand for operand in operands if operand is not scaled]
        if isinstance(scaled, int) and scaled in found and all(_is_number(program, number) for number in numbers):
            yield found[scaled]._replace(same=False)


def _is_number(program: Program, operand: int | Constant) -> bool:
    """Whether an operand is one number, or one that has been spread."""
    maker = program.makers.get(operand) if isinstance(operand, int) else None
    if maker is not None and maker.primitive.name == "broadcast_in_dim":
        operand = maker.operands[0]
    return prod(operand_type(program, operand).shape) == 1
