"""Kernels as they grow while values are fused into them (`shardplan.memory.priorities`), and how long they take.

>>> quicker(2e5), quicker(1e6), quicker(1e9)
(20.0, 2.5, 1.0)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardplan.memory.cycles import BESIDE, CYCLES_PER_BYTE
from shardplan.memory.sums import tile_of_column

_CACHES = ((270e3, 20.0), (50e6, 2.5))
"""What fits into an H100's caches, in bytes, and how much quicker it is to read it from there once more. Of the first
ones, one in each of its processors, XLA takes 2 KiB to be free."""

ONE_NUMBER = 1 / _CACHES[0][1]
"""What it takes to read one number for every element, of the time in which these elements are read from memory."""

BY_ITSELF = 15
"""How many times as many bytes more are read with an element of 4 bytes by itself, rather than in tiles."""

OWN = -1
"""Where a kernel reads what it computes its own elements from."""


@dataclass(slots=True)
class Kernel:
    """A kernel as it grows, by the value that it makes.

    ``reads`` has the values that it reads, and how often it goes through each of them: once for its own elements
    (`OWN`), whatever is computed from them, and once more for each value of which it takes parts, or elements at
    other places, as a slice, a broadcast or a sum does; ``times`` has the sums of these. ``elements``: how many it goes
    through. ``sums``: whether it adds up many numbers to one. ``rows``: where it goes through rows that it has reduced,
    how much it computes for each element, else 0; ``length``: of such a row. ``whole``: whether it reduces rows, and
    can be part of kernels that go through them. ``tiles``: whether tiles can be cut of all that it computes.
    ``slower``: how much longer it takes to read and to compute than one that keeps the whole device busy; ``again``:
    the least time of reading from caches, as a share of that from memory; ``begun``: the bytes of what its sums begin
    with, which it reads so. ``writes``: the bytes of what it makes; ``scalars``: of elements that it computes with one
    number each; ``generated``: of what is read in the time in which it reads what depends on nothing, ``masks``: of
    that part of it which is soon computed. ``turned``: the bytes of what it moves from where a product wrote it
    (`shardplan.memory.transposed`), ``by_element``: whether it does so in tiles; ``apart``: places at which it goes
    through each element by itself (`shardplan.memory.coalescing`). ``time`` is how long it takes. ``columns``: of a
    sum, the columns that lie side by side, 0 where it adds up rows, the numbers that it adds up, and how many it makes
    of them. ``alike``: of the values that it reads equally often and that take as long, the first, and how many they
    are, once that is known.
    """

    reads: dict[int, dict[int, float]]
    cycles: float
    branches: int
    operations: int = 1
    moved: float = 0.0
    sums: bool = False
    rows: float = 0.0
    length: int = 0
    elements: float = 0.0
    tiles: bool = True
    slower: float = 1.0
    writes: float = 0.0
    again: float = 0.0
    begun: float = 0.0
    scalars: float = 0.0
    generated: float = 0.0
    masks: float = 0.0
    by_element: bool = False
    whole: bool = False
    turned: float = 0.0
    times: dict[int, float] = field(default_factory=dict)
    time: float = 0.0
    apart: frozenset[int] = frozenset()
    columns: tuple[int, float, float] | None = None
    alike: Mapping[tuple[int, float], int] | None = None

    @property
    def summed(self) -> int:
        """How many numbers of a column a tile has of which it makes one number."""
        side_by_side, read, made = self.columns or (0, 0.0, 0.0)
        return tile_of_column(read, made) if side_by_side and made else 1

    def duration(self) -> float:
        """How long it takes, by what it computes and moves."""
        return time_of(self.cycles, self.moved, self.rows)

    def compute_masks(self) -> None:
        """Lets it compute what it reads that depends on nothing and is soon computed."""
        self.moved -= self.slower * self.masks
        self.generated -= self.masks
        self.masks = 0.0
        self.time = self.duration()


def quicker(size: float) -> float:
    """How much quicker it is to read so many bytes once more."""
    return next((quicker for fits, quicker in _CACHES if size < fits), 1.0)


def time_of(cycles: float, moved: float, rows: float = 0.0) -> float:
    """How long a kernel takes, in the time in which one byte is read."""
    computing = cycles * max(rows, 1.0) / CYCLES_PER_BYTE
    return computing + moved - BESIDE * min(computing, moved)
