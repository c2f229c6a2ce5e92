"""The page of two plans: their figures, collectives, layouts and memory, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardplan.layout.layout import axes_of
from shardplan.memory import lifetimes_of
from shardplan.pages.sides import Sides
from shardplan.plans.collectives_table import Group, grouped_collectives
from shardplan.plans.pipeline import donated_leaves, memory_limit_of
from shardplan.plans.plan_data import PlanData, PlannedArgument
from shardplan.plans.report import above_share, bytes_on_device, glob_of, mesh_text, objective_text

Pair = tuple[PlanData, PlanData]


def diff_page(plans: Pair, warnings: list[str]) -> str:
    """The page of ``PlanDifference.to_html``."""
    named = dict.fromkeys(plan.built.program.name for plan in plans if plan.built is not None)
    sides = Sides(f"Two plans of {' and '.join(named) or 'a step'}", ("this", "other"), [p.mesh_axes for p in plans])
    sides.warnings = warnings
    _add_figures(sides, plans)
    if all(plan.built is not None for plan in plans):
        note = "Predicted bytes on one device, each over the schedule of its own plan."
        sides.curves("Memory over the step", note, [profile_of(plan) for plan in plans])
    else:
        sides.texts.append("A plan from a file has no memory over the step before plan.bind(fn, *args).")
    sent = [grouped_collectives(plan) for plan in plans]
    _add_kinds(sides, sent)
    _add_collectives(sides, sent)
    _add_layouts(sides, plans)
    return sides.text('plan.diff(other).to_html("diff.html")')


def profile_of(plan: PlanData) -> NDArray[np.float64]:
    """The predicted bytes on one device at each position of the schedule."""
    schedule = plan.schedule
    lifetimes = lifetimes_of(schedule, donated_leaves(plan.program, plan.donated))
    return np.asarray(lifetimes.profile(schedule.problem.encode(schedule.assignment)), dtype=np.float64)


def _add_figures(sides: Sides, plans: Pair) -> None:
    def row(label: str, kind: str, of: Callable[[PlanData], object]) -> None:
        sides.figure(label, kind, of(plans[0]), of(plans[1]))

    limits = [float(memory_limit_of(plan.recipe.options)) for plan in plans]
    sides.limit = limits[0] if limits[0] == limits[1] else None
    row("mesh", "text", lambda plan: mesh_text(plan.mesh_axes))
    row("sent per device and step", "bytes", lambda plan: plan.communication_bytes)
    row("objective", "text", lambda plan: objective_text(plan, plan.objective))
    row("above the optimum at most", "percent", lambda plan: above_share(plan.objective, plan.lower_bound))
    row("peak per device", "bytes", lambda plan: float(plan.peak_bytes))
    sides.figure("memory limit", "bytes", *limits)
    if all(plan.built is not None for plan in plans):
        row("step by the planner's model", "seconds", lambda plan: plan.step_time.seconds)


def _add_kinds(sides: Sides, sent: list[dict[Group, list[float]]]) -> None:
    kinds: dict[tuple[str, str], list[float]] = {}
    for number, groups in enumerate(sent):
        for (kind, axes, *_), (_, size) in groups.items():
            kinds.setdefault((kind, axes), [0.0, 0.0])[number] += size
    columns = [("collective", "text"), ("mesh axes", "text"), *_BOTH]
    rows: list[list[Any]] = [[*key, one, other, other - one] for key, (one, other) in kinds.items()]
    rows.sort(key=lambda row: -max(row[2], row[3]))
    sides.table("Kinds of collectives", columns, rows, bars=[2, 3], total=True, nothing="Neither plan sends anything.")


_BOTH = [("this", "bytes"), ("other", "bytes"), ("difference", "signed")]


def _add_collectives(sides: Sides, sent: list[dict[Group, list[float]]]) -> None:
    keys = dict.fromkeys((*sent[0], *sent[1]))
    nothing = [0.0, 0.0]
    rows: list[list[Any]] = [[*key, sent[0].get(key, nothing)[1], sent[1].get(key, nothing)[1]] for key in keys]
    different = [[*row, row[6] - row[5]] for row in rows if abs(row[6] - row[5]) > 0.5]
    names = ("collective", "mesh axes", "tensor", "operation", "source")
    note = f"{len(rows) - len(different)} of {len(rows)} rows are equal and left out. Equal layers are one row."
    sides.table(
        "Collectives that differ",
        [*((name, "text") for name in names), *_BOTH],
        sorted(different, key=lambda row: -abs(row[7])),
        bars=[5, 6],
        total=True,
        note=note,
        nothing="All collectives are equal.",
    )


def _add_layouts(sides: Sides, plans: Pair) -> None:
    found = [{one.path: one for one in plan.arguments} for plan in plans]
    groups: dict[tuple[object, ...], list[str]] = {}
    for path in dict.fromkeys((*found[0], *found[1])):
        one, other = found[0].get(path), found[1].get(path)
        if one is None or other is None or one.spec != other.spec or one.type_text != other.type_text:
            key = (glob_of(path), *(None if a is None else (a.type_text, a.spec) for a in (one, other)))
            groups.setdefault(key, []).append(path)
    rows: list[list[Any]] = []
    for paths in groups.values():
        held = [sum(_held(found[n], plans[n], path) for path in paths) for n in (0, 1)]
        cells = [_cell(sides, found[n].get(paths[0])) for n in (0, 1)]
        name = paths[0] if len(paths) == 1 else glob_of(paths[0])
        rows.append([name, len(paths), *cells, *held, held[1] - held[0]])
    kinds = [("this", "layout"), ("other", "layout"), *((f"{name}, per device", kind) for name, kind in _BOTH)]
    same = sum(path in found[0] for path in found[1]) - sum(map(len, groups.values()))
    sides.table(
        "Arguments with different layouts",
        [("arguments", "text"), ("tensors", "number"), *kinds],
        sorted(rows, key=lambda row: -max(row[4], row[5])),
        bars=[4, 5],
        note=f"{max(same, 0)} arguments have equal layouts and are left out.",
        nothing="All arguments have equal layouts.",
    )


def _held(arguments: Mapping[str, PlannedArgument], plan: PlanData, path: str) -> float:
    return bytes_on_device(arguments[path], plan.mesh_axes) if path in arguments else 0.0


def _cell(sides: Sides, argument: PlannedArgument | None) -> list[int] | None:
    if argument is None:
        return None
    dims = [axes_of(entry) for entry in argument.spec] + [()] * (len(argument.shape) - len(argument.spec))
    return sides.layout(argument.dtype, argument.shape, dims)
