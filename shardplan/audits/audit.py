"""The audit: a comparison of a plan's prediction with the compiled program.

    audit = shardplan.audit(plan, target="h100")
    print(audit)                        # predicted and compiled, per kind of collective and mesh axes
    if audit.ok: ...                    # the bytes agree; with another tolerance: audit.ok(0.001)
    print(audit.details())              # the operations whose bytes differ most

`measure` (of `shardplan.compiled.program`) reads any compiled step, without a prediction.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from shardplan.audits.attribution import OperationTraffic, PlannedCollective, attribute, axes_in_order
from shardplan.audits.audit_page import audit_page
from shardplan.audits.compiled_overlap import CompiledTime, compiled_time
from shardplan.common.tables import html_table, size_cell, size_text, text_table
from shardplan.compiled.hlo.collectives import KINDS
from shardplan.compiled.program import Axes as Axes
from shardplan.compiled.program import CompiledMemory as CompiledMemory
from shardplan.compiled.program import CompiledReport as CompiledReport
from shardplan.compiled.program import Traffic as Traffic
from shardplan.compiled.program import axes_text, operation_of
from shardplan.compiled.program import measure as measure
from shardplan.compiled.rematerialization import Rematerialization, caught_rematerializations
from shardplan.compiled.target import gpu_mesh, only_described
from shardplan.errors import ArgumentError, no_plan
from shardplan.pages.page import write_page
from shardplan.plans.plan_data import PlanData
from shardplan.program.missing_libraries import name_missing_library
from shardplan.timing.step_time import StepTime


class AuditedPlan(Protocol):
    """The attributes of a plan for an audit."""

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
class Agreement:
    """The agreement of bytes: true within 2 %, and as a call, within a tolerance.

    >>> bool(Agreement(ratio=1.01)), Agreement(ratio=1.01)(tolerance=0.001), Agreement(ratio=1.01)
    (True, False, True)
    """

    ratio: float

    def __call__(self, tolerance: float = 0.02) -> bool:
        """Whether the compiled bytes are within ``tolerance``, a fraction, of the predicted ones."""
        return abs(self.ratio - 1) <= tolerance

    def __bool__(self) -> bool:
        return self()

    def __repr__(self) -> str:
        return repr(bool(self))


@dataclass(frozen=True, slots=True)
class Audit:
    """A plan's prediction and the figures of the compiled program, per device and step.

    Attributes:
        target: the GPU type of the compilation. Empty for a mesh that the caller gave.
        predicted: times and bytes per kind and mesh axes, as planned.
        predicted_bytes: communication bytes, as planned.
        predicted_peak_bytes: peak memory, as planned.
        predicted_host_bytes: host memory, as planned.
        compiled: the report of the compiled program.
        operations: the same bytes by operation, largest difference first. The compiler merges and moves collectives, so
            differences of operations may cancel each other. Those of the totals are real.
        predicted_time: the parts of a step's time, as planned.
        compiled_time: the same with the overlap of the compiler's schedule.
        rematerialized: tensors that XLA gathers whole for want of collectives ("involuntary full rematerialization"),
            each with the source line of its operation.
        plan: the audited plan, for ``to_html``.
    """

    target: str
    predicted: Mapping[tuple[str, Axes], Traffic]
    predicted_bytes: float
    predicted_peak_bytes: float
    compiled: CompiledReport
    operations: tuple[OperationTraffic, ...]
    predicted_time: StepTime | None = None
    compiled_time: CompiledTime | None = None
    predicted_host_bytes: float = 0.0
    rematerialized: tuple[tuple[Rematerialization, str], ...] = ()
    plan: PlanData | None = field(default=None, repr=False)

    @property
    def ratio(self) -> float:
        """Compiled over predicted communication bytes. 1.0 where neither sends anything."""
        compiled = self.compiled.communication_bytes
        if self.predicted_bytes:
            return compiled / self.predicted_bytes
        return float("inf") if compiled else 1.0

    @property
    def ok(self) -> Agreement:
        """Whether the compiled communication bytes are those predicted: `if audit.ok`, or within `audit.ok(0.001)`."""
        return Agreement(self.ratio)

    def differences(self) -> dict[tuple[str, Axes], float]:
        """Compiled minus predicted bytes per kind and mesh axes."""
        compiled = self.compiled.traffic()
        keys = [*self.predicted, *(key for key in compiled if key not in self.predicted)]
        nothing = Traffic()
        return {
            key: compiled.get(key, nothing).bytes_sent - self.predicted.get(key, nothing).bytes_sent for key in keys
        }

    @property
    def unexplained_bytes(self) -> float:
        """Compiled bytes above the planned ones of their operation, and those without an operation."""
        return sum(max(traffic.difference, 0) for traffic in self.operations)

    @property
    def overlapped_bytes(self) -> float:
        """Compiled bytes that are sent while kernels run, by the compiler's schedule."""
        return sum(traffic.overlapped_bytes for traffic in self.compiled.traffic().values())

    def overlap(self, limit: int = 10) -> str:
        """A table of the compiled collectives that send most, with the number of kernels between start and end.

        A collective that is marked synchronous overlaps with none, wherever its end is.
        """
        found = sorted(self.compiled.collectives, key=lambda one: -one.bytes_sent * one.times)
        rows = [
            (
                *(one.kind, axes_text(one.axes(self.compiled.mesh_axes)), one.source, str(one.times)),
                *(size_cell(one.bytes_sent * one.times), "yes" if one.synchronous else "no"),
                str(0 if one.synchronous else one.kernels_meanwhile),
            )
            for one in found[:limit]
        ]
        header = ("collective", "mesh axes", "source", "times", "compiled MB", "synchronous", "kernels meanwhile")
        return text_table(header, rows, numbers=(3, 4, 6))

    def details(self, limit: int = 10) -> str:
        """A table of the operations whose compiled bytes differ most from the planned ones."""
        rows = [
            (o.description, o.source, size_cell(o.predicted_bytes), size_cell(o.compiled_bytes), _signed(o.difference))
            for o in self.operations[:limit]
        ]
        header = ("operation", "source", "predicted MB", "compiled MB", "difference")
        return text_table(header, rows, numbers=(2, 3, 4))

    def _rows(self) -> list[tuple[str, ...]]:
        compiled, nothing = self.compiled.traffic(), Traffic()
        rows: list[tuple[str, ...]] = []
        for key, difference in sorted(self.differences().items(), key=lambda item: _row_order(item[0])):
            kind, axes = key
            planned, found = self.predicted.get(key, nothing), compiled.get(key, nothing)
            counts = (str(planned.times), str(found.times))
            sizes = (size_cell(planned.bytes_sent), size_cell(found.bytes_sent), _signed(difference))
            rows.append((kind, axes_text(axes), *counts, *sizes, size_cell(found.overlapped_bytes)))
        total, peak = self.compiled.communication_bytes, self.compiled.memory.peak
        overlapped = size_cell(self.overlapped_bytes)
        rows.append(("total", "", "", "", *_pair(self.predicted_bytes, total), overlapped))
        rows.append(("peak memory", "", "", "", *_pair(self.predicted_peak_bytes, peak), ""))
        host = self.predicted_host_bytes, self.compiled.memory.host
        rows += [("host memory", "", "", "", *_pair(*host), "")] if any(host) else []
        return rows

    def verdict(self) -> str:
        """The ratio of the bytes, with what no planned collective explains and what XLA gathers whole."""
        unexplained = f"{size_text(self.unexplained_bytes)} that no planned collective explains"
        counted = f"{self.compiled.counted_once}{self._gathered()}"
        return f"compiled / predicted bytes: {self.ratio:.4f}; {unexplained}{self._times()}{counted}"

    def _gathered(self) -> str:
        """A line for each involuntary full rematerialization."""
        return "".join(
            f"\nXLA gathers the whole {one.tensor}, from {one.before} to {one.after}, at {source or 'no known line'}"
            f"{f' ({one.op_name})' if one.op_name else ''}"
            for one, source in self.rematerialized
        )

    def _times(self) -> str:
        if self.predicted_time is None or self.compiled_time is None:
            return ""
        pairs = [
            f"{1e3 * getattr(self.predicted_time, name):,.3f} ms predicted, "
            f"{1e3 * getattr(self.compiled_time, name):,.3f} ms compiled"
            for name in ("exposed", "hidden")
        ]
        return f"\nof collectives, what makes the step longer: {pairs[0]}; what hides behind work: {pairs[1]}"

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the audit as one HTML page: the plan and the compiled program side by side, with their memory.

        Raises ArgumentError for a path that cannot be written.
        """
        write_page(path, audit_page(self, self.plan))

    def __str__(self) -> str:
        place = f" for {self.target}" if self.target else ""
        mesh = ", ".join(f"{name}={size}" for name, size in self.compiled.mesh_axes.items())
        title = f"Audit{place}, mesh ({mesh}); per device and step, compiled in {self.compiled.compile_seconds:.1f} s"
        return "\n".join((title, text_table(_AUDIT_HEADER, self._rows(), numbers=range(2, 8)), self.verdict()))

    def _repr_html_(self) -> str:
        return html_table(_AUDIT_HEADER, self._rows(), numbers=range(2, 8), caption=self.verdict())


_AUDIT_HEADER = (
    *("collective", "mesh axes", "planned", "compiled", "predicted MB", "compiled MB", "difference"),
    "overlapped",
)


def audit(plan: AuditedPlan, target: str = "h100", mesh: Mesh | None = None) -> Audit:
    """Compiles a plan for GPUs, real or not, and compares its prediction with the compiled program.

    Args:
        plan: from `shardplan.plan` or the `.plan(...)` of an `auto` step.
        target: the GPU type to compile for, one of `shardplan.compiled.target.targets()`.
        mesh: compile for this mesh, with the plan's axes, instead of a target.

    Raises:
        ArgumentError: no plan is given, the target is unknown, or the mesh has other axes than the plan.
        TargetNotInstalledError: the extra `audit` is not installed.
        ShardplanError: the program calls back to Python, or asks for a library that is not installed.
    """
    if not hasattr(plan, "mesh_axes"):
        raise no_plan(plan)
    axes = dict(plan.mesh_axes)
    if mesh is None:
        mesh = gpu_mesh(target, tuple(axes.values()), tuple(axes))
    else:
        target = ""
        if dict(mesh.shape) != axes:
            raise ArgumentError(f"the plan is for a mesh of axes `{axes}`, and this one has `{dict(mesh.shape)}`.")
    planned = plan if isinstance(plan, PlanData) else None
    library = name_missing_library(planned.program if planned else None)
    with caught_rematerializations() as gathered, only_described(), library:
        report = measure(plan.lower(mesh), axes, live_ranges=planned is not None)
    return Audit(
        target=target,
        predicted=_planned(plan.collectives, axes),
        predicted_bytes=plan.communication_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        compiled=report,
        operations=attribute(plan.collectives, report.collectives, axes),
        predicted_time=planned.step_time if planned else None,
        compiled_time=compiled_time(planned, report) if planned else None,
        predicted_host_bytes=planned.host_bytes if planned else 0.0,
        rematerialized=tuple((one, _source_of(one, planned)) for one in gathered),
        plan=planned,
    )


def _source_of(gathered: Rematerialization, plan: PlanData | None) -> str:
    """The source line of the planned operation that a rematerialization is in, or nothing."""
    operation = operation_of(gathered.op_name)
    return "" if plan is None or operation is None else plan.program.operations[operation].source


def _planned(found: Iterable[PlannedCollective], mesh_axes: Mapping[str, int]) -> dict[tuple[str, Axes], Traffic]:
    """Times and bytes of planned collectives per kind and mesh axes. Axes are in the order of the mesh."""
    sent: dict[tuple[str, Axes], Traffic] = {}
    for planned in found:
        key = (planned.kind, axes_in_order(planned, mesh_axes))
        sent[key] = sent.get(key, Traffic()).plus(planned.times, planned.bytes * planned.times)
    return sent


def _row_order(key: tuple[str, Axes]) -> tuple[int, tuple[str, ...]]:
    kind, axes = key
    return (KINDS.index(kind) if kind in KINDS else len(KINDS), axes or ())


def _signed(size: float) -> str:
    return f"{size / 1e6:+,.1f}"


def _pair(predicted: float, compiled: float) -> tuple[str, str, str]:
    return size_cell(predicted), size_cell(compiled), _signed(compiled - predicted)
