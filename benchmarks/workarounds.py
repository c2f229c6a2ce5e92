"""What each rewrite of the applied program gains: `python -m benchmarks.workarounds`.

Some rewrites hold XLA:GPU to a dimension order or a first value, where it would take more memory than a plan needs
(`docs/xla/rewrites.md`). Each is switched off for the models here, for small layers, and for models that fill their
devices (`benchmarks.large`). Where the lowered program changes, both are compiled for H100, and their peaks and sent
bytes are compared.
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
from benchmarks.large import CONFIGS, train_step
from benchmarks.measuring import TARGET
from benchmarks.processes import in_own_process
from shardplan.compiled.program import measure
from shardplan.compiled.target import gpu_mesh
from tests.fidelity.records import read
from tests.fidelity.steps import MESHES, step_of

INTRODUCTION = (
    "Compiled peaks and sent bytes without a rewrite, as a multiple of those with it, on the steps whose program "
    "changes. A rewrite that is nowhere above 1.02 is not worth its code."
)
STEPS = ("zoo/", "layers/", "large/")
LARGE = {f"large/{config.layers}": config for config in CONFIGS}
HEADER = ("rewrite", "steps that change", "peak: mean", "at most", "on", "bytes: at most")


def _as_it_is(schedule: Any, mesh: Any, operation: Any, operands: Sequence[Any]) -> Sequence[Any]:
    return operands


REWRITES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "gathered_slices": lambda schedule: frozenset(),
        "is_gathered_out_of_order": lambda schedule, value, layout: False,
        "fill_late": _as_it_is,
        "begun_apart": lambda schedule: {},
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
    donated: tuple[int, ...]
    if step in LARGE:
        function, arguments, donated, sizes = train_step, LARGE[step].arguments, (0,), LARGE[step].mesh
    else:
        found, sizes = step_of(step), MESHES[mesh]
        function, arguments, donated = found.function, found.arguments, found.donated
    devices = gpu_mesh(TARGET, tuple(sizes.values()), tuple(sizes))
    plan = shardplan.plan(function, devices, *arguments, donate_argnums=donated)
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
    only = parser.parse_args(arguments).only
    recorded = [(one.step, one.mesh) for part in ("fit", "decide") for one in read(part) if one.limit is None]
    large = [(name, "x".join(map(str, config.mesh.values()))) for name, config in LARGE.items()]
    chosen = [row for row in (*recorded, *large) if row[0].startswith(only or STEPS)]
    with progress() as shown:
        rows = [in_own_process(compiled, *row) for row in shown.track(chosen, description="steps")]
    document = Document("workarounds", "Rewrites of the applied program", INTRODUCTION, "workarounds", writes=not only)
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
