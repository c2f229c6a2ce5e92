"""Hoisting of conversions: a conversion of a scan's constant is done once, before the loop.

Gradients are often accumulated by a scan over microbatches whose loss converts the parameters to bfloat16. The scan
reads each parameter unconverted. Its all-gather would be in float32, or in bfloat16 once per iteration. A constant of a
scan is converted before the loop if the body only converts it, to a type of no more bytes.

>>> import jax, jax.numpy as jnp
>>> from shardplan.program.tracing import trace_program
>>> def total(w, rows):
...     return jax.lax.scan(lambda c, x: (c + x.astype("bfloat16") @ w.astype("bfloat16"), None), jnp.bfloat16(0), rows)
>>> program = trace_program(total, (jnp.ones(8), jnp.ones((4, 8))))
>>> [(o.primitive.name, o.region) for o in program.operations if program.values[0].index in o.operands]
[('convert_element_type', 0)]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardplan import _jax
from shardplan.program.program import Operation, Program, Region, Value


def hoist_conversions(program: Program) -> Program:
    """The program with conversions of scans' constants before the scans, innermost first."""
    hoisting = _Hoisting(program)
    for operation in program.operations:
        hoisting.take(operation)
    return replace(
        program,
        values=tuple(hoisting.values),
        operations=tuple(hoisting.operations.values()),
        regions=tuple(hoisting.regions),
    )


class _Hoisting:
    """The operations so far, by their first result or (without results) their number, and the readers of each value."""

    def __init__(self, program: Program) -> None:
        self.values: list[Value] = list(program.values)
        self.regions: list[Region] = list(program.regions)
        self.operations: dict[object, Operation] = {}
        outputs = (*program.outputs, *(o for region in program.regions for o in region.outputs))
        self._leaving = {output for output in outputs if isinstance(output, int)}
        self._readers: dict[int, list[object]] = {}

    def take(self, operation: Operation) -> None:
        if operation.primitive.name == "scan":
            operation = self._with_converted(operation)
        self._add(operation)

    def _add(self, operation: Operation) -> None:
        key = _key(operation)
        self.operations[key] = operation
        for operand in operation.operands:
            if isinstance(operand, int):
                self._readers.setdefault(operand, []).append(key)

    def _with_converted(self, scan: Operation) -> Operation:
        """A scan with constants in the types to which its body converts them."""
        (body,) = scan.bodies
        operands, inputs = list(scan.operands), list(self.regions[body].inputs)
        for position in range(scan.params["num_consts"]):
            conversion = self._only_conversion(inputs[position], body)
            if conversion is None or not isinstance(operands[position], int):
                continue
            del self.operations[_key(conversion)]
            inside = self.values[conversion.results[0]]
            outside = replace(inside, index=len(self.values))
            self.values.append(outside)
            moved = replace(conversion, operands=(operands[position],), results=(outside.index,), region=scan.region)
            self._add(moved)
            inputs[position], operands[position] = inside.index, outside.index
        self.regions[body] = replace(self.regions[body], inputs=tuple(inputs))
        return replace(scan, operands=tuple(operands))

    def _only_conversion(self, constant: int, body: int) -> Operation | None:
        """The conversion that is the only reader of a body's constant and makes it no larger."""
        readers: Sequence[object] = self._readers.get(constant, ())
        if len(readers) != 1 or constant in self._leaving:
            return None
        reader = self.operations[readers[0]]
        if reader.primitive.name != "convert_element_type" or reader.region != body:
            return None
        before, after = self.values[constant].dtype, self.values[reader.results[0]].dtype
        return reader if _jax.item_bytes(after) <= _jax.item_bytes(before) else None


def _key(operation: Operation) -> object:
    return operation.results[0] if operation.results else ("without a result", operation.index)
