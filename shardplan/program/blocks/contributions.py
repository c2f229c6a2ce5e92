"""Contributions: values of which a block holds its own part alone, because nothing but sums comes of them.

The gradient of a convolution's input adds up what several rows of the gradient of its result give. A block that needs
all of a row of it has to know the gradients of all these rows, and they all the activations that they depend on. But
where such a value is read by linear operations alone, and these end in sums over the index, each block may as well take
the rows of a gradient that are its own through all of them, as if all other rows were zero. The sum over the blocks is
the same, and halos are half as deep. VGG-16 on 10,240 x 10,240 pixels over 8 devices sends 125.1 MB, else 152.6 MB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardplan.program.blocks.places import Growth, is_barrier
from shardplan.program.blocks.regions import Region
from shardplan.program.program import Constant, Operation, Program
from shardplan.rules import linear_sets


@dataclass(frozen=True, slots=True)
class Contributions:
    """The values of which a block holds a contribution, and per operation the places of the operands that it reads so.

    Other values are read so as well: then the rows of a block's own are its contribution."""

    values: frozenset[int]
    read: dict[int, frozenset[int]]


def contributions(program: Program, growth: Growth, region: Region, reduced: dict[int, str]) -> Contributions:
    """The contributions of a region whose sums over the index are ``reduced``."""
    found, whole, read = set[int](), _read_outside(program, region), dict[int, frozenset[int]]()
    for index in reversed(region.operations):
        operation = program.operations[index]
        held = [r for r in operation.results if growth.blocked(r) and r not in whole]
        found |= {*held}
        if is_barrier(operation):
            pairs = zip(operation.operands, operation.results, strict=True)
            whole |= {o for o, result in pairs if isinstance(o, int) and result not in found}
            continue
        parts = {r for r in operation.results if reduced.get(r) == "sum"}
        taken = _taken(program, growth, operation) if {*operation.results} == {*held} | parts else None
        if taken is not None:
            read[index] = taken
        whole |= {o for place, o in enumerate(operation.operands) if isinstance(o, int) and place not in (taken or ())}
    return Contributions(frozenset(found), read)


def _read_outside(program: Program, region: Region) -> set[int]:
    inside = {*region.operations}
    outside = (operation for operation in program.operations if operation.index not in inside)
    found = {o for operation in outside for o in operation.read}
    return found | {o for o in program.outputs if isinstance(o, int)}


def _taken(program: Program, growth: Growth, operation: Operation) -> frozenset[int] | None:
    """The places in which an operation is linear and whose values are made last, as a gradient is made after the
    activations that it is multiplied with."""
    along = growth.along[operation.index][0]
    allowed = [
        places
        for places in (linear_sets(along.expression) if along.expression else ())
        if all(_may_enter(growth, operation, place, along.once) for place in places)
        and any(growth.blocked(o) for o in _values(operation, places))
    ]
    makers = program.makers
    last = {
        places: max(makers[o].index if o in makers else -1 for o in _values(operation, places)) for places in allowed
    }
    return max(allowed, key=lambda places: last[places], default=None)


def _may_enter(growth: Growth, operation: Operation, place: int, once: int | None) -> bool:
    operand = operation.operands[place]
    if isinstance(operand, Constant):
        return not np.any(np.asarray(operand.value))
    return growth.blocked(operand) or place == once


def _values(operation: Operation, places: frozenset[int]) -> Iterator[int]:
    for place in places:
        operand = operation.operands[place]
        if isinstance(operand, int):
            yield operand
