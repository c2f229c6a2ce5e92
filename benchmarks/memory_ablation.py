"""Ablation of the memory model: the error without each of its effects: `python -m benchmarks.memory_ablation`.

The recorded choices of `tests/fidelity` are counted again with one effect switched off, without a search and without a
compiler. The function of a switched-off effect finds nothing.
"""

import argparse
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from benchmarks.documents import Document, progress
from shardplan.memory.model import lifetimes_of
from shardplan.plans.pipeline import donated_leaves
from shardplan.problem.schedule import Schedule
from tests.fidelity.records import problem_of, read, schedule_of
from tests.fidelity.steps import step_of

INTRODUCTION = (
    "Counted again with one effect of the memory model off: by how many points the mean and the largest error of peaks "
    "grow on the recorded steps that figures were fitted to and on those held out. Without what is `needed`, nothing "
    "is counted."
)
HEADER = ("effect", "fit: mean", "at most", "held out: mean", "95 %", "at most")
PARTS = ("fit", "decide")
_ALL = 10**9


def _gives(made: Callable[[], Any]) -> Callable[..., Any]:
    return lambda *_, **__: made()


@dataclass(frozen=True, slots=True)
class Effect:
    """An effect, and per function of `shardplan.memory` its replacement when the effect is off."""

    name: str
    switches: Mapping[str, Callable[..., Any]]

    def switch_off(self) -> None:
        """Replaces an effect's functions, in all modules that import them."""
        for path, other in self.switches.items():
            module, name = path.split(".")
            mine = getattr(import_module(f"shardplan.memory.{module}"), name)
            for loaded in [m for key, m in sys.modules.items() if key.startswith("shardplan")]:
                for own in [own for own, value in vars(loaded).items() if value is mine]:
                    setattr(loaded, own, other)


EFFECTS = (
    Effect("what is stored, by estimated times", {"fusion.materialised_values": _gives(frozenset)}),
    Effect("rows in one kernel", {"operations.row_fusion_values": _gives(frozenset)}),
    Effect("scatters into other gradients", {"operations.merged_scatters": _gives(dict)}),
    Effect("common subexpressions", {"kernels.common_subexpressions": _gives(list)}),
    Effect("transposed and padded operands of products", {"products.product_operands": _gives(dict)}),
    Effect("partial sums of products", {"products.partial_sums": _gives(float)}),
    Effect("copies of convolutions", {"convolutions.convolution_copies": _gives(dict)}),
    Effect("merged collectives", {"merging.merge_collectives": lambda graph: list(range(len(graph.nodes)))}),
    Effect("merged products", {"merging.merged_products": _gives(list)}),
    Effect("kernels with several results", {"merging.joined_kernels": _gives(list)}),
    Effect("the latency-hiding order", {"order.backward_schedule": lambda nodes: sorted(nodes.needs, reverse=True)}),
    Effect("results in place", {"timeline.write_in_place": _gives(int)}),
)

Row = tuple[str, Schedule, frozenset[int], int]
"""The part of a record, its schedule, the donated inputs, and the compiled peak in bytes."""


def rows(most_operations: int, only: str) -> list[Row]:
    """The schedules of all records with so few operations whose step's name begins with a text."""
    found: list[Row] = []
    for part in PARTS:
        for record in [one for one in read(part) if one.step.startswith(only) and len(one.live) <= most_operations]:
            problem = problem_of(record.step, record.mesh)
            donated = donated_leaves(problem.program, step_of(record.step).donated)
            found.append((part, schedule_of(record, problem), donated, record.peak))
    return found


def errors(counted: Iterable[Row], effect: Effect | None = None) -> dict[str, np.ndarray]:
    """Per part, the error of each row's predicted peak as a share of the compiled one, counted in a forked process."""
    here = list(counted)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        found: dict[str, list[float]] = {part: [] for part in PARTS}
        try:
            if effect is not None:
                effect.switch_off()
            for part, schedule, donated, compiled in here:
                choices = schedule.problem.encode(schedule.assignment)
                peak = lifetimes_of(schedule, donated).profile(choices).max()
                found[part].append(abs(float(peak) / compiled - 1))
        finally:
            with os.fdopen(writing, "wb") as file:
                pickle.dump(found, file)
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        read_back = pickle.load(file)
    os.waitpid(child, 0)
    return {part: np.array(shares) for part, shares in read_back.items()}


def _points(found: Mapping[str, np.ndarray]) -> list[float]:
    """The mean and the maximum of the first part, and the mean, the 95th percentile and the maximum of the other."""
    fit, held_out = (found[part] if len(found[part]) else np.zeros(1) for part in PARTS)
    points = fit.mean(), fit.max(), held_out.mean(), np.quantile(held_out, 0.95), held_out.max()
    return [100 * float(point) for point in points]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="PREFIX", help="steps whose names begin so, as flax/")
    parser.add_argument("--operations", type=int, default=_ALL, metavar="N", help="steps of at most N operations")
    options = parser.parse_args(arguments)
    command = "memory_ablation" if options.operations == _ALL else f"memory_ablation --operations {options.operations}"
    document = Document("memory_ablation", "Memory ablation", INTRODUCTION, command, writes=not options.only)
    table = document.table(HEADER)
    counted = rows(options.operations, options.only)
    base = errors(counted)
    count = {part: len(base[part]) for part in PARTS}
    before = _points(base)
    table.add((f"all effects ({count['fit']} and {count['decide']} rows)", *(f"{value:.2f}" for value in before)))
    with progress() as shown:
        for effect in shown.track(EFFECTS, description="effects"):
            after = errors(counted, effect)
            if any(len(after[part]) < count[part] for part in PARTS):
                table.add((effect.name, *["needed"] * 5))
                continue
            grown = (b - a for a, b in zip(before, _points(after), strict=True))
            table.add((effect.name, *(f"{value:+.2f}" for value in grown)))
    document.print()


if __name__ == "__main__":
    main()
