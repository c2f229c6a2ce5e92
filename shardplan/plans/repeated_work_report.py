"""The first line of a plan with repeated work: the repeated share, and the rates that make it best."""

from __future__ import annotations

from shardplan.hardware import load
from shardplan.layout.objectives import OBJECTIVES
from shardplan.plans.plan_data import PlanData

_REPORTED_SHARE = 0.5
"""The least share of repeated work in a report."""

_PROVEN_GAP = 1e-6
"""The largest gap of a proven optimum."""


def repeated_text(plan: PlanData) -> str:
    """The text on a plan that splits nothing, or whose devices repeat more than half of their work, with the reason."""
    found = plan.statistics.get("repeated")
    if found is None or plan.device_count == 1:
        return ""
    whole = found["split"] == 1 and not any(entry for one in plan.arguments for entry in one.spec)
    if not whole and found["share"] <= _REPORTED_SHARE:
        return ""
    what = "nothing is split" if whole else f"devices repeat {found['share']:.0%} of their work"
    hardware = load(plan.recipe.options.hardware or "h100")
    costs = OBJECTIVES[plan.recipe.options.objective].repeating_text(found["seconds"], hardware)
    proven = "no split of this program costs less" if plan.gap <= _PROVEN_GAP else "no split was found that costs less"
    return f": {what}: by {hardware.name}'s rates repeating {_flops_text(found['flops'])} costs {costs}, and {proven}"


def _flops_text(flops: float) -> str:
    """Operations in the unit that fits.

    >>> _flops_text(1.23e9), _flops_text(900)
    ('1.2 GFLOP', '900 FLOP')
    """
    units = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"))
    return next((f"{flops / size:,.1f} {unit}" for size, unit in units if flops >= size), f"{flops:.0f} FLOP")
