"""Clones of broadcasts: each reader of a broadcast has a broadcast of its own.

The gradient of a mean over an image is one number for each channel, broadcast over the image. If a reader needs the
whole image, XLA does an all-gather of the numbers: it turns the all-gather of a broadcast into a broadcast of an
all-gather. The plan must have the same choice for one reader, while others read the broadcast in split layouts. A
broadcast for each reader costs nothing: XLA fuses it into the reader, and merges two broadcasts of one layout. The same
holds for elementwise operations on a broadcast alone. A clone is made in its reader's layout, or in a layout of larger
blocks: the broadcast itself is never sent (`Problem`).

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

_BEFORE_BROADCAST = frozenset({"add", "sub", "mul", "div", "neg", "convert_element_type"})
"""Operations on a broadcast and scalars that XLA does before the broadcast."""


def clone_broadcasts(program: Program) -> Program:
    """The program whose operations each read broadcasts of their own."""
    spreading = _Cloning(program)
    found = [one for operation in reversed(program.operations) for one in spreading.take(operation)]
    return replace(program, values=tuple(spreading.values), operations=tuple(reversed(found)))


class _Cloning:
    """Broadcast values, those of them with a reader so far, and per value its clones for further readers."""

    def __init__(self, program: Program) -> None:
        self.values: list[Value] = list(program.values)
        self._spread = broadcast_values(program)
        self._read: set[int] = set()
        self._further: dict[int, list[int]] = {}

    def take(self, operation: Operation) -> list[Operation]:
        """An operation, after its clones for further readers. Readers are visited before the operations that they
        read."""
        own = self._further.pop(operation.results[0], ()) if operation.results else ()
        return [self._reading(one) for one in (*(replace(operation, results=(value,)) for value in own), operation)]

    def _reading(self, operation: Operation) -> Operation:
        """The operation with clones in the place of values that have a reader already. A loop reads the values
        themselves.
        """
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
def broadcast_values(program: Program) -> frozenset[int]:
    """The results of broadcasts larger than their operand, and of operations on these and scalars alone."""
    spread: set[int] = set()
    for operation in program.operations:
        read = {operand for operand in operation.operands if isinstance(operand, int)}
        if len(read) != 1:
            continue
        name, source = operation.primitive.name, program.values[read.pop()]
        wider = name == "broadcast_in_dim" and program.values[operation.results[0]].elements > source.elements
        if wider or (name in _BEFORE_BROADCAST and source.index in spread):
            spread.add(operation.results[0])
    return frozenset(spread)
