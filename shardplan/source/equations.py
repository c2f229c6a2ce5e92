"""A traced program as a flat list of equations over numbered variables, with calls inlined.

>>> import jax, jax.numpy as jnp
>>> body = body_of(jax.make_jaxpr(lambda x: jnp.where(x > 0, x, 0 * x))(jnp.ones(4)), lambda equation: "")
>>> [equation.name for equation in body.equations]
['gt', 'mul', 'select_n']
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardplan import _jax

PlaceOf = Callable[[_jax.Equation], str]
"""The place of an equation in the user's code, as a comment has it."""


@dataclass(frozen=True, slots=True)
class Number:
    """A literal operand."""

    value: Any
    aval: Any


Atom = int | Number


@dataclass(frozen=True, slots=True)
class Equation:
    """One primitive: parameters, operands and results. A result is None where nothing reads it."""

    name: str
    params: dict[str, Any]
    operands: tuple[Atom, ...]
    results: tuple[int | None, ...]
    place: str
    primitive: Any = field(repr=False)


@dataclass(slots=True)
class Body:
    """A program or the body of a loop. ``types`` are those of variables, ``constants`` closed-over arrays."""

    inputs: list[int]
    equations: list[Equation]
    outputs: list[Atom]
    types: dict[int, Any]
    constants: dict[int, Any]

    def type_of(self, atom: Atom) -> Any:
        return atom.aval if isinstance(atom, Number) else self.types[atom]


def body_of(closed: Any, place_of: PlaceOf) -> Body:
    """The body of a closed jaxpr, without equations that nothing reads."""
    flat = _Flat(place_of)
    body = flat.body
    body.inputs = [flat.new(var.aval) for var in closed.jaxpr.invars]
    constants = flat.constants(closed.consts, closed.jaxpr)
    body.outputs = flat.run(closed.jaxpr, body.inputs, constants)
    _drop_unread(body)
    return body


class _Flat:
    def __init__(self, place_of: PlaceOf) -> None:
        self.body = Body([], [], [], {}, {})
        self.place_of = place_of
        self._constrained: dict[int, str] = {}

    def new(self, aval: Any) -> int:
        number = len(self.body.types)
        self.body.types[number] = aval
        return number

    def constants(self, arrays: Sequence[Any], jaxpr: Any) -> list[int]:
        """The variables of closed-over arrays."""
        numbers = [self.new(var.aval) for var in jaxpr.constvars]
        self.body.constants.update(zip(numbers, arrays, strict=True))
        return numbers

    def run(self, jaxpr: Any, inputs: Sequence[Atom], constants: Sequence[Atom]) -> list[Atom]:
        """Appends the equations of a jaxpr, and gives its outputs."""
        held: dict[Any, Atom] = dict(zip(jaxpr.constvars, constants, strict=True))
        held.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Atom:
            return Number(atom.val, atom.aval) if isinstance(atom, _jax.Literal) else held[atom]

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            call = _jax.call_body(equation)
            if call is not None:
                given = self.constants(call.constants, call.jaxpr)
                results: Sequence[Atom] = self.run(call.jaxpr, [operands[n] for n in call.positions], given)
            else:
                results = self._append(equation, operands)
            held.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _append(self, equation: Any, operands: list[Atom]) -> Sequence[Atom]:
        spec = equation.params["sharding"].spec if equation.primitive.name == _jax.SHARDING_CONSTRAINT else None
        if spec is not None and isinstance(operands[0], int) and self._constrained.get(operands[0]) == str(spec):
            return operands  # it has this constraint already
        results = [self.new(var.aval) for var in equation.outvars]
        if spec is not None:
            self._constrained[results[0]] = str(spec)
        place = self.place_of(equation)
        self.body.equations.append(
            Equation(
                equation.primitive.name, equation.params, tuple(operands), tuple(results), place, equation.primitive
            )
        )
        return results


def _drop_unread(body: Body) -> None:
    """Leaves out equations without readers, and marks results without readers."""
    read = {atom for atom in body.outputs if isinstance(atom, int)}
    kept = []
    for equation in reversed(body.equations):
        results = tuple(result if result in read else None for result in equation.results)
        if any(result is not None for result in results):
            read.update(variables(equation.operands))
            kept.append(
                Equation(equation.name, equation.params, equation.operands, results, equation.place, equation.primitive)
            )
    body.equations = kept[::-1]


def variables(atoms: Iterable[Atom | None]) -> list[int]:
    """The variables among operands or results."""
    return [atom for atom in atoms if isinstance(atom, int)]
