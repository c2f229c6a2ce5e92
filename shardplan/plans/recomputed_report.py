"""What a plan says of the values that it computes again, and of those that wait in host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardplan.common.tables import size_text
from shardplan.plans.plan_data import PINNED, PlanData

_MODULES = 3
"""The modules that are named, those that save most."""


def recomputed_text(plan: PlanData) -> str:
    """One line: how many values are computed again, what that frees, what it adds, and where most of it is."""
    if plan.recipe.recomputed is None:
        return ""
    rows = plan.recomputed
    if not rows and plan.recipe.offloaded:
        return ""
    if not rows:
        return "to fit, gradients of weights are computed before the backward part goes on"
    count, freed, seconds = (sum(row[name] for row in rows) for name in ("count", "bytes", "seconds"))
    effects = plan.statistics.get("kept_for_effects", 0)
    kept = f"; {effects} are kept, since what makes them has effects" if effects else ""
    least = plan.statistics.get("least_added_seconds")
    bound = "" if least is None or plan.offloaded else f" (at least {1e3 * least:,.3f} ms in these layouts)"
    return (
        f"to fit, {count} values are computed again: {size_text(freed)} per device wait no longer, for "
        f"{1e3 * seconds:,.3f} ms of work{bound}; most in {_most(rows)}{kept}"
    )


def offloaded_text(plan: PlanData) -> str:
    """A line each of values and of pinned arguments: how many wait in host memory, what that frees, how long a device
    waits, and where most of it is."""
    parts = []
    for pinned, what, where in (
        (False, "to fit, {} values wait", "most in"),
        (True, "{} arguments wait", "by the pins"),
    ):
        rows = [row for row in plan.offloaded if (row["made_by"] == PINNED) is pinned]
        count, freed, seconds = (sum(row[name] for row in rows) for name in ("count", "bytes", "seconds"))
        if rows:
            parts.append(
                f"{what.format(count)} in host memory: {size_text(freed)} per device, copied while kernels run but for "
                f"{1e3 * seconds:,.3f} ms; {where} {_most(rows)}"
            )
    return "\n  ".join(parts)


def _most(rows: Sequence[Mapping[str, Any]]) -> str:
    saved: dict[str, float] = {}
    for row in rows:
        saved[row["module"]] = saved.get(row["module"], 0.0) + row["bytes"]
    return ", ".join(f"`{module}`" for module in sorted(saved, key=lambda one: -saved[one])[:_MODULES])
