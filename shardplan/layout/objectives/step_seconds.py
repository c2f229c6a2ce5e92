"""The objective ``"time"``: estimated seconds of a step.

A step takes the longer of its work and of the collectives that can run during work. A maximum is no sum of tables. So
``share`` is the part of their time that such collectives cost, and work, and what they take from it, cost the rest. For
any part the least sum is a lower bound of the step's time (`shardplan.optimize.step_time_objective`).

>>> from shardplan.hardware import load
>>> from shardplan.layout.layout import MeshAxes
>>> seconds = StepSeconds(load("h100"), MeshAxes(("data", "model"), (2, 4)))
>>> round(seconds.per_byte((0,)) * 450e9, 6)
1.0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardplan.hardware import HardwareProfile
from shardplan.layout.collectives import CollectiveKind
from shardplan.layout.objectives.prices import BYTES_SENT_PER_BYTE_STORED, Prices


@dataclass(frozen=True, slots=True)
class StepSeconds(Prices):
    """Prices in seconds."""

    compiled_measure = "compiled_seconds"
    counts_time = True

    @staticmethod
    def text(amount: float) -> str:
        return f"{1e3 * amount:,.3f} ms"

    @staticmethod
    def repeating_text(seconds: float, hardware: HardwareProfile) -> str:
        return f"{1e3 * seconds:,.3f} ms"

    def per_byte(self, axes: Sequence[int]) -> float:
        seconds = (2.0 if self.through_device else 1.0) * self.seconds_per_byte(axes)
        if self.share is None or not self.hidden:
            return seconds
        return self.share * seconds + (1 - self.share) * self.memory_seconds_per_byte

    def per_collective(self, kind: CollectiveKind, axes: Sequence[int]) -> float:
        """Its launch, and the latencies of a ring of so many devices."""
        latency = max(self.link(axis).latency_seconds for axis in axes)
        seconds = self.hardware.launch_seconds + kind.hops(self.mesh.degree(axes)) * latency
        return self.share * seconds if self.share is not None and self.hidden else seconds

    def per_byte_stored(self) -> float:
        return BYTES_SENT_PER_BYTE_STORED / self.hardware.intra_host.bytes_per_second

    def work(self, flops: float, memory_bytes: float, dtype: Any, degree: float) -> float:
        """All that one device does counts."""
        alone = self.work_seconds(flops, memory_bytes, dtype)
        return alone / degree if self.share is None else (1 - self.share) * alone / degree
