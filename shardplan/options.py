"""What a user may say about a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from shardplan.errors import ArgumentError
from shardplan.hardware import HardwareProfile


@dataclass(frozen=True, slots=True)
class Options:
    """What a user may say about a plan; the arguments of ``shardplan.auto``."""

    memory_limit: float | None = None
    objective: str = "bytes"
    hardware: HardwareProfile | str | None = None
    pins: Mapping[str, PartitionSpec] | None = None
    donate_argnums: int | Sequence[int] | None = None
    static_argnums: int | Sequence[int] = ()
    reduce_dtype: Any = None
    time_limit: float = 60.0

    def check(self) -> None:
        """Raises ArgumentError for options that no program could be planned with."""
        if self.objective not in ("bytes", "time"):
            raise ArgumentError(f"there is no objective `{self.objective}`: choose 'bytes' or 'time'")
        if not self.time_limit > 0:
            raise ArgumentError(f"a time limit is a number of seconds above 0, got `{self.time_limit}`")
        if self.memory_limit is not None and not self.memory_limit > 0:
            raise ArgumentError(f"a memory limit is a number of bytes above 0, got `{self.memory_limit}`")
        for path, spec in (self.pins or {}).items():
            if not isinstance(spec, PartitionSpec):
                raise ArgumentError(f"the pin `{path}` is `{spec!r}`: a jax.sharding.PartitionSpec was expected")

    @property
    def static(self) -> tuple[int, ...]:
        return as_positions(self.static_argnums)


def as_positions(argnums: int | Iterable[int] | None) -> tuple[int, ...]:
    """Argument positions as a sorted tuple."""
    if argnums is None:
        return ()
    return (argnums,) if isinstance(argnums, int) else tuple(sorted(argnums))
