"""Fidelity of predictions against compiled programs, and the cost of compiling: `python -m benchmarks.fidelity`."""

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.documents import Document, progress
from benchmarks.measuring import MESHES, PLAIN, PLAN, Compiled, Job, Planned, measured
from benchmarks.recipes import baselines_of
from shardplan.common.tables import megabytes
from shardplan.models import NAMES

AT_ONCE = 2
"""The number of rows measured at the same time: the comparison is of work, in seconds of all cores."""
INTRODUCTION = (
    "Predicted and compiled bytes sent per device and step, those compiled bytes that no planned collective "
    "explains, peak memory, the gap to the lower bound, and seconds: to plan (tracing included), and to lower and "
    "compile the planned step; in brackets the work of it, in seconds of all cores together. The work of compiling is "
    "also a multiple of that of plain `jit` with the plan's input and output shardings and no constraints (with the "
    "bytes that this sends), and of the model's first layout by hand (data parallelism)."
)
HEADER = (
    *("model", "mesh", "predicted MB", "compiled MB", "compiled - predicted", "unexplained", "gap"),
    *("predicted peak GB", "compiled peak GB", "compiled - predicted peak", "s to plan", "s to compile"),
    *("x plain jit", "plain jit MB", "x first by hand"),
)


def _percent(part: float, whole: float) -> str:
    return f"{100 * (part / whole - 1):+.2f} %" if whole else "-"


def _seconds(of: Planned | Compiled) -> str:
    return f"{of.seconds:.2f} ({of.work:.2f})"


def row(model: str, mesh: str) -> tuple[str, ...]:
    """A plan as predicted and as compiled, with plain jit and the first layout by hand (data parallelism) for
    comparison."""
    found = measured(Job(model, mesh, PLAN))
    planned, compiled = found.planned, found.compiled
    if planned is None or compiled is None:
        return (model, mesh, found.error, *[""] * (len(HEADER) - 3))
    plain = measured(Job(model, mesh, PLAIN)).compiled
    by_hand = measured(Job(model, "", baselines_of(model)[0].title)).compiled
    return (
        model,
        mesh,
        megabytes(planned.bytes_sent),
        megabytes(compiled.bytes_sent),
        _percent(compiled.bytes_sent, planned.bytes_sent),
        f"{100 * planned.unexplained / max(compiled.bytes_sent, 1):.2f} %",
        f"{100 * planned.gap:.4f} %",
        f"{planned.peak / 1e9:.2f}",
        f"{compiled.peak / 1e9:.2f}",
        _percent(compiled.peak, planned.peak),
        _seconds(planned),
        _seconds(compiled),
        f"{compiled.work / plain.work:.2f}" if plain else "-",
        megabytes(plain.bytes_sent) if plain else "-",
        f"{compiled.work / by_hand.work:.2f}" if by_hand else "-",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=NAMES, help="these models; the document is left as it is")
    parser.add_argument("--mesh", nargs="+", choices=MESHES, help="these meshes; the document is left as it is")
    options = parser.parse_args(arguments)
    document = Document("fidelity", "Fidelity", INTRODUCTION, "fidelity", writes=not (options.only or options.mesh))
    table = document.table(HEADER)
    jobs = [(model, mesh) for model in options.only or NAMES for mesh in options.mesh or MESHES]
    with progress() as shown, ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        for cells in shown.track(pool.map(lambda job: row(*job), jobs), len(jobs), description="fidelity"):
            table.add(cells)
    document.print()


if __name__ == "__main__":
    main()
