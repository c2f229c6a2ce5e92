"""Which values kernels store, though each reader could compute them: XLA:GPU's fusion by priorities.

A value is *fused* where every kernel that reads it computes it, else *stored*. XLA begins with a kernel per operation,
and estimates how long each takes from its cycles and its bytes. It fuses next the value that saves most time over all
its readers. These grow, so that others save less, until nothing is saved.

The estimate is that of XLA's `GpuPerformanceModel`: the longer one of computing and moving bytes, and a twentieth of
the shorter one; what is read again comes from a cache if it fits. Times are in the bytes that an H100 reads meanwhile.

>>> quicker(2e5), quicker(1e6), quicker(1e9)
(20.0, 2.5, 1.0)
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from shardplan.memory.cycles import cycles_of
from shardplan.memory.gpu import H100
from shardplan.memory.operations import computed_in_rows
from shardplan.operation_kinds import CUMULATIVE, PRODUCT, REDUCTIONS, is_view
from shardplan.problem import Problem
from shardplan.program import Operation, operand_type

_LAUNCH_BYTES = H100.fusion.launch_microseconds * H100.reading.bytes_per_microsecond
"""Bytes that are read in the time in which a kernel starts."""

_PUT_TOGETHER = 400
"""Cycles, by XLA's count, of an element of what is put together from parts, as the indices of batched gathers are."""

_SUMS_AT_ONCE = 16
"""What reads blocks of a cumulative sum adds up so many elements again."""

_PARTS = frozenset({"slice", "dynamic_slice", "split", "gather", "squeeze"})
_RENAMING = frozenset({"reshape", "squeeze", "expand_dims", "copy", "copy_p", "stop_gradient"})
_OWN = -1
"""The place of a kernel at which it reads what its own elements are computed from."""


def quicker(size: float) -> float:
    """How much quicker it is to read so many bytes once more."""
    return next((quicker for fits, quicker in H100.reading.caches if size < fits), 1.0)


def stored_values(fusion: Fusion, operations: Iterable[Operation], fusible: Collection[int]) -> frozenset[int]:
    """The values, of those that may be fused, that are stored: those of which fusing into all readers saves nothing."""
    return fusion.stored(operations, fusible)


@dataclass(slots=True)
class _Kernel:
    """A kernel as it grows. ``reads`` says how often it goes through each value, by place: `_OWN` for the elements at
    its own place, whatever is computed from them, else one place for each value read in parts, spread or reduced.
    ``cycles`` is what it computes altogether, ``writes`` the bytes of its result, ``constants`` those of the results of
    its operations for each number that they read; ``slower`` is a factor of reductions."""

    reads: dict[int, dict[int, float]]
    cycles: float
    writes: float
    operations: int = 1
    constants: float = 0.0
    reduces: bool = False
    slower: float = 1.0
    moved: float = 0.0
    time: float = 0.0


@dataclass(slots=True)
class Fusion:
    """The kernels of a program while values are fused.

    ``sizes`` has the bytes of each value on one device, ``elements`` its elements there; ``same`` the values that are
    computed once with another one.
    """

    problem: Problem
    sizes: Mapping[int, float]
    elements: Mapping[int, float]
    same: Mapping[int, int]
    _kernels: dict[int, _Kernel] = field(default_factory=dict)
    _saved: dict[int, dict[int, float]] = field(default_factory=dict)
    _gains: dict[int, float] = field(default_factory=dict)
    _queue: list[tuple[float, int]] = field(default_factory=list)
    _renamed: set[int] = field(default_factory=set)
    _open: dict[int, None] = field(default_factory=dict)

    def stored(self, operations: Iterable[Operation], fusible: Collection[int]) -> frozenset[int]:
        """The values, of those that may be fused, that are stored."""
        for operation in operations:
            for result in operation.results:
                self._begin(operation, result)
        for value in fusible:
            if value in self._kernels:
                self._open[value] = None
        for value in self._open:
            self._weigh(value)
        while self._queue:
            gain, number = heapq.heappop(self._queue)
            if -number in self._open and self._gains[-number] == -gain and self._fits(-number):
                self._fuse(-number)
        return frozenset(self._open)

    def _begin(self, operation: Operation, result: int) -> None:
        """The kernel of one operation."""
        program, name = self.problem.program, operation.primitive.name
        choices = self.problem.choices.get(operation.index)
        pointwise = choices is not None and choices.pointwise
        read = [self.same.get(o, o) for o in operation.operands if isinstance(o, int) and o in self.sizes]
        made = self.elements[result]
        through = max([made, *(self.elements[o] for o in read)]) if name in REDUCTIONS else made
        renames = name in _RENAMING or is_view(program, operation)
        if renames or result in computed_in_rows(self.problem):
            self._renamed.add(result)
        reads: dict[int, dict[int, float]] = {}
        for position, value in enumerate(read):
            own = max(self.elements[value], 1e-9)
            if pointwise or renames or name == "transpose":
                same = program.values[value].elements == program.values[result].elements
                times, place = (1.0, _OWN) if same else (made / own, value)
            else:
                place, times = value, 1.0
                if name in ("broadcast_in_dim", PRODUCT) or (name in _PARTS and not position):
                    times = made / own
                elif name in CUMULATIVE:
                    times += _SUMS_AT_ONCE
            places = reads.setdefault(value, {})
            places[place] = max(places.get(place, 0.0), times)
        cycles = 0 if renames else cycles_of(program, operation)
        if name == "gather" and (batch := operation.params["dimension_numbers"].operand_batching_dims):
            cycles = _PUT_TOGETHER * (len(batch) + 1)
        kernel = _Kernel(reads, cycles * through, self.sizes[result], reduces=name in REDUCTIONS)
        if name in REDUCTIONS:
            kernel.slower = self._slower(operation, through, made)
        if pointwise:
            kernel.constants = self.sizes[result] * self._numbers(operation)
        self._kernels[result] = kernel
        self._time(kernel)
        for value in reads:
            self._saved.setdefault(value, {})[result] = 0.0

    def _numbers(self, operation: Operation) -> int:
        """The operands that are one number, spread: XLA counts that each element reads it from a cache."""
        makers, found = self.problem.program.makers, 0
        for operand in operation.operands:
            while isinstance(operand, int) and operand in self.problem.generated:
                maker = makers[operand]
                if maker.primitive.name != "broadcast_in_dim":
                    break
                operand = maker.operands[0]
            found += not isinstance(operand, int)
        return found

    def _slower(self, operation: Operation, read: float, made: float) -> float:
        """How many times longer a reduction takes than one that keeps the device busy: it has too few blocks."""
        shape, dims = operand_type(self.problem.program, operation.operands[0]).shape, operation.params["axes"]
        inner = [dim for dim, size in enumerate(shape) if size > 1]
        length = read / max(made, 1.0)
        if not inner or inner[-1] in dims:
            threads = min(-(-length // 512) * 32, 1024) if length <= H100.reading.long_row else 1024 / length
            blocks = (
                made / max(256 // max(threads, 1), 1)
                if length <= H100.reading.long_row
                else made * length / H100.reading.long_row
            )
        else:
            blocks = made / 32 * max(1.0, length / H100.reading.long_column)
        return max(1.0, H100.reading.busy_blocks / max(blocks, 1.0))

    def _time(self, kernel: _Kernel) -> None:
        kernel.moved = kernel.writes + kernel.constants / H100.reading.caches[0][1]
        kernel.moved += sum(self._reading(v, sum(p.values())) for v, p in kernel.reads.items())
        kernel.time = kernel.slower * _time_of(kernel.cycles, kernel.moved)

    def _reading(self, value: int, times: float) -> float:
        size = self.sizes[value]
        return times * size if times <= 1 else size + (times - 1) * size / quicker(size)

    def _fits(self, value: int) -> bool:
        """Whether all kernels that read a value may compute it."""
        own = self._kernels[value]
        for reader in self._saved[value]:
            kernel = self._kernels[reader]
            if own.reduces and kernel.reduces:
                return False
            copies = len(kernel.reads[value])
            many = len(kernel.reads.keys() | own.reads.keys()) > H100.fusion.most_read
            if many or copies * own.operations + kernel.operations > H100.fusion.most_operations:
                return False
        return True

    def _weigh(self, value: int) -> None:
        saved = self._saved.setdefault(value, {})
        for reader in saved:
            saved[reader] = self._saving(value, reader)
        renamed = value in self._renamed
        self._offer(value, inf if renamed else _LAUNCH_BYTES + self._kernels[value].time + sum(saved.values()))

    def _offer(self, value: int, gain: float) -> None:
        self._gains[value] = gain
        if gain >= 0:
            heapq.heappush(self._queue, (-gain, -value))

    def _saving(self, value: int, reader: int) -> float:
        """The time that a kernel takes less where it computes a value instead of reading it."""
        own, kernel = self._kernels[value], self._kernels[reader]
        places = kernel.reads[value]
        times = sum(places.values())
        moved = kernel.moved - self._reading(value, times) + times * own.constants / H100.reading.caches[0][1]
        for source, shares in own.reads.items():
            known = kernel.reads.get(source)
            before = sum(known.values()) if known else 0.0
            after = before
            for place, share in shares.items():
                if place == _OWN:
                    after += sum(t for p, t in places.items() if not known or p not in known)
                else:
                    after += share * times
            moved += self._reading(source, after) - (self._reading(source, before) if known else 0.0)
        return kernel.time - kernel.slower * _time_of(kernel.cycles + times * own.cycles, moved)

    def _fuse(self, value: int) -> None:
        """Lets all kernels that read a value compute it, and weighs what that changes."""
        del self._open[value]
        own, readers = self._kernels[value], self._saved.pop(value)
        for source in own.reads:
            saved = self._saved[source].pop(value, 0.0)
            if source in self._open:
                self._gains[source] -= saved
        for reader in readers:
            self._take_in(value, self._kernels[reader], reader)
        changed: dict[int, None] = {}
        for reader in readers:
            for source in self._kernels[reader].reads:
                if source in self._open:
                    saved = self._saving(source, reader)
                    self._gains[source] += saved - self._saved[source].get(reader, 0.0)
                    self._saved[source][reader] = saved
                    changed[source] = None
        for source in changed:
            self._offer(source, self._gains[source])
        for reader in readers:
            if reader in self._open:
                self._weigh(reader)

    def _take_in(self, value: int, kernel: _Kernel, reader: int) -> None:
        own, places = self._kernels[value], kernel.reads.pop(value)
        times = sum(places.values())
        for source, shares in own.reads.items():
            merged = kernel.reads.setdefault(source, {})
            for place, share in shares.items():
                if place == _OWN:
                    for p, t in places.items():
                        merged[p] = max(merged.get(p, 0.0), t)
                else:
                    merged[place] = merged.get(place, 0.0) + share * times
            self._saved[source].setdefault(reader, 0.0)
        kernel.cycles += times * own.cycles
        kernel.constants += times * own.constants
        kernel.operations += len(places) * own.operations
        kernel.reduces |= own.reduces
        self._time(kernel)


def _time_of(cycles: float, moved: float) -> float:
    computing = cycles / H100.fusion.cycles_per_byte
    return computing + moved - H100.fusion.overlap * min(computing, moved)
