"""An operation along one of its indices: what it reads of every operand for an interval of the index.

Blocks in time are intervals of an index, as blocks on devices are. They need not be equal shares of a dimension: a
block may start anywhere, and its intervals in the operands may overlap those of its neighbours.

>>> import jax, jax.numpy as jnp
>>> from shardplan.rules import rule_of
>>> rows = rule_of(lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (3,), (2,), "SAME"), jnp.ones(16))
>>> step = along_result(rows, 0, 0)
>>> step.name, step.operands[0], step.scale(0)
('x', 0, Fraction(2, 1))
>>> step.needed(0, Span(4, 0, 4))
Span(step=8, low=0, high=9)
>>> step.reached(0, Span(8, 0, 8))
Span(step=4, low=-1, high=4)
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from typing import NamedTuple

from shardplan.rules.analysis import Facts, Refusal, ends_are_met
from shardplan.rules.expression import Affine, Apply, Expression, Position, Read, Reduce, Term, children, index
from shardplan.rules.rule import Rule


class Span(NamedTuple):
    """The positions ``step*k + low`` to ``step*k + high - 1`` of block ``k``."""

    step: int
    low: int
    high: int

    @property
    def length(self) -> int:
        """The number of positions of one block."""
        return self.high - self.low

    def union(self, other: "Span | None") -> "Span":
        """The least span that has both. Raises :class:`Refusal` where they advance by different steps."""
        if other is None:
            return self
        if self.step != other.step:
            raise Refusal(f"it is read in steps of {self.step} and of {other.step} per block")
        return Span(self.step, min(self.low, other.low), max(self.high, other.high))


@dataclass(frozen=True)
class Along:
    """An operation along the index ``name``: per operand and result the dimension that the index moves, or None.

    ``reducers`` are those of results that are reduced over the index. ``plain`` says that the index is a whole
    dimension by itself wherever it occurs. ``placed`` says that a result depends on the value of the index itself, as
    that of an iota does. ``once`` is an operand that enters a reduced result once and not once per block, as that does
    into which a scatter adds.
    """

    expression: Expression | None
    """None where a loop runs along the index."""
    name: str
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    reducers: tuple[str | None, ...]
    positions: tuple[tuple[Affine, ...], ...]
    """Per operand, its positions along the dimension, one for each read."""
    plain: bool
    placed: bool
    size: int
    """The number of values of the index."""
    once: int | None = None

    @classmethod
    def of_loop(
        cls,
        size: int,
        operands: tuple[int | None, ...],
        results: tuple[int | None, ...],
        reducers: tuple[str | None, ...],
    ) -> "Along":
        """A loop along an index of such a size, which is a whole dimension by itself wherever it occurs."""
        return cls(None, "", operands, results, reducers, ((),) * len(operands), plain=True, placed=False, size=size)

    def needed(self, operand: int, span: Span) -> Span:
        """The span of an operand's dimension that the operation reads for a span of the index."""
        if self.plain:
            return span
        assert self.expression is not None
        found = None
        for position in self.positions[operand]:
            found = span_of(position, self.name, span, self.expression.sizes).union(found)
        assert found is not None
        return found

    def reached(self, operand: int, span: Span) -> Span:
        """The span of the index outside of which the operation does not read a span of an operand's dimension: where
        the index is no whole dimension by itself, in whole runs of what reads one position."""
        if self.plain:
            return span
        scale = self.scale(operand)
        if scale <= 0 or (span.step / scale).denominator > 1:
            raise Refusal("it does not go through the dimension in whole steps")
        step, run = int(span.step / scale), scale.denominator
        block = self.needed(operand, Span(step, 0, step))
        first, last = block.low - 1, block.high - scale * (step - 1)  # at least what position 0 of the index reads
        low, high = ceil((span.low - last) / scale), floor((span.high - 1 - first) / scale) + 1
        while low < high and not self._reads(operand, low, span):
            low += 1
        while low < high and not self._reads(operand, high - 1, span):
            high -= 1
        return Span(step, low // run * run, -(-high // run) * run)

    def _reads(self, operand: int, position: int, span: Span) -> bool:
        """Whether a position of the index may read a position of a span of an operand's dimension."""
        try:
            found = self.needed(operand, Span(0, position, position + 1))
        except Refusal:  # it reads nothing there
            return False
        return found.low < span.high and span.low < found.high

    def scale(self, operand: int) -> Fraction:
        """The positions by which an operand's dimension advances where the index advances by one."""
        return Fraction(1) if self.plain else _slope(self.positions[operand][0], self.name)


def along_operand(rule: Rule, operand: int, dim: int) -> Along:
    """The operation along the index that moves a dimension of an operand. Raises :class:`Refusal` if none does."""
    expression, key = _known(rule), ("operand", operand, dim)
    if key in rule.along:
        return rule.along[key]
    positions = [read.at[dim] for read in _reads(expression, operand)]
    if not positions or any(position is None for position in positions):
        raise Refusal("it is read whole")
    names = {_mover(position, expression.sizes) for position in positions if position is not None}
    if len(names) != 1 or None in names:
        raise Refusal("no one index moves it")
    return rule.along.setdefault(key, _along(rule, str(names.pop())))


def along_result(rule: Rule, result: int, dim: int) -> Along:
    """The operation along the index of a dimension of a result. Raises :class:`Refusal` if there is none."""
    expression, key = _known(rule), ("result", result, dim)
    if key in rule.along:
        return rule.along[key]
    name = _mover(expression.results[result].at[dim], expression.sizes)
    if name is None:
        raise Refusal("no one index moves it")
    return rule.along.setdefault(key, _along(rule, name))


def span_of(position: Affine, name: str, span: Span, sizes: Mapping[str, int]) -> Span:
    """The span that a position covers while ``name`` runs through a span, and every other index through all values.

    Raises :class:`Refusal` where its ends do not advance by equal steps.
    """
    if not ends_are_met(position, name):
        raise Refusal("its parts in one position do not meet their ends together")
    step, low, high = 0, position.offset, position.offset + 1
    for coefficient, atom in position.terms:
        if atom == name:
            inner = span
        elif isinstance(atom, str):
            inner = Span(0, 0, sizes[atom])
        else:
            inner = _quotient(atom.kind, atom.by, span_of(atom.of, name, span, sizes))
        step += coefficient * inner.step
        ends = (coefficient * inner.low, coefficient * (inner.high - 1))
        low, high = low + min(ends), high + max(ends)
    return Span(step, low, high)


def _quotient(kind: str, by: int, of: Span) -> Span:
    step, low, last = of.step, of.low, of.high - 1
    if kind == "%":
        if step % by == 0 and low // by == last // by:
            return Span(0, low % by, last % by + 1)
        if step % by or low % by or (last + 1) % by:
            raise Refusal(f"blocks cut through runs of {by}")
        return Span(0, 0, by)
    if step % by:
        raise Refusal(f"blocks do not start at multiples of {by}")
    if kind == "//":
        return Span(step // by, low // by, last // by + 1)
    if -(-low // by) > last // by:
        raise Refusal(f"blocks contain no multiple of {by}")
    return Span(step // by, -(-low // by), last // by + 1)


def _known(rule: Rule) -> Expression:
    if rule.expression is None:
        raise Refusal(rule.missing or "it has no index expression")
    return rule.expression


def _along(rule: Rule, name: str) -> Along:
    expression, facts = _known(rule), rule.facts
    if name in facts.hidden:
        raise Refusal(f"`{facts.hidden[name]}` gives them only together")
    operands = tuple(_moved(expression, n, name) for n in range(len(expression.operands)))
    results, reducers = [], []
    for number in range(len(expression.results)):
        dim, reducer = _result(expression, facts, number, name)
        results.append(dim)
        reducers.append(reducer)
    if any(reducers) and all(dim is None for dim in operands):
        raise Refusal("no operand is split along it, so that partial results would count elements twice")
    alone, size = index(name), expression.sizes[name]
    placed = [(p, expression.operand_shapes[n][d]) for n in range(len(operands)) for p, d in _at(expression, n)]
    placed += [
        (position, shape[dim])
        for result, shape in zip(expression.results, expression.result_shapes, strict=True)
        for dim, position in enumerate(result.at)
    ]
    plain = all(p == alone and extent == size for p, extent in placed if name in p.indices())
    valued = any(name in _valued(result.body) for result in expression.results)
    positions = tuple(tuple(_along_dim(expression, n, dim)) for n, dim in enumerate(operands))
    once = {operand for result in expression.results for operand in _once(result.body, name)}
    if len(once) > 1 or any(operands[operand] is not None for operand in once):
        raise Refusal("several tensors enter its partial results once")
    return Along(
        expression,
        name,
        operands,
        tuple(results),
        tuple(reducers),
        positions,
        plain,
        valued,
        size,
        next(iter(once), None),
    )


def _along_dim(expression: Expression, operand: int, dim: int | None) -> Iterator[Affine]:
    yield from (position for position, at in _at(expression, operand) if at == dim)


def _at(expression: Expression, operand: int) -> Iterator[tuple[Affine, int]]:
    for read in _reads(expression, operand):
        yield from ((position, dim) for dim, position in enumerate(read.at) if position is not None)


def _moved(expression: Expression, operand: int, name: str) -> int | None:
    """The dimension of an operand that an index moves."""
    found = set[int | None]()
    for read in _reads(expression, operand):
        dims = [dim for dim, position in enumerate(read.at) if position is not None and name in position.indices()]
        moved = [dim for dim in dims if _mover(read.at[dim], expression.sizes) == name]  # type: ignore[arg-type]
        small = [dim for dim in dims if dim not in moved and not _stays(read.at[dim], name, expression)]  # type: ignore[arg-type]
        if small or len(moved) > 1:
            raise Refusal("two indices move one dimension of an operand, or one index moves two")
        found.add(moved[0] if moved else None)
    if len(found) > 1:
        raise Refusal("an operand is read along it and whole")
    return found.pop() if found else None


def _stays(position: Affine, name: str, expression: Expression) -> bool:
    """Whether a position covers the same values whatever the block, as ``i % 5`` does for blocks of whole fives."""
    return all(not isinstance(a, str) and a.kind == "%" for _, a in position.terms if a == name or _has(a, name))


def _has(atom: object, name: str) -> bool:
    return not isinstance(atom, str) and name in atom.of.indices()  # type: ignore[attr-defined]


def _result(expression: Expression, facts: Facts, number: int, name: str) -> tuple[int | None, str | None]:
    """The dimension of a result that an index moves, or the reducer over it."""
    result = expression.results[number]
    dims = [dim for dim, position in enumerate(result.at) if name in position.indices()]
    if dims:
        if len(dims) > 1 or result.at[dims[0]] != index(name):
            raise Refusal("it is no dimension of a result by itself")
        return dims[0], None
    if name in facts.reducers[number]:
        reducer = facts.reducers[number][name]
        if reducer is None:
            raise Refusal("partial results of it can not be combined")
        return None, reducer
    if name in facts.mentions[number]:
        raise Refusal("a result depends on it without having it as a dimension")
    return None, None


def _mover(position: Affine, sizes: Mapping[str, int]) -> str | None:
    """The index that moves a position most: by its extent, or a window's place rather than what is in the window."""
    moves = {name: abs(_slope(position, name)) * (sizes[name] - 1) for name in position.indices()}
    moves = {name: far for name, far in moves.items() if far or len(moves) == 1}
    return max(moves, key=lambda name: (moves[name], name)) if moves else None


def _slope(position: Affine, name: str) -> Fraction:
    total = Fraction(0)
    for coefficient, atom in position.terms:
        if atom == name:
            total += coefficient
        elif not isinstance(atom, str) and atom.kind != "%":
            total += coefficient * _slope(atom.of, name) / atom.by
    return total


def _once(term: Term, name: str) -> set[int]:
    """The operands that are added to a reduction over an index, or multiplied with it if it is a product."""
    if not isinstance(term, Apply):
        return set()
    reducers = [_reducer(argument, name) for argument in term.arguments]
    found = set[int]().union(*(_once(argument, name) for argument in term.arguments))
    if (term.function in ("+", "-") and "sum" in reducers) or (term.function == "*" and "prod" in reducers):
        for number, (argument, reducer) in enumerate(zip(term.arguments, reducers, strict=True)):
            if reducer is None:
                if number or not isinstance(argument, Read):
                    raise Refusal("partial results of it can not be combined")
                found.add(argument.operand)
    return found


def _reducer(term: Term, name: str) -> str | None:
    """The reducer of a term over an index."""
    if isinstance(term, Reduce) and name in term.indices:
        return term.reducer
    return next((found for inner in children(term) if (found := _reducer(inner, name)) is not None), None)


def _reads(expression: Expression, operand: int) -> Iterator[Read]:
    for result in expression.results:
        yield from (read for read in _all_reads(result.body) if read.operand == operand)


def _all_reads(term: Term) -> Iterator[Read]:
    if isinstance(term, Read):
        yield term
    for inner in children(term):
        yield from _all_reads(inner)


def _valued(term: Term) -> set[str]:
    """The indices whose values are numbers of a term."""
    own = set(term.value.indices()) if isinstance(term, Position) else set[str]()
    return own.union(*map(_valued, children(term)))
