"""Element types on the wire: XLA sends a converted value in the narrower of its types.

XLA moves a conversion to a wider type after the collective on its result (CollectiveQuantizer), also through views and
slices. It moves several conversions after their concatenation first. A conversion to a narrower type that is the only
reader of a collective moves before that collective. With another operation in between (a factor), XLA may or may not
move it: such values count in their own type. Sums over devices are made in the wider type.

>>> import jax, jax.numpy as jnp
>>> from shardplan.program.tracing import trace_program
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
from shardplan.memoize import memoize
from shardplan.program.program import Operation, Program, Value, operand_type

_MOVING = frozenset(
    {"reshape", "squeeze", "expand_dims", "stop_gradient", "transpose", "slice"}
    | {"copy", "copy_p", "sharding_constraint"}
)


def sent_bytes(program: Program) -> list[int]:
    """Per value, the bytes of the whole tensor in its type on the wire."""
    found = [value.stored_bytes for value in program.values]
    for value, dtype in (narrowed_to(program) | widened_from(program)).items():
        found[value] = program.values[value].elements * _jax.item_bytes(dtype)
    return found


def reduced_width(tensor: Value, sent: int, dtype: Any) -> float:
    """The size of an element during a reduction in a type, relative to its type on the wire.

    ``sent`` are the bytes of the whole tensor in the latter.
    """
    return _jax.item_bytes(dtype) * tensor.elements / sent if sent else 1.0


@memoize
def narrowed_to(program: Program) -> dict[int, Any]:
    """Per value with a single reader, a view, and then a single conversion to a narrower type, that type.

    A conversion's direct operand is left out: its collective can be planned after the conversion as well.
    """
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
            elif reader.primitive.name in _MOVING and reader.operands[0] == result:
                dtype = found.get(reader.results[0], converted.get(reader.results[0]))
                if dtype is not None:
                    found[result] = dtype
    return found


@memoize
def widened_terms(program: Program) -> frozenset[int]:
    """The values of narrow floats that a conversion to a wider type reads: above all the terms of a sum.

    XLA:CPU computes them in float32, and leaves out the rounding in between. A constraint between the two keeps the
    rounding: its copy is there until after the pass (FloatNormalization). The layout comes from the conversion's own
    constraint. XLA:GPU has no copies by then.
    """
    conversions = (o for o in program.operations if o.primitive.name == "convert_element_type")
    read = ((o.operands[0], program.values[o.results[0]].dtype) for o in conversions)
    return frozenset(v for v, wide in read if isinstance(v, int) and _is_narrower(program.values[v].dtype, wide))


def _is_narrower(narrow: Any, wide: Any) -> bool:
    real = _jax.is_float(narrow) and _jax.is_float(wide)
    return real and _jax.item_bytes(narrow) < _jax.item_bytes(wide)


@memoize
def widened_from(program: Program) -> dict[int, Any]:
    """Per value from a conversion to a wider type, its type before."""
    found: dict[int, Any] = {}
    for operation in program.operations:
        dtypes = set(_dtypes(program, operation, found))
        if len(dtypes) == 1 and (dtype := dtypes.pop()) is not None:
            found[operation.results[0]] = dtype
    return found


def _dtypes(program: Program, operation: Operation, found: Mapping[int, Any]) -> Iterator[Any]:
    """The types before conversion of the operands that an operation passes on, None for an operand without
    conversion."""
    name, operands = operation.primitive.name, operation.operands
    if name == "convert_element_type":
        narrow, wide = operand_type(program, operands[0]).dtype, program.values[operation.results[0]].dtype
        real = not jnp.issubdtype(wide, jnp.complexfloating)
        yield narrow if real and _jax.item_bytes(narrow) < _jax.item_bytes(wide) else None
    elif name in _MOVING or name == "concatenate":
        yield from (found.get(operand) if isinstance(operand, int) else None for operand in operands)
