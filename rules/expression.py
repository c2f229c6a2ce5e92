"""Index expressions: what an operation computes, element by element.

An operation's result is a lambda over named indices (the tensor description language of Wang et al., EuroSys 2019,
section 3). Indices range over ``0 <= index < size``. A position in a tensor is an affine function of them, with ``//``,
``%`` and exact ``/`` by constants. A matrix product reads:

>>> i, j, k = index("i"), index("j"), index("k")
>>> product = Apply("*", (Read(0, (i, k)), Read(1, (k, j))))
>>> matmul = Expression(
...     operands=("a", "b"), operand_shapes=((4, 6), (6, 8)), result_shapes=((4, 8),), sizes={"i": 4, "j": 8, "k": 6},
...     results=(Result((i, j), Reduce("sum", ("k",), product)),))
>>> print(matmul)
out[i, j] = Sum(k) a[i, k] * b[k, j]

Everything here is plain data. :mod:`shardplan.rules.analysis` finds out what splits, and
:mod:`shardplan.rules.notation` parses text into it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

REDUCERS = frozenset({"sum", "prod", "max", "min", "and", "or"})
"""Reducers whose partial results can be combined. Any other name (such as ``last``) reduces, but only as a whole."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Quotient:
    """``of // by``, ``of % by``, or ``of / by``: the exact quotient, which exists only where ``by`` divides."""

    kind: str
    of: "Affine"
    by: int

    def __str__(self) -> str:
        inner = f"({self.of})" if len(self.of.terms) > 1 or self.of.offset or self.of.terms[0][0] != 1 else str(self.of)
        return f"{inner} {self.kind} {self.by}"


@dataclass(frozen=True, slots=True)
class Affine:
    """A position: ``sum(coefficient * atom) + offset``, where an atom is an index name or a :class:`Quotient`."""

    terms: tuple[tuple[int, "str | Quotient"], ...]
    offset: int = 0

    def __add__(self, other: "Affine | int") -> "Affine":
        if not isinstance(other, int | Affine):
            return NotImplemented
        if isinstance(other, int):
            return Affine(self.terms, self.offset + other) if other else self
        merged: dict[str | Quotient, int] = {}
        for coefficient, atom in self.terms + other.terms:
            merged[atom] = merged.get(atom, 0) + coefficient
        terms = tuple((coefficient, atom) for atom, coefficient in merged.items() if coefficient)
        return Affine(terms, self.offset + other.offset)

    def __sub__(self, other: "Affine | int") -> "Affine":
        if not isinstance(other, int | Affine):
            return NotImplemented
        return self + (-other if isinstance(other, int) else other * -1)

    def __mul__(self, factor: int) -> "Affine":
        if not isinstance(factor, int):
            return NotImplemented
        if factor == 1:
            return self
        if factor == 0:
            return ZERO
        return Affine(tuple((c * factor, atom) for c, atom in self.terms), self.offset * factor)

    def __rmul__(self, factor: int) -> "Affine":
        return self * factor

    def __radd__(self, other: int) -> "Affine":
        return self + other

    def __rsub__(self, other: int) -> "Affine":
        return self * -1 + other

    def __floordiv__(self, by: int) -> "Affine":
        return self._quotient("//", by)

    def __mod__(self, by: int) -> "Affine":
        return self._quotient("%", by)

    def exactly(self, by: int) -> "Affine":
        """The quotient by ``by`` where ``by`` divides. Elsewhere the position does not exist."""
        return self._quotient("/", by)

    def _quotient(self, kind: str, by: int) -> "Affine":
        if by == 1:
            return ZERO if kind == "%" else self
        if not self.terms and kind != "/":
            return Affine((), self.offset // by if kind == "//" else self.offset % by)
        return Affine(((1, Quotient(kind, self, by)),))

    def indices(self) -> Iterator[str]:
        """The names of the indices in it, with repetitions."""
        for _, atom in self.terms:
            if isinstance(atom, str):
                yield atom
            else:
                yield from atom.of.indices()

    def __str__(self) -> str:
        if len(self.terms) == 1 and not self.offset and self.terms[0][0] == 1:
            return str(self.terms[0][1])
        parts = [("-" if c < 0 else "+", _scaled(abs(c), atom)) for c, atom in self.terms]
        if self.offset or not parts:
            parts.append(("-" if self.offset < 0 else "+", str(abs(self.offset))))
        if parts[0][0] == "-":  # a positive part first reads better: `3 - i`
            parts.sort(key=lambda part: part[0] == "-")
        text = " ".join(f"{sign} {part}" for sign, part in parts)
        return text[2:] if text.startswith("+") else "-" + text[2:]


def _scaled(coefficient: int, atom: "str | Quotient") -> str:
    name = atom if isinstance(atom, str) else f"({atom})"
    return name if coefficient == 1 else f"{coefficient}*{name}"


ZERO = Affine(())


def index(name: str) -> Affine:
    """The position that is the index itself."""
    return Affine(((1, name),))


# Terms: the value of one element of a result.


@dataclass(frozen=True, slots=True)
class Read:
    """One element of an operand, or a slice of it: ``None`` in ``at`` stands for a whole dimension.

    ``padded``: positions outside of the operand (or without an exact quotient) are allowed and contribute nothing.
    """

    operand: int
    at: tuple[Affine | None, ...] = ()
    padded: bool = False


@dataclass(frozen=True, slots=True)
class Constant:
    """A literal number."""

    value: float


@dataclass(frozen=True, slots=True)
class Position:
    """The value of an affine function of the indices, as a number."""

    value: Affine


@dataclass(frozen=True, slots=True)
class Compare:
    """``left <relation> right`` as 0 or 1."""

    relation: str
    left: "Term"
    right: "Term"


@dataclass(frozen=True, slots=True)
class Guard:
    """``body if condition``: where the condition is 0 the enclosing reduction skips it."""

    condition: "Term"
    body: "Term"


@dataclass(frozen=True, slots=True)
class Reduce:
    """``reducer`` of the body over all values of ``indices``."""

    reducer: str
    indices: tuple[str, ...]
    body: "Term"


@dataclass(frozen=True, slots=True)
class Apply:
    """A function of its arguments alone.

    ``linear``: sets of argument positions in which the function is jointly linear, as far as that is known from
    outside. The analysis itself knows the arithmetic of ``+``, ``-``, ``*``, ``where``, ``overwrite``, ``pad`` and
    ``concat``.
    """

    function: str
    arguments: tuple["Term", ...]
    linear: tuple[frozenset[int], ...] = ()


@dataclass(frozen=True, slots=True)
class Opaque:
    """A function without an expression, of whole slices, with whole slices as results.

    ``at`` selects the element of the function's result. Its indices cannot be split. ``flops``: floating point
    operations of the whole function, 0 if unknown.
    """

    function: str
    arguments: tuple["Term", ...]
    at: tuple[Affine, ...] = ()
    linear: tuple[frozenset[int], ...] = ()
    flops: int = 0


Term = Read | Constant | Position | Compare | Guard | Reduce | Apply | Opaque


@dataclass(frozen=True, slots=True)
class Result:
    """One result of an operation: the position of the element with these indices, and its value."""

    at: tuple[Affine, ...]
    body: Term


@dataclass(frozen=True, slots=True)
class Expression:
    """What an operation computes. ``sizes`` gives the extent of every index.

    ``flops``: floating point operations where the expression does not show them, because it repeats parts; else 0.
    """

    operands: tuple[str, ...]
    operand_shapes: tuple[Shape, ...]
    result_shapes: tuple[Shape, ...]
    sizes: Mapping[str, int]
    results: tuple[Result, ...]
    names: tuple[str, ...] = ()
    flops: int = 0

    def __str__(self) -> str:
        names = self.names or (
            ("out",) if len(self.results) == 1 else tuple(f"out{n}" for n in range(len(self.results)))
        )
        return "; ".join(
            f"{name}{_bracket(result.at)} = {show(result.body, self.operands)}"
            for name, result in zip(names, self.results, strict=True)
        )


def rebuilt(term: Term, place: Callable[[Affine], Affine], inner: Callable[[Term], Term]) -> Term:
    """The term with ``place`` applied to its own positions and ``inner`` to the terms right below it."""
    match term:
        case Read(operand, at, padded):
            return Read(operand, tuple(None if p is None else place(p) for p in at), padded)
        case Reduce(reducer, indices, body):
            return Reduce(reducer, indices, inner(body))
        case Position(value):
            return Position(place(value))
        case Compare(relation, left, right):
            return Compare(relation, inner(left), inner(right))
        case Guard(condition, body):
            return Guard(inner(condition), inner(body))
        case Apply(function, arguments, linear):
            return Apply(function, tuple(map(inner, arguments)), linear)
        case Opaque(function, arguments, at, linear, flops):
            return Opaque(function, tuple(map(inner, arguments)), tuple(map(place, at)), linear, flops)
    return term


def children(term: Term) -> tuple[Term, ...]:
    """The terms right below a term."""
    match term:
        case Reduce(_, _, body):
            return (body,)
        case Guard(left, right) | Compare(_, left, right):
            return (left, right)
        case Apply(_, arguments) | Opaque(_, arguments):
            return arguments
    return ()


def replaced(position: Affine, names: Mapping[str, Affine]) -> Affine:
    """The position with indices replaced by positions."""
    total = Affine((), position.offset)
    for coefficient, atom in position.terms:
        if isinstance(atom, Quotient):
            inner = replaced(atom.of, names)
            divided = {"//": inner.__floordiv__, "%": inner.__mod__, "/": inner.exactly}[atom.kind](atom.by)
            total = total + divided * coefficient
        else:
            total = total + names.get(atom, index(atom)) * coefficient
    return total


_INFIX = {"+": 1, "-": 1, "*": 2}


def show(term: Term, operands: tuple[str, ...], strength: int = 0) -> str:
    """The term as text. ``strength``: how tightly the surrounding operator binds."""
    match term:
        case Read(operand, at, padded):
            return f"{operands[operand]}{_bracket(at)}" + ("?" if padded else "")
        case Constant(value):
            return f"{value:g}"
        case Position(value):
            return f"({value})" if strength and len(value.terms) + bool(value.offset) > 1 else str(value)
        case Compare(relation, left, right):
            return f"({show(left, operands)} {relation} {show(right, operands)})"
        case Guard(condition, body):
            text = f"{show(body, operands, 3)} if {show(condition, operands)}"
            return f"({text})" if strength else text
        case Reduce(reducer, indices, body):
            text = f"{reducer.capitalize()}({', '.join(indices)}) {show(body, operands, 2)}"
            return f"({text})" if strength > 1 else text
        case Apply(function, (left, right)) if function in _INFIX:
            own = _INFIX[function]
            text = f"{show(left, operands, own)} {function} {show(right, operands, own + (function == '-'))}"
            return f"({text})" if strength > own else text
        case Apply(function, arguments):
            return f"{function}({', '.join(show(a, operands) for a in arguments)})"
        case Opaque(function, arguments, at):
            return f"Opaque.{function}({', '.join(show(a, operands) for a in arguments)}){_bracket(at)}"


def _bracket(at: tuple[Affine | None, ...]) -> str:
    return f"[{', '.join(':' if a is None else str(a) for a in at)}]" if at else ""
