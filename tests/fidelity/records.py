"""What is on file of a compiled plan: its choices, its peak, and the bytes live at each operation.

Choices are layouts of values and strategies of operations in words, not numbers of a network's variables: they hold as
long as the program is traced into the same operations. `python -m tests.fidelity.record` compiles the steps again.

| file | rows |
|---|---|
| `records/fit.jsonl.gz` | those that figures may be fitted to |
| `records/decide.jsonl.gz` | held out: whether an effect stays is decided on these |
| `records/report.jsonl.gz` | drawn when the code was frozen, for figures that are reported |
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from shardplan.layout.layout import Layout
from shardplan.options import Options
from shardplan.plans.pipeline import build_problem
from shardplan.problem.cost_network import Problem
from shardplan.problem.schedule import Schedule
from shardplan.problem.strategy import Strategy
from shardplan.program.tracing import trace_program
from tests.fidelity.steps import MESHES, step_of

FOLDER = Path(__file__).parent / "records"
PARTS = ("fit", "decide", "report")


@dataclass(frozen=True, slots=True)
class Record:
    """A plan and what XLA:GPU made of it.

    ``step`` and ``mesh`` are names of `tests.fidelity.steps`; ``limit`` is the memory limit in bytes, None without one.
    ``peak`` is the compiled peak in bytes. ``values`` and ``copies`` give the number of a text in ``words`` for each
    value of the program, ``operations`` for each operation: -1 where it has none. ``live`` has the most bytes that are
    held while each operation runs, in units of 1,024, 0 where the compiled program has no such operation.
    """

    step: str
    mesh: str
    limit: float | None
    peak: int
    words: list[str]
    values: list[int]
    copies: list[int]
    operations: list[int]
    live: list[int]


class StaleRecordError(Exception):
    """A record does not fit the program that its step is traced into now: record it again."""


def problem_of(step: str, mesh: str) -> Problem:
    """The problem of a step over a mesh."""
    found, sizes = step_of(step), MESHES[mesh]
    program = trace_program(found.function, found.arguments, {})
    abstract = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    return build_problem(program, abstract, Options(donate_argnums=found.donated))


def schedule_of(record: Record, problem: Problem) -> Schedule:
    """The schedule of a record. Raises StaleRecordError where the program or its layouts are others by now."""
    return Schedule(problem, problem.decode(_choices(record, problem)))


def in_words(schedule: Schedule) -> dict[str, Any]:
    """The fields of a record that state the choices of a schedule."""
    words: dict[str, int] = {}
    assignment = schedule.assignment

    def number(of: Any, text: Callable[[Any], str]) -> int:
        return -1 if of is None else words.setdefault(text(of), len(words))

    program = schedule.program
    return {
        "values": [number(assignment.values.get(value.index), _layout_text) for value in program.values],
        "copies": [number(assignment.copies.get(value.index), _layout_text) for value in program.values],
        "operations": [number(assignment.strategies.get(o.index), _strategy_text) for o in program.operations],
        "words": [*words],
    }


def _choices(record: Record, problem: Problem) -> NDArray[np.int64]:
    variables, found = problem.variables, np.zeros(len(problem.network), np.int64)
    program = problem.program
    if (len(record.values), len(record.operations)) != (len(program.values), len(program.operations)):
        raise StaleRecordError(f"the record of `{record.step}` on {record.mesh} is that of another program")
    try:
        for kind, words in ((variables.values, record.values), (variables.copies, record.copies)):
            for value, variable in kind.items():
                layouts = {_layout_text(layout): number for number, layout in enumerate(problem.domain(value).layouts)}
                found[variable] = layouts[record.words[words[value]]]
        for index, variable in variables.operations.items():
            strategies = [_strategy_text(one) for one in problem.choices[index].strategies]
            found[variable] = strategies.index(record.words[record.operations[index]])
    except (KeyError, ValueError) as error:
        raise StaleRecordError(f"the record of `{record.step}` on {record.mesh}: {error}") from error
    return found


def _layout_text(layout: Layout | None) -> str:
    """``0,12|`` for a tensor split over the axes 0, then over 1 and 2, and whole along its last dimension."""
    return "-" if layout is None else "|".join(",".join(map(str, axes)) for axes in layout)


def _strategy_text(strategy: Strategy) -> str:
    parts = (strategy.operands, strategy.results, (strategy.pending,))
    return ">".join(";".join(_layout_text(layout) for layout in layouts) for layouts in parts)


def read(part: str) -> Iterator[Record]:
    """The records of a part; none where it has no file yet."""
    path = FOLDER / f"{part}.jsonl.gz"
    if path.exists():
        with gzip.open(path, "rt", encoding="utf-8") as file:
            yield from (Record(**json.loads(line)) for line in file)


def write(part: str, records: Iterable[Record]) -> None:
    """Replaces a part, its records in the order of their names."""
    FOLDER.mkdir(exist_ok=True)
    ordered = sorted(records, key=lambda one: (one.step, one.mesh, one.limit or 0.0))
    lines = (json.dumps(asdict(one), separators=(",", ":")) + "\n" for one in ordered)
    packed = gzip.compress("".join(lines).encode(), 9, mtime=0)
    begun = FOLDER / f"{part}.part"
    begun.write_bytes(packed)
    begun.replace(FOLDER / f"{part}.jsonl.gz")
