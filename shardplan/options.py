"""The options of a plan."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from jax.numpy import finfo
from jax.sharding import NamedSharding, PartitionSpec
from numpy import dtype

from shardplan._jax import HOST_MEMORY, is_float
from shardplan.errors import ArgumentError, warn
from shardplan.hardware import HardwareProfile, load
from shardplan.layout.objectives import OBJECTIVES

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}

FITS = ("recompute", "blocks")
"""What a plan may do where a step does not fit, by default."""

HOST = "host"
"""What it may do in addition: have values wait in host memory."""

Pin = PartitionSpec | NamedSharding | str
"""A layout, a layout with a memory kind, or a memory kind alone."""

MOST_REFINED = 8
"""The most plans that `refine` compares."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a plan: the arguments of ``shardplan.auto``. Sizes of memory may be text (``11GB``)."""

    memory_limit: Any = None
    objective: str = "bytes"
    hardware: HardwareProfile | str | os.PathLike[str] | None = None
    pins: Mapping[str, PartitionSpec] | None = None
    donate_argnums: int | Sequence[int] | None = None
    static_argnums: int | Sequence[int] | None = None
    reduce_dtype: Any = None
    time_limit: float = 60.0
    refine: int = 1
    islands: bool = True
    verify: bool | None = None
    static_argnames: str | Iterable[str] | None = None
    donate_argnames: str | Iterable[str] | None = None
    in_shardings: Any = None
    out_shardings: Any = None
    like: Any = None
    keep_unused: bool = False
    compiler_options: Mapping[str, Any] | None = None
    fit: Sequence[str] = FITS
    blocks: Mapping[str, int] | None = None
    host_memory: Any = None
    results: Mapping[str, PartitionSpec] | None = None
    """The layouts of results by their paths, from ``out_shardings`` or their types. Planning sets them."""
    on_host: tuple[str, ...] = ()
    """Path globs of the arguments that pins put into host memory: a pin may have, or be, a memory kind. Only its layout
    stays among the pins."""

    def __post_init__(self) -> None:
        if isinstance(self.pins, Mapping):
            layouts, on_host = _split_pins(self.pins)
            object.__setattr__(self, "pins", layouts)
            object.__setattr__(self, "on_host", (*self.on_host, *on_host))
        for name in ("memory_limit", "host_memory"):
            if isinstance(given := getattr(self, name), str):
                object.__setattr__(self, name, parse_bytes(given))

    def check(self) -> None:
        """Raises ArgumentError for options that no program could be planned with."""
        if self.objective not in (*OBJECTIVES,):
            raise ArgumentError(
                f"there is no objective `{self.objective}`: choose {' or '.join(map(repr, OBJECTIVES))}"
            )
        if not _is_positive(self.time_limit):
            raise ArgumentError(f"a time limit is a number of seconds above 0, got `{self.time_limit!r}`")
        if self.memory_limit is not None and not _is_positive(self.memory_limit):
            raise ArgumentError(f"a memory limit is a number of bytes above 0, got `{self.memory_limit!r}`")
        if self.reduce_dtype is not None:
            _check_reduce_dtype(self.reduce_dtype)
        if isinstance(self.refine, bool) or not isinstance(self.refine, int) or not 1 <= self.refine <= MOST_REFINED:
            raise ArgumentError(f"refine is a number of plans from 1 to {MOST_REFINED}, got `{self.refine}`")
        if self.verify is not None and not isinstance(self.verify, bool):
            raise ArgumentError(f"verify is True, False or None, got `{self.verify!r}`")
        _check_fit(self.fit)
        self.check_host()
        _check_blocks(self.blocks)
        if not isinstance(self.keep_unused, bool):
            raise ArgumentError(f"keep_unused is True or False, got `{self.keep_unused!r}`")
        if self.compiler_options is not None and not isinstance(self.compiler_options, Mapping):
            raise ArgumentError(
                f"compiler_options map names of XLA's options to values, got `{self.compiler_options!r}`"
            )
        if not isinstance(self.islands, bool):
            raise ArgumentError(f"islands is True or False, got `{self.islands!r}`")
        if self.reduce_dtype is not None and not self.islands:
            raise ArgumentError("reduce_dtype needs islands: XLA alone reduces in the type of the operation")
        if self.hardware is not None:
            load(self.hardware)
        if self.pins is not None and not isinstance(self.pins, Mapping):
            raise ArgumentError(f"pins map path globs to PartitionSpecs, got `{self.pins!r}`")
        for path, spec in (self.pins or {}).items():
            if not isinstance(path, str):
                raise ArgumentError(
                    f"pins map path globs to PartitionSpecs: `{path!r}` is no path, such as `0/params/*`"
                )
            if not isinstance(spec, PartitionSpec):
                raise ArgumentError(
                    f"the pin `{path}` is `{spec!r}`: a jax.sharding.PartitionSpec was expected, or the memory kind "
                    f"{HOST_MEMORY!r}, or a NamedSharding with both"
                )

    def check_host(self) -> None:
        """Raises ArgumentError for wrong options of values in host memory. The hardware may be known late."""
        if self.host_memory is not None and not _is_positive(self.host_memory):
            raise ArgumentError(f"host_memory is a number of bytes above 0, got `{self.host_memory!r}`")
        if self.host_memory is not None and HOST not in self.fit:
            raise ArgumentError(f"host_memory is for values that wait there: add {HOST!r} to fit, got `{self.fit!r}`")
        asks = [f"the pin `{path}` is {HOST_MEMORY!r}" for path in self.on_host[:1]]
        asks += [f"fit has {HOST!r}"] if HOST in self.fit else []
        if asks and self.hardware is not None and load(self.hardware).host_bytes_per_second is None:
            raise ArgumentError(
                f"{asks[0]}, and the hardware profile `{load(self.hardware).name}` has no link to the host: "
                "state its `host_bytes_per_second`, or name another profile by hardware="
            )

    @property
    def static(self) -> tuple[int, ...]:
        return as_positions(self.static_argnums)


def parse_bytes(text: str) -> float:
    """A number of bytes from ``80GB``, ``512MiB`` or plain digits.

    >>> parse_bytes("11GB"), parse_bytes("512 MiB")
    (11000000000.0, 536870912.0)
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([KMGT]?I?)B?\s*", text, re.IGNORECASE)
    if found is None or found[2].upper() not in _UNITS:
        raise ArgumentError(f"a size is written `80GB`, `512MiB` or as a number of bytes, got `{text}`")
    return float(found[1]) * _UNITS[found[2].upper()]


def as_positions(argnums: int | Iterable[int] | None) -> tuple[int, ...]:
    """Argument positions as a sorted tuple."""
    if argnums is None:
        return ()
    return (argnums,) if isinstance(argnums, int) else tuple(sorted(argnums))


def _split_pins(pins: Mapping[str, Pin]) -> tuple[dict[str, Any], list[str]]:
    """Pins as layouts, and the paths that are pinned to host memory. What is neither stays, for `Options.check`."""
    layouts, on_host = dict[str, Any](), list[str]()
    for path, pin in pins.items():
        kind = pin.memory_kind if isinstance(pin, NamedSharding) else pin
        if kind == HOST_MEMORY and isinstance(path, str):
            on_host.append(path)
        if isinstance(pin, NamedSharding) and kind in (None, "device", HOST_MEMORY):
            layouts[path] = pin.spec
        elif kind != HOST_MEMORY:
            layouts[path] = pin
    return layouts, on_host


def _is_positive(number: Any) -> bool:
    return isinstance(number, Real) and not isinstance(number, bool) and float(number) > 0


def _check_fit(given: Any) -> None:
    known = (*FITS, HOST)
    words = [f"`{one}`" for one in given if one not in known] if isinstance(given, tuple | list) else [f"`{given!r}`"]
    if words:
        listed, got = ", ".join(map(repr, known)), ", ".join(words)
        raise ArgumentError(f"fit is a tuple of what may make a step fit, of {listed}, or (); got {got}")


def _check_blocks(given: Any) -> None:
    if given is not None and not isinstance(given, Mapping):
        raise ArgumentError(
            f"blocks map paths of arguments to numbers of blocks, such as {{'batch': 8}}; got `{given!r}`"
        )
    for path, count in (given or {}).items():
        if not isinstance(path, str) or isinstance(count, bool) or not isinstance(count, int) or count < 2:
            raise ArgumentError(f"blocks map paths to numbers of blocks from 2 on, got `{path!r}: {count!r}`")


def _check_reduce_dtype(given: Any) -> None:
    """Refuses unsuitable types of sums, and warns of a smaller range than that of float32."""
    if not _is_float_type(given):
        raise ArgumentError(f"reduce_dtype is a floating-point type, got `{given}`")
    kind = finfo(dtype(given))
    if kind.bits < 16:
        raise ArgumentError(
            f"reduce_dtype is `{kind.dtype}`: {kind.bits} bits have neither the range nor the digits for sums over "
            "devices. Choose bfloat16 or float32."
        )
    if kind.nexp < finfo("float32").nexp:
        warn(
            f"reduce_dtype is `{kind.dtype}`, which ends at {float(kind.max):g}: gradients and activations that are "
            "larger, summed over devices, become inf. bfloat16 is as small, and has the range of float32."
        )


def _is_float_type(given: Any) -> bool:
    try:
        return is_float(dtype(given))
    except (TypeError, ValueError, SyntaxError):  # NumPy evaluates texts with commas and spaces
        return False
