"""The difference of two plans."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from math import isfinite

from jax.sharding import PartitionSpec

from shardplan.common.tables import size_cell, text_table
from shardplan.pages.page import write_page
from shardplan.plans.diff_page import diff_page
from shardplan.plans.plan_data import PlanData
from shardplan.plans.report import glob_of, mesh_text, objective_text, planned_traffic

_ABSENT = (0, 0.0)


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """The difference of two plans. It prints, and is false for equal plans.

    Attributes:
        layouts: argument path to its ``PartitionSpec`` in either plan, where they differ. None for a plan without the
            argument.
        traffic: kind and mesh axes to the bytes that one device sends in either plan, where they differ.
        measures: name to the figures of either plan, as text, where they differ.
        programs: the names and fingerprints of the planned programs, where these differ.
    """

    layouts: dict[str, tuple[PartitionSpec | None, PartitionSpec | None]]
    traffic: dict[tuple[str, tuple[str, ...]], tuple[float, float]]
    measures: dict[str, tuple[str, str]]
    programs: tuple[str, str] | None = None
    plans: tuple[PlanData, PlanData] | None = field(default=None, repr=False, compare=False)

    def __bool__(self) -> bool:
        return bool(self.layouts or self.traffic or self.measures or self.programs)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes both plans as one HTML page: figures, collectives, layouts, and memory over the step, side by side.

        The memory needs plans with their programs. Raises ArgumentError for a path that cannot be written.
        """
        assert self.plans is not None
        write_page(path, diff_page(self.plans, [self._programs_text()] if self.programs else []))

    def _programs_text(self) -> str:
        one, other = self.programs or ("", "")
        return (
            f"The plans are of two programs, {one} and {other}: arguments are compared by their paths, collectives by "
            "kind, mesh axes, tensor and source line."
        )

    def __str__(self) -> str:
        if not self:
            return "the plans are equal"
        tables = [self._programs_text()] if self.programs else []
        if self.measures:
            tables.append(text_table(("", "this", "other"), [(k, *pair) for k, pair in self.measures.items()], (1, 2)))
        if self.traffic:
            rows = [
                (kind, ", ".join(axes), size_cell(one), size_cell(other), f"{(other - one) / 1e6:+,.1f}")
                for (kind, axes), (one, other) in self.traffic.items()
            ]
            header = ("collective", "mesh axes", "this MB", "other MB", "difference")
            tables.append(text_table(header, rows, numbers=(2, 3, 4)))
        if self.layouts:
            tables.append(text_table(("arguments", "this", "other", "tensors"), self._layout_rows(), numbers=(3,)))
        return "\n\n".join(tables)

    def _layout_rows(self) -> list[tuple[str, ...]]:
        groups: dict[tuple[str, str, str], list[str]] = {}
        for path, (one, other) in self.layouts.items():
            groups.setdefault((glob_of(path), _text(one), _text(other)), []).append(path)
        return [
            (paths[0] if len(paths) == 1 else pattern, one, other, str(len(paths)))
            for (pattern, one, other), paths in groups.items()
        ]


def compare_plans(one: PlanData, other: PlanData) -> PlanDifference:
    """The difference of ``other`` from ``one``."""
    paths = dict.fromkeys((*one.layouts, *other.layouts))
    layouts = {path: (one.layouts.get(path), other.layouts.get(path)) for path in paths}
    sent = planned_traffic(one), planned_traffic(other)
    kinds = dict.fromkeys((*sent[0], *sent[1]))
    traffic = {key: (sent[0].get(key, _ABSENT)[1], sent[1].get(key, _ABSENT)[1]) for key in kinds}
    measures = {
        name: (first, second)
        for name, first, second in zip(_measures(one), _measures(one).values(), _measures(other).values(), strict=True)
        if first != second
    }
    return PlanDifference(
        {path: pair for path, pair in layouts.items() if pair[0] != pair[1]},
        {key: pair for key, pair in traffic.items() if abs(pair[0] - pair[1]) > 0.5},
        measures,
        _programs(one, other),
        (one, other),
    )


def _programs(one: PlanData, other: PlanData) -> tuple[str, str] | None:
    """The names of two programs with the beginnings of their fingerprints, None for the same program."""
    if one.fingerprint == other.fingerprint:
        return None
    named = [f"`{plan.built.program.name}` " if plan.built is not None else "" for plan in (one, other)]
    return f"{named[0]}({one.fingerprint[:12]})", f"{named[1]}({other.fingerprint[:12]})"


def _measures(plan: PlanData) -> dict[str, str]:
    return {
        "mesh": mesh_text(plan.mesh_axes),
        "MB sent": size_cell(plan.communication_bytes),
        "objective": objective_text(plan, plan.objective),
        "lower bound": objective_text(plan, plan.lower_bound) if isfinite(plan.lower_bound) else "none",
        "peak MB": size_cell(plan.peak_bytes),
    }


def _text(spec: PartitionSpec | None) -> str:
    return "no such argument" if spec is None else str(spec)
