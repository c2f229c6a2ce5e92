"""In how many bytes XLA sends what has been converted to a wider type, or will be to a narrower: in the fewest.

XLA moves a conversion behind the collective that brings its result elsewhere (CollectiveQuantizer), also where only
views and slices are in between, and puts several conversions behind their concatenation first. One to a narrower type
that alone reads what a collective brings it moves before that. Where something else is in between (a factor), it may or
may not: such values count as they are. Sums of several devices' parts are made in the wider type.

>>> import jax, jax.numpy as jnp
>>> from shardplan.tracing import trace_program
>>> weights = jax.ShapeDtypeStruct((4, 8), "bfloat16")
>>> program = trace_program(lambda w: w.astype("float32").T + 1, (weights,), {})
>>> widened = widened_from(program)
>>> [(o.primitive.name, widened[o.results[0]].name) for o in program.operations if o.results[0] in widened]
[('convert_element_type', 'bfloat16'), ('transpose', 'bfloat16')]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from shardplan import _jax
from shardplan.once import once
from shardplan.program import Operation, Program, Value, operand_type

_PASSED = frozenset(
    {"reshape", "squeeze", "expand_dims", "stop_gradient", "transpose", "slice"}
    | {"copy", "copy_p", "sharding_constraint"}
)


def sent_bytes(program: Program) -> list[int]:
    """Per value, the bytes of the whole tensor in the type in which parts of it are sent."""
    found = [value.stored_bytes for value in program.values]
    for value, dtype in (narrowed_to(program) | widened_from(program)).items():
        found[value] = program.values[value].elements * _jax.item_bytes(dtype)
    return found


def reduced_width(tensor: Value, sent: int, dtype: Any) -> float:
    """The size of an element while a tensor is reduced in a type, in units of that in which parts of it are sent:
    ``sent`` bytes for the whole tensor."""
    return _jax.item_bytes(dtype) * tensor.elements / sent if sent else 1.0


@once
def narrowed_to(program: Program) -> dict[int, Any]:
    """Per value that one view alone reads, and then one conversion to a narrower type, that type. What a conversion
    reads itself can as well be sent behind it."""
    found, converted, readers = dict[int, Any](), dict[int, Any](), dict[int, list[Operation]]()
    for operation in program.operations:
        for operand in operation.operands:
            if isinstance(operand, int):
                readers.setdefault(operand, []).append(operation)
    leaving = {o for region in program.regions for o in region.outputs if isinstance(o, int)}
    for operation in reversed(program.operations):
        for result in operation.results:
            reading = readers.get(result, [])
            if len(reading) != 1 or len(reading[0].results) != 1 or result in leaving or reading[0].bodies:
                continue
            [reader] = reading
            own = program.values[result].dtype
            made = program.values[reader.results[0]].dtype
            if reader.primitive.name == "convert_element_type" and _is_narrower(made, own):
                converted[result] = made
            elif reader.primitive.name in _PASSED and reader.operands[0] == result:
                dtype = found.get(reader.results[0], converted.get(reader.results[0]))
                if dtype is not None:
                    found[result] = dtype
    return found


@once
def unrounded(program: Program) -> frozenset[int]:
    """The values of narrow floats that a conversion to a wider type reads: the terms of a sum, above all.

    XLA:CPU computes them in float32, and leaves out the rounding in between. A constraint between the two keeps that,
    whose copy is there until after the pass (FloatNormalization); the conversion's own constraint says the layout.
    XLA:GPU has no copies by then.
    """
    conversions = (o for o in program.operations if o.primitive.name == "convert_element_type")
    read = ((o.operands[0], program.values[o.results[0]].dtype) for o in conversions)
    return frozenset(v for v, wide in read if isinstance(v, int) and _is_narrower(program.values[v].dtype, wide))


def _is_narrower(narrow: Any, wide: Any) -> bool:
    real = _jax.is_float(narrow) and _jax.is_float(wide)
    return real and _jax.item_bytes(narrow) < _jax.item_bytes(wide)


@once
def widened_from(program: Program) -> dict[int, Any]:
    """Per value that comes from a conversion to a wider type, the type that its elements had before."""
    found: dict[int, Any] = {}
    for operation in program.operations:
        dtypes = set(_dtypes(program, operation, found))
        if len(dtypes) == 1 and (dtype := dtypes.pop()) is not None:
            found[operation.results[0]] = dtype
    return found


def _dtypes(program: Program, operation: Operation, found: Mapping[int, Any]) -> Iterator[Any]:
    """From what each operand was converted that an operation passes on, None where from nothing."""
    name, operands = operation.primitive.name, operation.operands
    if name == "convert_element_type":
        narrow, wide = operand_type(program, operands[0]).dtype, program.values[operation.results[0]].dtype
        real = not jnp.issubdtype(wide, jnp.complexfloating)
        yield narrow if real and _jax.item_bytes(narrow) < _jax.item_bytes(wide) else None
    elif name in _PASSED or name == "concatenate":
        yield from (found.get(operand) if isinstance(operand, int) else None for operand in operands)
