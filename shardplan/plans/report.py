"""The printed report of a plan: its evidence, its collectives, and the layouts of its arguments in groups.

Arguments with equal layouts whose paths only differ in numbers are one row. `*` stands for the numbers:

>>> glob_of("0/params/layer_11/kernel")
'0/params/layer_*/kernel'
"""

from __future__ import annotations

import html
import math
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from jax.sharding import PartitionSpec

from shardplan.common.tables import html_table, size_cell, size_text, text_table
from shardplan.hardware import load
from shardplan.layout.collectives import CollectiveKind
from shardplan.layout.layout import axes_of
from shardplan.layout.objectives import OBJECTIVES
from shardplan.plans.blocks_report import blocks_text
from shardplan.plans.plan_data import PlanData, PlannedArgument
from shardplan.plans.recomputed_report import offloaded_text, recomputed_text
from shardplan.plans.repeated_work_report import repeated_text

_MAX_ROWS = 40
"""The most rows of a table of layouts. The report counts the others."""

_MAX_BLOCKS = 16
"""The most blocks in the drawing of a dimension."""

_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")


@dataclass(frozen=True, slots=True)
class LayoutGroup:
    """Arguments of equal shape, dtype, memory kind and layout whose paths match one glob.

    ``also`` are the globs of further such tensors: a parameter's moments in the optimizer's state.
    ``bytes_per_device`` are the bytes of all of them on one device.
    """

    pattern: str
    also: tuple[str, ...]
    paths: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    memory_kind: str | None
    spec: PartitionSpec
    bytes_per_device: float

    @property
    def tensor(self) -> str:
        """Type and shape, with the mesh axes after the dimensions that they split: ``float32[64/data, 256]``. Memory
        other than the devices' is named: ``float32<pinned_host>[64]``."""
        kind = f"<{self.memory_kind}>" if self.memory_kind else ""
        return f"{self.dtype}{kind}[{sizes_text(self.shape, self.spec)}]"


def glob_of(path: str) -> str:
    """A path with `*` for every number after its first component, which is an argument's position."""
    first, *rest = path.split("/")
    return "/".join([first, *(re.sub(r"\d+", "*", component) for component in rest)])


def sizes_text(shape: tuple[int, ...], spec: PartitionSpec) -> str:
    """A shape with the mesh axes that split its dimensions.

    >>> sizes_text((64, 256), PartitionSpec(None, ("data", "model")))
    '64, 256/data/model'
    """
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    return ", ".join("/".join([str(size), *axes_of(entry)]) for size, entry in zip(shape, entries, strict=True))


def bytes_on_device(argument: PlannedArgument, mesh_axes: dict[str, int]) -> float:
    """The bytes of an argument on one device."""
    return argument.total_bytes / prod(mesh_axes[axis] for entry in argument.spec for axis in axes_of(entry))


def layout_groups(plan: PlanData) -> list[LayoutGroup]:
    """The arguments in groups, in the order of their first members."""
    mesh_axes = plan.mesh_axes
    globs: dict[tuple[str, Any], list[PlannedArgument]] = {}
    for argument in plan.arguments:
        key = (argument.shape, argument.dtype, argument.memory_kind, tuple(argument.spec))
        globs.setdefault((glob_of(argument.path), key), []).append(argument)
    homes = _main_globs(list(globs))
    found = []
    for home, others in homes.items():
        members = [member for one in (home, *others) for member in globs[one]]
        first = members[0]
        found.append(
            LayoutGroup(
                pattern=first.path if len(globs[home]) == 1 else home[0],
                also=tuple(_place(other[0], home[0]) for other in others),
                paths=tuple(member.path for member in members),
                shape=first.shape,
                dtype=first.dtype,
                memory_kind=first.memory_kind,
                spec=first.spec,
                bytes_per_device=sum(bytes_on_device(member, mesh_axes) for member in members),
            )
        )
    return found


def _main_globs(globs: list[tuple[str, Any]]) -> dict[tuple[str, Any], list[tuple[str, Any]]]:
    """Globs, with the further globs of the same tensors that have their end, except for the first two components."""
    shortest_first = sorted(globs, key=lambda one: one[0].count("/"))
    by_tail: dict[Any, tuple[str, Any]] = {}
    home_of = {}
    for one in shortest_first:
        parts = one[0].split("/")
        tails = [tuple(parts[start:]) for start in range(2, len(parts))]
        home_of[one] = next(
            (by_tail[parts[0], tail, one[1]] for tail in tails if (parts[0], tail, one[1]) in by_tail), one
        )
        if home_of[one] == one and len(parts) > 2:
            by_tail.setdefault((parts[0], tails[0], one[1]), one)
    homes: dict[tuple[str, Any], list[tuple[str, Any]]] = {one: [] for one in globs if home_of[one] == one}
    for one in globs:
        if home_of[one] != one:
            homes[home_of[one]].append(one)
    return homes


def _place(pattern: str, home: str) -> str:
    """The start of a glob before the end that it shares with its home.

    >>> _place("0/opt_state/*/mu/layer_*/kernel", "0/params/layer_*/kernel")
    'opt_state/*/mu'
    """
    shared = home.count("/") - 1
    return "/".join(pattern.split("/")[1:-shared])


def planned_traffic(plan: PlanData) -> dict[tuple[str, tuple[str, ...]], tuple[int, float]]:
    """Times and bytes that one device sends per step, by kind of collective and mesh axes, most bytes first."""
    found: dict[tuple[str, tuple[str, ...]], tuple[int, float]] = {}
    for collective in plan.collectives:
        key = (collective.kind, collective.axes)
        times, sent = found.get(key, (0, 0.0))
        found[key] = times + collective.times, sent + collective.bytes * collective.times
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def objective_text(plan: PlanData, amount: float) -> str:
    """An amount of the plan's objective in its unit."""
    return OBJECTIVES[plan.recipe.options.objective].text(amount)


def above_text(objective: float, lower_bound: float) -> str:
    """How far a cost is above the optimum at most, as a share of the lower bound.

    >>> above_text(1.5, 1.0), above_text(1.0, 0.0)
    ('at most 50.0000 % above the optimum of the cost model', 'above a bound of 0')
    """
    above = above_share(objective, lower_bound)
    return "above a bound of 0" if above is None else f"at most {100 * above:.4f} % above the optimum of the cost model"


def above_share(objective: float, lower_bound: float) -> float | None:
    """The same as a number. None for a bound of 0, and without one."""
    if objective <= lower_bound:
        return 0.0
    return (objective - lower_bound) / lower_bound if 0 < lower_bound < math.inf else None


def evidence(plan: PlanData) -> str:
    """One line: the communication bytes, and the gap to the optimum."""
    sent = f"{size_text(plan.communication_bytes)} sent per device and step"
    if plan.lower_bound == float("-inf"):
        return f"{sent}; objective {objective_text(plan, plan.objective)}, without a bound"
    share = above_text(plan.objective, plan.lower_bound)
    return f"{sent}; objective {objective_text(plan, plan.objective)}, {share}"


def links_text(plan: PlanData) -> str:
    """One line: the weights of bytes over links slower than the fastest one of the mesh."""
    options = plan.recipe.options
    if OBJECTIVES[options.objective].counts_time or plan.device_count == 1:
        return ""
    hardware = load(options.hardware or "h100")
    links = {axis: hardware.link(axis, plan.mesh_axes) for axis, size in plan.mesh_axes.items() if size > 1}
    rates = {axis: link.bytes_per_second for axis, link in links.items()}
    slower = {axis: max(rates.values()) / rate for axis, rate in rates.items() if rate < max(rates.values())}
    said = " and ".join(f"over `{axis}` {times:.3g} times" for axis, times in slower.items())
    return f"by {hardware.name}'s links a byte counts {said}; bytes sent are the plain sum" if said else ""


def time_text(plan: PlanData) -> str:
    """One line: the parts of a step's time, for the objective "time" and a plan with its program."""
    if not OBJECTIVES[plan.recipe.options.objective].counts_time or plan.built is None:
        return ""
    step = plan.step_time
    return (
        f"{1e3 * step.work:,.3f} ms of work; of collectives, {1e3 * step.exposed:,.3f} ms make the step longer and "
        f"{1e3 * step.hidden:,.3f} ms hide behind work"
    )


def memory_text(plan: PlanData) -> str:
    """One line: the peak memory of one device, and its host memory."""
    mesh_axes = plan.mesh_axes
    arguments = sum(bytes_on_device(one, mesh_axes) for one in plan.arguments if one.memory_kind is None)
    peak = f", {size_text(plan.peak_bytes)} at the peak ({_peak_source(plan)})" if plan.peak_bytes else ""
    host = f"; {size_text(plan.host_bytes)} per device in host memory" if plan.host_bytes else ""
    return f"{size_text(arguments)} of arguments per device{peak}{host}"


def _peak_source(plan: PlanData) -> str:
    """The source of the peak's figure."""
    if plan.verified is None:
        return "predicted"
    rounds = len(plan.verified["rounds"])
    tried = f" after {rounds} plans" if rounds > 1 else ""
    return f"compiled for {plan.verified['target']} by jaxlib {plan.verified['jaxlib']}{tried}"


def pins_text(plan: PlanData) -> str:
    """One line: the price of the pins, if any, and the pinned arguments that are gathered all the same."""
    price = plan.statistics.get("pins")
    if price is None:
        return ""
    sent = price["communication_bytes"]
    more = f"{size_text(abs(sent))} {'less' if sent < 0 else 'more'} are sent than without them"
    text = f"pins cost {objective_text(plan, price['objective'])} of the objective; {more}"
    gathered = _gathered_batches(plan)
    sizes = ", ".join(f"`{path}` ({size_text(amount)})" for path, amount in list(gathered.items())[:3])
    others = f" and {len(gathered) - 3} more" if len(gathered) > 3 else ""
    return f"{text}; the step gathers {sizes}{others}, since splitting its work costs more" if gathered else text


def _gathered_batches(plan: PlanData) -> dict[str, float]:
    """The bytes sent to gather pinned arguments that are no state of the step, by their paths."""
    pins = plan.recipe.options.pins or {}
    pinned = {
        one.path for one in plan.arguments if not one.fed_back and any(fnmatchcase(one.path, name) for name in pins)
    }
    found: dict[str, float] = {}
    for sent in plan.collectives:
        if sent.kind == CollectiveKind.ALL_GATHER.value and sent.tensor in pinned:
            found[sent.tensor] = found.get(sent.tensor, 0.0) + sent.bytes * sent.times
    return found


def mesh_text(mesh_axes: dict[str, int]) -> str:
    """``data=2, model=4``."""
    return ", ".join(f"{name}={size}" for name, size in mesh_axes.items())


def plan_record(plan: PlanData) -> dict[str, Any]:
    """A plan as plain data for JSON: bytes per device and step, layouts as entries per dimension."""
    return {
        "mesh": plan.mesh_axes,
        "communication_bytes": plan.communication_bytes,
        "objective": plan.objective,
        "lower_bound": plan.lower_bound if math.isfinite(plan.lower_bound) else None,
        "gap": plan.gap if math.isfinite(plan.gap) else None,
        "peak_bytes": float(plan.peak_bytes),
        "host_bytes": float(plan.host_bytes),
        "verified": plan.verified,
        "recomputed": list(plan.recomputed),
        "offloaded": list(plan.offloaded),
        "blocks": list(plan.blocks),
        **_time_record(plan),
        "collectives": [
            {"kind": kind, "axes": axes, "times": times, "bytes": sent}
            for (kind, axes), (times, sent) in planned_traffic(plan).items()
        ],
        "layouts": {argument.path: list(argument.spec) for argument in plan.arguments},
        **({"pins": plan.statistics["pins"]} if "pins" in plan.statistics else {}),
        **({"refined": plan.statistics["refined"]} if "refined" in plan.statistics else {}),
    }


def _time_record(plan: PlanData) -> dict[str, Any]:
    """The seconds of a step, for the objective "time"."""
    if not time_text(plan):
        return {}
    step = plan.step_time
    parts = {"work": step.work, "exposed": step.exposed, "hidden": step.hidden}
    return {"seconds": {"step": step.seconds, **parts}}


_REFINED_HEADER = ("way", "predicted MB", "compiled MB", "compiled peak MB", "ms", "result")
_TRAFFIC_HEADER = ("collective", "mesh axes", "times", "MB sent")
_MESH_HEADER = ("mesh", "MB sent", "objective", "at least")
_LAYOUT_HEADER = ("arguments", "tensor", "layout", "tensors", "MB per device", "also in")


def results_text(plan: PlanData) -> str:
    """The number of results with requested layouts."""
    held = len(plan.recipe.options.results or {})
    return (
        f"{held} results have the layouts of their types on axes of type Explicit, or of out_shardings" if held else ""
    )


def plan_line(plan: PlanData) -> str:
    """The plan in a few words, for ``repr``."""
    name = f" of {plan.built.program.name}" if plan.built is not None else ""
    return f"Plan{name} over mesh ({mesh_text(plan.mesh_axes)}): {evidence(plan)}"


def donatable_bytes(plan: PlanData) -> dict[int | str, float]:
    """Bytes per device of undonated arguments that results replace, by position or name in a call."""
    found: dict[int | str, float] = {}
    static = plan.recipe.options.static
    for one in plan.arguments:
        first = one.path.split("/")[0]
        place: int | str = int(first) if first.isdigit() else first
        if not one.fed_back or one.is_ref or place in plan.donated or one.memory_kind is not None:
            continue
        if isinstance(place, int):
            place = [n for n in range(place + len(static) + 1) if n not in static][place]
        found[place] = found.get(place, 0.0) + bytes_on_device(one, plan.mesh_axes)
    return found


def donating_text(plan: PlanData) -> str:
    """The memory that a donation of the state would save, if it is not donated."""
    saved = donatable_bytes(plan)
    if not sum(saved.values()):
        return ""
    positions, names = [one for one in saved if isinstance(one, int)], [one for one in saved if isinstance(one, str)]
    said = [
        f"{option}={places[0]!r}" if len(places) == 1 else f"{option}={tuple(places)!r}"
        for option, places in (("donate_argnums", positions), ("donate_argnames", names))
        if places
    ]
    size = size_text(sum(saved.values()))
    return f"{' and '.join(said)} would save up to {size}: results replace what comes in there"


LINE_TEXTS = (
    links_text,
    time_text,
    pins_text,
    results_text,
    memory_text,
    recomputed_text,
    offloaded_text,
    blocks_text,
    donating_text,
)
"""The texts of a plan of one line each. An empty text has no line."""


def plan_text(plan: PlanData) -> str:
    """The text of ``print(plan)``."""
    lines = [
        f"Plan over mesh ({mesh_text(plan.mesh_axes)}), {plan.device_count} devices{repeated_text(plan)}",
        f"  {evidence(plan)}",
        *(f"  {text}" for text in (said(plan) for said in LINE_TEXTS) if text),
        *(
            []
            if "meshes" not in plan.statistics
            else ["", text_table(_MESH_HEADER, _mesh_rows(plan), numbers=(1, 2, 3))]
        ),
        *(
            []
            if "refined" not in plan.statistics
            else ["", text_table(_REFINED_HEADER, _refined_rows(plan), numbers=(1, 2, 3, 4))]
        ),
        "",
        text_table(_TRAFFIC_HEADER, _traffic_rows(plan), numbers=(2, 3)),
        "",
        text_table(_LAYOUT_HEADER, _layout_rows(layout_groups(plan)), numbers=(3, 4)),
    ]
    return "\n".join(lines)


def plan_html(plan: PlanData) -> str:
    """The report for a notebook, with a drawing of the blocks of each layout."""
    groups = layout_groups(plan)
    drawn = "".join(
        f'<div style="display:inline-block;margin:4px 10px;vertical-align:top">{_grid(group, plan.mesh_axes)}'
        f"<div><code>{html.escape(group.pattern)}</code><br>{html.escape(group.tensor)}</div></div>"
        for group in groups[:_MAX_ROWS]
        if group.shape
    )
    title = f"<b>Plan over mesh ({html.escape(mesh_text(plan.mesh_axes))})</b>{html.escape(repeated_text(plan))}"
    said = "<br>".join(html.escape(text) for text in (one(plan) for one in LINE_TEXTS) if text)
    return (
        f"<div>{title}<br>{html.escape(evidence(plan))}<br>{said}"
        f"{html_table(_TRAFFIC_HEADER, _traffic_rows(plan), numbers=(2, 3))}"
        f"{html_table(_LAYOUT_HEADER, _layout_rows(groups), numbers=(3, 4))}<div>{drawn}</div></div>"
    )


def _traffic_rows(plan: PlanData) -> list[tuple[str, ...]]:
    traffic = planned_traffic(plan)
    rows = [(kind, ", ".join(axes), str(times), size_cell(sent)) for (kind, axes), (times, sent) in traffic.items()]
    return [*rows, ("total", "", str(sum(t for t, _ in traffic.values())), size_cell(plan.communication_bytes))]


def _mesh_rows(plan: PlanData) -> list[tuple[str, ...]]:
    """The compared meshes. Those that cannot be the best only have a bound."""

    def text(amount: float | None) -> str:
        return "" if amount is None else objective_text(plan, amount) if math.isfinite(amount) else "does not fit"

    return [
        (
            mesh_text(row["mesh"]),
            size_cell(row["sent"]) if row.get("sent") is not None else "",
            text(row["objective"]),
            text(row["lower_bound"]),
        )
        for row in plan.statistics["meshes"]
    ]


def _refined_rows(plan: PlanData) -> list[tuple[str, ...]]:
    """The planned and compiled variants of the step, with the kept one."""
    rows = []
    for row in plan.statistics["refined"]:
        sizes = [row.get(name) for name in ("predicted_bytes", "compiled_bytes", "compiled_peak_bytes")]
        cells = ["" if size is None else size_cell(size) for size in sizes]
        seconds = f"{1e3 * row['compiled_seconds']:.2f}" if "compiled_seconds" in row else ""
        rows.append((row["way"], *cells, seconds, "kept" if row["kept"] else row["result"]))
    return rows


def _layout_rows(groups: list[LayoutGroup]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (g.pattern, g.tensor, str(g.spec), str(len(g.paths)), size_cell(g.bytes_per_device), ", ".join(g.also))
        for g in groups[:_MAX_ROWS]
    ]
    if len(groups) > _MAX_ROWS:
        rest = groups[_MAX_ROWS:]
        held = size_cell(sum(group.bytes_per_device for group in rest))
        rows.append((f"and {len(rest)} more", "", "", str(sum(len(group.paths) for group in rest)), held, ""))
    return rows


def _grid(group: LayoutGroup, mesh_axes: dict[str, int]) -> str:
    """The first two split dimensions (or the first ones) as rows and columns of coloured blocks."""
    entries = [*group.spec, *[None] * (len(group.shape) - len(group.spec))]
    blocks = [prod(mesh_axes[axis] for axis in axes_of(entry)) for entry in entries]
    split = [dim for dim, count in enumerate(blocks) if count > 1][:2]
    whole = [dim for dim in range(len(blocks)) if dim not in split]
    shown = [blocks[dim] for dim in sorted([*split, *whole][:2])]
    rows, columns = (min(count, _MAX_BLOCKS) for count in (shown if len(shown) == 2 else (1, *shown)))
    size = f"width:{max(4, 64 // columns)}px;height:{max(4, 40 // rows)}px"

    def cell(block: int) -> str:
        colour = _COLOURS[block % len(_COLOURS)]
        return f'<td style="{size};padding:0;border:1px solid #fff;background:{colour}"></td>'

    lines = ("".join(cell(row * columns + column) for column in range(columns)) for row in range(rows))
    return f'<table style="border-collapse:collapse">{"".join(f"<tr>{line}</tr>" for line in lines)}</table>'
