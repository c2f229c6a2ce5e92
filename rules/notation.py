"""Text to expressions, in two notations.

The einsum-like one names the dimensions of every operand and result. A name that no result has is summed over. ``(a
b)`` is a dimension that ``a`` and ``b`` make up. ``...`` are leading dimensions, and ``:`` is a dimension that is only
known as a whole:

>>> print(parse("i k, k j -> i j", [(4, 6), (6, 8)], [(4, 8)]))
out[i, j] = Sum(k) x[i, k] * y[k, j]
>>> print(parse("(a b) c -> a b c", [(12, 5)], [(3, 4, 5)]))
out[a, b, c] = f(x[4*a + b, c])
>>> print(parse("b : -> b :", [(8, 16)], [(8, 16)]))
out[b, h0] = Opaque.f(x[b, :])[h0]

The other one is the language in which expressions print:

>>> print(parse("out[i] = Sum(d) x[i + d] * weights[d]", [(10,), (3,)], [(8,)]))
out[i] = Sum(d) x[i + d] * weights[d]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from shardplan.rules.expression import ZERO, Affine, Apply, Expression, Opaque, Read, Reduce, Result, Shape, Term, index
from shardplan.rules.language import parse_language
from shardplan.rules.tokens import Token, fail, tokens
from shardplan.rules.validation import validate


def parse(
    text: str,
    operand_shapes: Sequence[Shape],
    result_shapes: Sequence[Shape],
    *,
    sizes: Mapping[str, int] | None = None,
) -> Expression:
    """The expression of ``text`` for these shapes.

    ``sizes``: sizes of indices that the shapes do not determine. Raises :class:`RuleError` that quotes the text and
    marks the place.
    """
    operand_shapes = [tuple(map(int, shape)) for shape in operand_shapes]
    result_shapes = [tuple(map(int, shape)) for shape in result_shapes]
    if "->" in text:
        expression = _Einsum(text, operand_shapes, result_shapes, dict(sizes or {})).parse()
    else:
        expression = parse_language(text, operand_shapes, result_shapes, dict(sizes or {}))
    validate(expression, text)
    return expression


Dim = tuple[str, ...]
"""One dimension: the names that make it up; ``(":",)`` for a whole one; the name ``1`` for size 1."""


@dataclass
class _Einsum:
    """One parse of the einsum-like notation."""

    text: str
    operand_shapes: list[Shape]
    result_shapes: list[Shape]
    sizes: dict[str, int]
    places: dict[str, Token] = field(default_factory=dict)

    def parse(self) -> Expression:
        left, right = self._sides()
        operands = self._expanded(left, self.operand_shapes, "operand")
        results = self._expanded(right, self.result_shapes, "result")
        everything = list(zip(operands + results, self.operand_shapes + self.result_shapes, strict=True))
        self._infer(everything)
        taken = {name for dims in operands for dim in dims for name in dim}
        reads = tuple(
            Read(n, tuple(None if dim == (":",) else self._position(dim) for dim in dims))
            for n, dims in enumerate(operands)
        )
        hidden_sizes: dict[str, int] = {}
        made = []
        for number, dims in enumerate(results):
            missing = taken - {name for dim in dims for name in dim}
            summed = [name for name in self.sizes if name in missing]
            made.append(self._result(number, dims, reads, summed, hidden_sizes))
        count = len(operands)
        names = ("x", "y", "z")[:count] if count <= 3 else tuple(f"x{n}" for n in range(count))
        return Expression(
            names, tuple(self.operand_shapes), tuple(self.result_shapes), self.sizes | hidden_sizes, tuple(made)
        )

    def _sides(self) -> tuple[list[list[Dim]], list[list[Dim]]]:
        found = tokens(self.text)
        arrows = [n for n, token in enumerate(found) if token.text == "->"]
        if len(arrows) != 1:
            fail(self.text, found[arrows[1]] if arrows else None, "expected one `->`")
        return self._tensors(found[: arrows[0]]), self._tensors(found[arrows[0] + 1 :])

    def check_names(self) -> None:
        """Every name of a result must occur in an operand."""
        left, right = self._sides()
        known = {name for dims in left for dim in dims for name in dim} | {":", "1", "..."}
        for name in (name for dims in right for dim in dims for name in dim):
            if name not in known:
                fail(self.text, self.places.get(name), f"index `{name}` of the result is in no operand")

    def made_up_shapes(self, sizes: Mapping[str, int]) -> list[Shape]:
        special = {":": 4, "1": 1, "...": 2}
        left, _ = self._sides()
        return [tuple(prod(sizes.get(n, special.get(n, 8)) for n in dim) for dim in dims) for dims in left]

    def _tensors(self, found: list[Token]) -> list[list[Dim]]:
        """The dimensions of each tensor on one side."""
        tensors: list[list[Dim]] = [[]]
        group: list[str] | None = None
        for token in found:
            if token.text == "," and group is None:
                tensors.append([])
            elif token.text == "(" and group is None:
                group = []
            elif token.text == ")" and group is not None:
                tensors[-1].append(tuple(group))
                group = None
            elif token.text.isidentifier() or token.text in ("1", ":", "..."):
                self.places.setdefault(token.text, token)
                if group is not None:
                    group.append(token.text)
                else:
                    tensors[-1].append((token.text,))
            else:
                fail(self.text, token, f"`{token.text}` does not belong here")
        if group is not None:
            fail(self.text, found[-1], "a `(` is not closed")
        return tensors if found else []

    def _expanded(self, tensors: list[list[Dim]], shapes: list[Shape], what: str) -> list[list[Dim]]:
        """Dimensions with ``...`` replaced by names, as many as the shapes leave."""
        if len(tensors) != len(shapes):
            fail(self.text, None, f"it names {len(tensors)} {what}s, but there are {len(shapes)}: {_list(shapes)}")
        expanded = []
        for number, (dims, shape) in enumerate(zip(tensors, shapes, strict=True)):
            if ("...",) in dims:
                leading = len(shape) - len(dims) + 1
                dims = [
                    d for dim in dims for d in ([(f"batch{n}",) for n in range(leading)] if dim == ("...",) else [dim])
                ]
            if len(dims) != len(shape):
                fail(self.text, None, f"{what} {number} has {len(dims)} dimensions here, but its shape is {shape}")
            expanded.append(dims)
        return expanded

    def _infer(self, tensors: list[tuple[list[Dim], Shape]]) -> None:
        """Sizes of all names, from dimensions of their own or from what is left of a shared one."""
        for dims, shape in tensors:
            for dim, size in zip(dims, shape, strict=True):
                if len(dim) == 1 and dim[0] != ":":
                    self._learn(dim[0], size, shape)
        for dims, shape in tensors:
            for dim, size in zip(dims, shape, strict=True):
                unknown = [name for name in dim if name not in self.sizes and name not in (":", "1")]
                known = prod(self.sizes.get(name, 1) for name in dim)
                if len(unknown) == 1 and size % known == 0:
                    self.sizes[unknown[0]] = size // known
                elif unknown:
                    fail(
                        self.text,
                        self.places.get(unknown[0]),
                        f"the size of `{unknown[0]}` can not be told from {shape}",
                    )
                elif len(dim) > 1 and known != size:
                    fail(
                        self.text, self.places.get(dim[0]), f"`({' '.join(dim)})` is {known}, but the shape is {shape}"
                    )

    def _learn(self, name: str, size: int, shape: Shape) -> None:
        if name == "1":
            if size != 1:
                fail(
                    self.text, self.places.get(name), f"`1` stands for a dimension of size 1, but the shape is {shape}"
                )
            return
        if self.sizes.setdefault(name, size) != size:
            fail(
                self.text,
                self.places.get(name),
                f"`{name}` is {self.sizes[name]} elsewhere, but {size} in the tensor of shape {shape}",
            )

    def _position(self, dim: Dim) -> Affine:
        position = ZERO
        for name in dim:
            if name != "1":
                position = position * self.sizes[name] + index(name)
        return position

    def _result(
        self,
        number: int,
        dims: list[Dim],
        reads: tuple[Read, ...],
        summed: list[str],
        hidden: dict[str, int],
    ) -> Result:
        at, picks = [], []
        for dim, size in zip(dims, self.result_shapes[number], strict=True):
            if dim == (":",):
                name = f"h{len(hidden)}"
                hidden[name] = size
                picks.append(index(name))
            at.append(picks[-1] if dim == (":",) else self._position(dim))
        function = "f" if len(self.result_shapes) == 1 else f"f{number}"
        whole = picks or any(None in read.at for read in reads)
        body: Term
        if whole:
            body = Opaque(function, reads, tuple(picks))
        elif summed:
            body = self._product(function, reads)
        else:
            body = Apply(function, reads)
        return Result(tuple(at), Reduce("sum", tuple(summed), body) if summed else body)

    def _product(self, function: str, reads: tuple[Read, ...]) -> Term:
        """The summand: the product of the operands, as in einsum. A function of several results only has the result's
        number."""
        if len(self.result_shapes) > 1:
            return Apply(function, reads)
        return reads[0] if len(reads) == 1 else Apply("*", reads)


def _list(shapes: Sequence[Shape]) -> str:
    return ", ".join(map(str, shapes)) or "none"


def check_syntax(text: str) -> None:
    """Raises :class:`RuleError` for text that fits no shapes."""
    if "->" not in text:
        if "=" not in text:
            fail(text, None, "expected `operands -> results`, or `out[...] = ...`")
        return
    _Einsum(text, [], [], {}).check_names()


def made_up_shapes(text: str, sizes: Mapping[str, int]) -> list[Shape]:
    """Shapes of operands that fit the einsum-like ``text``, with every index of size 8 unless ``sizes`` says
    otherwise."""
    return _Einsum(text, [], [], {}).made_up_shapes(sizes)
