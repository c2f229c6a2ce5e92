"""What is written into an argument, or into what a body is given, and leaves in its place: caches of keys and values.

>>> import jax
>>> from shardplan.tracing import trace_program
>>> def step(cache, new):
...     return jax.lax.dynamic_update_slice(cache, new, (0, 3, 0)), cache * 2
>>> cache, new = (jax.ShapeDtypeStruct((8, length, 64), "float32") for length in (512, 4))
>>> program = trace_program(step, (cache, new), {})
>>> [len(updates_of_inputs(program, program.regions[0], output)) for output in program.outputs]
[1, 0]
"""

from __future__ import annotations

from shardplan.program import Program, Region

_UPDATES = frozenset({"dynamic_update_slice", "scatter"})


def updates_of_inputs(program: Program, region: Region, value: int) -> list[int]:
    """A value of three or more dimensions and what it is an update of, each an update itself, down to an input of its
    region; nothing where it is no such update."""
    found, makers = list[int](), program.makers
    given = {*region.inputs} if region.index else {*program.inputs, *program.captured}
    while value not in given:
        maker = makers.get(value)
        operand = maker.operands[0] if maker is not None and maker.operands else None
        updates = maker is not None and maker.primitive.name in _UPDATES and maker.region == region.index
        if not updates or not isinstance(operand, int) or len(program.values[value].shape) < 3:
            return []
        found.append(value)
        value = operand
    return found
