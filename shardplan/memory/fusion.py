"""Priority fusion of XLA:GPU: the values that are materialised although their readers could compute them.

A value is *fused* if all of its readers compute it, and *materialised* otherwise. XLA starts with a kernel per
operation, and estimates the time of each from its cycles and its bytes. The next fused value is the one that saves most
time over all of its readers. These kernels grow, and further fusions save less. The pass ends when none saves time.

The estimate is that of XLA's `GpuPerformanceModel`: the longer time of computing and of memory traffic, and a twentieth
of the shorter one. A repeated read comes from a cache if the value fits. The unit of time is the bytes that an H100
reads meanwhile.

>>> cache_speedup(2e5), cache_speedup(1e6), cache_speedup(1e9)
(20.0, 2.5, 1.0)
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from shardplan.memory.cycles import cycles_of
from shardplan.memory.gpu import H100
from shardplan.memory.operations import row_fusion_values
from shardplan.problem.cost_network import Problem
from shardplan.program.operation_kinds import CUMULATIVE, PRODUCT, REDUCTIONS, is_view
from shardplan.program.program import Operation, operand_type

_LAUNCH_BYTES = H100.fusion.launch_microseconds * H100.reading.bytes_per_microsecond
"""The launch time of a kernel, in bytes read meanwhile."""

_CONCATENATION_CYCLES = 400
"""Cycles, by XLA's count, of an element of a concatenation, such as the indices of batched gathers."""

_CUMULATIVE_BLOCK = 16
"""The elements that a reader of blocks of a cumulative sum adds up again."""

_PARTS = frozenset({"slice", "dynamic_slice", "split", "gather", "squeeze"})
_BITCASTS = frozenset({"reshape", "squeeze", "expand_dims", "copy", "copy_p", "stop_gradient"})
_OWN_POSITION = -1
"""The position at which a kernel reads the operands of its own elements."""


def cache_speedup(size: float) -> float:
    """The speed-up of another read of a value of this size."""
    return next((quicker for fits, quicker in H100.reading.caches if size < fits), 1.0)


def materialised_values(fusion: Fusion, operations: Iterable[Operation], fusible: Collection[int]) -> frozenset[int]:
    """The fusible values that are materialised, since their fusion into all readers saves no time."""
    return fusion.stored(operations, fusible)


@dataclass(slots=True)
class _Kernel:
    """A growing kernel.

    ``reads`` has the number of passes over each value, by position. `_OWN_POSITION` is that of elementwise reads. A
    value that is sliced, broadcast or reduced has a position of its own. ``cycles`` is the sum over all operations,
    ``writes`` the bytes of the result. ``constants`` are the bytes of results, counted for each scalar that their
    operations read. ``slower`` is a factor of reductions."""

    reads: dict[int, dict[int, float]]
    cycles: float
    writes: float
    operations: int = 1
    constants: float = 0.0
    reduces: bool = False
    slower: float = 1.0
    moved: float = 0.0
    time: float = 0.0
    times: dict[int, float] = field(default_factory=dict)
    """The passes over each value, at all positions."""
    moves: dict[int, float] = field(default_factory=dict)
    """The bytes that these move."""


@dataclass(slots=True)
class Fusion:
    """The kernels of a program during the fusion pass.

    ``sizes`` has the bytes of each value on one device, ``elements`` its elements there. ``same`` maps a value to the
    earlier one that common subexpression elimination keeps.
    """

    problem: Problem
    sizes: Mapping[int, float]
    elements: Mapping[int, float]
    same: Mapping[int, int]
    _speedups: dict[int, float] = field(default_factory=dict)
    _kernels: dict[int, _Kernel] = field(default_factory=dict)
    _saved: dict[int, dict[int, float]] = field(default_factory=dict)
    _gains: dict[int, float] = field(default_factory=dict)
    _queue: list[tuple[float, int]] = field(default_factory=list)
    _renamed: set[int] = field(default_factory=set)
    _open: dict[int, None] = field(default_factory=dict)

    def stored(self, operations: Iterable[Operation], fusible: Collection[int]) -> frozenset[int]:
        """The fusible values that are materialised."""
        self._speedups |= {value: cache_speedup(size) for value, size in self.sizes.items()}
        for operation in operations:
            for result in operation.results:
                self._begin(operation, result)
        for value in fusible:
            if value in self._kernels:
                self._open[value] = None
        for value in self._open:
            self._update_priority(value)
        while self._queue:
            gain, number = heapq.heappop(self._queue)
            if -number in self._open and self._gains[-number] == -gain and self._is_fusible_into_readers(-number):
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
        renames = name in _BITCASTS or is_view(program, operation)
        if renames or result in row_fusion_values(self.problem):
            self._renamed.add(result)
        reads: dict[int, dict[int, float]] = {}
        for position, value in enumerate(read):
            own = max(self.elements[value], 1e-9)
            if pointwise or renames or name == "transpose":
                same = program.values[value].elements == program.values[result].elements
                times, place = (1.0, _OWN_POSITION) if same else (made / own, value)
            else:
                place, times = value, 1.0
                if name in ("broadcast_in_dim", PRODUCT) or (name in _PARTS and not position):
                    times = made / own
                elif name in CUMULATIVE:
                    times += _CUMULATIVE_BLOCK
            places = reads.setdefault(value, {})
            places[place] = max(places.get(place, 0.0), times)
        cycles = 0 if renames else cycles_of(program, operation)
        if name == "gather" and (batch := operation.params["dimension_numbers"].operand_batching_dims):
            cycles = _CONCATENATION_CYCLES * (len(batch) + 1)
        kernel = _Kernel(reads, cycles * through, self.sizes[result], reduces=name in REDUCTIONS)
        if name in REDUCTIONS:
            kernel.slower = self._reduction_slowdown(operation, through, made)
        if pointwise:
            kernel.constants = self.sizes[result] * self._scalar_operands(operation)
        self._kernels[result] = kernel
        self._time(kernel)
        for value in reads:
            self._saved.setdefault(value, {})[result] = 0.0

    def _scalar_operands(self, operation: Operation) -> int:
        """The number of broadcast scalar operands. XLA counts a read from a cache for each element."""
        makers, found = self.problem.program.makers, 0
        for operand in operation.operands:
            while isinstance(operand, int) and operand in self.problem.generated:
                maker = makers[operand]
                if maker.primitive.name != "broadcast_in_dim":
                    break
                operand = maker.operands[0]
            found += not isinstance(operand, int)
        return found

    def _reduction_slowdown(self, operation: Operation, read: float, made: float) -> float:
        """The slowdown of a reduction with too few blocks to keep the device busy."""
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
        kernel.times = {value: sum(places.values()) for value, places in kernel.reads.items()}
        kernel.moves = {value: self._reading(value, times) for value, times in kernel.times.items()}
        kernel.moved += sum(kernel.moves.values())
        kernel.time = kernel.slower * _time_of(kernel.cycles, kernel.moved)

    def _reading(self, value: int, times: float) -> float:
        size = self.sizes[value]
        return times * size if times <= 1 else size + (times - 1) * size / self._speedups[value]

    def _is_fusible_into_readers(self, value: int) -> bool:
        """Whether all readers of a value may compute it."""
        own = self._kernels[value]
        for reader in self._saved[value]:
            kernel = self._kernels[reader]
            if own.reduces and kernel.reduces:
                return False
            copies = len(kernel.reads[value])
            most = H100.fusion.most_read
            many = len(kernel.reads) + len(own.reads) > most and len(kernel.reads.keys() | own.reads.keys()) > most
            if many or copies * own.operations + kernel.operations > H100.fusion.most_operations:
                return False
        return True

    def _update_priority(self, value: int) -> None:
        saved = self._saved.setdefault(value, {})
        for reader in saved:
            saved[reader] = self._saving(value, reader)
        renamed = value in self._renamed
        self._push_candidate(value, inf if renamed else _LAUNCH_BYTES + self._kernels[value].time + sum(saved.values()))

    def _push_candidate(self, value: int, gain: float) -> None:
        self._gains[value] = gain
        if gain >= 0:
            heapq.heappush(self._queue, (-gain, -value))

    def _saving(self, value: int, reader: int) -> float:
        """The time that a kernel saves by computing a value instead of reading it."""
        own, kernel = self._kernels[value], self._kernels[reader]
        places, times = kernel.reads[value], kernel.times[value]
        moved = kernel.moved - kernel.moves[value] + times * own.constants / H100.reading.caches[0][1]
        for source, shares in own.reads.items():
            known = kernel.reads.get(source)
            before = after = kernel.times[source] if known else 0.0
            for place, share in shares.items():
                if place != _OWN_POSITION:
                    after += share * times
                elif known:
                    after += sum([t for p, t in places.items() if p not in known])
                else:
                    after += times
            if after != before:
                moved += self._reading(source, after) - (kernel.moves[source] if known else 0.0)
        return kernel.time - kernel.slower * _time_of(kernel.cycles + times * own.cycles, moved)

    def _fuse(self, value: int) -> None:
        """Fuses a value into all of its readers, and updates the priorities that this changes."""
        del self._open[value]
        own, readers = self._kernels[value], self._saved.pop(value)
        for source in own.reads:
            saved = self._saved[source].pop(value, 0.0)
            if source in self._open:
                self._gains[source] -= saved
        for reader in readers:
            self._inline(value, self._kernels[reader], reader)
        changed: dict[int, None] = {}
        for reader in readers:
            for source in self._kernels[reader].reads:
                if source in self._open:
                    saved = self._saving(source, reader)
                    self._gains[source] += saved - self._saved[source].get(reader, 0.0)
                    self._saved[source][reader] = saved
                    changed[source] = None
        for source in changed:
            self._push_candidate(source, self._gains[source])
        for reader in readers:
            if reader in self._open:
                self._update_priority(reader)

    def _inline(self, value: int, kernel: _Kernel, reader: int) -> None:
        own, places, times = self._kernels[value], kernel.reads.pop(value), kernel.times[value]
        for source, shares in own.reads.items():
            merged = kernel.reads.setdefault(source, {})
            for place, share in shares.items():
                if place == _OWN_POSITION:
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
