"""Uneven windows: the rows that each block reads of its neighbours if blocks do not divide the dimension.

Split over n devices, a dimension of `size` rows has blocks of the next whole number of rows, `ceil(size / n)`, and a
shorter last one. A window that moves by a stride then shifts against the blocks that it reads. Pooling halves 200 rows
over 8 devices from blocks of 25 to blocks of 13: block k needs rows 26k to 26k + 25, and has 25k to 25k + 24. All
blocks but the last therefore read up to 7 rows of their right neighbour:

>>> from shardplan.rules.analysis import collect
>>> from shardplan.rules.expression import Read, Reduce, Result, index
>>> x, dx = index("x"), index("dx")
>>> pooled = Expression(
...     operands=("a",), operand_shapes=((200,),), result_shapes=((100,),), sizes={"x": 100, "dx": 2},
...     results=(Result((x,), Reduce("max", ("dx",), Read(0, (x * 2 + dx,)))),))
>>> uneven_split(pooled, collect(pooled), "x", 8).operands
(Slot(dim=0, halo=(0, 7), reducer=None),)
"""

from collections.abc import Mapping

from shardplan.rules.analysis import WHOLE, Facts, Refusal, Slot, Split, ends_are_met
from shardplan.rules.expression import Affine, Expression, Read

Range = tuple[int, int]


def uneven_split(expression: Expression, facts: Facts, name: str, n: int) -> Split:
    """The split of the index `name` into `n` blocks of which the last is shorter, or which read such blocks.

    Raises `Refusal` if there is none.
    """
    size = expression.sizes[name]
    if name in facts.hidden:
        raise Refusal(f"`{facts.hidden[name]}` gives them only together")
    block = _block(size, n)
    ranges = {other: (0, extent - 1) for other, extent in expression.sizes.items()}
    of_blocks = [ranges | {name: (k * block, (k + 1) * block - 1)} for k in range(n)]
    operands = tuple(
        _operand_slot(expression, operand, facts.reads[operand], name, of_blocks)
        for operand in range(len(expression.operands))
    )
    results = tuple(_result_slot(expression, facts, number, name) for number in range(len(expression.results)))
    halos = [slot.halo for slot in operands if slot.dim is not None]
    if not halos:
        raise Refusal("every block reads the same rows of all operands")
    if any(slot.reducer for slot in results) and (0, 0) not in halos:
        raise Refusal("no operand is split along it, so that partial results would count elements twice")
    return Split(name, operands, results)


def _block(size: int, n: int) -> int:
    """Rows per block; raises `Refusal` where the last block would be empty."""
    block = -(-size // n)
    if n < 2 or (n - 1) * block >= size:
        raise Refusal(f"its {size} values leave the last of {n} blocks empty")
    return block


def _operand_slot(
    expression: Expression, operand: int, reads: list[Read], name: str, of_blocks: list[dict[str, Range]]
) -> Slot:
    found: Slot | None = None
    for read in reads:
        for dim, position in enumerate(read.at):
            if position is None or name not in position.indices():
                continue
            slot = _read_slot(position, name, expression.operand_shapes[operand][dim], dim, of_blocks)
            if slot is WHOLE:
                continue
            if found is not None and found.dim != dim:
                raise Refusal(
                    f"`{expression.operands[operand]}` is read along dimensions {found.dim} and {dim} at once"
                )
            low, high = found.halo if found else (0, 0)
            found = Slot(dim, (max(low, slot.halo[0]), max(high, slot.halo[1])))
    return found or WHOLE


def _read_slot(position: Affine, name: str, extent: int, dim: int, of_blocks: list[dict[str, Range]]) -> Slot:
    covered = [reach(position, ranges) for ranges in of_blocks]
    if len(set(covered)) == 1:
        return WHOLE
    if not ends_are_met(position, name):
        raise Refusal("it occurs in one position in ways that pull apart, so that the ends are not known exactly")
    n = len(covered)
    own = _block(extent, n)
    # The first block has no neighbour below, the last one none above.
    low = max(0, *(k * own - first for k, (first, _) in enumerate(covered) if k > 0))
    high = max(0, *(last - ((k + 1) * own - 1) for k, (_, last) in enumerate(covered) if k < n - 1))
    if max(low, high) > own:
        raise Refusal(f"the halo of {max(low, high)} rows is larger than a block of {own}")
    return Slot(dim, (low, high))


def _result_slot(expression: Expression, facts: Facts, number: int, name: str) -> Slot:
    if name not in facts.involved[number]:
        return WHOLE
    dim = facts.placed[number].get(name)
    if dim is not None:
        at, extent = expression.results[number].at[dim], expression.result_shapes[number][dim]
        if at != Affine(((1, name),)) or extent != expression.sizes[name]:
            raise Refusal(f"it is not dimension {dim} of the result by itself")
        return Slot(dim)
    reducer = facts.reducers[number].get(name)
    if reducer is None:
        raise Refusal("partial results of it can not be combined")
    return Slot(reducer=reducer)


def reach(position: Affine, ranges: Mapping[str, Range]) -> Range:
    """The least and the greatest value of a position, with its indices in inclusive ranges.

    Raises `Refusal` if it has none.

    >>> from shardplan.rules.expression import index
    >>> reach((index("v") + 1 - index("w")).exactly(2), {"v": (25, 49), "w": (0, 1)})
    (13, 25)
    """
    low = high = position.offset
    for coefficient, atom in position.terms:
        if isinstance(atom, str):
            first, last = ranges[atom]
        else:
            first, last = reach(atom.of, ranges)
            if atom.kind == "/":
                first, last = -(-first // atom.by), last // atom.by
                if first > last:
                    raise Refusal(f"a block contains no multiple of {atom.by}")
            elif atom.kind == "//":
                first, last = first // atom.by, last // atom.by
            elif first // atom.by == last // atom.by:
                first, last = first % atom.by, last % atom.by
            else:
                first, last = 0, atom.by - 1
        ends = coefficient * first, coefficient * last
        low, high = low + min(ends), high + max(ends)
    return low, high
