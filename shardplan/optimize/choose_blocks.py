"""Choosing blocks: what to run block by block where a schedule exceeds a memory limit.

Values that are large where most bytes are live say where to begin: each of their dimensions is an index that a loop may
run along. What lives only inside of the loop is then as large as one block. What the loop gives is there from its
beginning to its end. Both are read off the buffers of the schedule, so that a candidate costs no plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import ceil, prod

import numpy as np
from numpy.typing import NDArray

from shardplan import _jax
from shardplan.layout.layout import axes_by_dim
from shardplan.memory import Lifetimes
from shardplan.problem.schedule import Schedule
from shardplan.program.blocks import Blocks, Growth, Region, Tiling, grown, regions, tiling
from shardplan.program.blocks.scans import with_bodies
from shardplan.program.operation_kinds import PRODUCTS, readers_in
from shardplan.program.program import Program
from shardplan.rules import Refusal
from shardplan.timing.step_time import time_prices

Array = NDArray[np.float64]

_MOST_SEEDS = 4
"""Values that candidates begin with, of different shapes."""

_LEAST_SEED = 1 / 8
"""The least size of these, as a share of the largest."""

_MOST_BLOCKS = 1024
"""Blocks of one index."""

_GAIN = 0.99
"""Twice as many blocks have to lower the peak to such a share, or are not taken."""

_AT_ONCE = 132 * 128 * 128
"""Results of a product that are made at once: a tile of 128 x 128 on each multiprocessor of an H100. A last wave of
fewer tiles takes as long (NVIDIA, Matrix Multiplication Background User's Guide, "Wave Quantization")."""

_DEEPEST = 1024
"""Terms of a result that one multiprocessor adds up. Several share a deeper one (split-K)."""

_COMPONENT = 1 / 2
"""The least size of the values that a component is made of, as a share of the one that it begins with."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Blocks, with the peak of a device in bytes and the seconds of work that they add, as estimated.

    ``slower`` are those of the seconds that products take longer since they are small, which no step time counts."""

    blocks: Blocks
    peak: float
    seconds: float
    slower: float


class BlockCandidates:
    """The candidates of one schedule."""

    def __init__(self, schedule: Schedule, lifetimes: Lifetimes) -> None:
        self._program: Program = schedule.program
        self._schedule, self._lifetimes = schedule, lifetimes
        self._choices = schedule.problem.encode(schedule.assignment)
        self._profile: Array = lifetimes.profile(self._choices)
        self._strided = schedule.space.mesh.device_count > 1
        self._held: dict[int | None, list[tuple[int, int, float]]] = {}  # first and last places, and bytes, by value
        for buffer in lifetimes.buffers:
            if size := buffer.size(self._choices):
                self._held.setdefault(buffer.value, []).append((buffer.start, buffer.end, size))
        self._readers = readers_in(self._program)
        self._loops: dict[object, _Loops | None] = {}
        self._found = list(self._families())

    def within(self, limit: float) -> list[Candidate]:
        """Per index and region, the fewest blocks that are estimated to keep a limit, those first that add least time;
        then those that do not reach it, the lowest peak first."""
        found = [one for family in self._found for one in [self._fewest(family, limit)] if one is not None]
        return sorted(found, key=lambda one: (one.peak > limit, one.seconds if one.peak <= limit else one.peak))

    def _fewest(self, family: _Family, limit: float) -> Candidate | None:
        """The fewest blocks whose estimated peak is within the limit, or as many as lower it at all."""
        counts, before = (1,) * len(family.seeds), float(self._profile.max())
        while (more := family.more(counts)) is not None:
            peak = self._peak(family, 1 / prod(more))
            if peak >= _GAIN * before:
                break
            counts, before = more, peak
            if peak <= limit:
                break
        if prod(counts) == 1:
            return None
        try:
            tiles = [tiling(family.program, family.growth, one, counts, family.devices) for one in family.loops.regions]
        except Refusal:
            return None
        loops = zip(family.loops.regions, tiles, strict=True)
        seconds = sum(self._seconds(family.growth, region, own) for region, own in loops)
        slower = sum(self._slower(family.growth, own) for own in tiles)
        blocks = Blocks(family.seeds, counts, family.least_bytes, self._strided, family.mesh)
        return Candidate(blocks, before, seconds + slower, slower)

    def _peak(self, family: _Family, share: float) -> float:
        """The most bytes of a device where what is inside of loops has a share of its size."""
        return float((self._profile + family.loops.given - (1 - share) * family.loops.inside).max())

    def _bytes_over_time(self, loops: Sequence[tuple[Region, Tiling]]) -> tuple[Array, Array]:
        """The bytes of what lives inside of loops, and those that what leaves a loop has more than before: from the
        beginning of the loop on, and for sums in float32."""
        inside, given = np.zeros(len(self._profile) + 1), np.zeros(len(self._profile) + 1)
        place, makers = self._lifetimes.place, self._program.makers
        for region, tiles in loops:
            places = [place[index] for index in region.operations if index in place]
            first, last = min(places), max(places)
            leaving = {*tiles.leaving}
            for value in self._made(region.operations):
                for start, end, size in self._held.get(value, ()):
                    if value in leaving:
                        given[first] += size
                        given[max(first, start)] -= size
                    else:
                        inside[start] += size
                        inside[end + 1] -= size
            for value in leaving - self._held.keys():  # kernels that read it compute it, as long as there is no loop
                ends = [place[reader.index] for reader in self._readers.get(value, ()) if reader.index in place]
                given[first] += self._bytes(value)
                given[max([*ends, last]) + 1] -= self._bytes(value)
            for value in leaving & {*tiles.reduced}:
                wider = 4 / _jax.item_bytes(self._program.values[value].dtype) - 1
                given[first] += max(wider, 0.0) * self._bytes(value)
                given[max(last, place[makers[value].index]) + 1] -= max(wider, 0.0) * self._bytes(value)
        return np.cumsum(inside)[:-1], np.cumsum(given)[:-1]

    def _made(self, operations: Iterable[int]) -> set[int]:
        """The results of operations, by index, and of those in their bodies."""
        found = (one for index in operations for one in with_bodies(self._program, self._program.operations[index]))
        return {result for one in found for result in one.results}

    def _may_lower(self, growth: Growth) -> bool:
        """Whether the peak is lower without all that the operations of a growth make."""
        held = np.zeros(len(self._profile) + 1)
        for value in self._made(growth.along):
            for start, end, size in self._held.get(value, ()):
                held[start] += size
                held[end + 1] -= size
        return float((self._profile - np.cumsum(held)[:-1]).max()) < _GAIN * float(self._profile.max())

    def _seconds(self, growth: Growth, region: Region, tiles: Tiling) -> float:
        """The time of what blocks compute twice, of sums that they read and write, and of what each reads whole."""
        problem, prices = self._schedule.problem, time_prices(self._schedule.problem)
        strategies, blocks, total = self._schedule.assignment.strategies, prod(tiles.counts), 0.0
        for index, parts in tiles.parts.items():
            operation, choices = self._program.operations[index], problem.choices.get(index)
            strategy = strategies.get(index)
            if choices is None or strategy is None:
                continue
            rows = prod(tiles.total(axis) * part.span.length / part.along.size for axis, part in enumerate(parts))
            times = self._program.regions[operation.region].times
            total += times * prices.work(choices.flops * max(rows - 1, 0.0), 0, choices.dtype, strategy.degree)
            whole = [o for o in operation.read if not growth.blocked(o)]
            again = [*whole, *(result for result in operation.results if result in tiles.reduced)]
            moved = sum(self._bytes(value) * (2 if value in tiles.reduced else 1) for value in again)
            total += prices.memory_seconds_per_byte * moved * (blocks - 1) * times
        return total

    def _slower(self, growth: Growth, tiles: Tiling) -> float:
        """The time by which products take longer in blocks, whose last wave of tiles leaves multiprocessors idle."""
        problem, prices, blocks, total = (
            self._schedule.problem,
            time_prices(self._schedule.problem),
            prod(tiles.counts),
            0.0,
        )
        for index in tiles.parts:
            operation, strategy = self._program.operations[index], self._schedule.assignment.strategies.get(index)
            made = operation.results[0]
            if operation.primitive.name not in PRODUCTS or strategy is None or not growth.blocked(made):
                continue
            choices, results = problem.choices[index], self._program.values[made].elements
            waves = max(results, choices.flops / 2 / _DEEPEST) / strategy.degree / _AT_ONCE
            wave = prices.work(choices.flops, 0, choices.dtype, strategy.degree) / waves
            times = self._program.regions[operation.region].times
            total += times * wave * (blocks * ceil(waves / blocks) - ceil(waves))
        return total

    def _bytes(self, value: int) -> float:
        layout = self._schedule.assignment.values.get(value)
        parts = self._schedule.problem.domain(value).parts
        return self._program.values[value].total_bytes / (1 if layout is None else parts.get(layout, 1))

    def _rows(self, value: int, dim: int) -> int:
        """The positions of a dimension that one device has: a block has at least one of them."""
        layout, mesh = self._schedule.assignment.values.get(value), self._schedule.space.mesh
        split = layout[dim] if layout else ()
        return self._program.values[value].shape[dim] // prod(mesh.sizes[axis] for axis in split)

    def _families(self) -> Iterator[_Family]:
        seen = set[object]()
        for value, size in self._seeds():
            found = list(self._families_of(value, size))
            deep = any(one.mesh for one in found)  # else each operation exchanges its own halo in every block
            for one in found:
                if one.key not in seen and (one.mesh or not one.overlaps or not deep):
                    seen.add(one.key)
                    yield one

    def _families_of(self, value: int, size: float) -> Iterator[_Family]:
        single = []
        for dim in range(len(self._program.values[value].shape)):
            found = [*self._along(((value, dim),), (0.0, _COMPONENT * size))] if self._rows(value, dim) > 1 else []
            single += found[:1]
            yield from found
        for pair in combinations([one for one in single if one.overlaps], 2):
            yield from self._along((*pair[0].seeds, *pair[1].seeds), (0.0,))

    def _along(self, seeds: tuple[tuple[int, int], ...], sizes: Sequence[float]) -> Iterator[_Family]:
        """The families along some indices, one for each least size of values, as long as the first has loops."""
        program, growth = grown(self._program, seeds)
        reached = frozenset((value, place.dim) for places in growth.places for value, place in places.items())
        mesh, value = self._schedule.space.mesh, seeds[0][0]
        split = axes_by_dim(mesh, self._schedule.assignment.values.get(value, ()), [dim for _, dim in seeds])
        whole = bool(mesh.splitting) and all(split[axis][2] >= 0 for axis in mesh.splitting)
        rows = tuple(self._rows(value, dim) for value, dim in seeds)
        for least_bytes in sizes if self._may_lower(growth) else ():
            key = reached, least_bytes
            if key not in self._loops:
                self._loops[key] = self._loops_of(program, growth, least_bytes)
            loops = self._loops[key]
            if loops is not None:
                own = split if whole and loops.overlaps else ()
                yield _Family(seeds, least_bytes, program, growth, rows, own, loops, reached)
            elif not least_bytes:
                return

    def _loops_of(self, program: Program, growth: Growth, least_bytes: float) -> _Loops | None:
        found = tuple(regions(program, growth, least_bytes))
        try:
            tiles = [tiling(program, growth, region, (2,) * len(growth.places)) for region in found]
        except Refusal:
            return None
        inside, given = self._bytes_over_time([*zip(found, tiles, strict=True)])
        return _Loops(found, any(own.overlaps for own in tiles), inside, given) if found else None

    def _seeds(self) -> list[tuple[int, float]]:
        """The largest values where most bytes are live, each of another shape and origin."""
        top = int(self._profile.argmax())
        found: dict[object, tuple[int, float]] = {}
        for size, value in self._lifetimes.live_values(top, self._choices):
            maker = self._program.makers.get(value) if value is not None else None
            if value is None or maker is None or maker.region:
                continue
            kind = (self._program.values[value].shape, maker.primitive.name)
            found.setdefault(kind, (value, size))
        largest = max((size for _, size in found.values()), default=0.0)
        return [one for one in found.values() if one[1] >= _LEAST_SEED * largest][:_MOST_SEEDS]


@dataclass(frozen=True, slots=True)
class _Loops:
    """The regions of a growth. ``overlaps``: their blocks have rows in common, as those of windows have.

    ``inside`` and ``given`` are bytes over time: of what lives in loops alone, and of what these give."""

    regions: Sequence[Region]
    overlaps: bool
    inside: Array
    given: Array


@dataclass(frozen=True, slots=True)
class _Family:
    """The loops along some indices, of which a device has so many ``rows``.

    ``mesh`` is that of blocks whose indices devices split, and nothing else. ``reached`` are values with the dimensions
    that are indices."""

    seeds: tuple[tuple[int, int], ...]
    least_bytes: float
    program: Program
    growth: Growth
    rows: tuple[int, ...]
    mesh: tuple[tuple[str, int, int], ...]
    loops: _Loops
    reached: frozenset[tuple[int, int]]

    @property
    def devices(self) -> tuple[int, ...]:
        """Of each index, those that split it."""
        return tuple(prod(size for _, size, own in self.mesh if own == index) for index in range(len(self.seeds)))

    def more(self, counts: tuple[int, ...]) -> tuple[int, ...] | None:
        """Twice as many blocks, of the index whose blocks have most rows: None where there are no more.

        Each index that devices do not split has two blocks or more."""
        first = [axis for axis, devices in enumerate(self.devices) if devices == 1] if prod(counts) == 1 else []
        longest = max(range(len(counts)), key=lambda axis: self.rows[axis] / counts[axis])
        more = tuple(count * (1 + (axis in (first or [longest]))) for axis, count in enumerate(counts))
        allowed = (count <= min(rows, _MOST_BLOCKS) for count, rows in zip(more, self.rows, strict=True))
        return more if all(allowed) else None

    @property
    def overlaps(self) -> bool:
        return self.loops.overlaps

    @property
    def key(self) -> tuple[frozenset[object], ...]:
        return (self.reached, *(frozenset(region.operations) for region in self.loops.regions))
