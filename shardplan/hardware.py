"""Hardware profiles: the rates of devices and of the links between them.

>>> profile = load("h100")
>>> profile.flops_per_second("bfloat16"), profile.memory_bytes_per_second
(989400000000000.0, 3350000000000.0)

Sixteen devices are two hosts. The axis between them is as slow as their network:

>>> links = profile.links({"data": 2, "model": 8})
>>> links["data"].bytes_per_second, links["model"].bytes_per_second
(50000000000.0, 450000000000.0)

A user's profile is a TOML or JSON file in the format of those in `shardplan/hardware_profiles/`. Its section
`[axes.NAME]` is the link along the mesh axis `NAME`, inside a host or across hosts.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from shardplan.errors import ArgumentError

_RANGES = {
    "memory_bytes": (1e8, 1e14),
    "memory_bytes_per_second": (1e9, 1e15),
    "launch_seconds": (1e-9, 1.0),
    "flops_per_second": (1e9, 1e18),
    "bytes_per_second": (1e7, 1e14),
    "latency_seconds": (1e-9, 1.0),
    "devices_per_host": (1, 1024),
    "host_bytes_per_second": (1e7, 1e14),
}
"""The sensible range of each number."""


@dataclass(frozen=True, slots=True)
class Link:
    """The rate at which one device sends to the next one of its ring.

    Attributes:
        bytes_per_second: in one direction.
        latency_seconds: of one step of a ring algorithm.
    """

    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """Peak rates of one type of device, and of the links between such devices.

    Attributes:
        name: of the profile.
        flops: dense floating point operations per second, by element type.
        memory_bytes, memory_bytes_per_second: of one device.
        launch_seconds: the time of a collective before its first byte.
        devices_per_host: devices with `intra_host` links.
        intra_host, inter_host: links inside a host and across hosts.
        axes: links along mesh axes by name, which override those of the hosts.
        sources: the sources of the numbers.
        host_bytes_per_second: between a device and the memory of its host, in one direction. None where it is not
            known, and nothing is chosen to wait there.
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    memory_bytes_per_second: float
    launch_seconds: float
    devices_per_host: int
    intra_host: Link
    inter_host: Link
    axes: Mapping[str, Link] = field(hash=False)
    sources: tuple[str, ...] = ()
    host_bytes_per_second: float | None = None

    def flops_per_second(self, dtype: Any) -> float:
        """Peak rate of matrix products of an element type (a name or a dtype).

        A type outside of the profile has the rate of the narrowest listed type that can represent it.
        """
        name = dtype if isinstance(dtype, str) else _name_of(dtype)
        for listed in (name, name.split("_")[0]):
            if listed in self.flops:
                return self.flops[listed]
        able = [listed for listed in self.flops if _is_float(listed) or not _is_float(name)] or list(self.flops)
        wide_enough = [listed for listed in able if _bits(listed) >= _bits(name)]
        if not wide_enough:
            return self.flops[max(able, key=_bits)]
        return self.flops[min(wide_enough, key=_bits)]

    def links(self, mesh_axes: Mapping[str, int]) -> dict[str, Link]:
        """The link along each axis of a mesh whose devices are numbered in row-major order, host by host."""
        return {axis: self.link(axis, mesh_axes) for axis in mesh_axes}

    def link(self, axis: str, mesh_axes: Mapping[str, int] | None = None) -> Link:
        """The link along one mesh axis. Without `mesh_axes`, all devices are in one host."""
        if axis in self.axes:
            return self.axes[axis]
        return self.inter_host if mesh_axes and self._crosses_hosts(axis, mesh_axes) else self.intra_host

    def bytes_per_second_link(self, axis: str, mesh_axes: Mapping[str, int] | None = None) -> float:
        """Bytes per second that one device sends along a mesh axis, see `link`."""
        return self.link(axis, mesh_axes).bytes_per_second

    def _crosses_hosts(self, axis: str, mesh_axes: Mapping[str, int]) -> bool:
        names = list(mesh_axes)
        stride = math.prod(mesh_axes[minor] for minor in names[names.index(axis) + 1 :])
        return mesh_axes[axis] > 1 and stride * mesh_axes[axis] > self.devices_per_host


def profiles() -> tuple[str, ...]:
    """The names of the profiles that come with the library.

    >>> profiles()
    ('a100', 'b200', 'cpu', 'gh200', 'h100', 'h200', 'k80')
    """
    files = resources.files("shardplan").joinpath("hardware_profiles").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


def load(profile: str | os.PathLike[str] | HardwareProfile) -> HardwareProfile:
    """A hardware profile by its name, or from a `.toml` or `.json` file.

    Raises:
        ArgumentError: there is no such profile or file, or some of its entries are missing, unknown or absurd. The
            message names all of them.
    """
    if isinstance(profile, HardwareProfile):
        return profile
    if not isinstance(profile, str | os.PathLike):
        raise ArgumentError(
            f"a hardware profile is a name ({', '.join(profiles())}), the path of a `.toml` or `.json` file, or what "
            f"`shardplan.hardware.load` gives, got `{profile!r}`"
        )
    if str(profile) in profiles():
        return _shipped(str(profile))
    path = Path(profile)
    if path.suffix not in (".toml", ".json"):
        raise ArgumentError(
            f"there is no hardware profile `{profile}`: choose one of {', '.join(profiles())}, or give the path of a "
            "`.toml` or `.json` file."
        )
    try:
        text = path.read_text(encoding="utf-8")
        entries = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        return _from_entries(path.stem, str(path), entries)
    except ArgumentError:
        raise
    except OSError as error:
        raise ArgumentError(f"cannot read the hardware profile `{path}`: {error.strerror}.") from error
    except ValueError as error:  # also for a number of too many digits for Python
        raise ArgumentError(f"the hardware profile `{path}` is no valid {path.suffix[1:].upper()}: {error}.") from error
    except RecursionError:
        raise ArgumentError(f"the hardware profile `{path}` cannot be used: it is nested too deep.") from None


@lru_cache(maxsize=16)
def _shipped(name: str) -> HardwareProfile:
    file = resources.files("shardplan").joinpath("hardware_profiles", f"{name}.toml")
    return _from_entries(name, file.name, tomllib.loads(file.read_text(encoding="utf-8")))


@cache
def _name_of(dtype: Any) -> str:
    """The name of a dtype, cached: NumPy builds it at each access."""
    return str(np.dtype(dtype).name)


def _bits(dtype_name: str) -> int:
    """Bits of a number of an element type. For a complex type, of its real part."""
    found = re.search(r"\d+", dtype_name)
    return (int(found[0]) if found else 8) // (2 if dtype_name.startswith("complex") else 1)


def _is_float(dtype_name: str) -> bool:
    return "float" in dtype_name or "complex" in dtype_name


def _is_dtype(name: str) -> bool:
    """Whether a name is an element type, or the common prefix of narrow ones (`float8`)."""
    try:
        return np.dtype(name).name == name
    except TypeError:
        return re.fullmatch(r"(float|int|uint)[2468]", name) is not None


class _Reader:
    """A reader of a profile's entries that collects all of their problems."""

    def __init__(self, entries: Any) -> None:
        self.problems: list[str] = []
        self.entries = self.as_section("the profile", entries)

    def as_section(self, where: str, value: Any) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        self.problems.append(f"{where} is `{value!r}`, not a section of entries")
        return {}

    def section(self, name: str) -> dict[str, Any]:
        if name not in self.entries:
            self.problems.append(f"`[{name}]` is missing")
            return {}
        return self.as_section(f"`[{name}]`", self.entries[name])

    def number(self, entries: Mapping[str, Any], key: str, where: str = "", kind: str = "") -> float:
        """A number in the range of its kind. For any other value, notes a problem and returns 1."""
        least, most = _RANGES[kind or key]
        place = f"`{where}{key}`"
        value = entries.get(key)
        if value is None:
            self.problems.append(f"{place} is missing: give a number from {least:g} to {most:g}")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            self.problems.append(f"{place} is `{value!r}`, not a number")
        elif key == "devices_per_host" and not isinstance(value, int):
            self.problems.append(f"{place} is `{value!r}`, not a whole number")
        elif not least <= value <= most:
            self.problems.append(f"{place} is `{value!r}`: a number from {least:g} to {most:g} is expected")
        else:
            return value
        return 1

    def link(self, entries: Mapping[str, Any], where: str) -> Link:
        self.unknown(entries, ("bytes_per_second", "latency_seconds"), where)
        return Link(self.number(entries, "bytes_per_second", where), self.number(entries, "latency_seconds", where))

    def unknown(self, entries: Mapping[str, Any], known: tuple[str, ...], where: str = "") -> None:
        for key in entries:
            if key not in known:
                self.problems.append(f"`{where}{key}` is unknown: the entries are {', '.join(known)}")


_SECTIONS = ("flops_per_second", "intra_host", "inter_host", "axes")
_NUMBERS = ("memory_bytes", "memory_bytes_per_second", "launch_seconds", "devices_per_host")
_HOST = "host_bytes_per_second"


def _from_entries(name: str, place: str, entries: Any) -> HardwareProfile:
    """The profile of a parsed file. The error names `place`."""
    reader = _Reader(entries)
    if reader.problems:
        raise ArgumentError(f"the hardware profile `{place}` cannot be used: {reader.problems[0]}")
    reader.unknown(reader.entries, (*_NUMBERS, _HOST, *_SECTIONS, "sources"))
    numbers = {key: reader.number(reader.entries, key) for key in _NUMBERS}
    host = float(reader.number(reader.entries, _HOST)) if _HOST in reader.entries else None
    rates = reader.section("flops_per_second")
    flops = {key: float(reader.number(rates, key, "flops_per_second.", "flops_per_second")) for key in rates}
    for key in flops:
        if not _is_dtype(key):
            reader.problems.append(f"`flops_per_second.{key}` is no element type, such as `float32` or `bfloat16`")
    if not flops:
        reader.problems.append("`[flops_per_second]` lists no element type: give at least `float32`")
    links = {key: reader.link(reader.section(key), f"{key}.") for key in ("intra_host", "inter_host")}
    axes = reader.section("axes") if "axes" in reader.entries else {}
    axis_links = {
        axis: reader.link(reader.as_section(f"`[axes.{axis}]`", axes[axis]), f"axes.{axis}.") for axis in axes
    }
    sources = reader.entries.get("sources", [])
    if not isinstance(sources, list) or not all(isinstance(source, str) for source in sources):
        reader.problems.append(f"`sources` is `{sources!r}`, not a list of texts")
    if reader.problems:
        listed = "".join(f"\n  {problem}" for problem in reader.problems)
        raise ArgumentError(f"the hardware profile `{place}` cannot be used:{listed}")
    return HardwareProfile(
        name=name,
        flops=flops,
        memory_bytes=int(numbers["memory_bytes"]),
        memory_bytes_per_second=float(numbers["memory_bytes_per_second"]),
        launch_seconds=float(numbers["launch_seconds"]),
        devices_per_host=int(numbers["devices_per_host"]),
        intra_host=links["intra_host"],
        inter_host=links["inter_host"],
        axes=axis_links,
        sources=tuple(sources),
        host_bytes_per_second=host,
    )
