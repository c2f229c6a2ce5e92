"""The plan held against the compiled program.

`measure` compiles any lowered program and reads back what it sends; `audit` does so for a plan and puts the two side by
side:

    report = measure(jax.jit(step, in_shardings=...).lower(*shapes), mesh_axes={"data": 2, "model": 4})
    report.communication_bytes          # per device and step, loops counted
    print(report)                       # a row per kind of collective and mesh axes

    audit = shardplan.audit(plan, target="h100")
    print(audit)                        # predicted beside compiled
    audit.ok(tolerance=0.02)            # True where the bytes agree
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
from jax.sharding import Mesh, NamedSharding

from shardplan.errors import ArgumentError
from shardplan.hlo import KINDS, CompiledCollective, collectives
from shardplan.tables import html_table, megabytes, text_table
from shardplan.target import compile_for, gpu_mesh

Axes = tuple[str, ...] | None
"""Mesh axes in the order of the mesh; None for a part of an axis."""

_OPERATION = re.compile(r"(?:^|/)op(\d+)(?=/|$)")


class PlannedCollective(Protocol):
    """What an audit reads of a plan's collective."""

    @property
    def kind(self) -> str: ...
    @property
    def axes(self) -> tuple[str, ...]: ...
    @property
    def bytes(self) -> float: ...
    @property
    def times(self) -> int: ...


class AuditedPlan(Protocol):
    """What an audit reads of a plan."""

    @property
    def mesh_axes(self) -> Mapping[str, int]: ...
    @property
    def collectives(self) -> tuple[Any, ...]: ...
    @property
    def communication_bytes(self) -> float: ...
    @property
    def peak_bytes(self) -> float: ...
    def lower(self, mesh: Mesh) -> jax.stages.Lowered: ...


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one kind over the same mesh axes, or several of them added up.

    Attributes:
        times: executions per step.
        bytes_sent: by one device per step.
    """

    times: int = 0
    bytes_sent: float = 0

    def plus(self, times: int, bytes_sent: float) -> Traffic:
        return Traffic(self.times + times, self.bytes_sent + bytes_sent)


@dataclass(frozen=True, slots=True)
class CompiledMemory:
    """Bytes on one device, as the compiler allocated them.

    Attributes:
        arguments, outputs: of the program.
        aliases: outputs that take the place of donated arguments.
        temporaries: everything in between.
        peak: the most that is alive at once, arguments and outputs included.
    """

    arguments: int
    outputs: int
    aliases: int
    temporaries: int
    peak: int


@dataclass(frozen=True, slots=True)
class CompiledReport:
    """What one device sends and holds in one step of a compiled program."""

    mesh_axes: Mapping[str, int]
    collectives: tuple[CompiledCollective, ...]
    memory: CompiledMemory
    compile_seconds: float
    hlo_text: str = field(repr=False)

    @property
    def communication_bytes(self) -> int:
        """Bytes that one device sends per step, by ring algorithms."""
        return sum(found.bytes_sent * found.times for found in self.collectives)

    def traffic(self) -> dict[tuple[str, Axes], Traffic]:
        """Times and bytes per kind of collective and mesh axes."""
        sent: dict[tuple[str, Axes], Traffic] = {}
        for found in self.collectives:
            key = (found.kind, found.axes(self.mesh_axes))
            sent[key] = sent.get(key, Traffic()).plus(found.times, found.bytes_sent * found.times)
        return sent

    def operation_bytes(self) -> dict[int | None, int]:
        """Bytes sent per operation of the plan, by the scope that applying leaves; None: led back to no operation."""
        sent: dict[int | None, int] = {}
        for found in self.collectives:
            operation = operation_of(found.op_name)
            sent[operation] = sent.get(operation, 0) + found.bytes_sent * found.times
        return sent

    def _rows(self) -> list[tuple[str, ...]]:
        traffic = sorted(self.traffic().items(), key=lambda item: -item[1].bytes_sent)
        rows = [(kind, _axes_text(axes), str(t.times), megabytes(t.bytes_sent)) for (kind, axes), t in traffic]
        times = sum(t.times for _, t in traffic)
        return [*rows, ("total", "", str(times), megabytes(self.communication_bytes))]

    def __str__(self) -> str:
        table = text_table(("collective", "mesh axes", "times", "MB sent"), self._rows(), numbers=(2, 3))
        return f"{table}\npeak memory {megabytes(self.memory.peak)} MB, compiled in {self.compile_seconds:.1f} s"

    def _repr_html_(self) -> str:
        return html_table(("collective", "mesh axes", "times", "MB sent"), self._rows(), numbers=(2, 3))


def operation_of(op_name: str) -> int | None:
    """The number of the planned operation in a metadata path such as `jit(step)/op12/dot_general`.

    >>> operation_of("jit(step)/while/body/op12/dot_general"), operation_of("jit(step)/add")
    (12, None)
    """
    found = _OPERATION.findall(op_name)
    return int(found[-1]) if found else None


def measure(lowered: jax.stages.Lowered, mesh_axes: Mapping[str, int] | None = None) -> CompiledReport:
    """Compiles a lowered program for the devices of its shardings and reads back what one device sends and holds.

    Args:
        lowered: any jitted function, lowered for a mesh of real, emulated or compile-only devices.
        mesh_axes: name and size of each axis of that mesh; by default those of the program's input shardings.

    Raises:
        ArgumentError: no input of the program has a `NamedSharding`, and `mesh_axes` is not given.
    """
    compiled, seconds = compile_for(lowered)
    axes = dict(_mesh_axes_of(compiled) if mesh_axes is None else mesh_axes)
    text = compiled.as_text() or ""
    return CompiledReport(axes, collectives(text), _memory_of(compiled), seconds, text)


def _mesh_axes_of(compiled: jax.stages.Compiled) -> Mapping[str, int]:
    for sharding in jax.tree.leaves((compiled.input_shardings, compiled.output_shardings)):
        if isinstance(sharding, NamedSharding):
            return sharding.mesh.shape
    raise ArgumentError(
        "the program has no `NamedSharding` on its inputs or outputs: say which mesh it is for, as "
        '`measure(lowered, mesh_axes={"data": 2, "model": 4})`.'
    )


def _memory_of(compiled: jax.stages.Compiled) -> CompiledMemory:
    stats: Any = compiled.memory_analysis()
    return CompiledMemory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliases=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        peak=stats.peak_memory_in_bytes,
    )


@dataclass(frozen=True, slots=True)
class Audit:
    """A plan's prediction beside the compiled program, per device and step.

    Attributes:
        target: the GPU type that it was compiled for; empty where the caller gave the mesh.
        predicted: times and bytes per kind and mesh axes, as planned.
        predicted_bytes: communication bytes, as planned.
        predicted_peak_bytes: peak memory, as planned.
        compiled: what the compiler made of it.
    """

    target: str
    predicted: Mapping[tuple[str, Axes], Traffic]
    predicted_bytes: float
    predicted_peak_bytes: float
    compiled: CompiledReport

    @property
    def ratio(self) -> float:
        """Compiled over predicted communication bytes; 1.0 where neither sends anything."""
        compiled = self.compiled.communication_bytes
        if self.predicted_bytes:
            return compiled / self.predicted_bytes
        return float("inf") if compiled else 1.0

    def ok(self, tolerance: float = 0.02) -> bool:
        """Whether the compiled communication bytes are within `tolerance` (a fraction) of the predicted ones."""
        return abs(self.ratio - 1) <= tolerance

    def differences(self) -> dict[tuple[str, Axes], float]:
        """Compiled minus predicted bytes per kind and mesh axes."""
        compiled = self.compiled.traffic()
        keys = [*self.predicted, *(key for key in compiled if key not in self.predicted)]
        nothing = Traffic()
        return {
            key: compiled.get(key, nothing).bytes_sent - self.predicted.get(key, nothing).bytes_sent for key in keys
        }

    def _rows(self) -> list[tuple[str, ...]]:
        compiled, nothing = self.compiled.traffic(), Traffic()
        rows: list[tuple[str, ...]] = []
        for key, difference in sorted(self.differences().items(), key=lambda item: _row_order(item[0])):
            kind, axes = key
            planned, found = self.predicted.get(key, nothing), compiled.get(key, nothing)
            counts = (str(planned.times), str(found.times))
            sizes = (megabytes(planned.bytes_sent), megabytes(found.bytes_sent), _signed(difference))
            rows.append((kind, _axes_text(axes), *counts, *sizes))
        total, peak = self.compiled.communication_bytes, self.compiled.memory.peak
        rows.append(("total", "", "", "", *_pair(self.predicted_bytes, total)))
        rows.append(("peak memory", "", "", "", *_pair(self.predicted_peak_bytes, peak)))
        return rows

    def __str__(self) -> str:
        place = f" for {self.target}" if self.target else ""
        mesh = ", ".join(f"{name}={size}" for name, size in self.compiled.mesh_axes.items())
        title = f"Audit{place}, mesh ({mesh}); per device and step, compiled in {self.compiled.compile_seconds:.1f} s"
        verdict = f"compiled / predicted bytes: {self.ratio:.4f}"
        return "\n".join((title, text_table(_AUDIT_HEADER, self._rows(), numbers=range(2, 7)), verdict))

    def _repr_html_(self) -> str:
        caption = f"compiled / predicted bytes: {self.ratio:.4f}"
        return html_table(_AUDIT_HEADER, self._rows(), numbers=range(2, 7), caption=caption)


_AUDIT_HEADER = ("collective", "mesh axes", "planned", "compiled", "predicted MB", "compiled MB", "difference")


def audit(plan: AuditedPlan, target: str = "h100", mesh: Mesh | None = None) -> Audit:
    """Compiles a plan for GPUs that need not be there, and holds its prediction against the compiled program.

    Args:
        plan: from `shardplan.plan` or the `.plan(...)` of an `auto` step.
        target: the GPU type to compile for, one of `shardplan.target.targets()`.
        mesh: compile for this mesh instead of a target; of the plan's axes.

    Raises:
        ArgumentError: the target is unknown, or the mesh has other axes than the plan.
        TargetNotInstalledError: the extra `audit` is not installed.
    """
    axes = dict(plan.mesh_axes)
    if mesh is None:
        mesh = gpu_mesh(target, tuple(axes.values()), tuple(axes))
    else:
        target = ""
        if dict(mesh.shape) != axes:
            raise ArgumentError(f"the plan is for a mesh of axes `{axes}`, and this one has `{dict(mesh.shape)}`.")
    report = measure(plan.lower(mesh), axes)
    return Audit(target, _planned(plan.collectives, axes), plan.communication_bytes, plan.peak_bytes, report)


def _planned(found: Iterable[PlannedCollective], mesh_axes: Mapping[str, int]) -> dict[tuple[str, Axes], Traffic]:
    """Times and bytes of planned collectives per kind and mesh axes, axes in the order of the mesh."""
    sent: dict[tuple[str, Axes], Traffic] = {}
    for planned in found:
        key = (planned.kind, tuple(axis for axis in mesh_axes if axis in planned.axes and mesh_axes[axis] > 1))
        sent[key] = sent.get(key, Traffic()).plus(planned.times, planned.bytes * planned.times)
    return sent


def _row_order(key: tuple[str, Axes]) -> tuple[int, tuple[str, ...]]:
    kind, axes = key
    return (KINDS.index(kind) if kind in KINDS else len(KINDS), axes or ())


def _axes_text(axes: Axes) -> str:
    return "part of an axis" if axes is None else ", ".join(axes)


def _signed(size: float) -> str:
    return f"{size / 1e6:+,.1f}"


def _pair(predicted: float, compiled: float) -> tuple[str, str, str]:
    return megabytes(predicted), megabytes(compiled), _signed(compiled - predicted)
