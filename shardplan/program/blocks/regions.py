"""Regions: the operations that one loop of blocks runs.

A *component* are the operations with a part in a growth that make or read large values. Its *closure* adds what lies on
paths between them. A loop must be convex: no path leaves it and comes back. A result that is summed over the index is
known only behind the loop, and so is what operations outside of the growth make of results. The closure is therefore
cut into *levels*: an operation that needs such a result, directly or not, is in a later loop. Operations are as late as
possible.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from shardplan.program.blocks.places import Growth, is_barrier
from shardplan.program.operation_kinds import readers_in
from shardplan.program.program import Operation, Program
from shardplan.search.graph.union_find import leaders


@dataclass(frozen=True, slots=True)
class Region:
    """The operations of one loop, by index in the order of the program, those that it makes for itself included."""

    operations: tuple[int, ...]
    own: frozenset[int]
    """What depends on no tensor outside: every loop makes it for itself, and it is made outside where needed there."""


def regions(program: Program, growth: Growth, least_bytes: float) -> list[Region]:
    """The loops of a growth whose components have values of at least so many bytes, in their order."""
    nothing = from_nothing(program, growth)
    large = {
        index
        for index in growth.along
        if index not in nothing and _largest(program, growth, program.operations[index]) >= least_bytes
    }
    found = list[Region]()
    for closure in _closures(program, growth, _components(program, growth, large, least_bytes), nothing):
        levels: dict[int, list[int]] = {}
        for index, level in _levels(program, growth, closure).items():
            levels.setdefault(level, []).append(index)
        chosen = [sorted(levels[level]) for level in sorted(levels) if not large.isdisjoint(levels[level])]
        found += [_with_own(program, growth, members, nothing) for members in chosen]
    return found


def from_nothing(program: Program, growth: Growth) -> set[int]:
    """The operations of a growth, by index, that read no block of a tensor but of others of them."""
    found = set[int]()
    for index in sorted(growth.along):
        operation = program.operations[index]
        blocked = [o for o in operation.read if growth.blocked(o)]
        made = [program.makers[o].index for o in blocked if o in program.makers]
        if len(made) == len(blocked) and found.issuperset(made) and not is_barrier(operation):
            found.update([index] if is_blocked_result(growth, operation) else [])
    return found


def is_blocked_result(growth: Growth, operation: Operation) -> bool:
    """Whether all results have the indices: none is a sum over one."""
    return all(map(growth.blocked, operation.results))


def partial(program: Program, growth: Growth, region: tuple[int, ...]) -> dict[int, str]:
    """The results that are reduced over an index, with the reducer, and what barriers pass on of them; parts of sums
    inside of scans as well."""
    found = dict.fromkeys(growth.partial, "sum")
    for index in region:
        operation, along = program.operations[index], growth.along[index]
        if is_barrier(operation):
            pairs = zip(operation.operands, operation.results, strict=True)
            found |= {result: found[o] for o, result in pairs if isinstance(o, int) and o in found}
        for one in along:
            reduced = zip(operation.results, one.reducers, strict=True)
            found |= {result: reducer for result, reducer in reduced if reducer is not None}
    return found


def _largest(program: Program, growth: Growth, operation: Operation) -> float:
    values = (v for v in (*operation.read, *operation.results) if growth.blocked(v))
    return max((program.values[v].total_bytes for v in values), default=0.0)


def _closures(program: Program, growth: Growth, components: Sequence[set[int]], nothing: set[int]) -> list[set[int]]:
    """The closures of components: with what of the growth is on a path between two of their operations. Those that meet
    are one."""
    among, found = {*growth.along} - nothing, [*components]
    while True:
        found = [one | (among & between) for one, between in zip(found, _between(program, found), strict=True)]
        holder = dict[int, int]()
        pairs = [(holder.setdefault(index, number), number) for number, one in enumerate(found) for index in one]
        leader, joined = leaders(len(found), pairs), dict[int, set[int]]()
        for number, one in enumerate(found):
            joined.setdefault(leader[number], set()).update(one)
        if len(joined) == len(found):
            return sorted(found, key=min)
        found = [*joined.values()]


def _components(program: Program, growth: Growth, large: set[int], least_bytes: float) -> list[set[int]]:
    """The operations that share blocks of large values, directly or over others."""
    holder, pairs = dict[int, int](), list[tuple[int, int]]()
    for index in sorted(large):
        operation = program.operations[index]
        for value in (*operation.read, *operation.results):
            if growth.blocked(value) and program.values[value].total_bytes >= least_bytes:
                pairs.append((holder.setdefault(value, index), index))
    leader, found = leaders(len(program.operations), pairs), dict[int, set[int]]()
    for index in sorted(large):
        found.setdefault(leader[index], set()).add(index)
    return [*found.values()]


def _between(program: Program, components: Sequence[set[int]]) -> list[set[int]]:
    """Per component, the operations on paths between two of its own, and these. One walk is for all components, each
    of them a bit of a number."""
    own, makers, readers = dict[int, int](), program.makers, readers_in(program)
    for number, one in enumerate(components):
        own |= {index: own.get(index, 0) | 1 << number for index in one}
    behind, before, found = dict[int, int](), dict[int, int](), [set[int]() for _ in components]
    operations = _spanned(program, own)
    for operation in operations:
        bits = own.get(operation.index, 0)
        for operand in operation.read:
            bits |= behind.get(makers[operand].index, 0) if operand in makers else 0
        behind[operation.index] = bits
    for operation in reversed(operations):
        bits = own.get(operation.index, 0)
        for result in operation.results:
            for reader in readers.get(result, ()):
                bits |= before.get(reader.index, 0)
        before[operation.index] = bits
        bits &= behind[operation.index]
        while bits:
            number = bits.bit_length() - 1
            found[number].add(operation.index)
            bits ^= 1 << number
    return found


def _spanned(program: Program, among: Collection[int]) -> list[Operation]:
    """The operations of the whole program from the first to the last of some."""
    order = program.regions[0].operations
    first, last = (bisect_left(order, end) for end in (min(among, default=0), max(among, default=-1)))
    return [program.operations[index] for index in order[first : last + 1]]


def _levels(program: Program, growth: Growth, closure: set[int]) -> dict[int, int]:
    """The level of each operation of a closure: late, but early where it makes less than it reads of earlier loops, as
    the gradient of queries does of scores. What is read across loops is in memory whole."""
    reduced = partial(program, growth, tuple(sorted(closure)))
    level = _late(program, growth, closure, reduced)
    after = dict[int, int]()  # the first level at which what an operation reads is there
    for operation in _spanned(program, closure):
        index, crossing = operation.index, 0
        for value in operation.read:
            maker = program.makers.get(value)
            if maker is None or maker.index not in after:
                continue
            inside = maker.index in closure
            goes_on = inside and index in closure and _goes_on(program, growth, operation, value, reduced)
            made = level[maker.index] if inside else after[maker.index]
            after[index] = max(after.get(index, made), made + (inside and not goes_on))
            crossing += program.values[value].total_bytes if goes_on and made < level[index] else 0
        if index not in closure:
            continue
        after.setdefault(index, level[index])
        if crossing > sum(program.values[result].total_bytes for result in operation.results):
            level[index] = min(level[index], after[index])
    return level


def _late(program: Program, growth: Growth, closure: set[int], reduced: dict[int, str]) -> dict[int, int]:
    """The level of each operation of a closure: the last that its readers allow. The last of all is 0, and what no loop
    needs has level 1."""
    readers, late = readers_in(program), dict[int, int]()
    for operation in reversed(_spanned(program, closure)):
        index, found = operation.index, int(operation.index not in closure)
        for result in operation.results:
            for reader in readers.get(result, ()):
                inside = index in closure and reader.index in closure
                leaves = not (inside and _goes_on(program, growth, reader, result, reduced))
                found = min(found, late.get(reader.index, 1) - (index in closure and leaves))
        late[index] = found
    return {index: late[index] for index in sorted(closure)}


def _goes_on(program: Program, growth: Growth, reader: Operation, value: int, reduced: dict[int, str]) -> bool:
    """Whether an operation reads a value of the same loop block by block."""
    if is_barrier(reader):
        return True
    if value in reduced:
        return False
    if not growth.blocked(value):  # what has no part in the loop, of a barrier or a scan that has one
        return is_barrier(program.makers[value]) or bool(program.makers[value].bodies)
    numbers = [number for number, operand in enumerate(reader.operands) if operand == value]
    return all(one.operands[number] is not None for one in growth.along[reader.index] for number in numbers)


def _with_own(program: Program, growth: Growth, members: list[int], nothing: set[int]) -> Region:
    own, waiting = set[int](), list(members)
    while waiting:
        for maker in _makers_of_blocks(program, growth, waiting.pop()):
            if maker in nothing and maker not in own:
                own.add(maker)
                waiting.append(maker)
    return Region(tuple(sorted({*members} | own)), frozenset(own))


def _makers_of_blocks(program: Program, growth: Growth, index: int) -> Iterator[int]:
    for operand in program.operations[index].read:
        if growth.blocked(operand) and operand in program.makers:
            yield program.makers[operand].index
