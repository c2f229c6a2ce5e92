"""What each rewrite of the applied program gains: `python -m benchmarks.workarounds`.

XLA:GPU is held to an order, a beginning or a reverse where it would take more memory than a plan needs
(`docs/xla.md`). Each rewrite is switched off for the plans on file of `tests/fidelity`; where the lowered program
changes, both are compiled for H100, and their peaks and sent bytes compared.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import shardplan
from benchmarks.documents import Document, progress
from benchmarks.measuring import TARGET
from benchmarks.processes import in_own_process
from shardplan.compiled.program import measure
from shardplan.compiled.target import gpu_mesh
from tests.fidelity.records import read
from tests.fidelity.steps import MESHES, step_of

INTRODUCTION = (
    "Compiled peaks and sent bytes without a rewrite, as a multiple of those with it, on the recorded steps whose "
    "program changes. What is nowhere above 1.02 is not worth its code."
)
_ALL = 10**9
HEADER = ("rewrite", "steps that change", "peak: mean", "at most", "on", "bytes: at most")


def _as_it_is(schedule: Any, mesh: Any, operation: Any, operands: Sequence[Any]) -> Sequence[Any]:
    return operands


def _brought(schedule: Any, value: int, array: Any, layouts: Any, constrain: Callable[..., Any]) -> Any:
    return constrain(array, layouts[1])


REWRITES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "held_in_order": lambda schedule: frozenset(),
        "is_gathered_out_of_order": lambda schedule, value, layout: False,
        "stacked_in_order": lambda links, results, schedule, mesh: results,
        "fill_late": _as_it_is,
        "begun_apart": lambda schedule: {},
        "awaited": lambda schedule, reader, value: (),
        "reduced_before_added": lambda schedule: frozenset(),
        "bring": _brought,
    }
)
"""The functions of `shardplan.apply.replay`, and what stands in the place of each."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A peak and sent bytes, by the rewrite that was switched off; "" for none."""

    step: str
    peaks: dict[str, float] = field(default_factory=dict)
    sent: dict[str, float] = field(default_factory=dict)


def compiled(step: str, mesh: str) -> Compiled:
    """A step's plan with all rewrites, and without each that changes its program."""
    found, sizes = step_of(step), MESHES[mesh]
    devices = gpu_mesh(TARGET, tuple(sizes.values()), tuple(sizes))
    plan = shardplan.plan(found.function, devices, *found.arguments, donate_argnums=found.donated)
    texts, result = dict[str, str](), Compiled(f"{step} on {mesh}")
    for name in ("", *REWRITES):
        with patch(f"shardplan.apply.replay.{name}", REWRITES[name]) if name else nullcontext():
            lowered = plan.lower(devices)
        texts[name] = lowered.as_text()
        if name and texts[name] == texts[""]:
            continue
        if not name:
            whole = lowered
            continue
        for key, program in (("", whole), (name, lowered)):
            if key not in result.peaks:
                report = measure(program, sizes)
                result.peaks[key], result.sent[key] = report.memory.peak, report.communication_bytes
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="PREFIX", help="steps whose names begin so, as flax/")
    parser.add_argument("--operations", type=int, default=_ALL, metavar="N", help="steps of at most N operations")
    options = parser.parse_args(arguments)
    every = not options.only
    chosen = [one for part in ("fit", "decide") for one in read(part) if one.step.startswith(options.only)]
    chosen = [one for one in chosen if len(one.live) <= options.operations and one.limit is None]
    rows = list[Compiled]()
    with progress() as shown:
        for record in shown.track(chosen, description="steps"):
            rows.append(in_own_process(compiled, record.step, record.mesh))
    command = "workarounds" if options.operations == _ALL else f"workarounds --operations {options.operations}"
    document = Document("workarounds", "Rewrites of the applied program", INTRODUCTION, command, writes=every)
    table = document.table(HEADER)
    for name in REWRITES:
        changed = [row for row in rows if name in row.peaks]
        cells = ["", "", "", ""]
        if changed:
            peaks = [row.peaks[name] / row.peaks[""] for row in changed]
            sent = [row.sent[name] / max(row.sent[""], 1.0) for row in changed]
            most = max(range(len(peaks)), key=peaks.__getitem__)
            cells = [f"{sum(peaks) / len(peaks):.3f}", f"{peaks[most]:.3f}", changed[most].step, f"{max(sent):.3f}"]
        table.add((name, str(len(changed)), *cells))
    document.print()


if __name__ == "__main__":
    main()
