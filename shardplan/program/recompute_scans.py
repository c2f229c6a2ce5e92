"""Recomputation in scans: a backward scan makes slices again that a forward scan would stack for it.

The derivative of a scan is a second scan, which reads what the first one has stacked, slice by slice. A slice that is
computed again is made inside the body of the second scan: from slices that stay stacked, from what the first scan reads
in this iteration, and from its carry, which is stacked where no slice shows it. It needs no barriers: XLA merges no
operations of two loops.

A scan can also stack what it does not stack yet (`stacking_more`): products and reductions of its body, of which slices
are made again. The scores of attention in a narrow type are smaller than the exponentials that a derivative stacks.

>>> import jax, jax.numpy as jnp
>>> from shardplan.program.tracing import trace_program
>>> def loss(w, x):
...     return jnp.sum(jax.lax.scan(lambda y, w: (jnp.sin(jnp.tanh(y @ w)), None), x, w)[0])
>>> program = trace_program(jax.grad(loss), (jnp.ones((4, 8, 8)), jnp.ones((64, 8))))
>>> again, _ = recomputing_stacks(program, frozenset(remakeable(program)))
>>> [len(o.results) for p in (program, again) for o in p.operations if o.bodies]
[5, 2, 2, 2]
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from shardplan import _jax
from shardplan.memoize import memoize
from shardplan.program.program import Constant, Operation, Program, Region, Value
from shardplan.program.prune import prune


@dataclass(frozen=True, slots=True)
class Stack:
    """What one scan stacks and a later one reads: ``made`` in the body of the one, ``read`` as a slice in that of the
    other; ``maker`` and ``reader`` are the scans, by index."""

    value: int
    made: int
    read: int
    maker: int
    reader: int

    def length(self, program: Program) -> int:
        """How many slices it has."""
        return int(program.operations[self.maker].params["length"])

    def is_read(self, program: Program) -> bool:
        """Whether the later scan reads a slice; what is stacked for others to be made of is not read at first."""
        body = program.regions[program.operations[self.reader].bodies[0]]
        read = any(self.read in program.operations[index].read for index in body.operations)
        return read or self.read in body.outputs


@memoize
def stacks(program: Program) -> Mapping[int, Stack]:
    """What a scan stacks for one later scan of as many iterations alone, by value."""
    found, leaving = dict[int, Stack](), {o for region in program.regions for o in region.outputs}
    scans = [o for o in program.operations if o.primitive.name == "scan"]
    readers: dict[int, list[tuple[Operation, int]]] = {}
    for operation in program.operations:
        for position, operand in enumerate(operation.operands):
            if isinstance(operand, int):
                readers.setdefault(operand, []).append((operation, position))
    for scan in scans:
        carries, body = scan.params["num_carry"], program.regions[scan.bodies[0]]
        for value, made in zip(scan.results[carries:], body.outputs[carries:], strict=True):
            [reader, position] = readers.get(value, [(scan, 0)])[0]
            if len(readers.get(value, ())) != 1 or value in leaving or not isinstance(made, int):
                continue
            if _reads_slices(reader, position) and reader.params["length"] == scan.params["length"]:
                read = program.regions[reader.bodies[0]].inputs[position]
                found[value] = Stack(value, made, read, scan.index, reader.index)
    return found


def _reads_slices(operation: Operation, position: int) -> bool:
    if operation.primitive.name != "scan":
        return False
    return bool(position >= operation.params["num_consts"] + operation.params["num_carry"])


@memoize
def remakeable(program: Program) -> tuple[int, ...]:
    """The stacks whose slices can be made again."""
    found, makers = list[int](), program.makers
    for value, stack in stacks(program).items():
        maker = makers.get(stack.made)
        if maker is not None and _can_be_made(program, stack):
            found.append(value)
    return tuple(found)


def _can_be_made(program: Program, stack: Stack) -> bool:
    """Whether no loop and no effect is behind a slice, up to other slices that stay, which may be made by loops."""
    stays = {one.made for one in stacks(program).values() if one.reader == stack.reader and one.maker == stack.maker}
    stays = {made for made in stays if made in program.makers and is_fixed(program.makers[made])}
    operations, _ = chain(program, [stack.made], stays)
    return not any(is_fixed(operation) for operation in operations)


def is_fixed(operation: Operation) -> bool:
    """Whether an operation is never run twice: a loop, a barrier, or one with effects."""
    barrier = operation.primitive is _jax.optimization_barrier
    return bool(operation.bodies or operation.equation.effects or barrier)


def chain(program: Program, made: Collection[int], stays: Collection[int]) -> tuple[list[Operation], list[int]]:
    """The operations of a body that make some of its values, from what stays and from its inputs; and what of both
    they read."""
    found, leaves, waiting = dict[int, Operation](), dict[int, None](), [*made]
    while waiting:
        value = waiting.pop()
        maker = program.makers.get(value)
        if maker is None or value in stays:
            leaves[value] = None
        elif maker.index not in found:
            found[maker.index] = maker
            waiting += maker.read
    return [found[index] for index in sorted(found)], [*leaves]


@memoize
def recomputing_stacks(program: Program, chosen: frozenset[int]) -> tuple[Program, Mapping[int, int]]:
    """The program that stacks some values no longer, and the values of the given one that new ones stand for. That of a
    stacked carry is the carry, which has a dimension less."""
    rewriting = _Rewriting(program)
    pairs = {(one.maker, one.reader): None for value, one in stacks(program).items() if value in chosen}
    for maker, reader in pairs:
        rewriting.make_again(maker, reader, chosen)
    return rewriting.program(), rewriting.origins


@dataclass(frozen=True, slots=True)
class StackingMore:
    """A program with further stacks, ``added``; ``origins``: the values that its new ones stand for."""

    program: Program
    added: frozenset[int]
    origins: Mapping[int, int]


def stacking_more(program: Program, stored: Callable[[Program, Operation], bool]) -> StackingMore:
    """The program that stacks all that slices could be made of: the results of the operations that kernels store, in
    the bodies of scans whose stacks can be made again."""
    rewriting, added, known = _Rewriting(program), list[int](), stacks(program)
    pairs: dict[tuple[int, int], list[int]] = {}
    for value in remakeable(program):
        pairs.setdefault((known[value].maker, known[value].reader), []).append(known[value].made)
    for (maker, reader), made in pairs.items():
        stacked = {one.made for one in known.values() if (one.maker, one.reader) == (maker, reader)}
        fixed = {one for one in stacked if one in program.makers and is_fixed(program.makers[one])}
        for operation in chain(program, made, fixed)[0]:
            if operation.results[0] not in stacked and len(operation.results) == 1 and stored(program, operation):
                added.append(rewriting.hand_over(maker, reader, operation.results[0]))
    return StackingMore(rewriting.program(), frozenset(added), rewriting.origins)


class _Rewriting:
    """The values, operations and regions so far; ``before`` has clones by the region that they begin."""

    def __init__(self, program: Program) -> None:
        self._program, self._stacks = program, stacks(program)
        self._values: list[Value] = list(program.values)
        self._regions: list[Region] = list(program.regions)
        self._scans: dict[int, Operation] = {}
        self._before: dict[int, list[Operation]] = {}
        self._instead: dict[int, int] = {}
        self.origins: dict[int, int] = {}

    def make_again(self, maker: int, reader: int, chosen: Collection[int]) -> None:
        """Makes the chosen stacks of a scan again in another one."""
        program, both = self._program, [s for s in self._stacks.values() if (s.maker, s.reader) == (maker, reader)]
        stays = {stack.made: stack.read for stack in both if stack.value not in chosen}
        wanted = [stack for stack in both if stack.value in chosen and stack.is_read(program)]
        operations, leaves = chain(program, [stack.made for stack in wanted], stays)
        now = {leaf: stays[leaf] if leaf in stays else self._input(maker, reader, leaf) for leaf in leaves}
        for operation in operations:
            now |= {result: self._new(result) for result in operation.results}
            operands = tuple(now[o] if isinstance(o, int) else o for o in operation.operands)
            results = tuple(now[result] for result in operation.results)
            region = program.operations[reader].bodies[0]
            clone = replace(operation, operands=operands, results=results, region=region, again=True)
            self._before.setdefault(region, []).append(clone)
        self._instead |= {stack.read: now[stack.made] for stack in wanted}
        self._drop(maker, reader, {stack.value for stack in both if stack.value in chosen})

    def _new(self, value: int, length: int | None = None) -> int:
        new, own = len(self._values), self._program.values[value]
        shape = own.shape if length is None else (length, *own.shape)
        self._values.append(replace(own, index=new, name=None, shape=shape))
        self.origins[new] = value
        return new

    def _scan(self, index: int) -> Operation:
        return self._scans.get(index, self._program.operations[index])

    def _input(self, maker: int, reader: int, leaf: int) -> int:
        """The input of the reader's body that shows an input of the maker's body, in the same iteration."""
        given = self._program.operations[maker]
        position = self._program.regions[given.bodies[0]].inputs.index(leaf)
        constants, carries = given.params["num_consts"], given.params["num_carry"]
        if constants <= position < constants + carries:
            return self._add(reader, self.stack(maker, leaf), leaf, sliced=True)
        return self._add(reader, given.operands[position], leaf, sliced=position >= constants)

    def stack(self, maker: int, made: int) -> int:
        """The stack of a carry as it enters each iteration, or of a value of the body, which the maker has from now
        on."""
        scan = self._scan(maker)
        region = self._regions[scan.bodies[0]]
        stack = self._new(made, int(scan.params["length"]))
        self._regions[region.index] = replace(region, outputs=(*region.outputs, made))
        self._scans[maker] = replace(scan, results=(*scan.results, stack))
        return stack

    def hand_over(self, maker: int, reader: int, made: int) -> int:
        """A stack of a value of the maker's body, which the reader gets slice by slice and does not read yet."""
        stack = self.stack(maker, made)
        self._add(reader, stack, made, sliced=True)
        return stack

    def _add(self, reader: int, operand: int | Constant, like: int, sliced: bool) -> int:
        """The input of the reader's body for an operand, a further one where it has none."""
        scan = self._scan(reader)
        constants = scan.params["num_consts"]
        first = constants + scan.params["num_carry"] if sliced else 0
        region = self._regions[scan.bodies[0]]
        among = scan.operands[first:] if sliced else scan.operands[:constants]
        if isinstance(operand, int) and operand in among:
            return region.inputs[first + among.index(operand)]
        new, at = self._new(like), len(scan.operands) if sliced else constants
        params = scan.params if sliced else {**scan.params, "num_consts": constants + 1}
        operands = (*scan.operands[:at], operand, *scan.operands[at:])
        self._regions[region.index] = replace(region, inputs=(*region.inputs[:at], new, *region.inputs[at:]))
        self._scans[reader] = replace(scan, operands=operands, params=params)
        return new

    def _drop(self, maker: int, reader: int, values: Collection[int]) -> None:
        scan, read = self._scan(maker), self._scan(reader)
        made, reading = self._regions[scan.bodies[0]], self._regions[read.bodies[0]]
        kept = [result not in values for result in scan.results]
        outputs = tuple(o for o, stays in zip(made.outputs, kept, strict=True) if stays)
        self._scans[maker] = replace(scan, results=tuple(r for r in scan.results if r not in values))
        self._regions[made.index] = replace(made, outputs=outputs)
        kept = [not (isinstance(operand, int) and operand in values) for operand in read.operands]
        inputs = tuple(i for i, stays in zip(reading.inputs, kept, strict=True) if stays)
        self._scans[reader] = replace(
            read, operands=tuple(o for o, stays in zip(read.operands, kept, strict=True) if stays)
        )
        self._regions[reading.index] = replace(self._regions[reading.index], inputs=inputs)

    def program(self) -> Program:
        """The program, with everything rewritten."""
        old, operations = self._program, list[Operation]()
        holders = {body: operation.region for operation in old.operations for body in operation.bodies}
        for operation in old.operations:
            inside = operation.region
            while inside not in self._before and inside in holders:
                inside = holders[inside]
            operations += self._before.pop(inside, ())
            operation = self._scans.get(operation.index, operation)
            operands = (self._instead.get(o, o) if isinstance(o, int) else o for o in operation.operands)
            operations.append(replace(operation, operands=tuple(operands)))
        regions = [
            replace(r, outputs=tuple(self._instead.get(o, o) if isinstance(o, int) else o for o in r.outputs))
            for r in self._regions
        ]
        return prune(replace(old, values=tuple(self._values), operations=tuple(operations), regions=tuple(regions)))
