"""The kernels of XLA:GPU as they grow: each value is fused into its readers as long as that saves time.

How long a kernel takes is XLA's count (`shardplan.memory.growing`): of the cycles that it computes, and of the bytes
that it moves, those that it goes through again from caches. A sum down columns whose threads keep too little of the
device busy is slower, the more so where it reads narrower numbers: what widens them is fused into it last.

A kernel that goes through rows which it has reduced is written in tiles of whole rows. It reads a number for each row
by itself, and what all rows share once in a while; others go through either for each element. It becomes part of a sum
down columns where a tile of all that is summed up, in rows as long, is not too large.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from math import inf, prod

from shardplan import _jax
from shardplan.memory.absorbing import narrow_values
from shardplan.memory.coalescing import READ_AT_ONCE
from shardplan.memory.computing import PARTS, Computing
from shardplan.memory.cycles import BESIDE, CYCLES_PER_BYTE, REDUCING_CYCLES
from shardplan.memory.fusion import BLOCK, CUMULATIVE, pointwise_operations
from shardplan.memory.growing import BY_ITSELF, ONE_NUMBER, OWN, Kernel, quicker, time_of
from shardplan.memory.lying import lies_in, lying_of
from shardplan.memory.moving import turned_back
from shardplan.memory.products import PRODUCT
from shardplan.memory.rows import LONGEST
from shardplan.memory.sums import LAUNCH, waiting_for_blocks, waiting_for_rows
from shardplan.problem import Problem
from shardplan.program import Operation

_WARP = 32
_APART = 400
"""Elements that a warp computes together, and cycles, by XLA's count, for an element of what is put together from
parts that warps do not divide."""

_NEARLY = 0.9
"""Of two numbers of elements that differ by less, since splits are uneven, one is taken to be the other."""

_SPREADING = frozenset({"broadcast_in_dim", PRODUCT})

_MOST_READ, _MOST_BRANCHES, _MOST_CODE = 96, 10, 10_000
"""What XLA lets one kernel read, how often it lets it branch, and how many operations it lets it have on all ways. A
padding does not count: kernels with 63 of them were compiled."""


class Fusion:
    """The kernels that make some values, while these are fused into their readers."""

    def __init__(
        self,
        problem: Problem,
        split: Mapping[int, tuple[float, float]],
        makes: Iterable[int],
        computing: Mapping[int, Computing],
        absorbed: frozenset[int] = frozenset(),
    ) -> None:
        """``split``: for each value, also of those that are read, into how many parts it is split, and the bytes of
        the buffer that it is part of, if that is larger; ``computing``: what operations do, by index."""
        values = problem.program.values
        self._problem, self._absorbed, self._narrow = problem, absorbed, narrow_values(problem, absorbed)
        self._bytes = {value: values[value].total_bytes / degree for value, (degree, _) in split.items()}
        self._elements = {value: values[value].elements / degree for value, (degree, _) in split.items()}
        self._around = {value: max(buffer, self._bytes[value]) for value, (_, buffer) in split.items()}
        self._quicker = {value: quicker(size) for value, size in self._around.items()}
        first = dict[tuple[float, float, float, bool], int]()
        self._alike = {value: first.setdefault(self._size_of(value), value) for value in split}
        """Per value, the first that takes as long to read, however often."""
        self._kernels: dict[int, Kernel] = {}
        self._saved: dict[int, dict[int, float]] = {}  # per value, what each kernel that reads it would save
        self._gains: dict[int, float] = {}
        self._queue: list[tuple[float, int]] = []
        self._renamed: set[int] = set()
        self.apart: dict[int, None] = {}
        makers = problem.program.makers
        pointwise = pointwise_operations(problem)
        lying, (self._turned_back, _) = lying_of(problem.program, pointwise), turned_back(problem.program, pointwise)
        self._moving, self._lying = lying.moved, lying.orders
        for result in makes:
            operation = makers[result]
            kernel = self._kernels[result] = self._kernel(operation, result, computing[operation.index])
            kernel.times = {value: sum(times.values()) for value, times in kernel.reads.items()}
            kernel.moved = self._moved(result)
            kernel.time = kernel.duration()
            for value in kernel.reads:
                self._saved.setdefault(value, {})[result] = 0.0

    def fuse(self, values: Iterable[int]) -> None:
        """Fuses values as long as that saves time; those that stay apart are left in `apart`."""
        self.apart = dict.fromkeys(values)
        for value in self.apart:
            self._weigh(value)
        masked = any(kernel.masks for kernel in self._kernels.values())
        while self._queue or masked:
            if masked and (not self._queue or -self._queue[0][0] < LAUNCH):
                self._compute_masks()
                masked = False
                continue
            gain, number = heapq.heappop(self._queue)
            if -number in self.apart and self._gains[-number] == -gain and self._fits(-number):
                self._fuse(-number)

    def _compute_masks(self) -> None:
        """Lets kernels compute what depends on nothing, where that is soon done: what is made of no memory saves hardly
        more than the launch of its own kernel, so all that saves more is fused before."""
        computing = {value for value, kernel in self._kernels.items() if kernel.masks}
        for value in computing:
            self._kernels[value].compute_masks()
        for value in self.apart:
            if value in computing or not computing.isdisjoint(self._saved[value]):
                self._weigh(value)

    def _kernel(self, operation: Operation, result: int, computing: Computing) -> Kernel:
        """The kernel of one operation."""
        name, choices = operation.primitive.name, self._problem.choices.get(operation.index)
        read, cycles = computing.read, computing.cycles
        elements = max([self._elements[value] for value in (*read, result)])
        if computing.renames:
            self._renamed.add(result)
        pointwise = choices is not None and choices.pointwise and name != "dynamic_update_slice"
        if operation.index in self._absorbed:
            computing = computing._replace(branches=0, sums=False, columns=None)
            reads = {value: {OWN: 1.0} for value in read}
        elif computing.views:
            reads = {value: {value: float(computing.views)} for value in read}
        elif pointwise or self._shows(operation, result) or not self._narrow.isdisjoint(read):
            reads = {value: self._of_element(value, result) for value in read}
            reads |= {value: {~(operation.index + 1): 1.0} for value in computing.through}
        else:
            reads = {value: {value: 0.0} for value in read}
            for position, value in enumerate(read):
                computed = elements if name == PRODUCT else self._elements[result]
                reads[value][value] += 1.0 if computing.library else self._times(operation, position, computed, value)
        if name == "concatenate" and any(times.get(value, 1.0) % 1.0 for value, times in reads.items()):
            cycles = _APART
        if name == "gather" and (batch := operation.params["dimension_numbers"].operand_batching_dims):
            # XLA puts places in the batch, and indices, together
            cycles, elements = _APART * (len(batch) + 1), self._elements[result]
        cycles += REDUCING_CYCLES if computing.rows else 0
        kernel = Kernel(reads, elements * cycles, computing.branches, sums=computing.sums)
        kernel.elements = elements
        kernel.length = self._problem.program.values[result].shape[-1] if computing.rows else 0
        kernel.rows, kernel.tiles, kernel.apart = computing.rows, computing.tiles, frozenset(computing.apart)
        kernel.by_element = pointwise and name != "transpose" and result not in self._turned_back
        kernel.whole = operation.index in self._absorbed
        kernel.turned = self._bytes[result] * (result in self._moving)
        kernel.scalars = self._bytes[result] * computing.numbers * pointwise
        for item, size, computed in computing.generated if pointwise else ():
            reading = item / quicker(size)
            kernel.generated += self._elements[result] * reading
            soon = computed * (1 - BESIDE) < reading * CYCLES_PER_BYTE
            kernel.masks += self._elements[result] * reading * soon
        kernel.writes = sum([self._bytes[value] for value in computing.copied]) or self._bytes[result]
        if computing.columns is not None:
            kernel.columns = (computing.columns[0], elements, computing.columns[1] * self._elements[result])
            waiting = self._waiting(kernel.columns, read)
            kernel.begun = kernel.columns[2] * _jax.item_bytes(self._problem.program.values[result].dtype)
            kernel.again, kernel.slower = min(waiting, 1.0), max(waiting, 1.0)
            kernel.cycles *= kernel.slower
        return kernel

    def _shows(self, operation: Operation, result: int) -> bool:
        """Whether a transposition moves nothing, or something is shown as another shape."""
        name, program = operation.primitive.name, self._problem.program
        return name == "reshape" or (name == "transpose" and lies_in(program, self._lying, result) != result)

    def _waiting(self, columns: tuple[int, float, float], values: Iterable[int]) -> float:
        """By how much a kernel that sums up numbers of some values reads slower than one that keeps the whole device
        busy; ``columns``: those that lie side by side, 0 where it sums up rows, the numbers that it sums up, and those
        that it makes of them."""
        side_by_side, read, made = columns
        if not side_by_side:
            return waiting_for_rows(read, made)
        width = min([_jax.item_bytes(self._problem.program.values[value].dtype) for value in values], default=4)
        return waiting_for_blocks(side_by_side, read, made, width)

    def _slower(self, own: Kernel, kernel: Kernel, value: int) -> tuple[float, float]:
        """By how much a kernel becomes slower where it computes a value instead of reading it, since it may read
        narrower numbers then; and the least time in which it reads from caches there."""
        if kernel.columns is None or not kernel.columns[0]:
            return 1.0, kernel.again
        waiting = self._waiting(kernel.columns, (kernel.reads.keys() - {value}) | own.reads.keys())
        return max(waiting, 1.0) / kernel.slower, min(waiting, 1.0)

    def _size_of(self, value: int) -> tuple[float, float, float, bool]:
        return self._bytes[value], self._elements[value], self._around[value], value in self._narrow

    def _of_element(self, value: int, result: int) -> dict[int, float]:
        """How often an operation element by element goes through an operand, which it may spread along dimensions, or
        of which each device may take a part, where the result is split into more."""
        values, times = self._problem.program.values, self._elements[result] / max(self._elements[value], 1e-9)
        if values[value].elements == values[result].elements or value in self._narrow:
            return {OWN: times if times < _NEARLY and value not in self._narrow else 1.0}
        return {value: times}

    def _times(self, operation: Operation, position: int, computed: float, value: int) -> float:
        """How often an operation that does not go element by element reads an operand's elements to compute so many."""
        name, own = operation.primitive.name, max(self._elements[value], 1e-9)
        if name in _SPREADING or (name in PARTS and not position):
            return computed / own
        if name in CUMULATIVE:
            length = self._problem.program.values[value].shape[operation.params["axis"]]
            return 1.0 + BLOCK if length > BLOCK else float(length)
        if name == "concatenate":
            dimension, shape = operation.params["dimension"], self._problem.program.values[value].shape
            if prod(shape[:dimension]) > 1 and shape[dimension]:  # in front, parts lie one after another
                return -(-shape[dimension] // _WARP) * _WARP / shape[dimension]
        return 1.0

    def _moved(self, value: int) -> float:
        """The bytes that a kernel reads and writes."""
        kernel = self._kernels[value]
        read = sum([self._reading(v, times, kernel, kernel.length) for v, times in kernel.times.items()])
        read += 0.0 if kernel.by_element else BY_ITSELF * kernel.turned
        for place in kernel.apart:
            read += sum([self._apart(v) for v, places in kernel.reads.items() if place in places])
        read += kernel.generated + kernel.scalars * max(kernel.again, ONE_NUMBER) + kernel.begun * kernel.again
        return kernel.slower * (kernel.writes + read)

    def _reading(self, value: int, times: float, kernel: Kernel, length: int) -> float:
        """The bytes that could be read in the time in which a kernel goes through a value so often; ``length``: of the
        rows through which it goes in tiles, if it does."""
        own, rows = self._elements[value], kernel.elements / max(length, 1)
        if length and own < _NEARLY * rows:  # all that is spread along the tiles is read once, or a number for each row
            return self._bytes[value]
        if length and _NEARLY * own < rows:
            return own * READ_AT_ONCE
        if value in self._narrow:
            times = max(times, kernel.elements / max(own, 1e-9))
        size = times * self._bytes[value]
        if size <= (first := self._around[value]):  # of a part of a buffer, XLA takes as many bytes to be new
            return size
        return first + (size - first) * max(kernel.again, 1.0 / self._quicker[value])

    def _apart(self, value: int) -> float:
        """The bytes that are read besides where each element of a value is read by itself."""
        return self._elements[value] * READ_AT_ONCE - self._bytes[value]

    def _fits(self, value: int) -> bool:
        """Whether XLA can generate the code of all kernels that read a value where they compute it."""
        own = self._kernels[value]
        for reader in self._saved[value]:
            kernel = self._kernels[reader]
            if (own.sums and kernel.sums) or (own.whole and not kernel.rows):
                return False
            tile = max(own.rows * own.length, kernel.rows * kernel.length)
            if tile and not (own.tiles and kernel.tiles and tile * kernel.summed <= LONGEST):
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
        gain = inf if value in self._renamed else LAUNCH + own.time + sum(saved.values())
        self._offer(value, gain)

    def _offer(self, value: int, gain: float) -> None:
        self._gains[value] = gain
        if gain >= 0:  # of equal ones the last comes first
            heapq.heappush(self._queue, (-gain, -value))

    def _saving(self, value: int, reader: int) -> float:
        """The time that a kernel takes less where it computes a value instead of reading it."""
        own, kernel = self._kernels[value], self._kernels[reader]
        times, again, length = kernel.times[value], kernel.again, max(own.length, kernel.length)
        moved = times * (own.generated + own.scalars * max(again, ONE_NUMBER))
        moved -= self._reading(value, times, kernel, kernel.length)
        apart = own.times.keys().isdisjoint(kernel.times)  # as most are, which spares going through all that it reads
        if apart:  # of sums over all of a model's weights, one reads them all, and all updates it
            own.alike = own.alike or Counter((self._alike[v], share) for v, share in own.times.items())
            moved += sum([n * self._reading(v, times * share, kernel, length) for (v, share), n in own.alike.items()])
        else:
            moved += self._reading_more(own, kernel, kernel.reads[value], length)
        if own.length and not kernel.length:
            moved += self._in_tiles(value, kernel, length)
        if not kernel.by_element:  # reads each element that is moved by itself
            moved += BY_ITSELF * times * own.turned
        for place in kernel.apart:
            if place in kernel.reads[value]:
                moved -= self._apart(value)
                moved += sum([self._apart(v) for v in own.reads if place not in kernel.reads.get(v, ())])
        rows, cycles = max(own.rows, kernel.rows), kernel.cycles + kernel.slower * times * own.cycles
        slower, later = self._slower(own, kernel, value)
        moved = kernel.moved + kernel.slower * (moved + kernel.begun * (later - again))
        return kernel.time - time_of(slower * cycles, slower * moved, rows)

    def _in_tiles(self, value: int, kernel: Kernel, length: int) -> float:
        """The bytes more that a kernel reads of other values where it becomes one in tiles, since it computes one."""
        others = [(v, times) for v, times in kernel.times.items() if v != value]
        more = [self._reading(v, times, kernel, length) - self._reading(v, times, kernel, 0) for v, times in others]
        return sum(more)

    def _reading_more(self, own: Kernel, kernel: Kernel, places: Mapping[int, float], length: int) -> float:
        """The bytes that a kernel which computes a value reads for it, some of which it reads anyway; ``places``: how
        often it goes through the value."""
        moved, times = 0.0, sum(places.values())
        for source, share in own.times.items():
            known = kernel.reads.get(source)
            if known is None:
                moved += self._reading(source, times * share, kernel, length)
                continue
            before = kernel.times[source]
            now = before + times * share
            if OWN in own.reads[source]:  # what it reads for these elements already is not read again
                now -= sum([share for place, share in known.items() if place in places])
            moved += self._reading(source, now, kernel, length) - self._reading(source, before, kernel, length)
        return moved

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
        slower, kernel.again = self._slower(own, kernel, value)
        places, times, kernel.alike = kernel.reads.pop(value), kernel.times.pop(value), None
        for source, shares in own.reads.items():
            merged = kernel.reads.setdefault(source, {})
            for place, share in shares.items():
                if place == OWN:
                    merged |= places
                else:
                    if not kernel.apart.isdisjoint(places):
                        kernel.apart |= {place}
                    merged[place] = merged.get(place, 0.0) + share * times
            kernel.times[source] = sum(merged.values())
            self._saved[source].setdefault(reader, 0.0)
        kernel.cycles = slower * (kernel.cycles + kernel.slower * times * own.cycles)
        kernel.slower *= slower
        kernel.scalars += times * own.scalars
        kernel.generated += times * own.generated
        kernel.masks += times * own.masks
        kernel.turned += times * own.turned
        kernel.operations += len(places) * own.operations
        kernel.branches += len(places) * own.branches
        kernel.sums |= own.sums
        kernel.rows = max(kernel.rows, own.rows)
        kernel.length = max(kernel.length, own.length)
        kernel.tiles &= own.tiles
        kernel.moved = self._moved(reader)
        kernel.time = kernel.duration()
