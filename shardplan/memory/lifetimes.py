"""The live ranges of a device's buffers, and their bytes for any choice of layouts.

A buffer has a first and a last schedule position, and bytes as a function of the choices of one or two variables. The
memory profile of a schedule and the usages of a search within a limit both come from these buffers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardplan.problem.cost_network import Problem
from shardplan.program.program import Operation
from shardplan.search import Network, PairUsage, Part, with_pairs

Array = NDArray[np.float64]

_NEGLIGIBLE = 1e-6
"""The share of the limit of the smallest buffers, which networks leave out."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory on one device from position ``start`` to ``end``, both included.

    ``bytes`` is an array over the choices of ``variables``: of none, one or two variables of the problem's network.
    ``value`` is its tensor, or None for the workspace of a library call. ``form`` is "value" for the tensor itself,
    "result" for its place in the caller's memory, "copy" for a resharded copy or an unreduced result, and "scratch" for
    the memory of a library call.
    """

    value: int | None
    start: int
    end: int
    variables: tuple[int, ...]
    bytes: Array
    form: str = "value"

    def size(self, choices: NDArray[np.int64]) -> float:
        """Bytes with these choices of the problem's variables."""
        return float(self.bytes[tuple([choices[variable] for variable in self.variables])])


@dataclass(frozen=True, slots=True, eq=False)
class Lifetimes:
    """The buffers of one order of a program's operations.

    ``order`` has the operations as they run, ``place`` the position of each. The positions number kernels, and the
    starts and ends of collectives.
    """

    problem: Problem
    order: Sequence[Operation]
    place: Mapping[int, int]
    buffers: Sequence[Buffer]
    positions: int

    def profile(self, choices: NDArray[np.int64]) -> Array:
        """float [positions + 1]: bytes on one device with these choices. The last position is the end of the step."""
        change = np.zeros(self.positions + 2)
        for buffer in self.buffers:
            size = buffer.size(choices)
            if size:
                change[buffer.start] += size
                change[buffer.end + 1] -= size
        return np.cumsum(change)[:-1]

    def least(self) -> Array:
        """float [positions + 1]: bytes that a device holds at least, if each buffer could be chosen alone."""
        change = np.zeros(self.positions + 2)
        for buffer in self.buffers:
            size = float(buffer.bytes.min())
            change[buffer.start] += size
            change[buffer.end + 1] -= size
        return np.cumsum(change)[:-1]

    def live_values(self, position: int, choices: NDArray[np.int64]) -> list[tuple[float, int | None]]:
        """The live buffers at a position: bytes and values, the largest first."""
        found = [(b.size(choices), b.value) for b in self.buffers if b.start <= position <= b.end]
        return sorted((one for one in found if one[0]), key=lambda one: -one[0])

    def network(
        self,
        limit: float,
        places: Collection[int],
        excess: Mapping[int, float] | None = None,
        part: Part | None = None,
    ) -> Network:
        """The problem's network, or a part of it, with a limit at some positions only.

        Its variables come first, then those of pairs. Times of the network are indices among ``places``, ascending.
        ``excess``: additional bytes at some of these positions, for all choices.
        """
        moments, part = sorted(places), part or Part(self.problem.network)
        always, single, pairs = (
            np.array([(excess or {}).get(m, 0.0) for m in moments]),
            list[Buffer](),
            list[PairUsage](),
        )
        for buffer in self._counted(limit, moments):
            first, last = bisect_left(moments, buffer.start), bisect_left(moments, buffer.end + 1)
            if len(buffer.variables) == 2:
                pairs.append(PairUsage(*buffer.variables, buffer.bytes, first, last))
            elif buffer.variables:
                single.append(replace(buffer, start=first, end=last))
            else:
                always[first:last] += buffer.bytes
        network = with_pairs(part.network, [replace(part.pair(p), start=p.start, end=p.end) for p in pairs])
        network.usage_limit = limit
        for buffer in single:
            [variable] = buffer.variables
            network.add_usage(variable, part.amounts(variable, buffer.bytes), buffer.start, buffer.end)
        fixed = network.add_variable([0.0], name="always in use")
        for moment, size in enumerate(always):
            if size:
                network.add_usage(fixed, [float(size)], moment, moment + 1)
        return network

    def _counted(self, limit: float, moments: Sequence[int]) -> Iterator[Buffer]:
        """The buffers that are live at some of the moments, without the smallest."""
        live = [b for b in self.buffers if bisect_left(moments, b.start) < bisect_left(moments, b.end + 1)]
        sizes = np.array([b.bytes.max(initial=0.0) for b in live])
        order = np.argsort(sizes)
        small = {int(n) for n in order[: int((np.cumsum(sizes[order]) <= _NEGLIGIBLE * limit).sum())]}
        return (b for n, b in enumerate(live) if n not in small)
