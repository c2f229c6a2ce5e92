"""Parts of a program that are fused alike, as those of a deep one's layers are: what is found of one holds for all.

Fusion asks what the operation of a kernel does and reads, and how large values are. Parts are alike where all of that
is equal, value by value, in the order of the values' numbers, by which ties are decided.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from shardplan.memory.parts import Part
from shardplan.problem import Problem
from shardplan.program import Constant, Operation

Asked = Mapping[int, tuple[tuple[Sequence[int], ...], Hashable]]
"""Per operation, by index, what fusion asks of it: the values that it reads, of some kinds, and what else."""


def first_alike(problem: Problem, parts: Sequence[Part], asked: Asked) -> list[Part]:
    """Per part, the first one that is alike."""
    program, makers = problem.program, problem.program.makers
    numbers: dict[Hashable, int] = {}
    sizes = [numbers.setdefault((value.total_bytes, value.shape), len(numbers)) for value in program.values]
    same = {}
    for index, (read, others) in asked.items():
        kind = _kind(problem, program.operations[index]), others, *map(len, read)
        same[index] = numbers.setdefault(kind, len(numbers))
    known: dict[Any, Part] = {}
    found = []
    for part in parts:
        place = {value: number for number, value in enumerate(part.values)}.__getitem__
        key = [len(part.makes), *map(sizes.__getitem__, part.values), *map(place, part.fusible)]
        for made in part.makes:
            index = makers[made].index
            key += (place(made), same[index])
            for some in asked[index][0]:
                key += map(place, some)
        found.append(known.setdefault(tuple(key), part))
    return found


def _kind(problem: Problem, operation: Operation) -> Hashable:
    """What of an operation counts, without what it reads."""
    name, choices = operation.primitive.name, problem.choices.get(operation.index)
    constants = sum([isinstance(operand, Constant) for operand in operation.operands])
    dimension = operation.params["dimension"] if name == "concatenate" else None
    return name, dimension, constants, choices is not None and choices.pointwise
