"""Calibration: a hardware profile from measurements on the user's devices.

    calibration = shardplan.calibrate(mesh, plan, path="ours.toml")
    print(calibration)  # the curves, and their errors; a notebook also shows the lanes of the step
    shardplan.plan(step, mesh, *args, objective="time", hardware="ours.toml")

The curves are times by size of matrix products of a plan's element types, and of its kinds of collectives over each of
its mesh axes, up to its largest ones (`shardplan.audits.microbenchmarks`). The rates of the profile come from these
curves. Further points are held out. The report has the errors of curves and profile there."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
from jax.sharding import Mesh

from shardplan.audits.microbenchmarks import Curve, collective, matrix_product, measure_curve, memory_traffic
from shardplan.common.atomic_files import write_file
from shardplan.common.checks import check_path
from shardplan.common.tables import html_table, text_table
from shardplan.errors import ArgumentError
from shardplan.hardware import HardwareProfile, Link, load
from shardplan.layout.collectives import CollectiveKind
from shardplan.layout.mesh import can_run, memory_for_arrays, with_auto_axes
from shardplan.plans.mesh_profile import profile_of
from shardplan.plans.plan_data import PlanData
from shardplan.plans.simulate import simulate
from shardplan.timing.simulator import Simulation

_KINDS = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER)
"""The kinds measured over each mesh axis without a plan. Latencies come from these two."""

_LARGEST_BYTES = 2**28
"""Several times the size of a GPU's cache."""
_LARGEST_SIDE = 4096


@dataclass(frozen=True, slots=True)
class Measured:
    """The name of a curve, and the relative errors of interpolation and of the profile on the held-out points."""

    name: str
    curve: Curve
    interpolation_error: float
    profile_error: float


_HEADER = ("measured", "points", "error of interpolation", "error of the profile")


@dataclass(frozen=True, slots=True)
class Calibration:
    """A measured profile with its evidence. A notebook shows the lanes of the step as well.

    ``simulation`` is that of the plan on this profile, None without a plan.
    """

    profile: HardwareProfile
    measured: tuple[Measured, ...]
    simulation: Simulation | None = None

    @property
    def error(self) -> float:
        """The mean relative error of interpolation, over all held-out points."""
        return float(np.mean([found.interpolation_error for found in self.measured]))

    def __str__(self) -> str:
        return f"{text_table(_HEADER, self._rows(), numbers=(1, 2, 3))}\n{self._sentence()}"

    def _repr_html_(self) -> str:
        table = html_table(_HEADER, self._rows(), numbers=(1, 2, 3), caption=self._sentence())
        return table + (self.simulation._repr_html_() if self.simulation is not None else "")

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (m.name, str(len(m.curve.sizes)), f"{m.interpolation_error:.1%}", f"{m.profile_error:.1%}")
            for m in self.measured
        ]

    def _sentence(self) -> str:
        step = self.simulation
        busy = f"; the step takes {1e3 * step.seconds:.2f} ms by this profile" if step is not None else ""
        return f"mean error of interpolation {self.error:.1%}{busy}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the profile as TOML for `hardware=`. Raises ArgumentError where that fails."""
        _check_path(path)
        write_file(path, profile_toml(self.profile), "the profile")


def calibrate(
    mesh: Mesh,
    plan: PlanData | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    largest_bytes: int = _LARGEST_BYTES,
    largest_side: int = _LARGEST_SIDE,
    progress: bool = True,
) -> Calibration:
    """Measures a hardware profile of the devices of a mesh.

    Args:
        mesh: of devices that can run, real or emulated.
        plan: its collectives and the element types of its matrix products are measured. Without a plan, all-reduce and
            all-gather over each axis, float32 and bfloat16.
        path: where to write the profile (a `.toml` file), if anywhere.
        largest_bytes: of a collective, and of memory traffic.
        largest_side: of a square matrix product, whose rows are then split. Sizes that take much longer than a tenth of
            a second are not measured.
        progress: whether to print the measured curves on standard error.

    Raises:
        ArgumentError: the mesh has no devices that can run, the plan is for other axes, a size is no whole number above
            0, or the path is no place for a profile. Raised before any measurement.
    """
    _check(mesh, plan)
    for name, size in (("largest_bytes", largest_bytes), ("largest_side", largest_side)):
        if not isinstance(size, Integral) or size <= 0:
            raise ArgumentError(f"`{name}` is a whole number above 0, got `{size!r}`")
    if path is not None:
        _check_path(path)
    mesh = with_auto_axes(mesh)
    unit, collectives, dtypes = 4 * mesh.size * 8, _collectives(mesh, plan), _dtypes(plan)
    say = _Progress(len(dtypes) + 1 + len(collectives), progress)
    products = {}
    for dtype in dtypes:
        say(f"product {dtype}")
        products[dtype] = measure_curve(matrix_product(mesh, dtype, largest_side), largest_side, 4)
    say("memory")
    memory = measure_curve(memory_traffic(mesh), largest_bytes, unit)
    sent = {}
    for kind, axes in collectives:
        say(_name(kind, axes))
        sent[kind, axes] = measure_curve(collective(mesh, kind, axes), largest_bytes, unit)
    curves = _Curves(largest_side, products, memory, sent)
    profile = _profile(mesh, curves)
    step = simulate(plan, profile) if plan is not None else None
    calibration = Calibration(profile, tuple(_compared(mesh, profile, curves)), step)
    if path is not None:
        calibration.save(path)
    return calibration


@dataclass(slots=True)
class _Progress:
    """Progress messages: the present curve, and the number of further ones."""

    total: int
    shown: bool
    count: int = 0

    def __call__(self, name: str) -> None:
        self.count += 1
        if self.shown:
            print(f"measuring {self.count} of {self.total}: {name}", file=sys.stderr, flush=True)


def _name(kind: str, axes: tuple[str, ...]) -> str:
    return f"{kind} over {', '.join(axes)}"


def _check(mesh: Mesh, plan: PlanData | None) -> None:
    if not isinstance(mesh, Mesh) or not all(can_run(device) for device in mesh.devices.flat):
        raise ArgumentError(f"calibrate measures devices that are there: a jax.sharding.Mesh of them, got `{mesh}`")
    if plan is not None and dict(mesh.shape) != plan.mesh_axes:
        raise ArgumentError(f"the plan is for the mesh {plan.mesh_axes}, got {dict(mesh.shape)}")


def _check_path(path: str | os.PathLike[str]) -> None:
    """Raises ArgumentError for a path that no profile for `hardware=` can be written to."""
    place = check_path(path)
    if place.suffix != ".toml":
        raise ArgumentError(f"a profile is written as TOML, got the path `{path}`: end it in `.toml`")
    if not place.absolute().parent.is_dir():
        raise ArgumentError(f"cannot write the profile to `{path}`: there is no folder `{place.parent}`")


def _dtypes(plan: PlanData | None) -> tuple[str, ...]:
    if plan is None:
        return ("float32", "bfloat16")
    products = [o for o in plan.program.operations if o.primitive.name == "dot_general"]
    return tuple(dict.fromkeys(str(plan.program.values[o.results[0]].dtype) for o in products)) or ("float32",)


def _collectives(mesh: Mesh, plan: PlanData | None) -> list[tuple[CollectiveKind, tuple[str, ...]]]:
    """Kinds and axes to measure: those for the rate and latency of each axis, and those of the plan."""
    found = [(kind, (axis,)) for axis in mesh.axis_names if mesh.shape[axis] > 1 for kind in _KINDS]
    planned = [(CollectiveKind(c.kind), c.axes) for c in plan.collectives] if plan else []
    return list(dict.fromkeys([*found, *planned]))


@dataclass(frozen=True, slots=True)
class _Curves:
    """Products by element type (of rows by ``side`` squared), memory traffic, and collectives by kind and axes."""

    side: int
    products: Mapping[str, Curve]
    memory: Curve
    sent: Mapping[tuple[CollectiveKind, tuple[str, ...]], Curve]

    def flops(self, rows: int) -> float:
        return 2.0 * rows * self.side**2


def _profile(mesh: Mesh, curves: _Curves) -> HardwareProfile:
    """The rates of the largest sizes, and of lines through the collectives of each axis."""
    flops = {dtype: curves.flops(c.sizes[-1]) / c.times[-1] for dtype, c in curves.products.items()}
    axes, launches = {}, []
    for axis in mesh.axis_names:
        count = mesh.shape[axis]
        if count == 1:
            continue
        lines = {kind: _line(kind, curves.sent[kind, (axis,)], count) for kind in _KINDS}
        rate = float(np.mean([slope for slope, _ in lines.values()]))
        around, gathered = lines[CollectiveKind.ALL_REDUCE][1], lines[CollectiveKind.ALL_GATHER][1]
        # the starts are launch + 2 (n-1) latency and launch + (n-1) latency
        latency = float(np.clip((around - gathered) / (count - 1), 1e-9, 1.0))
        launches.append(float(np.clip(gathered - (count - 1) * latency, 1e-9, 1.0)))
        axes[axis] = Link(float(np.clip(1 / rate, 1e7, 1e14)), latency)
    slowest = min(axes.values(), key=lambda link: link.bytes_per_second, default=load("h100").intra_host)
    device = mesh.devices.flat[0]
    return HardwareProfile(
        name="calibrated",
        flops={dtype: float(np.clip(rate, 1e9, 1e18)) for dtype, rate in flops.items()},
        memory_bytes=_memory_bytes(mesh),
        memory_bytes_per_second=float(np.clip(2 * curves.memory.sizes[-1] / curves.memory.times[-1], 1e9, 1e15)),
        launch_seconds=min(launches, default=1e-6),
        devices_per_host=max(1, sum(d.process_index == device.process_index for d in mesh.devices.flat)),
        intra_host=slowest,
        inter_host=slowest,
        axes=axes,
        sources=(f"measured on {mesh.size} x {device.device_kind}, mesh {dict(mesh.shape)}, by shardplan.calibrate",),
        host_bytes_per_second=load(profile_of(mesh)).host_bytes_per_second,  # not measured
    )


def _line(kind: CollectiveKind, curve: Curve, count: int) -> tuple[float, float]:
    """Seconds per byte sent and at the start, of the line through the smallest and the largest size.

    Two measured points, since a least-squares line would be that of the largest sizes alone.
    """
    first, last = (kind.sent(count) * curve.sizes[end] for end in (0, -1))
    slope = max((curve.times[-1] - curve.times[0]) / (last - first), 1e-14) if last > first else 1e-14
    return slope, max(curve.times[0] - slope * first, 1e-9)


def _memory_bytes(mesh: Mesh) -> int:
    """The memory that a device reports. An emulated device has its part of the machine's."""
    return memory_for_arrays(mesh) or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // mesh.size


def _compared(mesh: Mesh, profile: HardwareProfile, curves: _Curves) -> list[Measured]:
    """Every curve with its errors."""
    found = []
    for dtype, curve in curves.products.items():
        rate = profile.flops_per_second(dtype)
        found.append(_measured(f"product {dtype}", curve, lambda rows, rate=rate: curves.flops(rows) / rate))
    found.append(_measured("memory", curves.memory, lambda size: 2 * size / profile.memory_bytes_per_second))
    for (kind, axes), curve in curves.sent.items():
        count = math.prod(mesh.shape[axis] for axis in axes)
        links = [profile.link(axis, dict(mesh.shape)) for axis in axes]
        start = profile.launch_seconds + kind.hops(count) * max(link.latency_seconds for link in links)
        rate = min(link.bytes_per_second for link in links)
        found.append(
            _measured(
                _name(kind, axes),
                curve,
                lambda size, k=kind, n=count, s=start, r=rate: s + k.sent(n) * size / r,
            )
        )
    return found


def _measured(name: str, curve: Curve, predict: Any) -> Measured:
    return Measured(name, curve, curve.error(), curve.error(predict))


def profile_toml(profile: HardwareProfile) -> str:
    """A profile in the form of the files in `shardplan/hardware_profiles`."""
    links = {"intra_host": profile.intra_host, "inter_host": profile.inter_host}
    links |= {f"axes.{_quoted(axis)}": link for axis, link in profile.axes.items()}
    host = profile.host_bytes_per_second
    lines = [
        f"sources = [{', '.join(_quoted(source) for source in profile.sources)}]",
        f"devices_per_host = {profile.devices_per_host}",
        f"memory_bytes = {profile.memory_bytes}",
        f"memory_bytes_per_second = {profile.memory_bytes_per_second!r}",
        f"launch_seconds = {profile.launch_seconds!r}",
        *([] if host is None else [f"host_bytes_per_second = {host!r}"]),
        "",
        "[flops_per_second]",
        *(f"{dtype} = {rate!r}" for dtype, rate in profile.flops.items()),
    ]
    for name, link in links.items():
        lines += ["", f"[{name}]", f"bytes_per_second = {link.bytes_per_second!r}"]
        lines += [f"latency_seconds = {link.latency_seconds!r}"]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
