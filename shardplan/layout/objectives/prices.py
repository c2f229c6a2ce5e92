"""Prices: the cost of sent bytes, collectives and work, in the unit of an objective.

An objective is a class of prices. Two that cost the same are told apart by memory, then by the number of collectives:
a byte that is stored costs so small a part of a byte that is sent that it cannot change which plan sends least by more
than a ten-millionth of what it stores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from shardplan import _jax
from shardplan.hardware import HardwareProfile, Link
from shardplan.layout.collectives import CollectiveKind
from shardplan.layout.layout import MeshAxes

BYTES_SENT_PER_BYTE_STORED = 1e-7


@dataclass(frozen=True, slots=True)
class Timing:
    """What the time of a program depends on, apart from the counts of its operations.

    Attributes:
        memory_bytes: per operation, what the kernel around it reads and writes, of whole tensors.
        hidden: the values whose collectives can run during other work.
    """

    memory_bytes: Mapping[int, int]
    hidden: frozenset[int]


@dataclass(frozen=True, slots=True)
class Prices(ABC):
    """The prices of one objective on one mesh of devices with a hardware profile.

    Attributes:
        share: of an objective whose time is the longer of work and collectives, the part that collectives cost
            (`shardplan.layout.objectives.step_seconds`); None counts all in full.
        hidden: whether the prices are of collectives that can run during other work.
        through_device: whether the prices are of tensors in host memory, which are sent from the memory of the devices:
            at twice the price, so that they are sent once they are there in any case.
    """

    hardware: HardwareProfile
    mesh: MeshAxes
    share: float | None = None
    hidden: bool = False
    through_device: bool = False

    compiled_measure: ClassVar[str]
    """What of a compiled program says which of two plans is better: a key of a row of ``refine``."""
    counts_time: ClassVar[bool]
    """Whether costs are seconds: memory traffic of all work counts then, and so does the order of mesh axes."""

    @staticmethod
    @abstractmethod
    def text(amount: float) -> str:
        """An amount of the objective in its unit."""

    @staticmethod
    @abstractmethod
    def repeating_text(seconds: float, hardware: HardwareProfile) -> str:
        """What repeated work of so many seconds costs, in words."""

    @abstractmethod
    def per_byte(self, axes: Sequence[int]) -> float:
        """Of one byte sent by a device in a collective over mesh axes; the slowest axis decides."""

    @abstractmethod
    def per_collective(self, kind: CollectiveKind, axes: Sequence[int]) -> float:
        """Of one collective, whatever its size."""

    @abstractmethod
    def per_byte_stored(self) -> float:
        """Of one byte that a device holds during the step."""

    @abstractmethod
    def work(self, flops: float, memory_bytes: float, dtype: Any, degree: float) -> float:
        """Of work of so many operations and bytes of memory traffic in all, shared by ``degree`` devices."""

    @property
    def memory_seconds_per_byte(self) -> float:
        """What a byte that is sent takes from work that runs meanwhile: it is read, and one that arrives written."""
        return 2.0 / self.hardware.memory_bytes_per_second

    def work_seconds(self, flops: float, memory_bytes: float, dtype: Any) -> float:
        """The seconds that one device takes for work, whichever is longer: its operations or its memory traffic (a
        roofline: Williams, Waterman and Patterson, CACM 52(4), 2009)."""
        compute = flops / self.hardware.flops_per_second(_jax.stored_dtype(dtype))
        return max(compute, memory_bytes / self.hardware.memory_bytes_per_second)

    def seconds_per_byte(self, axes: Sequence[int]) -> float:
        """The seconds that a byte takes over the slowest of some mesh axes."""
        return 1.0 / min(self.link(axis).bytes_per_second for axis in axes)

    def link(self, axis: int) -> Link:
        """The link along a mesh axis."""
        sizes = dict(zip(self.mesh.names, self.mesh.sizes, strict=True))
        return self.hardware.link(self.mesh.names[axis], sizes)
