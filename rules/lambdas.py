"""Descriptions as Python lambdas, executed symbolically: operands in, one lambda over index variables per result out.

>>> def convolution(data, filters, *, stride):
...     return lambda b, co, x: Sum(lambda ci, dx: data[b, ci, x * stride + dx] * filters[ci, co, dx])
>>> print(trace(convolution, [(2, 3, 16), (3, 4, 2)], [(2, 4, 8)], {"stride": 2}))
out[b, co, x] = Sum(ci, dx) data[b, ci, 2*x + dx] * filters[ci, co, dx]
>>> print(trace(lambda ids, table: lambda b, d: Sum(lambda v: (ids[b] == v) * table[v, d]), [(4,), (6, 8)], [(4, 8)]))
out[b, d] = Sum(v) (ids[b] == v) * table[v, d]
>>> print(trace(lambda a: lambda b, i, j: Opaque.cholesky(a[b, :, :])[i, j], [(8, 4, 4)], [(8, 4, 4)]))
out[b, i, j] = Opaque.cholesky(a[b, :, :])[i, j]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

from shardplan.rules import expression as ex
from shardplan.rules.errors import RuleError
from shardplan.rules.expression import Affine, Expression, Result, Shape, Term
from shardplan.rules.validation import validate

Operands = tuple["Operand", ...]


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """The value of an element, with arithmetic."""

    term: Term

    def __add__(self, other: Any) -> Value:
        return Value(ex.Apply("+", (self.term, _term(other))))

    def __radd__(self, other: Any) -> Value:
        return Value(ex.Apply("+", (_term(other), self.term)))

    def __sub__(self, other: Any) -> Value:
        return Value(ex.Apply("-", (self.term, _term(other))))

    def __rsub__(self, other: Any) -> Value:
        return Value(ex.Apply("-", (_term(other), self.term)))

    def __mul__(self, other: Any) -> Value:
        return Value(ex.Apply("*", (self.term, _term(other))))

    def __rmul__(self, other: Any) -> Value:
        return Value(ex.Apply("*", (_term(other), self.term)))

    def __eq__(self, other: object) -> Value:  # type: ignore[override]
        return Value(ex.Compare("==", self.term, _term(other)))

    def __le__(self, other: Any) -> Value:
        return Value(ex.Compare("<=", self.term, _term(other)))

    def __ge__(self, other: Any) -> Value:
        return Value(ex.Compare(">=", self.term, _term(other)))

    def __getitem__(self, at: Any) -> Value:
        """An element of an opaque function's result."""
        if not isinstance(self.term, ex.Opaque):
            raise RuleError(f"only what an `Opaque` function gives can be indexed, not `{type(self.term).__name__}`")
        places = tuple(p for p in _positions(at) if p is not None)
        return Value(ex.Opaque(self.term.function, self.term.arguments, places))


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand to read elements or slices of. ``sizes`` collects the sizes of indices that are a whole position."""

    number: int
    name: str
    shape: Shape
    sizes: dict[str, int]
    padded: bool = False

    def __getitem__(self, at: Any) -> Value:
        places = _positions(at)
        if len(places) != len(self.shape):
            raise RuleError(f"`{self.name}` is read at {len(places)} positions, but its shape is {self.shape}")
        _learn(places, self.shape, self.sizes)
        return Value(ex.Read(self.number, places, self.padded))

    @property
    def or_nothing(self) -> Operand:
        """The operand, whose elements outside contribute nothing."""
        return Operand(self.number, self.name, self.shape, self.sizes, padded=True)


def _reducer(name: str) -> Callable[[Callable[..., Any]], Value]:
    def reduce(body: Callable[..., Any]) -> Value:
        names = tuple(signature(body).parameters)
        return Value(ex.Reduce(name, names, _term(body(*map(ex.index, names)))))

    reduce.__doc__ = f"The {name} of ``body`` over all values of its parameters."
    return reduce


Sum, Prod, Max, Min, And, Or = map(_reducer, ("sum", "prod", "max", "min", "and", "or"))


class _Functions:
    """``Opaque.name(...)``, or ``Function.name(...)``, by attribute."""

    def __init__(self, kind: Callable[..., Term]) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Callable[..., Value]:
        return lambda *arguments: Value(self._kind(name, tuple(map(_term, arguments))))


Opaque = _Functions(ex.Opaque)
"""Functions of whole slices that are not expressible: ``Opaque.sort(x[b, :])[i]``."""
Function = _Functions(ex.Apply)
"""Functions of single elements: ``Function.tanh(x[i])``."""


def trace(
    function: Callable[..., Any],
    operand_shapes: Sequence[Shape],
    result_shapes: Sequence[Shape],
    params: Mapping[str, Any] | None = None,
) -> Expression:
    """The expression that a lambda describes. Its keyword-only parameters are given those of ``params`` by name.

    Raises :class:`RuleError` where the lambda does not fit the shapes.
    """
    sizes: dict[str, int] = {}
    parameters = signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind != Parameter.KEYWORD_ONLY]
    wanted = [p.name for p in parameters if p.kind == Parameter.KEYWORD_ONLY]
    if len(names) != len(operand_shapes):
        raise RuleError(
            f"the lambda takes {len(names)} operands, but there are {len(operand_shapes)}: {operand_shapes}"
        )
    operands = [
        Operand(n, name, shape, sizes) for n, (name, shape) in enumerate(zip(names, operand_shapes, strict=True))
    ]
    given = params or {}
    made = function(*operands, **{name: given[name] for name in wanted if name in given})
    elements = made if isinstance(made, tuple) else (made,)
    if len(elements) != len(result_shapes):
        raise RuleError(
            f"the lambda gives {len(elements)} results, but there are {len(result_shapes)}: {result_shapes}"
        )
    results = []
    for element, shape in zip(elements, result_shapes, strict=True):
        at = tuple(map(ex.index, signature(element).parameters)) if callable(element) else ()
        _learn(at, shape, sizes)
        results.append(Result(at, _term(element(*at) if callable(element) else element)))
    found = Expression(tuple(names), tuple(operand_shapes), tuple(result_shapes), sizes, tuple(results))
    validate(found)
    return found


def _term(value: Any) -> Term:
    if isinstance(value, Value):
        return value.term
    if isinstance(value, Operand):
        return value[()].term
    if isinstance(value, Affine):
        return ex.Position(value)
    if isinstance(value, int | float):
        return ex.Constant(value)
    raise RuleError(f"a `{type(value).__name__}` has no place in an expression")


def _positions(at: Any) -> tuple[Affine | None, ...]:
    places = at if isinstance(at, tuple) else (at,)
    found: list[Affine | None] = []
    for place in places:
        if isinstance(place, slice):
            if place != slice(None):
                raise RuleError(f"only whole dimensions can be sliced, with `:`, not `{place}`")
            found.append(None)
        elif isinstance(place, int):
            found.append(Affine((), place))
        elif isinstance(place, Affine):
            found.append(place)
        else:
            raise RuleError(
                "a position must be affine in the indices; what is read from an operand can only be compared"
            )
    return tuple(found)


def _learn(at: Sequence[Affine | None], shape: Shape, sizes: dict[str, int]) -> None:
    for position, size in zip(at, shape, strict=False):
        if position is not None and not position.offset and len(position.terms) == 1:
            coefficient, atom = position.terms[0]
            if coefficient == 1 and isinstance(atom, str):
                sizes.setdefault(atom, size)
