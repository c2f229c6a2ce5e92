"""Which values XLA:GPU stores though each kernel that reads them could compute them anew: its fusion, by priorities.

A value is *fused* where all kernels that read it compute it, or *stored* by a kernel of its own. XLA starts with a
kernel for each operation, and knows how long each takes, from what it computes and what it reads and writes. What it
fuses next is the value that saves most: the time of its own kernel, and what its readers then take less. They become
larger, so that others save less by being fused into them, until nothing is saved any more.

What is fused first so decides what is stored: of an associative scan, say, the slices, not what they are taken from.
What is put together from parts that no warp divides is dear to compute, and stored where two kernels read it.

>>> import jax, jax.numpy as jnp, shardplan
>>> from shardplan.memory.recomputing import kernels_of
>>> def stored(parts):
...     def read_twice(*parts):
...         whole = jnp.concatenate([2 * part for part in parts], axis=1)
...         return jnp.sum(whole), jnp.sum(whole, axis=0)
...     plan = shardplan.plan(read_twice, 1, *(jax.ShapeDtypeStruct((8192, n), "float32") for n in parts))
...     makers = {value: o.primitive.name for o in plan.program.operations for value in o.results}
...     return [makers[value] for value in kernels_of(plan.schedule.problem).stored]
>>> stored((512, 512)), stored((1, 1023))
([], ['concatenate'])
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import NamedTuple

from shardplan.memory.alike import first_alike
from shardplan.memory.cycles import REDUCING_CYCLES, cycles_of
from shardplan.memory.fusion import REDUCTIONS, is_view, merged_scatters, pointwise_operations
from shardplan.memory.parts import Part, parts_of
from shardplan.memory.products import PRODUCT, copied_again, is_multiplied, product_operands
from shardplan.memory.rows import cuts_tiles, row_results
from shardplan.memory.sums import adds_few, adds_many, columns_of, waiting_for_blocks
from shardplan.once import once
from shardplan.problem import Problem
from shardplan.program import Constant, Operation, Program

_CYCLES_PER_BYTE = 20.0
"""What an H100 computes in the time in which it reads or writes one byte."""

_BESIDE = 0.95
"""How much of the shorter one of computing and of reading and writing runs beside the longer one."""

_LAUNCH = 3.35e6
"""Bytes that an H100 reads in the microsecond in which a kernel starts."""

_CACHES = ((270e3, 20.0), (50e6, 2.5))
"""What fits into an H100's caches, in bytes, and how much quicker it is to read it from there once more. Of the first
ones, one in each of its processors, XLA takes 2 KiB to be free."""

_ONE_NUMBER = 1 / _CACHES[0][1]
"""What it takes to read one number for every element, of the time in which these elements are read from memory."""

_WARP = 32
_APART = 400
"""Elements that a warp computes together, and cycles, by XLA's count, for an element of what is put together from
parts that warps do not divide."""

_PARTS = frozenset({"slice", "dynamic_slice", "split", "gather", "squeeze"})
_SPREADING = frozenset({"broadcast_in_dim", PRODUCT})
_RENAMING = frozenset({"reshape", "squeeze", "expand_dims", "copy", "copy_p", "stop_gradient"})
_MOVING = frozenset({"broadcast_in_dim", "transpose", "rev", "pad", "iota"} | _PARTS | _RENAMING)
_BRANCHING = frozenset({"concatenate", "dynamic_update_slice", "reduce_window"} | REDUCTIONS)

_MOST_READ, _MOST_BRANCHES, _MOST_CODE = 96, 10, 10_000
"""What XLA lets one kernel read, how often it lets it branch, and how many operations it lets it have on all ways. A
padding does not count: kernels with 63 of them were compiled."""

_OWN = -1


@dataclass(slots=True)
class _Kernel:
    """A kernel as it grows, by the value that it makes.

    ``reads`` has the values that it reads, and how often it goes through each of them: once for its own elements
    (`_OWN`), whatever is computed from them, and once more for each value of which it takes parts, or elements at
    other places, as a slice, a broadcast or a sum does; ``times`` has the sums of these. ``sums``: whether it adds up
    many numbers to one. ``rows``: where it goes through rows that it has reduced, how much it computes for each
    element, else 0. ``tiles``: whether tiles can be cut of all that it computes. ``slower``: how much longer it takes
    to read and to compute than one that keeps the whole device busy; ``again``: the least time of reading from caches,
    as a share of that from memory. ``writes``: the bytes of what it makes; ``scalars``: of elements that it computes
    with one number each.
    """

    reads: dict[int, dict[int, float]]
    cycles: float
    branches: int
    operations: int = 1
    moved: float = 0.0
    sums: bool = False
    rows: float = 0.0
    tiles: bool = True
    slower: float = 1.0
    writes: float = 0.0
    again: float = 0.0
    scalars: float = 0.0
    times: dict[int, float] = field(default_factory=dict)


class _Computing(NamedTuple):
    """What an operation does, whatever its size: the values that it reads, but for what it makes of nothing or of what
    else it reads; cycles for an element, branches, whether it gives back what it reads (``renames``), adds up many
    numbers to one (``sums``), or is left to a library; ``rows`` and ``tiles`` as a kernel has them; ``columns``: how
    many numbers it leaves innermost of those that it sums up, or 0, and how many of these become one then;
    ``copied``: what a kernel copies for a library."""

    read: tuple[int, ...]
    cycles: int
    branches: int
    renames: bool
    sums: bool
    library: bool
    rows: float
    tiles: bool
    columns: tuple[int, int]
    copied: tuple[int, ...]


@once
def _computing(problem: Problem) -> dict[int, _Computing]:
    """What operations without bodies do, by index."""
    program, found, pointwise = problem.program, {}, pointwise_operations(problem)
    rows, operands = row_results(program, pointwise), product_operands(program, pointwise)
    padded, again = {index for (index, _), read in operands.items() if read.padding > 1}, copied_again(operands)
    copies = {place for place, read in operands.items() if read.copied}
    merged = {program.operations[index].results[0] for index in merged_scatters(problem)}
    passed = merged | problem.generated  # a scatter writes into the sum of what else is added, in a kernel of its own
    for operation in program.operations:
        name = operation.primitive.name
        if operation.bodies or not operation.results:
            continue
        library = is_multiplied(program, operation)  # what reads its operand is a kernel that copies it
        renames = name in _RENAMING or is_view(program, operation)
        cycles = 0 if library or renames or name in _MOVING else cycles_of(program, operation)
        branches = int(name in _BRANCHING and not adds_few(program, operation))
        row = rows.get(operation.results[0], 0.0)
        places = [place for place in range(len(operation.operands)) if (operation.index, place) not in again]
        operands_read = [operation.operands[place] for place in (places[:1] if row else places)]
        read = tuple([o for o in operands_read if isinstance(o, int) and o not in passed])
        tiles = cuts_tiles(operation) and operation.index not in padded
        sums = adds_many(program, operation)
        columns = columns_of(program, operation) if sums else (0, 1)
        copied = tuple([o for o in read if (operation.index, operation.operands.index(o)) in copies])
        found[operation.index] = _Computing(read, cycles, branches, renames, sums, library, row, tiles, columns, copied)
    return found


def stored_values(
    problem: Problem,
    fused: frozenset[int],
    needed: frozenset[int],
    degrees: Sequence[float],
    buffers: Mapping[int, float],
) -> frozenset[int]:
    """The values that XLA:GPU stores, of those that operations ``fused`` make, by index, and that are not ``needed`` in
    memory anyway, where each value is split into so many parts (``degrees``), and some are parts of ``buffers`` of so
    many bytes."""
    found = set[int]()
    for part, alike in _parts(problem, fused, needed):
        around = tuple([buffers.get(value, 0.0) for value in part.values])
        places = _stored_in(problem, alike, tuple([degrees[value] for value in part.values]), around)
        found.update([part.values[place] for place in places])
    return frozenset(found)


@once
def _parts(problem: Problem, fused: frozenset[int], needed: frozenset[int]) -> list[tuple[Part, Part]]:
    """The parts, each with the first one that is alike."""
    computing, merged = _computing(problem), merged_scatters(problem)
    without_bodies = [operation for operation in problem.program.operations if not operation.bodies]
    alone = fused - merged.keys()
    parts = parts_of(
        {result: computing[operation.index].read for operation in without_bodies for result in operation.results},
        {r for operation in without_bodies if operation.index in alone for r in operation.results} - needed,
    )
    reading = {index: ((done.read, done.copied), done[1:-1]) for index, done in computing.items()}
    return list(zip(parts, first_alike(problem, parts, reading), strict=True))


@once
def _stored_in(problem: Problem, part: Part, degrees: tuple[float, ...], buffers: tuple[float, ...]) -> list[int]:
    """Those of one part, by place, whose values are split into so many parts, and lie in buffers of so many bytes."""
    fusion = _Fusion(problem, dict(zip(part.values, zip(degrees, buffers, strict=True), strict=True)), part.makes)
    fusion.fuse(part.fusible)
    return [place for place, value in enumerate(part.values) if value in fusion.apart]


@once
def _makers(program: Program) -> dict[int, Operation]:
    return {result: operation for operation in program.operations for result in operation.results}


class _Fusion:
    """The kernels that make some values, while these are fused into their readers."""

    def __init__(self, problem: Problem, split: Mapping[int, tuple[float, float]], makes: Iterable[int]) -> None:
        """``split``: for each value, also of those that are read, into how many parts it is split, and the bytes of
        the buffer that it is part of, if that is larger."""
        values = problem.program.values
        self._problem = problem
        self._bytes = {value: values[value].total_bytes / degree for value, (degree, _) in split.items()}
        self._elements = {value: prod(values[value].shape) / degree for value, (degree, _) in split.items()}
        self._around = {value: max(buffer, self._bytes[value]) for value, (_, buffer) in split.items()}
        self._quicker = {
            value: next((quicker for fits, quicker in _CACHES if size < fits), 1.0)
            for value, size in self._around.items()
        }
        self._kernels: dict[int, _Kernel] = {}
        self._saved: dict[int, dict[int, float]] = {}  # per value, what each kernel that reads it would save
        self._gains: dict[int, float] = {}
        self._queue: list[tuple[float, int]] = []
        self._renamed: set[int] = set()
        self.apart: dict[int, None] = {}
        computing, makers = _computing(problem), _makers(problem.program)
        for result in makes:
            operation = makers[result]
            kernel = self._kernels[result] = self._kernel(operation, result, computing[operation.index])
            kernel.times = {value: sum(times.values()) for value, times in kernel.reads.items()}
            kernel.moved = self._moved(result)
            for value in kernel.reads:
                self._saved.setdefault(value, {})[result] = 0.0

    def fuse(self, values: Iterable[int]) -> None:
        """Fuses values as long as that saves time; those that stay apart are left in `apart`."""
        self.apart = dict.fromkeys(values)
        for value in self.apart:
            self._weigh(value)
        while self._queue:
            gain, number = heapq.heappop(self._queue)
            if -number in self.apart and self._gains[-number] == -gain and self._fits(-number):
                self._fuse(-number)

    def _kernel(self, operation: Operation, result: int, computing: _Computing) -> _Kernel:
        """The kernel of one operation."""
        name, choices = operation.primitive.name, self._problem.choices.get(operation.index)
        read, cycles = computing.read, computing.cycles
        elements = max([self._elements[value] for value in (*read, result)])
        if computing.renames:
            self._renamed.add(result)
        pointwise = choices is not None and choices.pointwise and name != "dynamic_update_slice"
        if pointwise:
            reads = {value: self._of_element(value, result) for value in read}
        else:
            reads = {value: {value: 0.0} for value in read}
            for position, value in enumerate(read):
                computed = elements if name == PRODUCT else self._elements[result]
                reads[value][value] += 1.0 if computing.library else self._times(operation, position, computed, value)
        if name == "concatenate" and any(times.get(value, 1.0) % 1.0 for value, times in reads.items()):
            cycles = _APART
        cycles += REDUCING_CYCLES if computing.rows else 0
        kernel = _Kernel(reads, elements * cycles, computing.branches, sums=computing.sums)
        kernel.rows, kernel.tiles = computing.rows, computing.tiles
        if pointwise:
            kernel.scalars = self._bytes[result] * sum([isinstance(o, Constant) for o in operation.operands])
        kernel.writes = sum([self._bytes[value] for value in computing.copied]) or self._bytes[result]
        columns, reduced_then = computing.columns
        if columns:
            waiting = waiting_for_blocks(columns, elements, reduced_then * self._elements[result])
            kernel.again, kernel.slower = min(waiting, 1.0), max(waiting, 1.0)
            kernel.cycles *= kernel.slower
        return kernel

    def _of_element(self, value: int, result: int) -> dict[int, float]:
        """How often an operation element by element goes through an operand, which it may spread along dimensions."""
        values = self._problem.program.values
        if prod(values[value].shape) == prod(values[result].shape):
            return {_OWN: 1.0}
        return {value: self._elements[result] / max(self._elements[value], 1e-9)}

    def _times(self, operation: Operation, position: int, computed: float, value: int) -> float:
        """How often an operation that does not go element by element reads an operand's elements to compute so many."""
        name, own = operation.primitive.name, max(self._elements[value], 1e-9)
        if name in _SPREADING or (name in _PARTS and not position):
            return computed / own
        if name == "concatenate":
            dimension, shape = operation.params["dimension"], self._problem.program.values[value].shape
            if prod(shape[:dimension]) > 1 and shape[dimension]:  # in front, parts lie one after another
                return -(-shape[dimension] // _WARP) * _WARP / shape[dimension]
        return 1.0

    def _moved(self, value: int) -> float:
        """The bytes that a kernel reads and writes."""
        kernel = self._kernels[value]
        read = sum([self._reading(v, times, kernel.again) for v, times in kernel.times.items()])
        return kernel.slower * (kernel.writes + read + kernel.scalars * max(kernel.again, _ONE_NUMBER))

    def _reading(self, value: int, times: float, again: float) -> float:
        """The bytes that could be read in the time in which a kernel goes through a value so often."""
        size = times * self._bytes[value]
        if size <= (first := self._around[value]):  # of a part of a buffer, XLA takes as many bytes to be new
            return size
        return first + (size - first) * max(again, 1.0 / self._quicker[value])

    def _fits(self, value: int) -> bool:
        """Whether XLA can generate the code of all kernels that read a value where they compute it."""
        own = self._kernels[value]
        for reader in self._saved[value]:
            kernel = self._kernels[reader]
            if own.sums and kernel.sums:
                return False
            if (own.rows or kernel.rows) and not (own.tiles and kernel.tiles):
                return False
            copies = len(kernel.reads[value])
            branches = copies * own.branches + kernel.branches
            if len(kernel.reads.keys() | own.reads.keys()) > _MOST_READ or branches > _MOST_BRANCHES:
                return False
            if (copies * own.operations + kernel.operations) * 2**branches > _MOST_CODE:
                return False
        return True

    def _weigh(self, value: int) -> None:
        """Counts what all readers of a value save where it is fused into them."""
        saved = self._saved.setdefault(value, {})
        for reader in saved:
            saved[reader] = self._saving(value, reader)
        own = self._kernels[value]
        gain = inf if value in self._renamed else _LAUNCH + _time(own.cycles, own.moved, own.rows) + sum(saved.values())
        self._offer(value, gain)

    def _offer(self, value: int, gain: float) -> None:
        self._gains[value] = gain
        if gain >= 0:  # of equal ones the last comes first
            heapq.heappush(self._queue, (-gain, -value))

    def _saving(self, value: int, reader: int) -> float:
        """The time that a kernel takes less where it computes a value instead of reading it."""
        own, kernel = self._kernels[value], self._kernels[reader]
        places, times, again = kernel.reads[value], kernel.times[value], kernel.again
        moved = times * own.scalars * max(again, _ONE_NUMBER) - self._reading(value, times, again)
        for source, share in own.times.items():
            known = kernel.reads.get(source)
            if known is None:
                moved += self._reading(source, times * share, again)
                continue
            before = kernel.times[source]
            now = before + times * share
            if _OWN in own.reads[source]:  # what it reads for these elements already is not read again
                now -= sum([share for place, share in known.items() if place in places])
            moved += self._reading(source, now, again) - self._reading(source, before, again)
        rows, cycles = max(own.rows, kernel.rows), kernel.cycles + kernel.slower * times * own.cycles
        moved = kernel.moved + kernel.slower * moved
        return _time(kernel.cycles, kernel.moved, kernel.rows) - _time(cycles, moved, rows)

    def _fuse(self, value: int) -> None:
        """Lets all kernels that read a value compute it, and weighs anew what that changes."""
        del self.apart[value]
        readers = self._saved.pop(value)
        for source in self._kernels[value].reads:
            saved = self._saved[source].pop(value)
            if source in self.apart:
                self._gains[source] -= saved
        for reader in readers:
            self._take_in(value, reader)
        changed: dict[int, None] = {}
        for reader in readers:
            for source in self._kernels[reader].reads:
                if source in self.apart:
                    saved = self._saving(source, reader)
                    self._gains[source] += saved - self._saved[source][reader]
                    self._saved[source][reader] = saved
                    changed[source] = None
        for source in changed:
            self._offer(source, self._gains[source])
        for reader in readers:
            if reader in self.apart:
                self._weigh(reader)

    def _take_in(self, value: int, reader: int) -> None:
        """Lets one kernel compute a value that it has read."""
        own, kernel = self._kernels[value], self._kernels[reader]
        places, times = kernel.reads.pop(value), kernel.times.pop(value)
        for source, shares in own.reads.items():
            merged = kernel.reads.setdefault(source, {})
            for place, share in shares.items():
                if place == _OWN:
                    merged |= places
                else:
                    merged[place] = merged.get(place, 0.0) + share * times
            kernel.times[source] = sum(merged.values())
            self._saved[source].setdefault(reader, 0.0)
        kernel.cycles += kernel.slower * times * own.cycles
        kernel.scalars += times * own.scalars
        kernel.operations += len(places) * own.operations
        kernel.branches += len(places) * own.branches
        kernel.sums |= own.sums
        kernel.rows = max(kernel.rows, own.rows)
        kernel.tiles &= own.tiles
        kernel.moved = self._moved(reader)


def _time(cycles: float, moved: float, rows: float = 0.0) -> float:
    """How long a kernel takes, in the time in which one byte is read."""
    computing = cycles * max(rows, 1.0) / _CYCLES_PER_BYTE
    return computing + moved - _BESIDE * min(computing, moved)
