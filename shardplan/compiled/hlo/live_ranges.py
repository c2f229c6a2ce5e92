r"""The live bytes of a compiled program at each position of its schedule, by XLA's buffer assignment.

On request, XLA writes files of the schedule, of the live range of every buffer, and of its allocation. Their peak is
the one of the executable's memory analysis.

>>> ranges = "HloLiveRange (max 3):\n  InstructionSequence:\n    0:x\n    1:y\n    2:z\n  BufferLiveRange:\n" \
...     "    x{}:0-3\n    y{}:1-2\n    z{}:2-3\n"
>>> buffers = "BufferAssignment:\nallocation 0: size 8, parameter 0, shape |f32[2]| at ShapeIndex {}:\n" \
...     " value: <0 x @0> (size=8,offset=0): f32[2]{0}\nallocation 1: size 24, preallocated-temp:\n" \
...     " value: <1 y @0> (size=8,offset=0): f32[2]{0}\n value: <2 z @0> (size=16,offset=8): f32[4]{0}\n"
>>> found = LiveRanges.parse(ranges, buffers)
>>> found.instructions, found.bytes.tolist()
(('x', 'y', 'z'), [8.0, 16.0, 32.0])
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_RANGE = re.compile(r"\s+(\S+?\{[\d,]*\}):(\d+)-(\d+)$")
_ALLOCATION = re.compile(r"allocation \d+: size (\d+)(.*)")
_ON_HOST = re.compile(r", color 5\b")
_VALUE = re.compile(r" value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)")


@dataclass(frozen=True, slots=True)
class LiveRanges:
    """The schedule of a compiled program, and the live bytes of one device at each instruction.

    Attributes:
        instructions: their names in the order of the schedule, with those of loops' bodies.
        bytes: float [instructions], with arguments and results. Host memory is left out.
    """

    instructions: tuple[str, ...]
    bytes: NDArray[np.float64]

    @property
    def peak(self) -> float:
        """The most bytes that are live at once."""
        return float(self.bytes.max(initial=0.0))

    @classmethod
    def parse(cls, live_ranges: str, buffer_assignment: str) -> LiveRanges:
        """Reads the files `*-live-range.txt` and `*-buffer-assignment.txt` that XLA writes.

        Raises ValueError for another format.
        """
        sequence, found, ranges = live_ranges.partition("  BufferLiveRange:\n")
        lines = sequence.splitlines()[2:]
        if not found or not lines:
            raise ValueError("the live ranges have no schedule")
        names = tuple(line.strip().split(":", 1)[1] for line in lines)
        spans = {m[1]: (int(m[2]), int(m[3])) for m in map(_RANGE.match, ranges.splitlines()) if m}
        change = np.zeros(len(names) + 2)  # buffers live at the end end after the last instruction
        for allocated, is_shared, values in _allocations(buffer_assignment):
            if not is_shared:
                change[0] += allocated
            until: dict[int, int] = {}  # per offset: values of one offset are one buffer in place
            for start, end, size, offset in sorted((*spans[n], s, o) for n, s, o in values if is_shared and n in spans):
                first = max(start, until.get(offset, 0))
                if first <= end:
                    change[first] += size
                    change[end + 1] -= size
                    until[offset] = end + 1
        return cls(names, np.cumsum(change)[: len(names)])


def _allocations(text: str) -> Iterator[tuple[int, bool, list[tuple[str, int, int]]]]:
    """The bytes of each allocation, whether its buffers reuse memory, and the buffers: name, bytes, offset."""
    found: list[tuple[int, bool, list[tuple[str, int, int]]]] = []
    for line in text.splitlines():
        if match := _ALLOCATION.match(line):
            if "thread-local" not in match[2] and not _ON_HOST.match(match[2]):
                found.append((int(match[1]), "preallocated-temp" in match[2], []))
            else:
                found.append((0, False, []))
        elif found and (match := _VALUE.match(line)):
            found[-1][2].append((match[1] + (match[2] or "{}"), int(match[3]), int(match[4])))
    yield from found
