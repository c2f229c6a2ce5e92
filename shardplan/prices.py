"""Prices: what bytes on the wire, collectives and work cost, in the unit of the objective.

The objective ``"bytes"`` counts bytes that one device sends. Work that devices repeat instead of splitting it is
converted at the profile's rates: the bytes that could have been sent in its time, which is that of its operations or of
its memory traffic, whichever is longer (a roofline: Williams, Waterman and Patterson, CACM 52(4), 2009). Memory traffic
counts where a step would mostly be repeated work (`shardplan.repeating`). The objective ``"time"`` counts estimated
seconds.

>>> from shardplan.hardware import load
>>> mesh = MeshAxes(("data", "model"), (2, 4))
>>> prices = Prices("bytes", load("h100"), mesh)
>>> prices.per_byte((0, 1)), prices.per_collective(CollectiveKind.ALL_GATHER, (0,)) < 0.1
(1.0, True)
>>> seconds = Prices("time", load("h100"), mesh)
>>> round(seconds.per_byte((0,)) * 450e9, 6)
1.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardplan import _jax
from shardplan.collectives import CollectiveKind
from shardplan.hardware import HardwareProfile
from shardplan.layout import MeshAxes

# Equal costs are decided by less memory, then by fewer collectives. A byte that is stored costs so small a part of a
# byte that is sent that it cannot change which plan sends least by more than a ten-millionth of what it stores. A
# collective costs what 200 kilobytes stored cost: vectors (biases, statistics) are reduced in one go, matrices are kept
# in parts.
_BYTES_SENT_PER_BYTE_STORED = 1e-7
_BYTES_SENT_PER_COLLECTIVE = 0.02

# Repeating an operation on a vector takes no time that anybody could measure: a hundredth of a kernel's own overhead.
_NEGLIGIBLE_SECONDS = 1e-8


@dataclass(frozen=True, slots=True)
class Timing:
    """What the time of a program depends on beside its operations' counts.

    Attributes:
        memory_bytes: per operation, what the kernel around it reads and writes, of whole tensors.
        hidden: the values whose collectives work can run beside.
    """

    memory_bytes: Mapping[int, int]
    hidden: frozenset[int]


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of one objective on one mesh of devices with a hardware profile.

    Of the objective "time", ``share`` is the part of its time that a collective which can hide costs; work, and what
    such a collective takes from it, then cost the rest. For any part the least sum is a lower bound of the step's time,
    which counts the longer of the two (`shardplan.balancing`). None counts all in full.
    """

    objective: str
    hardware: HardwareProfile
    mesh: MeshAxes
    share: float | None = None
    beside: bool = False
    """Whether the prices are of collectives that work runs beside."""
    through_device: bool = False
    """Whether the prices are of tensors in host memory, which are sent from the memory of the devices: at twice the
    price, so that they are sent once they are there in any case."""

    @property
    def unit(self) -> str:
        return "s" if self.objective == "time" else "B"

    def per_byte(self, axes: Sequence[int]) -> float:
        """Of one byte sent by a device in a collective over mesh axes; the slowest axis decides."""
        times = 2.0 if self.through_device else 1.0
        if self.objective == "bytes":
            return times
        seconds = times / min(self._link(axis).bytes_per_second for axis in axes)
        if self.share is None or not self.beside:
            return seconds
        return self.share * seconds + (1 - self.share) * self.memory_seconds_per_byte

    def per_collective(self, kind: CollectiveKind, axes: Sequence[int]) -> float:
        """Of one collective, whatever its size: in seconds, its launch and the latencies of a ring of n devices."""
        if self.objective == "bytes":
            return _BYTES_SENT_PER_COLLECTIVE
        latency = max(self._link(axis).latency_seconds for axis in axes)
        seconds = self.hardware.launch_seconds + kind.hops(self.mesh.degree(axes)) * latency
        return self.share * seconds if self.share is not None and self.beside else seconds

    @property
    def memory_seconds_per_byte(self) -> float:
        """What a byte that is sent takes from work that runs meanwhile: it is read, and one that arrives written."""
        return 2.0 / self.hardware.memory_bytes_per_second

    def per_byte_stored(self) -> float:
        """Of one byte that a device holds during the step."""
        return _BYTES_SENT_PER_BYTE_STORED * self._per_byte_sent()

    def work(self, flops: float, memory_bytes: float, dtype: Any, degree: float) -> float:
        """Of work of so many operations and bytes of memory traffic in all, shared by ``degree`` devices.

        In bytes, only what is repeated counts; in seconds, all that one device does.
        """
        compute = flops / self.hardware.flops_per_second(_jax.stored_dtype(dtype))
        alone = max(compute, memory_bytes / self.hardware.memory_bytes_per_second)
        if self.objective == "bytes":
            repeated = alone * (1 / degree - 1 / self.mesh.device_count)
            return repeated / self._seconds_per_byte_sent() if repeated > _NEGLIGIBLE_SECONDS else 0.0
        return alone / degree if self.share is None else (1 - self.share) * alone / degree

    def _per_byte_sent(self) -> float:
        return 1.0 if self.objective == "bytes" else self._seconds_per_byte_sent()

    def _seconds_per_byte_sent(self) -> float:
        return 1.0 / self.hardware.intra_host.bytes_per_second

    def _link(self, axis: int) -> Any:
        sizes = dict(zip(self.mesh.names, self.mesh.sizes, strict=True))
        return self.hardware.link(self.mesh.names[axis], sizes)
