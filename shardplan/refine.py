"""Refining: plans made in several ways, each compiled, and the best by what the compiler made of it.

The cost model can be wrong about a program. ``refine=n`` plans it n times: as asked, for the other objective, without
islands, with less memory, and in combinations of these. Each plan is compiled for the target once; among those whose
compiled peak keeps within the limit, the one that sends least is kept (or takes least time, for that objective).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, islice
from typing import Any

from shardplan.audit import audit
from shardplan.compiled_overlap import compiled_time
from shardplan.errors import InfeasibleError, ShardplanError
from shardplan.hardware import load
from shardplan.options import Options
from shardplan.plan import Plan
from shardplan.target import gpu_mesh, targets

# The part of the first plan's peak that a plan "with less memory" may need.
_LESS_MEMORY = 0.9


def refined(make: Callable[[Options], Plan], options: Options) -> Plan:
    """The best of ``options.refine`` plans by their compiled programs; ``make`` plans for options.

    ``statistics["refined"]`` of the plan has a row for each: how it was made, its predicted and compiled bytes and
    peak, compiled seconds, and whether it was kept.

    Raises TargetNotInstalledError where the extra ``audit`` is missing, before any work starts.
    """
    target = _target(options)
    gpu_mesh(target, (1,), ("x",))
    first = make(replace(options, refine=1))
    limit = options.memory_limit or load(options.hardware or "h100").memory_bytes
    plans: list[Plan] = []
    rows: list[dict[str, Any]] = []
    for name, changed in islice(_ways(options, first), options.refine):
        row: dict[str, Any] = {"way": name, "kept": False}
        rows.append(row)
        try:
            plan = first if name == "as asked" else make(changed)
        except InfeasibleError:
            row["result"] = "infeasible"
            continue
        if any(_same(plan, other) for other in plans):
            row["result"] = "the same plan as before"
            continue
        row |= _measured(plan, target)
        plans.append(plan)
        row["result"] = "compiled" if row["compiled_peak_bytes"] <= limit else "compiled, above the limit"
    compiled = [row for row in rows if "compiled_bytes" in row]
    within = [row for row in compiled if row["result"] == "compiled"] or compiled
    measure = "compiled_seconds" if options.objective == "time" else "compiled_bytes"
    best = min(within, key=lambda row: (row[measure], row["compiled_peak_bytes"]))
    best["kept"] = True
    chosen = plans[next(n for n, row in enumerate(compiled) if row is best)]
    return replace(chosen, statistics={**chosen.statistics, "refined": rows})


def _ways(options: Options, first: Plan) -> Iterator[tuple[str, Options]]:
    """Names and options of the ways to plan, the simplest first."""
    other = "bytes" if options.objective == "time" else "time"
    less = _LESS_MEMORY * min(first.peak_bytes, options.memory_limit or first.peak_bytes)
    changes: list[tuple[str, dict[str, Any]]] = [(f"objective {other}", {"objective": other})]
    if options.reduce_dtype is None and options.islands:
        changes.append(("no islands", {"islands": False}))
    changes.append((f"peak below {less / 1e6:.1f} MB", {"memory_limit": less}))
    yield "as asked", options
    for count in range(1, len(changes) + 1):
        for chosen in combinations(changes, count):
            merged = {key: value for _, change in chosen for key, value in change.items()}
            yield ", ".join(name for name, _ in chosen), replace(options, refine=1, **merged)


def _target(options: Options) -> str:
    """The GPU type to compile for: the one that the hardware profile is named after, where there is one."""
    name = load(options.hardware or "h100").name
    return name if name in targets() else "h100"


def _same(plan: Plan, other: Plan) -> bool:
    same_variables = plan.recipe.network == other.recipe.network and plan.recipe.choices == other.recipe.choices
    return same_variables and plan.collectives == other.collectives


def _measured(plan: Plan, target: str) -> dict[str, Any]:
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
