"""How much plans send beside what experts write by hand: `python -m benchmarks.quality`.

Every model on every mesh, without a memory limit and within 1.2 times the least possible, against the best of the
model's layouts by hand (`benchmarks.recipes`) that keeps within the same memory. `--list mlp` shows all of these.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.documents import Document, Table, progress
from benchmarks.measuring import LEAST, MESHES, PLAN, Compiled, Job, Measured, measured
from benchmarks.recipes import baselines_of
from shardplan.models import NAMES
from shardplan.tables import megabytes, text_table

TIGHT = 1.2
INTRODUCTION = (
    "Bytes that one device sends per step, read from the programs that XLA:GPU compiles for 8 H100: the plan beside "
    "the best layout by hand whose compiled peak keeps within the same memory. A tight limit is 1.2 times the least "
    "peak that the planner finds. `benchmarks/recipes.py` has the layouts by hand: data parallelism, ZeRO, Megatron "
    "with and without sequence parallelism, both axes at once, experts, spatial ones, as published."
)
HEADER = (
    *("model", "mesh", "limit GB", "predicted MB", "compiled MB", "gap"),
    *("best by hand MB", "which", "ratio", "peak GB: plan", "by hand"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A plan on a mesh within a limit, beside the best layout by hand."""

    mesh: str
    tight: bool
    cells: tuple[str, ...]
    ratio: float | None


def by_hand(model: str) -> dict[str, Measured]:
    """All layouts by hand of a model, by their titles."""
    return {b.title: measured(Job(model, "", b.title)) for b in baselines_of(model)}


def best_within(found: dict[str, Measured], limit: float | None) -> tuple[str, Compiled] | None:
    """The one that sends least, among those that keep within the limit."""
    fitting = {
        title: m.compiled for title, m in found.items() if m.compiled and (limit is None or m.compiled.peak <= limit)
    }
    if not fitting:
        return None
    title = min(fitting, key=lambda title: fitting[title].bytes_sent)
    return title, fitting[title]


def rows(model: str, meshes: Sequence[str]) -> Iterator[Row]:
    """The rows of a model."""
    hand = by_hand(model)
    for mesh in meshes:
        yield _row(model, mesh, None, hand)
        least = measured(Job(model, mesh, LEAST))
        if least.least_peak is None:
            yield Row(mesh, True, (model, mesh, "?", *[""] * 3, "", least.error, "", "", ""), None)
        else:
            yield _row(model, mesh, TIGHT * least.least_peak, hand)


def _row(model: str, mesh: str, limit: float | None, hand: dict[str, Measured]) -> Row:
    plan = measured(Job(model, mesh, PLAN, limit))
    start = (model, mesh, f"{limit / 1e9:.2f}" if limit else "none")
    if plan.planned is None or plan.compiled is None:
        return Row(mesh, limit is not None, (*start, *[""] * 3, "", plan.error, "", "", ""), None)
    cells = (megabytes(plan.planned.bytes_sent), megabytes(plan.compiled.bytes_sent), f"{100 * plan.planned.gap:.3f} %")
    peak = f"{plan.compiled.peak / 1e9:.2f}"
    best = best_within(hand, limit)
    if best is None:
        return Row(mesh, limit is not None, (*start, *cells, "", "none fits", "", peak, ""), None)
    title, other = best
    ratio = plan.compiled.bytes_sent / other.bytes_sent if other.bytes_sent else 1.0
    beside = (megabytes(other.bytes_sent), title, f"{ratio:.3f}", peak, f"{other.peak / 1e9:.2f}")
    return Row(mesh, limit is not None, (*start, *cells, *beside), ratio)


def means(found: Sequence[Row]) -> Iterator[str]:
    """Geometric means of the ratios per mesh."""
    for mesh in MESHES:
        parts = []
        for name, tight in (("without a limit", (False,)), ("tight", (True,)), ("all", (False, True))):
            ratios = [row.ratio for row in found if row.mesh == mesh and row.tight in tight and row.ratio]
            if ratios:
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                parts.append(f"{name} {mean:.3f} ({len(ratios)} rows, worst {max(ratios):.3f})")
        if parts:
            yield f"Geometric mean of the ratios on {mesh}: {', '.join(parts)}."


def fill(table: Table, models: Sequence[str], meshes: Sequence[str]) -> None:
    """Measures and adds row after row."""
    found: list[Row] = []
    with progress() as shown:
        task = shown.add_task("quality", total=len(models) * len(meshes) * 2)
        for model in models:
            shown.update(task, description=f"quality: {model}")
            for row in rows(model, meshes):
                found.append(row)
                table.add(row.cells)
                table.say(means(found))
                shown.advance(task)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=NAMES, help="these models; the document is left as it is")
    parser.add_argument("--mesh", nargs="+", choices=MESHES, help="these meshes; the document is left as it is")
    parser.add_argument("--list", nargs="+", choices=NAMES, help="print every layout by hand of these models")
    options = parser.parse_args(arguments)
    for model in options.list or ():
        show_all(model)
    if options.list:
        return
    document = Document("quality", "Quality", INTRODUCTION, "quality", writes=not (options.only or options.mesh))
    fill(document.table(HEADER), options.only or NAMES, options.mesh or list(MESHES))
    document.print()


def show_all(model: str) -> None:
    """Prints every layout by hand of a model, the one that sends least first."""
    found = by_hand(model)
    cells = [
        (title, megabytes(m.compiled.bytes_sent), f"{m.compiled.peak / 1e9:.2f}")
        for title, m in sorted(found.items(), key=lambda item: item[1].compiled.bytes_sent if item[1].compiled else 0)
        if m.compiled
    ]
    cells += [(title, m.error, "") for title, m in found.items() if not m.compiled]
    print(text_table((model, "MB sent", "peak GB"), cells, numbers=(1, 2)))


if __name__ == "__main__":
    main()
