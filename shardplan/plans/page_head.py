"""The page of a plan: its figures and warnings, and the data of its schedule."""

from __future__ import annotations

import html
import math
import os
import shlex
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from shardplan.errors import ArgumentError
from shardplan.hardware import HardwareProfile
from shardplan.layout.layout import axes_of
from shardplan.options import Options
from shardplan.pages.page import page_text
from shardplan.pages.page_data import page_data
from shardplan.plans.page_reasons import reasons
from shardplan.plans.pipeline import donated_leaves, memory_limit_of, remarks_on_layouts, remarks_on_operations
from shardplan.plans.plan_data import PlanData
from shardplan.plans.repeated_work_report import repeated_text
from shardplan.plans.report import LINE_TEXTS, above_share, evidence, mesh_text, objective_text

STEP = "step"
"""The entry of a plan's statistics with the name of its step on the command line."""


_MOST_IN_NOTEBOOKS = 2000
"""The most operations of a program whose page is part of a notebook."""


class Compared(Protocol):
    """A row of ``shardplan.compare``."""

    @property
    def method(self) -> str: ...
    @property
    def communication_bytes(self) -> float: ...
    @property
    def peak_bytes(self) -> float: ...
    @property
    def simulated_seconds(self) -> float: ...
    @property
    def note(self) -> str: ...


def plan_page(plan: PlanData, comparison: Iterable[Compared] | None = None) -> str:
    """The page of a plan. Raises PlanMismatchError for a plan without its program."""
    schedule, compared = plan.schedule, _rows_of(comparison)
    data = page_data(schedule, donated_leaves(plan.program, plan.donated), plan.held)
    title = f"{plan.program.name} over mesh ({mesh_text(plan.mesh_axes)})"
    head = {**plan_head(plan, bool(compared)), "comparison": compared}
    why = reasons(plan, data["collectives"], data["operations"]["kind"])
    return page_text(title, {"head": head, "why": why, **data})


def _rows_of(comparison: Iterable[Compared] | None) -> list[list[Any]]:
    try:
        return [
            [row.method, *map(_finite, (row.communication_bytes, row.peak_bytes, row.simulated_seconds)), row.note]
            for row in comparison or ()
        ]
    except (TypeError, AttributeError):
        raise ArgumentError(f"`comparison` is a result of shardplan.compare, got `{comparison!r}`") from None


def notebook_page(plan: PlanData) -> str:
    """The page in a frame, for a notebook. Nothing for a plan without its program, and for a large one, whose page
    takes seconds and would make the notebook large."""
    if plan.built is None or len(plan.program.operations) > _MOST_IN_NOTEBOOKS:
        return ""
    page = html.escape(plan_page(plan))
    return f'<iframe sandbox="allow-scripts allow-downloads" width="100%" height="640" srcdoc="{page}"></iframe>'


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def plan_head(plan: PlanData, compared: bool = False) -> dict[str, Any]:
    """The figures, texts and warnings above the page's tabs."""
    options, repeated, step = plan.recipe.options, plan.statistics.get("repeated"), plan.step_time
    return {
        "communication_bytes": plan.communication_bytes,
        "peak_bytes": float(plan.peak_bytes),
        "limit": float(memory_limit_of(options)),
        "verified": None if plan.verified is None else str(plan.verified["target"]),
        "host_bytes": float(plan.host_bytes),
        "objective": objective_text(plan, plan.objective),
        "above": above_share(plan.objective, plan.lower_bound),
        "repeated": None if repeated is None else float(repeated["share"]),
        "recomputed": bool(plan.recomputed),
        "blocks": [[*map(int, row["count"]), str(row["index"])] for row in plan.blocks],
        "seconds": {"work": step.work, "exposed": step.exposed, "hidden": step.hidden},
        "texts": [text for text in (evidence(plan) + repeated_text(plan), *(one(plan) for one in LINE_TEXTS)) if text],
        "warnings": [
            *remarks_on_operations(plan.schedule),
            *remarks_on_layouts(plan.program, plan.mesh, options.pins),
        ],
        "command": _command(plan, compared),
    }


def _command(plan: PlanData, compared: bool) -> str:
    """The command that makes the page, or the call for a plan that was made in Python."""
    step, options = plan.statistics.get(STEP), plan.recipe.options
    if not isinstance(step, str):
        return 'plan.to_html("plan.html", shardplan.compare(...))' if compared else 'plan.to_html("plan.html")'
    words = ["shardplan", "report", step, "--mesh", ",".join(f"{name}={size}" for name, size in plan.mesh_axes.items())]
    if options.memory_limit is not None:
        words += ["--memory-limit", f"{options.memory_limit:.0f}B"]
    if options.objective != "bytes":
        words += ["--objective", options.objective]
    if options.hardware is not None:
        hardware = options.hardware.name if isinstance(options.hardware, HardwareProfile) else options.hardware
        words += ["--hardware", os.fspath(hardware)]
    for path, spec in (options.pins or {}).items():
        entries = ["+".join(axes_of(entry)) or "-" for entry in spec]
        words += ["--pin", f"{path}={','.join(entries)}"]
    if plan.donated:
        words += ["--donate", ",".join(map(str, plan.donated))]
    if options.reduce_dtype is not None:
        words += ["--reduce-dtype", np.dtype(options.reduce_dtype).name]
    if options.time_limit != Options().time_limit:
        words += ["--time-limit", f"{options.time_limit:g}"]
    if options.refine != 1:
        words += ["--refine", str(options.refine)]
    given = {"--recompute": "recompute" in options.fit, "--verify": bool(options.verify), "--compare": compared}
    return shlex.join([*words, *(word for word, there in given.items() if there), "-o", "plan.html"])
