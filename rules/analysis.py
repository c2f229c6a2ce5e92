"""The split analysis: which index can be split over n equal blocks, and the part of each tensor in each block.

Block ``k`` of ``n`` of an index of size ``N`` runs from ``k*N/n`` to ``(k+1)*N/n - 1``. A position in a tensor then
covers an interval whose ends are linear in ``k``; :func:`interval` computes it. There are three cases:

- The interval advances by exactly one nth of the dimension per block. The operand is split there, and the rows by which
  the interval exceeds a block are halo.
- The interval does not move. The operand is needed whole.
- Anything else is refused. No interval is ever widened to make it fit.

>>> from shardplan.rules.expression import index
>>> x, dx = index("x"), index("dx")
>>> interval(x * 2 + dx - 1, "x", 4, {"x": 8, "dx": 3}, 2)   # a window of 3 rows every 2 rows, from row -1 on
Interval(step=8, low=-1, high=7)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shardplan.rules.expression import (
    REDUCERS,
    Affine,
    Apply,
    Compare,
    Expression,
    Guard,
    Opaque,
    Position,
    Quotient,
    Read,
    Reduce,
    Term,
    index,
)


class Interval(NamedTuple):
    """Positions ``step*k + low`` to ``step*k + high``, both included, for block ``k``."""

    step: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Slot:
    """The part of one tensor in one block.

    ``dim``: the dimension that is split in n blocks, ``None`` for the whole tensor. ``halo``: additional rows below and
    above an operand's block (clipped at the ends of the tensor). ``reducer``: for a partial result of every block, the
    function that combines them.
    """

    dim: int | None = None
    halo: tuple[int, int] = (0, 0)
    reducer: str | None = None


WHOLE = Slot()


@dataclass(frozen=True, slots=True)
class Split:
    """One way to run an operation as n blocks: the split index, and the slot of every tensor."""

    index: str
    operands: tuple[Slot, ...]
    results: tuple[Slot, ...]


class Refusal(Exception):
    """The reason why an index cannot be split: a sentence without its subject."""


def interval(position: Affine, split: str, block: int, sizes: Mapping[str, int], n: int) -> Interval:
    """The positions that one block of ``split`` covers while all other indices take all their values.

    ``block`` is the size of one block of the split index, of which there are ``n``. Raises :class:`Refusal` if the ends
    of the interval are not linear in the number of the block.
    """
    step, low, high = 0, position.offset, position.offset
    for coefficient, atom in position.terms:
        if isinstance(atom, str):
            extent = (block if atom == split else sizes[atom]) - 1
            if atom == split:
                step += coefficient * block
            if coefficient > 0:
                high += coefficient * extent
            else:
                low += coefficient * extent
        else:
            inner = _quotient_interval(atom, split, block, sizes, n)
            step += coefficient * inner.step
            low += coefficient * (inner.low if coefficient > 0 else inner.high)
            high += coefficient * (inner.high if coefficient > 0 else inner.low)
    return Interval(step, low, high)


def _quotient_interval(quotient: Quotient, split: str, block: int, sizes: Mapping[str, int], n: int) -> Interval:
    step, low, high = interval(quotient.of, split, block, sizes, n)
    by = quotient.by
    if quotient.kind == "/":
        if step % by:
            raise Refusal(f"blocks do not start at multiples of {by}")
        if -(-low // by) > high // by:
            raise Refusal(f"blocks contain no multiple of {by}")
        return Interval(step // by, -(-low // by), high // by)
    first, last = low + min(0, step * (n - 1)), high + max(0, step * (n - 1))
    if first // by == last // by:  # the same quotient everywhere
        return (
            Interval(0, first // by, first // by)
            if quotient.kind == "//"
            else Interval(step, low - first // by * by, high - first // by * by)
        )
    if quotient.kind == "//":
        if step % by:
            raise Refusal(f"blocks do not start at multiples of {by}")
        return Interval(step // by, low // by, high // by)
    if high - low + 1 >= by:
        return Interval(0, 0, by - 1)
    if step % by:
        raise Refusal(f"blocks cut through runs of {by}")
    return Interval(0, low % by, high % by) if low // by == high // by else Interval(0, 0, by - 1)


@dataclass(slots=True)
class Facts:
    """Facts about an expression, collected once for all indices and block counts.

    ``reads``: per operand, every read of it. ``read_by``: per operand, the indices in these reads. ``mentions``: per
    result, the indices in its value. ``placed``: per result, the dimension that each index takes part in. ``reducers``:
    per result, for each index that its value reduces over, the reducer that combines partial results, or ``None`` for
    none. ``involved``: per result, all its indices. ``hidden``: indices that select an element of an opaque function's
    result.
    """

    reads: list[list[Read]]
    read_by: list[set[str]]
    mentions: list[set[str]] = field(default_factory=list)
    placed: list[dict[str, int]] = field(default_factory=list)
    reducers: list[dict[str, str | None]] = field(default_factory=list)
    hidden: dict[str, str] = field(default_factory=dict)
    involved: list[set[str]] = field(default_factory=list)


def collect(expression: Expression) -> Facts:
    """One pass over the expression."""
    facts = Facts(reads=[[] for _ in expression.operands], read_by=[set() for _ in expression.operands])
    for result in expression.results:
        facts.mentions.append(set())
        facts.reducers.append({})
        facts.placed.append({name: dim for dim, at in enumerate(result.at) for name in at.indices()})
        _visit(result.body, REDUCERS, facts)
        facts.involved.append(facts.mentions[-1] | set(facts.placed[-1]) | set(facts.reducers[-1]))
    return facts


_NOTHING: frozenset[str] = frozenset()
_THROUGH = {
    "+": frozenset({"sum"}),
    "-": frozenset({"sum"}),
    "*": frozenset({"sum", "prod"}),
    "maximum": frozenset({"max"}),
    "minimum": frozenset({"min"}),
}
"""Reducers that may be moved out of an argument: partial results of one argument make partial results of the whole,
the other arguments entering once."""


def _visit(term: Term, outer: frozenset[str], facts: Facts) -> None:
    """Visits a term. ``outer``: reducers at this place that can be moved out to the result."""
    mentions, reducers = facts.mentions[-1], facts.reducers[-1]
    match term:
        case Read(operand, at):
            facts.reads[operand].append(term)
            for position in at:
                if position is not None:
                    names = set(position.indices())
                    mentions.update(names)
                    facts.read_by[operand].update(names)
        case Reduce(reducer, indices, body):
            free = outer & {reducer}
            for name in indices:
                reducers[name] = reducer if free and name not in reducers else None
            _visit(body, free, facts)
        case Apply(function, arguments, linear):
            for number, argument in enumerate(arguments):
                through = _THROUGH.get(function, _NOTHING)
                if frozenset({number}) in linear:
                    through |= {"sum"}
                _visit(argument, outer & through, facts)
        case Guard(condition, body):
            _visit(condition, _NOTHING, facts)
            _visit(body, outer, facts)
        case Compare(_, left, right):
            _visit(left, _NOTHING, facts)
            _visit(right, _NOTHING, facts)
        case Position(value):
            mentions.update(value.indices())
        case Opaque(function, arguments, at):
            for argument in arguments:
                _visit(argument, _NOTHING, facts)
            for position in at:
                for name in position.indices():
                    facts.hidden[name] = function
                    mentions.add(name)


def split(expression: Expression, facts: Facts, name: str, n: int) -> Split:
    """The split of the index ``name`` into ``n`` blocks. Raises :class:`Refusal` if there is none."""
    size = expression.sizes[name]
    if n < 1 or size < n or size % n:
        raise Refusal(f"its {size} values do not divide into {n} equal blocks")
    if name in facts.hidden:
        raise Refusal(f"`{facts.hidden[name]}` gives them only together")
    block = size // n
    operands = tuple(
        _operand_slot(expression, operand, facts.reads[operand], name, block, n)
        if name in facts.read_by[operand]
        else WHOLE
        for operand in range(len(expression.operands))
    )
    results = tuple(
        _result_slot(expression, facts, number, name, block, n) if name in facts.involved[number] else WHOLE
        for number in range(len(expression.results))
    )
    partial = any(slot.reducer for slot in results)
    if partial and not any(slot.dim is not None and slot.halo == (0, 0) for slot in operands):
        raise Refusal("no operand is split along it, so that partial results would count elements twice")
    return Split(name, operands, results)


def padded_split(expression: Expression, facts: Facts, name: str) -> Split:
    """The split of the index ``name`` into blocks of any one size, the last of which are shorter or empty.

    Raises :class:`Refusal` if there is none. The index must be a whole dimension by itself in every read and result.
    Blocks then differ from one of a single row in the number of their rows alone.

    >>> from shardplan.rules.expression import Result
    >>> i, j = index("i"), index("j")
    >>> shifted = Expression(
    ...     operands=("a",), operand_shapes=((5, 7),), result_shapes=((5, 7),), sizes={"i": 5, "j": 7},
    ...     results=(Result((i, j), Read(0, (i, j * -1 + 6))),))
    >>> padded_split(shifted, collect(shifted), "i").operands
    (Slot(dim=0, halo=(0, 0), reducer=None),)
    >>> padded_split(shifted, collect(shifted), "j")
    Traceback (most recent call last):
    shardplan.rules.analysis.Refusal: it is no whole dimension by itself
    """
    size, alone = expression.sizes[name], index(name)
    placed = [(read.at, expression.operand_shapes[n]) for n, reads in enumerate(facts.reads) for read in reads]
    placed += [(result.at, shape) for result, shape in zip(expression.results, expression.result_shapes, strict=True)]
    for at, shape in placed:
        for position, extent in zip(at, shape, strict=False):
            if position is not None and name in position.indices() and (position != alone or extent != size):
                raise Refusal("it is no whole dimension by itself")
    return split(expression, facts, name, size)


def _operand_slot(expression: Expression, operand: int, reads: list[Read], name: str, block: int, n: int) -> Slot:
    """The slot of an operand, over all reads of it."""
    found: Slot | None = None
    whole = False
    for read in reads:
        slot = _read_slot(read, expression.operand_shapes[operand], expression.sizes, name, block, n)
        if slot is WHOLE:
            whole = True
        elif found is None or found.dim == slot.dim:
            low, high = found.halo if found else (0, 0)
            found = Slot(slot.dim, (max(low, slot.halo[0]), max(high, slot.halo[1])))
        else:
            raise Refusal(
                f"`{expression.operands[operand]}` is read along dimensions {found.dim} and {slot.dim} at once"
            )
    return WHOLE if whole or found is None else found


def _read_slot(read: Read, shape: tuple[int, ...], sizes: Mapping[str, int], name: str, block: int, n: int) -> Slot:
    slot = WHOLE
    for dim, position in enumerate(read.at):
        if position is None or (
            len(position.terms) == 1 and isinstance(position.terms[0][1], str) and position.terms[0][1] != name
        ):
            continue
        step, low, high = interval(position, name, block, sizes, n)
        if step == 0:
            continue
        if not ends_are_met(position, name):
            raise Refusal("it occurs in one position in ways that pull apart, so that the ends are not known exactly")
        extent = shape[dim]
        if step * n != extent:
            raise Refusal(f"dimension {dim} of size {extent} is read in steps of {step}, not in {n} equal blocks")
        halo = (max(0, -low), max(0, high - step + 1))
        if max(halo) > step:
            raise Refusal(f"the halo of {max(halo)} rows is larger than a block of {step}")
        if slot is not WHOLE:
            raise Refusal("two dimensions of one operand are read along it")
        slot = Slot(dim, halo)
    return slot


def ends_are_met(position: Affine, name: str) -> bool:
    """Whether all parts of a position that depend on the index reach their ends together: they grow with it."""
    parts = [(c, atom) for c, atom in position.terms if atom == name or name in Affine(((1, atom),)).indices()]
    grows = all(c > 0 and (isinstance(atom, str) or atom.kind == "//") for c, atom in parts)
    return len(parts) < 2 or grows


def _result_slot(expression: Expression, facts: Facts, number: int, name: str, block: int, n: int) -> Slot:
    dim = facts.placed[number].get(name)
    if dim is not None:
        extent = expression.result_shapes[number][dim]
        found = interval(expression.results[number].at[dim], name, block, expression.sizes, n)
        if found == (0, 0, extent - 1):
            raise Refusal(f"its blocks lie interleaved in dimension {dim} of the result")
        if found.step * n != extent or found.low != 0 or found.high != found.step - 1:
            raise Refusal(f"its blocks do not lie one after another in dimension {dim} of the result")
        return Slot(dim)
    if name in facts.reducers[number]:
        reducer = facts.reducers[number][name]
        if reducer is None:
            raise Refusal("partial results of it can not be combined")
        return Slot(reducer=reducer)
    if name in facts.mentions[number]:
        raise Refusal("a result depends on it without having it as a dimension")
    return WHOLE
