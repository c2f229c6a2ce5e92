"""Validation of descriptions: known indices, right ranks, reads inside of operands, results of the whole shape."""

from collections.abc import Iterator
from math import prod

from shardplan.rules.analysis import interval
from shardplan.rules.errors import RuleError
from shardplan.rules.expression import (
    Affine,
    Expression,
    Opaque,
    Position,
    Read,
    Reduce,
    Term,
    children,
    show,
)
from shardplan.rules.tokens import Token


def validate(expression: Expression, text: str | None = None) -> None:
    """Raises :class:`RuleError` with every problem of an expression, one line each.

    ``text``: the user's text, which the message quotes with marked places.
    """
    text = text if text is not None else str(expression)
    problems = [line for problem, place in _problems(expression) for line in _marked(text, problem, place)]
    if problems:
        raise RuleError("\n".join(problems))


def _marked(text: str, problem: str, place: str) -> list[str]:
    start = text.find(place)
    found = Token(place, start) if start >= 0 else Token(text, 0)
    return [problem, f"    {text}", f"    {' ' * found.start}{'^' * len(found.text)}"]


def _problems(expression: Expression) -> Iterator[tuple[str, str]]:
    """Problems, each with its piece of text."""
    for number, (result, shape) in enumerate(zip(expression.results, expression.result_shapes, strict=True)):
        if len(result.at) != len(shape):
            yield f"result {number} has {len(result.at)} positions, but its shape is {shape}", ""
            continue
        bound = {name for position in result.at for name in position.indices()}
        yield from _filled(expression, number)
        yield from _unknown(expression, result.body, bound)
    for term in (t for result in expression.results for t in _terms(result.body)):
        if isinstance(term, Read):
            yield from _read(expression, term)


def _filled(expression: Expression, number: int) -> Iterator[tuple[str, str]]:
    """The positions of a result must be all of its elements, once each."""
    result, shape = expression.results[number], expression.result_shapes[number]
    names = [name for position in result.at for name in position.indices()]
    if unknown := [name for name in names if name not in expression.sizes]:
        yield f"the size of index `{unknown[0]}` is not known; the result's shape is {shape}", unknown[0]
        return
    if len(names) != len(set(names)):
        yield f"an index is used twice in the positions of result {number}", ""
    for position, size in zip(result.at, shape, strict=True):
        low, high = _range(expression, position)
        count = prod(expression.sizes[name] for name in position.indices())
        if (low, high, count) != (0, size - 1, size):
            yield (
                f"`{position}` covers {low} to {high} of a dimension of size {size}; the result's shape is {shape}",
                str(position),
            )


def _unknown(expression: Expression, term: Term, bound: set[str]) -> Iterator[tuple[str, str]]:
    """Indices without a value from the result or an enclosing reduction."""
    positions: tuple[Affine | None, ...] = ()
    match term:
        case Read(_, at):
            positions = at
        case Position(value):
            positions = (value,)
        case Opaque(_, _, at):
            positions = at
        case Reduce(_, indices, _):
            bound = bound | set(indices)
    for position in positions:
        for name in position.indices() if position is not None else ():
            if name not in bound:
                where = show(term, expression.operands)
                shapes = _shape_of(expression, term)
                yield f"index `{name}` in `{where}` is neither an index of the result nor reduced over{shapes}", name
    for child in children(term):
        yield from _unknown(expression, child, bound)


def _shape_of(expression: Expression, term: Term) -> str:
    if not isinstance(term, Read):
        return ""
    return f"; `{expression.operands[term.operand]}` has shape {expression.operand_shapes[term.operand]}"


def _read(expression: Expression, read: Read) -> Iterator[tuple[str, str]]:
    name, shape = expression.operands[read.operand], expression.operand_shapes[read.operand]
    where = show(read, expression.operands)
    if len(read.at) != len(shape):
        yield f"`{where}` has {len(read.at)} positions, but `{name}` has shape {shape}", where
        return
    for position, size in zip(read.at, shape, strict=True):
        if position is None or any(n not in expression.sizes for n in position.indices()):
            continue
        low, high = _range(expression, position)
        if not read.padded and (low < 0 or high >= size):
            yield (
                f"`{position}` runs from {low} to {high}, but the dimension of `{name}` has size {size} (its shape is "
                f"{shape}); write `{where}?` if elements outside of it contribute nothing",
                where,
            )


def _range(expression: Expression, position: Affine) -> tuple[int, int]:
    _, low, high = interval(position, "", 1, expression.sizes, 1)
    return low, high


def _terms(term: Term) -> Iterator[Term]:
    yield term
    for child in children(term):
        yield from _terms(child)
