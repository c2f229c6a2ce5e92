"""The page of an audit: the plan and its compiled program, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from shardplan.audits.attribution import OperationTraffic
from shardplan.audits.compiled_overlap import CompiledTime
from shardplan.compiled.program import Axes, CompiledReport, Traffic, axes_text
from shardplan.compiled.rematerialization import Rematerialization
from shardplan.pages.sides import Sides
from shardplan.plans.diff_page import profile_of
from shardplan.plans.pipeline import memory_limit_of
from shardplan.plans.plan_data import PlanData
from shardplan.timing.step_time import StepTime

_BOTH = [("predicted", "bytes"), ("compiled", "bytes"), ("difference", "signed")]


class Audited(Protocol):
    """The figures of an audit, which `shardplan.audits.audit.Audit` documents."""

    @property
    def target(self) -> str: ...
    @property
    def predicted(self) -> Mapping[tuple[str, Axes], Traffic]: ...
    @property
    def predicted_bytes(self) -> float: ...
    @property
    def predicted_peak_bytes(self) -> float: ...
    @property
    def compiled(self) -> CompiledReport: ...
    @property
    def operations(self) -> tuple[OperationTraffic, ...]: ...
    @property
    def predicted_time(self) -> StepTime | None: ...
    @property
    def compiled_time(self) -> CompiledTime | None: ...
    @property
    def predicted_host_bytes(self) -> float: ...
    @property
    def rematerialized(self) -> tuple[tuple[Rematerialization, str], ...]: ...
    def differences(self) -> dict[tuple[str, Axes], float]: ...
    def verdict(self) -> str: ...


def audit_page(audit: Audited, plan: PlanData | None) -> str:
    """The page of ``Audit.to_html``."""
    name = plan.program.name if plan is not None else "a step"
    place = f" for {audit.target}" if audit.target else ""
    mesh = dict(audit.compiled.mesh_axes)
    sides = Sides(f"{name}, planned and compiled{place}", ("predicted", "compiled"), [mesh])
    _add_figures(sides, audit, plan)
    _add_memory(sides, audit, plan)
    _add_kinds(sides, audit)
    _add_operations(sides, audit)
    _add_collectives(sides, audit)
    _add_gathered(sides, audit)
    return sides.text('shardplan.audit(plan).to_html("audit.html")')


def _add_figures(sides: Sides, audit: Audited, plan: PlanData | None) -> None:
    compiled = audit.compiled
    sides.figure("sent per device and step", "bytes", audit.predicted_bytes, compiled.communication_bytes)
    sides.figure("peak per device", "bytes", float(audit.predicted_peak_bytes), compiled.memory.peak)
    if audit.predicted_host_bytes or compiled.memory.host:
        sides.figure("host memory", "bytes", float(audit.predicted_host_bytes), compiled.memory.host)
    if audit.predicted_time is not None and audit.compiled_time is not None:
        for name in ("work", "exposed", "hidden"):
            of = getattr(audit.predicted_time, name), getattr(audit.compiled_time, name)
            sides.figure(name if name == "work" else f"{name} collectives", "seconds", *of)
    sides.texts = [line for line in audit.verdict().splitlines() if line]
    if plan is not None:
        sides.limit = float(memory_limit_of(plan.recipe.options))


def _add_memory(sides: Sides, audit: Audited, plan: PlanData | None) -> None:
    held = audit.compiled.live_ranges
    if plan is None or held is None:
        return
    note = "Bytes on one device: predicted over the positions of the plan, compiled over the schedule of XLA."
    sides.curves("Memory over the step", note, [profile_of(plan), held.bytes])


def _add_kinds(sides: Sides, audit: Audited) -> None:
    compiled, nothing = audit.compiled.traffic(), Traffic()
    rows: list[list[Any]] = []
    for key, difference in audit.differences().items():
        one, other = audit.predicted.get(key, nothing), compiled.get(key, nothing)
        sizes = (one.bytes_sent, other.bytes_sent, difference, other.overlapped_bytes)
        rows.append([key[0], axes_text(key[1]), one.times, other.times, *sizes])
    columns = [("collective", "text"), ("mesh axes", "text"), ("planned", "number"), ("compiled", "number")]
    columns += [*_BOTH, ("overlapped", "bytes")]
    rows.sort(key=lambda row: -max(row[4], row[5]))
    sides.table("Kinds of collectives", columns, rows, bars=[4, 5], total=True, nothing="Nothing is sent.")


def _add_operations(sides: Sides, audit: Audited) -> None:
    rows = [
        [one.description, one.source, one.predicted_bytes, one.compiled_bytes, one.difference]
        for one in audit.operations
    ]
    columns = [("operation", "text"), ("source", "text"), *_BOTH]
    note = "The compiler merges and moves collectives, so that differences of operations may cancel each other."
    sides.table("Operations", columns, rows, bars=[2, 3], total=True, note=note, nothing="No operation sends anything.")


def _add_collectives(sides: Sides, audit: Audited) -> None:
    found = sorted(audit.compiled.collectives, key=lambda one: -one.bytes_sent * one.times)
    rows = [
        [
            *(one.kind, axes_text(one.axes(audit.compiled.mesh_axes)), one.source, one.times),
            *(one.bytes_sent * one.times, "yes" if one.synchronous else "no"),
            0 if one.synchronous else one.kernels_meanwhile,
        ]
        for one in found
    ]
    names = ("collective", "mesh axes", "source")
    columns = [*((name, "text") for name in names), ("times", "number"), ("compiled", "bytes"), ("synchronous", "text")]
    columns.append(("kernels meanwhile", "number"))
    sides.table("Compiled collectives", columns, rows, nothing="The compiled program sends nothing.")


def _add_gathered(sides: Sides, audit: Audited) -> None:
    rows = [[one.tensor, one.before, one.after, source, one.op_name] for one, source in audit.rematerialized]
    columns = [(name, "text") for name in ("tensor", "from", "to", "source", "operation")]
    nothing = "XLA gathers no tensor whole for want of collectives."
    sides.table("Tensors that XLA gathers whole", columns, rows, nothing=nothing)
