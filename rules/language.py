"""A parser for the language in which expressions print. Printing its result gives the text back.

Operands are numbered in the order of their first use, or as the text lists them: ``x, y: out[i] = y[i] - x[i]``.
``x[...]?`` allows positions outside of ``x``, which contribute nothing. ``:`` reads a whole dimension. ``body if
(condition)`` is a guard. Other names are functions.
"""

from dataclasses import dataclass, field

from shardplan.rules.expression import (
    Affine,
    Apply,
    Compare,
    Constant,
    Expression,
    Guard,
    Opaque,
    Position,
    Read,
    Reduce,
    Result,
    Shape,
    Term,
    index,
)
from shardplan.rules.tokens import Token, fail, tokens

_RELATIONS = frozenset({"==", "!=", "<", "<=", ">", ">="})
_END = Token("", -1)


def parse_language(
    text: str, operand_shapes: list[Shape], result_shapes: list[Shape], sizes: dict[str, int]
) -> Expression:
    """The expression that ``text`` describes; sizes of indices come from results, operands or ``sizes``."""
    return _Parser(text, operand_shapes, result_shapes, sizes, tokens(text)).expression()


@dataclass
class _Parser:
    text: str
    operand_shapes: list[Shape]
    result_shapes: list[Shape]
    sizes: dict[str, int]
    found: list[Token]
    at: int = 0
    names: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    indices: set[str] = field(default_factory=set)
    reading: str = ""

    # Tokens

    def peek(self, ahead: int = 0) -> Token:
        place = self.at + ahead
        return self.found[place] if place < len(self.found) else _END

    def take(self, expected: str | None = None) -> Token:
        token = self.peek()
        if token is _END or (expected is not None and token.text != expected):
            got = f", got `{token.text}`" if token is not _END else ""
            fail(self.text, None if token is _END else token, f"expected `{expected or 'more'}`{got}")
        self.at += 1
        return token

    def skip(self, text: str) -> bool:
        if self.peek().text == text:
            self.at += 1
            return True
        return False

    # Results

    def header(self) -> None:
        """Names of the operands in their order, if the text starts with them: ``x, y: out[i] = ...``."""
        length = 1
        while self.peek(length).text == "," and self.peek(length + 1).text.isidentifier():
            length += 2
        if self.peek(length).text == ":":
            tensors = [token for token in self.found[:length] if token.text != ","]
            self.at = length + 1
            for token in tensors:
                self.operand(token)

    def expression(self) -> Expression:
        self.header()
        made = [self.result()]
        while self.skip(";"):
            made.append(self.result())
        if self.peek() is not _END:
            fail(self.text, self.peek(), f"`{self.peek().text}` does not belong here")
        for what, count, shapes in (
            ("results", len(made), self.result_shapes),
            ("operands", len(self.names), self.operand_shapes),
        ):
            if count != len(shapes):
                fail(self.text, None, f"it names {count} {what}, but there are {len(shapes)}: {shapes}")
        names = tuple(self.results)
        default = ("out",) if len(names) == 1 else tuple(f"out{n}" for n in range(len(names)))
        return Expression(
            tuple(self.names),
            tuple(self.operand_shapes),
            tuple(self.result_shapes),
            self.sizes,
            tuple(made),
            () if names == default else names,
        )

    def result(self) -> Result:
        number = len(self.results)
        self.results.append(self.take().text)
        at = tuple(p for p in self.bracket() if p is not None) if self.peek().text == "[" else ()
        if number < len(self.result_shapes):
            self.learn(at, self.result_shapes[number])
        self.indices |= {name for position in at for name in position.indices()}
        self.take("=")
        return Result(at, self.guarded())

    def learn(self, at: tuple[Affine | None, ...], shape: Shape) -> None:
        """Sizes of indices that stand alone in a position."""
        for position, size in zip(at, shape, strict=False):
            if position is not None and len(position.terms) == 1 and not position.offset:
                coefficient, atom = position.terms[0]
                if coefficient == 1 and isinstance(atom, str):
                    self.sizes.setdefault(atom, size)

    # Terms, from the weakest binding to the strongest

    def guarded(self) -> Term:
        body = self.sum()
        if self.skip("if"):
            return Guard(self.sum(), body)
        return body

    def sum(self) -> Term:
        term = self.product()
        while self.peek().text in ("+", "-"):
            term = _joined(self.take().text, term, self.product())
        return term

    def product(self) -> Term:
        term = self.factor()
        while self.peek().text in ("*", "//", "%"):
            operator = self.take()
            other = self.factor()
            if operator.text == "*":
                term = _joined("*", term, other)
            elif isinstance(term, Position) and isinstance(other, Constant):
                by = int(other.value)
                term = Position(term.value // by if operator.text == "//" else term.value % by)
            else:
                fail(self.text, operator, "only positions can be divided, and only by constants")
        return term

    def factor(self) -> Term:
        token = self.take()
        if token.text == "(":
            return self.parenthesis()
        if token.text == "-":
            return _joined("*", Constant(-1), self.factor())
        if token.text[0].isdigit():
            return Constant(float(token.text))
        if not token.text.isidentifier():
            fail(self.text, token, f"`{token.text}` does not belong here")
        following = self.peek().text
        if token.text == "Opaque" and following == ".":
            return self.opaque()
        if following == "[":
            return self.read(token)
        if following == "(":
            return self.reduction(token) if self.is_reduction(token) else self.function(token)
        if token.text in self.indices or token.text in self.sizes:
            return Position(index(token.text))
        return self.scalar(token)

    def parenthesis(self) -> Term:
        inner = self.guarded()
        if self.peek().text in _RELATIONS:
            relation = self.take().text
            inner = Compare(relation, inner, self.sum())
        self.take(")")
        return inner

    def is_reduction(self, token: Token) -> bool:
        """Reducers start with a capital letter."""
        return token.text[0].isupper()

    def reduction(self, token: Token) -> Term:
        self.take("(")
        names = [self.take().text]
        while self.skip(","):
            names.append(self.take().text)
        self.take(")")
        self.indices |= set(names)
        body = self.product()
        if self.skip("if"):
            body = Guard(self.factor(), body)
        return Reduce(token.text.lower(), tuple(names), body)

    def function(self, token: Token) -> Term:
        return Apply(token.text, self.arguments())

    def opaque(self) -> Term:
        self.take(".")
        name = self.take().text
        arguments = self.arguments()
        at = self.bracket() if self.peek().text == "[" else ()
        return Opaque(name, arguments, tuple(p for p in at if p is not None))

    def arguments(self) -> tuple[Term, ...]:
        self.take("(")
        if self.skip(")"):
            return ()
        found = [self.guarded()]
        while self.skip(","):
            found.append(self.guarded())
        self.take(")")
        return tuple(found)

    # Operands and positions

    def operand(self, token: Token) -> int:
        if token.text not in self.names:
            if len(self.names) == len(self.operand_shapes):
                shapes = ", ".join(f"`{n}` {s}" for n, s in zip(self.names, self.operand_shapes, strict=True))
                fail(self.text, token, f"`{token.text}` is neither an index nor one of the operands: {shapes}")
            self.names.append(token.text)
        return self.names.index(token.text)

    def scalar(self, token: Token) -> Read:
        operand = self.operand(token)
        if self.operand_shapes[operand]:
            fail(
                self.text,
                token,
                f"`{token.text}` is read without positions, but has shape {self.operand_shapes[operand]}",
            )
        return Read(operand)

    def read(self, token: Token) -> Read:
        operand = self.operand(token)
        shape = self.operand_shapes[operand]
        self.reading = f"; `{token.text}` has shape {shape}"
        at = self.bracket()
        self.reading = ""
        if len(at) != len(shape):
            fail(self.text, token, f"`{token.text}` has {len(at)} positions here, but its shape is {shape}")
        self.learn(at, shape)
        return Read(operand, at, padded=self.skip("?"))

    def bracket(self) -> tuple[Affine | None, ...]:
        self.take("[")
        found = [self.position()]
        while self.skip(","):
            found.append(self.position())
        self.take("]")
        return tuple(found)

    def position(self) -> Affine | None:
        return None if self.skip(":") else self.affine()

    def affine(self) -> Affine:
        sign = -1 if self.skip("-") else 1
        total = self.scaled() * sign
        while self.peek().text in ("+", "-"):
            sign = -1 if self.take().text == "-" else 1
            total = total + self.scaled() * sign
        return total

    def scaled(self) -> Affine:
        value = self.atom()
        while self.peek().text in ("*", "//", "%", "/"):
            operator = self.take()
            other = self.atom()
            if operator.text == "*" and not value.terms:
                value = other * value.offset
            elif other.terms:
                fail(
                    self.text,
                    operator,
                    f"a position must be affine: `{value} {operator.text} {other}` is not{self.reading}",
                )
            elif operator.text == "*":
                value = value * other.offset
            else:
                by = other.offset
                value = {"//": value.__floordiv__, "%": value.__mod__, "/": value.exactly}[operator.text](by)
        return value

    def atom(self) -> Affine:
        token = self.take()
        if token.text == "(":
            inner = self.affine()
            self.take(")")
            return inner
        if token.text.isdigit():
            return Affine((), int(token.text))
        if not token.text.isidentifier() or self.peek().text in ("[", "("):
            problem = f"a position must be affine in the indices: `{token.text}` does not belong here{self.reading}"
            fail(self.text, token, problem)
        return index(token.text)


def _joined(operator: str, left: Term, right: Term) -> Term:
    """Arithmetic on positions stays a position where it is affine."""
    if isinstance(left, Position) and isinstance(right, (Position, Constant)):
        other = right.value if isinstance(right, Position) else Affine((), int(right.value))
        if operator != "*":
            return Position(left.value + other if operator == "+" else left.value - other)
        if not other.terms:
            return Position(left.value * other.offset)
    if operator == "*" and isinstance(left, Constant) and isinstance(right, Position):
        return Position(right.value * int(left.value))
    return Apply(operator, (left, right))
