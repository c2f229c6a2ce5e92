"""Producers and consumers of the tensors of a collective.

The compiler merges collectives and drops their metadata. The instructions around them keep theirs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from shardplan.compiled.hlo.module import Instruction

Computation = Mapping[str, Instruction]
Users = Mapping[str, list[Instruction]]

_MAX_DEPTH = 6
_MAX_INSTRUCTIONS = 24
_INDEX = re.compile(r"\bindex=(\d+)")


def users_of(computation: Computation) -> dict[str, list[Instruction]]:
    """The consumers of each instruction of a computation."""
    users: dict[str, list[Instruction]] = {}
    for instruction in computation.values():
        for operand in dict.fromkeys(instruction.operands):
            users.setdefault(operand, []).append(instruction)
    return users


def producers(computation: Computation, operand: str) -> tuple[str, ...]:
    """`op_name` of the instructions before an operand, nearest first."""

    def before(instruction: Instruction) -> list[Instruction]:
        return [computation[name] for name in instruction.operands if name in computation]

    first = [computation[operand]] if operand in computation else []
    return tuple(_names(_walk(first, before)))


def consumers(users: Users, collective: Instruction, position: int) -> tuple[str, ...]:
    """`op_name` of the instructions after the result at `position` of a collective, nearest first."""

    def after(instruction: Instruction) -> list[Instruction]:
        return users.get(instruction.name, [])

    first: list[Instruction] = []
    pending = list(after(collective))
    while pending:
        instruction = pending.pop()
        if instruction.opcode.endswith("-done"):
            pending += after(instruction)
        elif instruction.opcode != "get-tuple-element" or _index(instruction) == position:
            first.append(instruction)
    return tuple(_names(_walk(first, after)))


def _index(instruction: Instruction) -> int:
    found = _INDEX.search(instruction.line)
    return int(found[1]) if found else -1


def _walk(first: list[Instruction], following: Callable[[Instruction], list[Instruction]]) -> Iterator[Instruction]:
    """A breadth-first walk of limited depth and number."""
    seen = {instruction.name for instruction in first}
    level = first
    for _ in range(_MAX_DEPTH):
        yield from level
        reached = [found for instruction in level for found in following(instruction)]
        level = []
        for instruction in reached:
            if instruction.name not in seen and len(seen) < _MAX_INSTRUCTIONS:
                seen.add(instruction.name)
                level.append(instruction)


def _names(instructions: Iterator[Instruction]) -> dict[str, None]:
    return dict.fromkeys(name for instruction in instructions if (name := instruction.op_name))
