"""The table of a plan's collectives, with those of equal layers in one row."""

from __future__ import annotations

from shardplan.common.checks import check_count
from shardplan.common.tables import size_cell, text_table
from shardplan.plans.plan_data import PlanData, PlannedCollective
from shardplan.plans.report import glob_of

Group = tuple[str, str, str, str, str]
"""Kind, mesh axes, tensor, operation and source line of equal collectives."""

_HEADER = ("collective", "mesh axes", "tensor", "operation", "source", "times", "MB sent", "share")


def collectives_table(plan: PlanData, limit: int) -> str:
    """The text of ``Plan.table``."""
    check_count("limit", limit)
    groups: dict[Group, list[PlannedCollective]] = {}
    for collective in plan.collectives:
        groups.setdefault(_group(collective), []).append(collective)
    total = plan.communication_bytes
    sent = {key: sum(c.bytes * c.times for c in members) for key, members in groups.items()}
    rows = []
    for key in sorted(groups, key=lambda key: -sent[key]):
        members = groups[key]
        names = {glob_of(c.tensor) for c in members}
        tensor = (
            members[0].tensor if len(members) == 1 else names.pop() if len(names) == 1 else f"{len(members)} values"
        )
        share = f"{100 * sent[key] / total:.1f} %" if total else ""
        times = str(sum(c.times for c in members))
        rows.append((key[0], key[1], tensor, key[3], key[4], times, size_cell(sent[key]), share))
    rest = rows[limit:]
    rows = rows[:limit]
    if rest:
        left = total - sum(sorted(sent.values(), reverse=True)[:limit])
        share = f"{100 * left / total:.1f} %" if total else ""
        rows.append((f"and {len(rest)} more", "", "", "", "", "", size_cell(left), share))
    times = str(sum(c.times for c in plan.collectives))
    rows.append(("total", "", "", "", "", times, size_cell(total), "100.0 %" if total else ""))
    return text_table(_HEADER, rows, numbers=(5, 6, 7))


def grouped_collectives(plan: PlanData) -> dict[Group, list[float]]:
    """The times and the bytes of a plan's collectives, those of equal layers together."""
    found: dict[Group, list[float]] = {}
    for one in plan.collectives:
        sums = found.setdefault(_group(one), [0.0, 0.0])
        sums[0] += one.times
        sums[1] += one.bytes * one.times
    return found


def _group(collective: PlannedCollective) -> Group:
    """What collectives of equal layers have in common."""
    name = collective.tensor
    tensor = "value" if name.startswith("value ") else glob_of(name)
    primitive = collective.operation.split(" ", 1)[-1]
    return collective.kind, ", ".join(collective.axes), tensor, primitive, collective.source
