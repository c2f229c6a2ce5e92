"""Parts of a program whose kernels do not change one another while values are fused into their readers.

Fusing a value changes the kernels that read it, and so what else these read saves, and what they save themselves where
they are fused. What kernels read that is stored anyway (operands of products, what leaves) stays as it is. So parts
that such values alone join are looked at one by one, and those that are split as before need not be looked at again.

>>> [part.makes for part in parts_of({1: (0,), 2: (1,), 3: (1,), 4: (2,), 5: (4,)}, [1, 4])]
[(1, 2, 3), (4, 5)]
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """The values that the kernels of a part make (``makes``), those of them that can be fused (``fusible``), and these
    with all that the kernels read (``values``)."""

    makes: tuple[int, ...]
    fusible: tuple[int, ...]
    values: tuple[int, ...]


def parts_of(reads: Mapping[int, Sequence[int]], fusible: Collection[int]) -> list[Part]:
    """The parts that have something that can be fused, in the order of their first kernels.

    ``reads``: per kernel, by the value that it makes, the values that it reads.
    """
    joined = {value: value for value in reads}

    def first_of(value: int) -> int:
        while joined[value] != value:
            joined[value] = value = joined[joined[value]]
        return value

    able = frozenset(fusible)
    for made, read in reads.items():
        for value in able.intersection(read):
            joined[first_of(made)] = first_of(value)
    parts: dict[int, list[int]] = {}
    for made in reads:
        parts.setdefault(first_of(made), []).append(made)
    return [
        Part(tuple(makes), found, tuple(sorted({*makes, *(value for made in makes for value in reads[made])})))
        for makes in parts.values()
        if (found := tuple(made for made in makes if made in able))
    ]
