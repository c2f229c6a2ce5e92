"""The objective ``"bytes"``: bytes that one device sends, each as often as its link is slower than the fastest.

Work that devices repeat instead of splitting it is converted at the profile's rates: the bytes that could have been
sent in its time. Memory traffic counts where a step would mostly be repeated work (`shardplan.optimize.repeated_work`).

>>> from shardplan.hardware import load
>>> prices = BytesSent(load("h100"), MeshAxes(("data", "model"), (2, 4)))
>>> prices.per_byte((0, 1)), prices.per_collective(CollectiveKind.ALL_GATHER, (0,)) < 0.1
(1.0, True)
>>> hosts = BytesSent(load("h100"), MeshAxes(("hosts", "devices"), (2, 8)))
>>> hosts.per_byte((0,)), hosts.per_byte((1,))
(9.0, 1.0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardplan.common.tables import size_text
from shardplan.hardware import HardwareProfile
from shardplan.layout.collectives import CollectiveKind
from shardplan.layout.layout import MeshAxes as MeshAxes
from shardplan.layout.objectives.prices import BYTES_SENT_PER_BYTE_STORED, Prices

_BYTES_SENT_PER_COLLECTIVE = 0.02
"""What 200 kilobytes stored cost: vectors (biases, statistics) are reduced in one go, matrices are kept in parts."""

_NEGLIGIBLE_SECONDS = 1e-8
"""Repeating an operation on a vector takes no time that anybody could measure: a hundredth of a kernel's overhead."""


@dataclass(frozen=True, slots=True)
class BytesSent(Prices):
    """Prices in bytes over the fastest link of the mesh."""

    compiled_measure = "compiled_bytes"
    counts_time = False

    @staticmethod
    def text(amount: float) -> str:
        return f"{size_text(amount)}"

    @staticmethod
    def repeating_text(seconds: float, hardware: HardwareProfile) -> str:
        return f"as much as sending {size_text(seconds * hardware.intra_host.bytes_per_second)}"

    def per_byte(self, axes: Sequence[int]) -> float:
        times = 2.0 if self.through_device else 1.0
        splitting = self.mesh.splitting
        if not splitting:
            return times
        fastest = max(self.link(axis).bytes_per_second for axis in splitting)
        return times * fastest * self.seconds_per_byte(axes)

    def per_collective(self, kind: CollectiveKind, axes: Sequence[int]) -> float:
        return _BYTES_SENT_PER_COLLECTIVE

    def per_byte_stored(self) -> float:
        return BYTES_SENT_PER_BYTE_STORED

    def work(self, flops: float, memory_bytes: float, dtype: Any, degree: float) -> float:
        """Only what is repeated counts."""
        repeated = self.work_seconds(flops, memory_bytes, dtype) * (1 / degree - 1 / self.mesh.device_count)
        return repeated * self.hardware.intra_host.bytes_per_second if repeated > _NEGLIGIBLE_SECONDS else 0.0
