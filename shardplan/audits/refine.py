"""Refinement: several plans of a program, each compiled, and the best by its compiled program.

The cost model can be wrong about a program. ``refine=n`` plans it n times: as asked, for the other objective, without
islands, with less memory, and in combinations of these. Each plan is compiled for the target once. Candidates are the
plans whose compiled peak is within the limit. The one that sends least is kept, or for the objective "time" the one
that takes least time. Of several that differ by less than a thousandth, it is the first with a true prediction.

While no compiled peak fits, the next plan has a limit lowered by the excess of the compiled peak. If none fits in the
end, the plan with the lowest peak is kept, with a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from shardplan.audits.audit import audit
from shardplan.audits.compiled_overlap import compiled_time
from shardplan.common.tables import size_text
from shardplan.compiled.target import gpu_mesh, targets
from shardplan.errors import InfeasibleError, ShardplanError, warn
from shardplan.hardware import load
from shardplan.layout.objectives import OBJECTIVES
from shardplan.options import Options
from shardplan.plans.plan_data import PlanData

# The limit of a plan "with less memory", as a share of the first plan's peak.
_LESS_MEMORY = 0.9

# The largest relative difference of compiled bytes (or seconds), and of prediction errors, of equally good plans.
_TIE_SHARE = 1e-3

# The factor by which a limit is lowered in addition to the excess of a compiled peak.
_MARGIN = 0.995


def refined(make: Callable[[Options], PlanData], options: Options) -> PlanData:
    """The best of ``options.refine`` plans by their compiled programs. ``make`` plans for options.

    ``statistics["refined"]`` of the plan has a row for each: its variant, predicted and compiled bytes and peak,
    compiled seconds, and whether it was kept.

    Raises TargetNotInstalledError where the extra ``audit`` is missing, before any work starts.
    """
    target = _target(options)
    gpu_mesh(target, (1,), ("x",))
    limit = options.memory_limit or load(options.hardware or "h100").memory_bytes
    compared = _Compared(make, target, limit)
    first = make(replace(options, refine=1))
    compared.add("as asked", first)
    ways = _variants(options, first)
    while len(compared.rows) < options.refine:
        way = compared.tighter(options) or next(ways, None)
        if way is None:
            break
        compared.add(*way)
    measure = OBJECTIVES[options.objective].compiled_measure
    chosen = compared.best(measure)
    return replace(chosen, statistics={**chosen.statistics, "refined": compared.rows})


@dataclass(slots=True)
class _Compared:
    """Plans with the figures of their compiled programs. ``rows`` also has infeasible and duplicate plans."""

    make: Callable[[Options], PlanData]
    target: str
    limit: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    plans: list[tuple[PlanData, dict[str, Any]]] = field(default_factory=list)
    tightest: float = float("inf")

    def add(self, name: str, way: PlanData | Options) -> None:
        """Plans a variant, unless it is a plan already, and compiles it."""
        row: dict[str, Any] = {"way": name, "kept": False}
        self.rows.append(row)
        try:
            plan = way if isinstance(way, PlanData) else self.make(way)
        except InfeasibleError:
            row["result"] = "infeasible"
            return
        if any(_same(plan, other) for other, _ in self.plans):
            row["result"] = "the same plan as before"
            return
        row |= _measured(plan, self.target)
        row["result"] = "compiled" if row["compiled_peak_bytes"] <= self.limit else "compiled, above the limit"
        self.plans.append((plan, row))

    def tighter(self, options: Options) -> tuple[str, Options] | None:
        """The variant with a limit lowered by the excess of compiled peaks. None where one fits, or once tried."""
        if any(row["result"] == "compiled" for _, row in self.plans) or self.rows[-1]["result"] == "infeasible":
            return None
        scales = [row["predicted_peak_bytes"] / row["compiled_peak_bytes"] for _, row in self.plans]
        allowed = _MARGIN * self.limit * min(scales)
        if allowed >= self.tightest:
            return None
        self.tightest = allowed
        return _peak_below(allowed), replace(options, refine=1, memory_limit=allowed)

    def best(self, measure: str) -> PlanData:
        """The plan to keep, marked in its row."""
        within = [one for one in self.plans if one[1]["result"] == "compiled"]
        if within:
            plan, row = _first_of_best(within, measure)
        else:
            plan, row = min(self.plans, key=lambda one: one[1]["compiled_peak_bytes"])
            warn(
                f"no plan's compiled peak keeps within {size_text(self.limit)} per device: the one that is kept "
                f"needs {size_text(row['compiled_peak_bytes'])}. Allow more ways (refine), or what makes it "
                "smaller: more devices, a smaller batch, jax.checkpoint."
            )
        row["kept"] = True
        return plan


def _first_of_best(plans: list[tuple[PlanData, dict[str, Any]]], measure: str) -> tuple[PlanData, dict[str, Any]]:
    """Of the plans with about the least compiled bytes, the first of those with about the smallest prediction error."""
    least = min(row[measure] for _, row in plans)
    tied = [one for one in plans if one[1][measure] <= (1 + _TIE_SHARE) * least]
    off = [abs(row["predicted_bytes"] - row["compiled_bytes"]) for _, row in tied]
    return next(
        one for one, by in zip(tied, off, strict=True) if by <= min(off) + _TIE_SHARE * one[1]["compiled_bytes"]
    )


def _variants(options: Options, first: PlanData) -> Iterator[tuple[str, Options]]:
    """Names and options of the further variants, the simplest first."""
    less = _LESS_MEMORY * min(first.peak_bytes, options.memory_limit or first.peak_bytes)
    others = [name for name in OBJECTIVES if name != options.objective]
    changes: list[tuple[str, dict[str, Any]]] = [(f"objective {one}", {"objective": one}) for one in others]
    if options.reduce_dtype is None and options.islands:
        changes.append(("no islands", {"islands": False}))
    changes.append((_peak_below(less), {"memory_limit": less}))
    for count in range(1, len(changes) + 1):
        for chosen in combinations(changes, count):
            merged = {key: value for _, change in chosen for key, value in change.items()}
            yield ", ".join(name for name, _ in chosen), replace(options, refine=1, **merged)


def _peak_below(limit: float) -> str:
    return f"peak below {limit / 1e6:.1f} MB"


def _target(options: Options) -> str:
    """The GPU type to compile for: that of the hardware profile's name, if there is one."""
    name = load(options.hardware or "h100").name
    return name if name in targets() else "h100"


def _same(plan: PlanData, other: PlanData) -> bool:
    same_variables = plan.recipe.network == other.recipe.network and plan.recipe.choices == other.recipe.choices
    return same_variables and plan.collectives == other.collectives


def _measured(plan: PlanData, target: str) -> dict[str, Any]:
    try:
        found = audit(plan, target)
    except ShardplanError as error:
        raise ShardplanError(f"refine compiles every plan for {target}, and one failed: {error}") from error
    return {
        "predicted_bytes": plan.communication_bytes,
        "compiled_bytes": found.compiled.communication_bytes,
        "predicted_peak_bytes": float(plan.peak_bytes),
        "compiled_peak_bytes": found.compiled.memory.peak,
        "compiled_seconds": compiled_time(plan, found.compiled).seconds,
        "compile_seconds": found.compiled.compile_seconds,
    }
