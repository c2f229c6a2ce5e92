"""What each effect of the memory model is worth: `python -m benchmarks.memory_ablation`.

The recorded choices of `tests/fidelity` are counted again with one effect switched off, without a search and without a
compiler. An effect is off where the functions that bring it in find nothing.
"""

import argparse
import importlib
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.documents import Document, progress
from shardplan.finding import in_own_order
from shardplan.memory.joining import Joining
from shardplan.memory.liveness import memory_profile
from shardplan.memory.lying import Lying
from shardplan.planning import donated_leaves
from shardplan.schedule import Schedule
from tests.fidelity.records import problem_of, read, schedule_of
from tests.fidelity.steps import step_of

INTRODUCTION = (
    "Counted again with one effect of the memory model off: by how many points the mean and the largest error of peaks "
    "grow on the recorded steps that figures were fitted to and on those held out, and the points of the held-out mean "
    "per 100 lines of the effect's files."
)
HEADER = ("effect", "lines", "fit: mean", "at most", "held out: mean", "at most", "held out, per 100 lines")
PARTS = ("fit", "decide")


def _none(*_: Any, **__: Any) -> None: ...


def _empty(kind: Callable[[], Any]) -> Callable[..., Any]:
    return lambda *_, **__: kind()


_NOTHING, _DICT, _LIST, _SET, _FALSE = (
    _empty(lambda: iter(())),
    _empty(dict),
    _empty(list),
    _empty(frozenset),
    _empty(bool),
)


def _as_given(_: Any, kernels: Any) -> Any:
    return kernels


def _no_order(program: Any, *_: Any) -> Lying:
    return Lying({}, {}, frozenset(), frozenset(), {r: o.index for o in program.operations for r in o.results})


@dataclass(frozen=True, slots=True)
class Effect:
    """An effect: its files in `shardplan/memory`, and per function what stands in its place where it is off."""

    name: str
    files: tuple[str, ...]
    switches: Mapping[str, Callable[..., Any]]

    @property
    def lines(self) -> int:
        folder = Path(str(importlib.import_module("shardplan.memory").__file__)).parent
        return sum((folder / f"{name}.py").read_text(encoding="utf-8").count("\n") for name in self.files)

    def switch_off(self) -> None:
        """Puts what finds nothing in the place of its functions, wherever they were imported."""
        for path, other in self.switches.items():
            module, name = path.split(".")
            mine = getattr(importlib.import_module(f"shardplan.memory.{module}"), name)
            for loaded in [m for key, m in sys.modules.items() if key.startswith("shardplan")]:
                for own in [own for own, value in vars(loaded).items() if value is mine]:
                    setattr(loaded, own, other)


EFFECTS = (
    Effect("rows inside of kernels", ("absorbing",), {"absorbing.sums_within_rows": _SET}),
    Effect("products that add themselves to a sum", ("accumulation",), {"accumulation.accumulations": _DICT}),
    Effect(
        "merged products",
        ("merging",),
        {"accumulation.merged_anywhere": _LIST, "accumulation.read_together": _DICT, "accumulation.merged_in": _LIST},
    ),
    Effect("activations", ("activations",), {"activations.activated": _none}),
    Effect("barriers in the order", ("barriers",), {"barriers.put_barriers": _none}),
    Effect("stacks begun early", ("beginning",), {"beginning.begin_stacks": _none, "beginning.held_before": _NOTHING}),
    Effect("scratch buffers of operations", ("besides", "indices"), {"besides.stored_beside": _NOTHING}),
    Effect("uncoalesced reads", ("coalescing",), {"coalescing.turning_reads": _DICT, "coalescing.moves_apart": _FALSE}),
    Effect("sums end kernels", ("combining",), {"combining.ending_at_reductions": _as_given}),
    Effect("outputs fused into consumers", ("consumers",), {"consumers.read_with_consumer": _DICT}),
    Effect("copies of convolutions", ("copies",), {"copies.convolution_copies": _NOTHING}),
    Effect("transposed arguments of convolutions", ("convolutions",), {"convolutions.reordered_in": _DICT}),
    Effect("copies of sums", ("copied_sums",), {"copied_sums.copy_sums": _none}),
    Effect("copies of products' operands", ("copying", "products"), {"products.copied_operands": _DICT}),
    Effect("copies of all-to-alls", ("exchanging",), {"exchanging.exchanged_copies": _NOTHING}),
    Effect("last steps of reductions", ("finishing",), {"finishing.finish_reductions": _none}),
    Effect("computed in another shape", ("flattened",), {"flattened.flattened": _DICT}),
    Effect("materialised values", ("priorities", "fusing", "computing"), {"priorities.stored_values": _SET}),
    Effect(
        "merged gathers",
        ("gathering",),
        {"gathering.gathered_together": _LIST, "gathering.combined_gathers": _LIST},
    ),
    Effect("gathers at the end", ("outputs",), {"outputs.send_at_the_end": _none, "outputs.copy_leaving": _none}),
    Effect(
        "multi-output fusion",
        ("joining",),
        {"joining.join_kernels": lambda *_: Joining({}, {}), "joining.join_as": _none, "joining.joined_in": _NOTHING},
    ),
    Effect(
        "results that leave transposed",
        ("leaving",),
        {"leaving.transposed_results": _SET, "leaving.copy_at_the_end": _none},
    ),
    Effect("dimension orders", ("lying", "transposed"), {"lying.lying_of": _no_order}),
    Effect("masked rows of groups", ("masking",), {"masking.masked_rows": _NOTHING, "masking.mask_rows": _none}),
    Effect(
        "measured times",
        ("times", "measured", "measured_collectives"),
        {"times.kernel_microseconds": lambda *_, **__: 5.0},
    ),
    Effect("narrow copies", ("narrower",), {"narrower.narrower_copies": _DICT, "narrower.sent_narrow": _SET}),
    Effect("padded results", ("padded",), {"padded.padded_results": _DICT, "padded.turned_before_padding": _SET}),
    Effect(
        "pipelined loops",
        ("pipelining",),
        {
            "pipelining.peeled_loops": _SET,
            "pipelining.held_twice": _DICT,
            "pipelining.gathered_before": _DICT,
            "pipelining.sent_late": _DICT,
            "pipelining.send_last_iterations": _none,
        },
    ),
    Effect("gradients of poolings", ("poolings",), {"poolings.zeros_of_poolings": _NOTHING}),
    Effect(
        "merged reductions",
        ("reductions",),
        {"reductions.reduced_together": _LIST, "reductions.combined_reductions": _LIST},
    ),
    Effect("repeated results", ("repeated",), {"repeated.repeated_results": _DICT, "repeated.repeated_in": _DICT}),
    Effect("memory of results", ("results",), {"results.unused_results": _NOTHING, "results.copied_after": _DICT}),
    Effect("softmax rows", ("rows",), {"rows.row_results": _DICT, "rows.made_by_rows": _SET}),
    Effect("in-place kernels", ("sharing",), {"sharing.overwritten": _NOTHING}),
    Effect("slices inside of kernels", ("slicing",), {"slicing.sliced_on_the_way": _DICT}),
    Effect("copies as nodes of the order", ("turning", "viewing"), {"turning.turn_operands": _none}),
    Effect("zeros of scatters", ("zeros",), {"zeros.fill_apart": _none, "zeros.filled_before": _NOTHING}),
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
                lifetimes, sending = in_own_order(schedule)
                peak = memory_profile(lifetimes, schedule, donated, sending).max()
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


def _points(shares: np.ndarray) -> tuple[float, float]:
    return (100 * float(shares.mean()), 100 * float(shares.max())) if len(shares) else (0.0, 0.0)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="PREFIX", help="steps whose names begin so, as flax/")
    parser.add_argument("--operations", type=int, default=10**9, metavar="N", help="steps of at most N operations")
    options = parser.parse_args(arguments)
    every = not options.only and options.operations == 10**9
    document = Document("memory_ablation", "Memory ablation", INTRODUCTION, "memory_ablation", writes=every)
    table = document.table(HEADER)
    counted = rows(options.operations, options.only)
    base = errors(counted)
    count = {part: len(base[part]) for part in PARTS}
    before = {part: _points(base[part]) for part in PARTS}
    cells = (f"{value:.2f}" for part in PARTS for value in before[part])
    table.add((f"all effects ({count['fit']} and {count['decide']} rows)", "", *cells, ""))
    with progress() as shown:
        for effect in shown.track(EFFECTS, description="effects"):
            after = errors(counted, effect)
            if any(len(after[part]) < count[part] for part in PARTS):
                table.add((effect.name, str(effect.lines), *["needed"] * 4, ""))
                continue
            grown = {p: [b - a for a, b in zip(before[p], _points(after[p]), strict=True)] for p in PARTS}
            shares = (f"{value:+.2f}" for part in PARTS for value in grown[part])
            table.add((effect.name, str(effect.lines), *shares, f"{100 * grown['decide'][0] / effect.lines:+.2f}"))
    document.print()


if __name__ == "__main__":
    main()
