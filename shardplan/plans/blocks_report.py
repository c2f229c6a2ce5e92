"""What a plan says of what it runs in blocks."""

from __future__ import annotations

from shardplan.common.tables import size_text
from shardplan.plans.plan_data import PlanData

_LOOPS = 3
"""The loops that are named."""


def blocks_text(plan: PlanData) -> str:
    """One line: what runs in how many blocks of which index, what that frees, and what it adds."""
    rows = plan.blocks
    if not rows:
        return ""
    said = [
        f"{row['operations']} operations, most in `{row['module']}`, in {' x '.join(map(str, row['count']))} blocks of "
        f"`{row['index']}`"
        for row in rows[:_LOOPS]
    ]
    if len(rows) > _LOOPS:
        said.append(f"{len(rows) - _LOOPS} more loops")
    freed, seconds = (sum(row[name] or 0.0 for row in rows) for name in ("bytes", "seconds"))
    gain = f" {size_text(freed)} per device less, for about {1e3 * seconds:,.3f} ms of work." if freed else ""
    remarks = "".join(f" {remark}." for remark in dict.fromkeys(row["remark"] for row in rows if row.get("remark")))
    return f"blocks: {'; '.join(said)}.{gain}{remarks} Sums over blocks are in another order than the step's own"
