"""What is spread over a larger tensor, spread for each of its readers.

The gradient of a mean over an image is one number for each channel, spread over the image. Where a reader needs it
whole, XLA gathers the numbers, not what is spread from them: of a gather of a broadcast it makes a broadcast of a
gather. So the plan must be able to do the same for one reader, while others read what is spread as it is split. Each
reader therefore has a broadcast of its own, which costs nothing: XLA computes it on the way, and once where two readers
find it in one layout. The same holds for what is computed of a broadcast alone, element by element. Such a broadcast is
made in the layout in which it is read, or in one of larger blocks: what is spread is never sent (`Problem`).

>>> import jax, jax.numpy as jnp
>>> from shardplan.program.tracing import trace_program
>>> def spread(x):
...     wide = 2 * jnp.broadcast_to(x, (8, 8))
...     return jnp.sin(wide), wide @ wide.T
>>> program = trace_program(spread, (jnp.ones(8),))
>>> [operation.primitive.name for operation in program.operations]
['broadcast_in_dim', 'broadcast_in_dim', 'broadcast_in_dim', 'mul', 'mul', 'mul', 'sin', 'transpose', 'dot_general']
"""

from __future__ import annotations

from dataclasses import replace

from shardplan.memoize import memoize
from shardplan.program.program import Operation, Program, Value

_ALONE = frozenset({"add", "sub", "mul", "div", "neg", "convert_element_type"})
"""What is computed of what is spread, and of numbers, that XLA computes before it spreads."""


def spread_for_each(program: Program) -> Program:
    """The program whose operations each read what is spread from something smaller by broadcasts of their own."""
    spreading = _Spreading(program)
    found = [one for operation in reversed(program.operations) for one in spreading.take(operation)]
    return replace(program, values=tuple(spreading.values), operations=tuple(reversed(found)))


class _Spreading:
    """What is spread, which of it has a reader by now, and the values that further ones read, by what these equal."""

    def __init__(self, program: Program) -> None:
        self.values: list[Value] = list(program.values)
        self._spread = spread_values(program)
        self._read: set[int] = set()
        self._further: dict[int, list[int]] = {}

    def take(self, operation: Operation) -> list[Operation]:
        """An operation, behind those that make the same for further readers; readers come before what they read."""
        own = self._further.pop(operation.results[0], ()) if operation.results else ()
        return [self._reading(one) for one in (*(replace(operation, results=(value,)) for value in own), operation)]

    def _reading(self, operation: Operation) -> Operation:
        """The operation with values of its own in the place of what others read too; a loop reads what is there."""
        own: dict[int, int] = {}
        read = {o for o in operation.operands if isinstance(o, int)} & self._spread
        for operand in sorted(read) if not operation.bodies else ():
            if operand in self._read:
                own[operand] = len(self.values)
                self.values.append(replace(self.values[operand], index=own[operand]))
                self._further.setdefault(operand, []).append(own[operand])
            self._read.add(operand)
        if not own:
            return operation
        operands = (own.get(o, o) if isinstance(o, int) else o for o in operation.operands)
        return replace(operation, operands=tuple(operands))


@memoize
def spread_values(program: Program) -> frozenset[int]:
    """The results of broadcasts larger than what they read, and of what reads nothing but these and numbers."""
    spread: set[int] = set()
    for operation in program.operations:
        read = {operand for operand in operation.operands if isinstance(operand, int)}
        if len(read) != 1:
            continue
        name, source = operation.primitive.name, program.values[read.pop()]
        wider = name == "broadcast_in_dim" and program.values[operation.results[0]].elements > source.elements
        if wider or (name in _ALONE and source.index in spread):
            spread.add(operation.results[0])
    return frozenset(spread)
