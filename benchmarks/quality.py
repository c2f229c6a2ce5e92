"""Quality of plans: bytes sent by plans and by experts' layouts by hand: `python -m benchmarks.quality`.

The table has every model on every mesh, without a memory limit and within 1.2 times the least possible. The reference
is the best of the model's layouts by hand (`benchmarks.recipes`) within the same memory. `--list mlp` shows all of
these. A full run also updates the README's table.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from tempfile import TemporaryDirectory

from benchmarks import headline
from benchmarks.baselines import Baseline
from benchmarks.documents import Document, Table, progress
from benchmarks.measuring import ALLOWED, MESHES, PLAN, TIGHT, Compiled, Job, Measured, measured
from benchmarks.recipes import baselines_of
from shardplan.common.tables import megabytes, text_table
from shardplan.models import NAMES

AT_ONCE = 2
"""The number of models measured at the same time: the figures are bytes, not seconds."""
ByHand = Sequence[tuple[Baseline, Measured]]
INTRODUCTION = (
    "Bytes that one device sends per step, read from the programs that XLA:GPU compiles for 8 H100: the plan next to "
    "the best layout by hand whose compiled peak keeps within the same memory. A tight limit is "
    f"{ALLOWED} times the least peak that the planner finds. `benchmarks/recipes.py` has the layouts by hand: "
    "data parallelism, ZeRO, Megatron with and without sequence parallelism, both axes at once, experts, spatial ones, "
    "as published."
)
HEADER = (
    *("model", "mesh", "limit GB", "predicted MB", "compiled MB", "gap"),
    *("best by hand MB", "which", "ratio", "peak GB: plan", "by hand"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A plan on a mesh within a limit, and the best layout by hand."""

    mesh: str
    tight: bool
    cells: tuple[str, ...]
    ratio: float | None


def suits(baseline: Baseline, mesh: str) -> bool:
    """Whether the axes of a mesh make the two of a layout by hand."""
    sizes = tuple(MESHES[mesh].values())
    made = (math.prod(taken) for count in range(len(sizes) + 1) for taken in combinations(sizes, count))
    return baseline.data in made


def by_hand(model: str, meshes: Sequence[str], kernels: str) -> ByHand:
    """All layouts by hand of a model that fit the axes of one of the meshes. See `measured` for `kernels`."""
    suiting = [baseline for baseline in baselines_of(model) if any(suits(baseline, mesh) for mesh in meshes)]
    return [(baseline, measured(Job(model, "", baseline.title), kernels)) for baseline in suiting]


def best_within(hand: ByHand, mesh: str, limit: float | None) -> tuple[str, Compiled] | None:
    """The layout that sends least, among those that fit the mesh's axes and the limit."""
    fitting = [
        (baseline.title, found.compiled)
        for baseline, found in hand
        if found.compiled and suits(baseline, mesh) and (limit is None or found.compiled.peak <= limit)
    ]
    return min(fitting, key=lambda entry: entry[1].bytes_sent, default=None)


def rows(model: str, meshes: Sequence[str], folder: str) -> Iterator[Row]:
    """The rows of a model, with its kernels in a folder."""
    kernels = f"{folder}/{model}"
    hand = by_hand(model, meshes, kernels)
    for mesh in meshes:
        yield _row(Job(model, mesh, PLAN), measured(Job(model, mesh, PLAN)), hand)
        tight = Job(model, mesh, TIGHT)
        yield _row(tight, measured(tight, kernels), hand)


def _row(job: Job, plan: Measured, hand: ByHand) -> Row:
    mesh, limit, tight = job.mesh, plan.limit, job.way == TIGHT
    start = (job.model, mesh, f"{limit / 1e9:.2f}" if limit else "?" if tight else "none")
    if plan.planned is None or plan.compiled is None:
        return Row(mesh, tight, (*start, *[""] * 3, "", plan.error, "", "", ""), None)
    cells = (megabytes(plan.planned.bytes_sent), megabytes(plan.compiled.bytes_sent), f"{100 * plan.planned.gap:.3f} %")
    peak = f"{plan.compiled.peak / 1e9:.2f}"
    best = best_within(hand, mesh, limit)
    if best is None:
        return Row(mesh, tight, (*start, *cells, "", "none fits", "", peak, ""), None)
    title, other = best
    ratio = plan.compiled.bytes_sent / other.bytes_sent if other.bytes_sent else 1.0
    others = (megabytes(other.bytes_sent), title, f"{ratio:.3f}", peak, f"{other.peak / 1e9:.2f}")
    return Row(mesh, tight, (*start, *cells, *others), ratio)


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
    nothing = [" on ".join(row.cells[:2]) for row in found if row.ratio == 0]
    if nothing:
        yield f"Plans that send nothing, since they repeat all work, are not in the means: {', '.join(nothing)}."


def fill(table: Table, models: Sequence[str], meshes: Sequence[str]) -> None:
    """Measures and adds row after row."""
    found: list[Row] = []
    with progress() as shown, TemporaryDirectory() as folder, ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        task = shown.add_task("quality", total=len(models))
        for of_model in pool.map(lambda model: list(rows(model, meshes, folder)), models):
            for row in of_model:
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
    if document.writes:
        headline.write(document.tables[0].rows)


def show_all(model: str) -> None:
    """Prints every layout by hand of a model, in the order of its recipe."""
    with TemporaryDirectory() as folder:
        found = by_hand(model, list(MESHES), f"{folder}/{model}")
    cells = [
        (b.title, megabytes(m.compiled.bytes_sent), f"{m.compiled.peak / 1e9:.2f}") for b, m in found if m.compiled
    ]
    cells += [(b.title, m.error, "") for b, m in found if not m.compiled]
    print(text_table((model, "MB sent", "peak GB"), cells, numbers=(1, 2)))


if __name__ == "__main__":
    main()
