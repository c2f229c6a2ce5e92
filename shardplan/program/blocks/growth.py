"""Growth: how far one index of a value reaches through a program, operation by operation.

An operation has a part in the growth if its index expression moves the index through one dimension of every operand
and result that has it. An operation that needs two dimensions of one value at once, or the same dimension at two
scales, is *cut*: it stays whole, with the reason.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from types import MappingProxyType

from shardplan import rules
from shardplan.program.blocks.places import Growth, Place, is_barrier
from shardplan.program.blocks.scans import through_scan
from shardplan.program.blocks.tiles import runs_on_tiles
from shardplan.program.operation_kinds import readers_in
from shardplan.program.program import Operation, Program, operand_type
from shardplan.rules import Along, Refusal


def grown(
    program: Program, seeds: Sequence[tuple[int, int]], refused: Mapping[int, str] = MappingProxyType({})
) -> tuple[Program, Growth]:
    """The growth of some indices, and the program with barriers that hold nothing but what has them."""
    growth = grow(program, seeds, refused)
    if not any(is_barrier(program.operations[index]) for index in growth.along):
        return program, growth
    program = _released(program, growth)
    return program, grow(program, seeds, refused)


def grow(program: Program, seeds: Sequence[tuple[int, int]], refused: Mapping[int, str]) -> Growth:
    """The growth of some indices, each the dimension of a value. All seeds are dimensions of the same value.

    ``refused`` are operations, by index, that are known not to run on blocks, with the reasons.
    """
    growth = Growth(tuple({value: Place(dim, Fraction(1))} for value, dim in seeds), cuts=dict(refused))
    readers, makers, waiting = readers_in(program), program.makers, deque([seeds[0][0]])
    while waiting:
        value = waiting.popleft()
        around = [makers[value]] if value in makers else []
        for operation in (*around, *readers.get(value, ())):
            if operation.region or operation.index in refused or _is_known(operation, value, growth):
                continue
            try:
                along, found = _through(program, operation, value, growth)
            except Refusal as reason:
                growth.cuts[operation.index] = str(reason)
                growth.along.pop(operation.index, None)
                continue
            if not is_barrier(operation):
                growth.along[operation.index] = along
                growth.cuts.pop(operation.index, None)  # another value had it in a dimension that does not go through
            pairs = [*zip(growth.places, found, strict=True)]
            waiting += dict.fromkeys(reached for places, more in pairs for reached in more if reached not in places)
            for places, more in pairs:
                places |= more
    growth.along |= {
        operation.index: ()
        for operation in program.operations
        if is_barrier(operation) and not operation.region and any(map(growth.blocked, operation.read))
    }
    return growth


def _released(program: Program, growth: Growth) -> Program:
    """The program in which barriers hold what is of blocks, and whole values that depend on no block pass by."""
    behind, passed = set[int](), dict[int, int]()
    operations = list(program.operations)
    for index in program.regions[0].operations:
        operation = operations[index]
        read = tuple(passed.get(o, o) if isinstance(o, int) else o for o in operation.operands)
        operation = replace(operation, operands=read)
        if index in growth.along and is_barrier(operation):
            pairs = [*zip(operation.operands, operation.results, strict=True)]
            by = [not (isinstance(o, int) and (growth.blocked(o) or o in behind)) for o, _ in pairs]
            passed |= {result: o for (o, result), free in zip(pairs, by, strict=True) if free and isinstance(o, int)}
            kept = [pair for pair, free in zip(pairs, by, strict=True) if not free]
            operation = replace(operation, operands=tuple(o for o, _ in kept), results=tuple(r for _, r in kept))
        if index in growth.along or not behind.isdisjoint(operation.read):
            behind.update(operation.results)
        operations[index] = operation
    outputs = tuple(passed.get(o, o) if isinstance(o, int) else o for o in program.outputs)
    whole = replace(program.regions[0], outputs=outputs)
    return replace(program, operations=tuple(operations), outputs=outputs, regions=(whole, *program.regions[1:]))


def _is_known(operation: Operation, value: int, growth: Growth) -> bool:
    """Whether the operation along the indices is known, that of a scan with this value of it."""
    along = growth.along.get(operation.index)
    if along is None or not operation.bodies:
        return along is not None
    ends = zip((*operation.operands, *operation.results), (*along[0].operands, *along[0].results), strict=True)
    return all(dim is not None for end, dim in ends if end == value)


def _through(
    program: Program, operation: Operation, value: int, growth: Growth
) -> tuple[tuple[Along, ...], list[dict[int, Place]]]:
    """The operation along every index, and the places of its values that follow from that of one of them."""
    if is_barrier(operation):
        pairs = zip(operation.operands, operation.results, strict=True)
        same = [other for pair in pairs if value in pair for other in pair if isinstance(other, int)]
        return (), [dict.fromkeys(same, places[value]) for places in growth.places]
    if operation.equation.effects:
        raise Refusal("an effect runs as a whole")
    if operation.bodies:
        return through_scan(program, operation, growth, _through)
    types = [operand_type(program, operand) for operand in operation.operands]
    results = [program.values[result] for result in operation.results]
    rule = rules.derive(operation.primitive, operation.params, types, results)
    along, found = [], []
    for places in growth.places:
        if value in operation.results:
            one = rules.along_result(rule, operation.results.index(value), places[value].dim)
            scale = places[value].scale
        else:
            number = operation.operands.index(value)
            one = rules.along_operand(rule, number, places[value].dim)
            scale = places[value].scale if one.plain else places[value].scale / one.scale(number)
        runs_on_tiles(operation, one)
        reached = _places(operation, one, scale)
        for other, place in reached.items():
            if places.get(other, place) != place:
                raise Refusal("it needs another dimension of a value, or at another scale")
        if all(other not in reached for other in operation.results) and not any(one.reducers):
            raise Refusal("no result has the index, nor a sum over it")
        along.append(one)
        found.append(reached)
    if any({*found[0]} != {*more} for more in found[1:]):
        raise Refusal("not all of its values have all of the indices")
    return tuple(along), found


def _places(operation: Operation, along: Along, scale: Fraction) -> dict[int, Place]:
    found = dict[int, Place]()
    for number, (operand, dim) in enumerate(zip(operation.operands, along.operands, strict=True)):
        if dim is not None and isinstance(operand, int):
            place = Place(dim, scale if along.plain else scale * along.scale(number))
            if found.setdefault(operand, place) != place:
                raise Refusal("it reads one value along two dimensions")
    results = zip(operation.results, along.results, strict=True)
    return found | {result: Place(dim, scale) for result, dim in results if dim is not None}
