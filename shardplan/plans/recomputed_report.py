"""What a plan says of the values that it computes again."""

from __future__ import annotations

from shardplan.common.tables import size_text
from shardplan.plans.plan_data import PlanData

_MODULES = 3
"""The modules that are named, those that save most."""


def recomputed_text(plan: PlanData) -> str:
    """One line: how many values are computed again, what that frees, what it adds, and where most of it is."""
    if plan.recipe.recomputed is None:
        return ""
    rows = plan.recomputed
    if not rows:
        return "to fit, gradients of weights are computed before the backward part goes on"
    count, freed = sum(row["count"] for row in rows), sum(row["bytes"] for row in rows)
    seconds = sum(row["seconds"] for row in rows)
    saved: dict[str, float] = {}
    for row in rows:
        saved[row["module"]] = saved.get(row["module"], 0.0) + row["bytes"]
    most = ", ".join(f"`{module}`" for module in sorted(saved, key=lambda one: -saved[one])[:_MODULES])
    return (
        f"to fit, {count} values are computed again: {size_text(freed)} per device wait no longer, for "
        f"{1e3 * seconds:,.3f} ms of work; most in {most}"
    )
