"""Equations as rules see them: parameters, shapes and dtypes, with small helpers to write rules."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from shardplan.rules.expression import Affine, Expression, Result, Shape, index


@dataclass(frozen=True, slots=True)
class Tensor:
    """An operand or a result: its shape and its dtype (a numpy dtype, or an extended one such as that of random
    keys)."""

    shape: Shape
    dtype: Any


@dataclass(frozen=True, slots=True)
class Equation:
    """One application of a primitive."""

    primitive: Any
    params: Mapping[str, Any]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class Unknown(Exception):
    """An operation without a description; the message is a sentence that tells how to describe it."""


Semantics = Callable[[Equation], Expression]
"""A family's function for a primitive: the expression of one of its equations."""


@lru_cache(maxsize=4096)
def letters(prefix: str, count: int) -> tuple[Affine, ...]:
    """``count`` indices named after ``prefix``: ``i`` alone, or ``i0, i1, ...``."""
    return (index(prefix),) if count == 1 else tuple(index(f"{prefix}{n}") for n in range(count))


def name_of(position: Affine) -> str:
    """The name of a position that is a plain index."""
    name = position.terms[0][1]
    assert isinstance(name, str)
    return name


def sizes_of(*pairs: tuple[Iterable[Affine], Iterable[int]]) -> dict[str, int]:
    """Index sizes from positions that are plain indices and the dimensions they run over."""
    return {name_of(p): int(size) for positions, extents in pairs for p, size in zip(positions, extents, strict=True)}


def expression(
    equation: Equation, sizes: Mapping[str, int], results: Iterable[Result], operands: tuple[str, ...] = ()
) -> Expression:
    """The expression of an equation. ``operands``: names to print; by default ``x``, or ``x, y, z``, or numbered."""
    count = len(equation.inputs)
    if not operands:
        operands = ("x", "y", "z")[:count] if count <= 3 else tuple(f"x{n}" for n in range(count))
    return Expression(
        operands=operands,
        operand_shapes=tuple(t.shape for t in equation.inputs),
        result_shapes=tuple(t.shape for t in equation.outputs),
        sizes=dict(sizes),
        results=tuple(results),
    )
