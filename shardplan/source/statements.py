"""Statements: the equations of a program as expressions, and calls of functions of repeated parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardplan.source.equations import Atom, Number
from shardplan.source.expressions import Expression
from shardplan.source.literals import number_text


@dataclass(slots=True, eq=False)
class Statement:
    """One assignment: an expression of variables, with the results that are read.

    ``name`` is that of the operation, ``place`` a comment. A call of a function of the text has ``result_names``, and
    stands in a line of its own."""

    expression: Expression
    operands: tuple[Atom, ...]
    results: tuple[int | None, ...]
    name: str
    place: str
    types: tuple[str, ...] = ()
    result_names: tuple[str, ...] = ()

    @property
    def token(self) -> tuple[Any, ...]:
        """What repeated statements have in common."""
        numbers = tuple(number_of(one, True) for one in self.operands if isinstance(one, Number))
        return self.expression.text, numbers, self.types, len(self.results)


def number_of(atom: Number, typed: bool) -> str:
    """The text of a literal. ``typed``: whether its type does not follow from what it meets."""
    return number_text(atom.value, atom.aval.dtype, typed or atom.aval.dtype == np.bool_)
