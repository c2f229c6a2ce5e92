"""The evaluation of the Tofu paper on today's stack: `python -m benchmarks.tofu`.

Wang et al., "Supporting Very Large Models using Automatic Dataflow Graph Partitioning", EuroSys 2019, section 7: the
memory of the weights (table 1), what the searches send and how long they take (figure 11), and how fast the plans are
on eight K80 (figures 9 and 10, simulated here). `--only rnn-6-4k` measures these models, and prints alone.

The results of a model are kept in `build/benchmarks`, so that an interrupted run continues.
"""

import argparse
import hashlib
import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from jax.sharding import AbstractMesh

from benchmarks.documents import Document, Table, progress
from benchmarks.measuring import KEPT, code
from benchmarks.processes import in_own_process, timed
from shardplan.audits.audit import audit
from shardplan.common.tables import megabytes
from shardplan.compiled.target import gpu_mesh
from shardplan.hardware import load as load_profile
from shardplan.models import Training, lstm, wide_resnet
from shardplan.options import Options
from shardplan.plans.pipeline import build_problem, plan_problem
from shardplan.plans.plan import Plan
from shardplan.plans.simulate import simulate
from shardplan.problem.cost_network import Problem
from shardplan.problem.tofu_annotations import annotate
from shardplan.program.program import Program
from shardplan.program.tracing import trace_program
from shardplan.timing.operator_placement import PLACEMENT_METHODS, simulate_placement
from shardplan.timing.step_time import time_prices, work_seconds

DEVICES = 8
HARDWARE = "k80"
RIVALS = ("all_row_greedy", "largest_first", "equal_chop", "recursive")
FACTORS = {"a": 2, "b": 2, "c": 2}
"""Tofu cuts recursively over the factors of the number of devices."""
ONE_AXIS = {"a": 8}
SEARCH_SECONDS = 60.0
"""Wall-clock limit of every search. Most open searches end earlier, at their budget of work."""
AT_ONCE = 2
"""The number of models measured at the same time, each on a core of its own."""
COMPILED = {"rnn-6-4k": {"layers": 2}, "wresnet-50-4": {}}
"""Models that are also compiled, with these changes."""

STATED: dict[str, dict[int, tuple[float, ...]]] = {
    "rnn": {6: (8.4, 18.6, 33.0), 8: (11.4, 28.5, 45.3), 10: (14.4, 32.1, 57.0)},
    "wresnet": {50: (4.2, 9.6, 17.1, 26.7), 101: (7.8, 17.1, 30.6, 47.7), 152: (10.5, 23.4, 41.7, 65.1)},
}
"""The paper's table 1, GB of weights, gradients and history."""
WIDTHS: dict[str, tuple[str, ...]] = {"rnn": ("4k", "6k", "8k"), "wresnet": ("4", "6", "8", "10")}

OVER_FACTORS = "exact (2, 2, 2)"
SEARCHES = (*RIVALS, "exact", OVER_FACTORS)

INTRODUCTION = (
    "The models of the Tofu paper on 8 devices, with float32 weights, SGD with momentum, RNNs unrolled over 20 steps "
    "with 512 sequences, WResNets with 32 images of 224 x 224. Bytes are what one device sends per step, by ring "
    "algorithms. Seconds are of the processor, so that other work on the machine hardly disturbs them."
)


@dataclass(frozen=True, slots=True)
class Way:
    """A plan or a placement: bytes that a device sends and holds, seconds of a simulated step, and seconds of the
    search.

    The search's seconds are of the processor, from the network to the assignment.
    """

    bytes_sent: float
    peak: float
    step_seconds: float
    search_seconds: float = 0.0
    gap: float = math.nan


@dataclass(frozen=True, slots=True)
class Found:
    """The results of a model. `planning_seconds` are of the whole planning by `exact` over one axis. `single_seconds`
    are of a step by one device, `small` is the batch that fits one, with the seconds of its step."""

    operations: int
    variables: int
    parameters: int
    batch: int
    planning_seconds: float
    ways: dict[str, Way]
    single_seconds: float
    small: tuple[int, float] | None


def config_of(name: str) -> Any:
    return (lstm if name in lstm.CONFIGS else wide_resnet).CONFIGS[name]


def training_of(config: Any) -> Training:
    return (lstm if isinstance(config, lstm.Config) else wide_resnet).training(config)


def trace(config: Any) -> Program:
    training = training_of(config)
    return trace_program(training.train_step, (training.state, training.batch))


def mesh_of(axes: dict[str, int]) -> AbstractMesh:
    return AbstractMesh(tuple(axes.values()), tuple(axes))


def options_of() -> Options:
    return Options(memory_limit=math.inf, hardware=HARDWARE, donate_argnums=(0,), time_limit=SEARCH_SECONDS)


def built(program: Program, axes: dict[str, int]) -> Problem:
    problem = build_problem(program, mesh_of(axes), options_of())
    assert len(problem.network)  # which is built when it is first asked for
    return problem


def planned(problem: Problem, axes: dict[str, int], method: str) -> Plan:
    return Plan.of(plan_problem(problem, mesh_of(axes), options_of(), method=method))


def way_of(plan: Plan, proven: bool) -> Way:
    seconds, work = simulate(plan).seconds, plan.statistics["search_processor_seconds"]
    return Way(plan.communication_bytes, plan.peak_bytes, seconds, work, plan.gap if proven else math.nan)


def measure(name: str) -> Found:
    """Plans a model by every method, and simulates the results."""
    config = config_of(name)
    program, _, tracing = timed(partial(trace, config))
    problem, _, building = timed(partial(built, program, ONE_AXIS))
    plan, _, searching = timed(partial(planned, problem, ONE_AXIS, "exact"))
    ways = {"exact": way_of(plan, True)}
    for method in PLACEMENT_METHODS:
        result = simulate_placement(problem, method)
        ways[method] = Way(max(result.sent_bytes), max(result.peak_bytes), result.seconds)
    single = sum(work_seconds(problem, time_prices(problem, None), o) for o in program.operations)
    problem = built(program, FACTORS)
    variables = len(problem.network)
    annotate(problem)
    for method in RIVALS:
        ways[method] = way_of(planned(problem, FACTORS, method), False)
    ways[OVER_FACTORS] = way_of(planned(problem, FACTORS, "exact"), True)
    parameters = training_of(config).parameters
    counts = (len(program.operations), variables, parameters, config.batch)
    return Found(*counts, tracing + building + searching, ways, single, small_batch(config, parameters))


def small_batch(config: Any, parameters: int) -> tuple[int, float] | None:
    """The largest batch, by halving, with which a step fits one device, and the seconds that it takes there."""
    limit, batch = load_profile(HARDWARE).memory_bytes, config.batch
    while batch >= 1 and 8 * parameters < limit:
        program = trace(replace(config, batch=batch))
        mesh = AbstractMesh((1,), ("a",))
        problem = build_problem(program, mesh, options_of())
        if plan_problem(problem, mesh, options_of()).peak_bytes <= limit:
            prices = time_prices(problem, None)
            return batch, sum(work_seconds(problem, prices, operation) for operation in program.operations)
        batch //= 2
    return None


def compiled(name: str, method: str) -> tuple[float, float]:
    """Predicted and compiled bytes of the plan by a method, for H100."""
    axes = ONE_AXIS if method == "exact" else FACTORS
    program = trace(replace(config_of(name), **COMPILED[name]))
    problem = build_problem(program, mesh_of(axes), options_of())
    annotate(problem)
    plan = planned(problem, axes, method)
    found = audit(plan, mesh=gpu_mesh("h100", tuple(axes.values()), tuple(axes)))
    return plan.communication_bytes, float(found.compiled.communication_bytes)


def kept(name: str) -> Found:
    """The results of a model: kept from an earlier run of this code, or new ones from a process of its own."""
    digest = code(("models", "benchmarks/tofu.py", "shardplan", "rules", "search"))
    path = KEPT / f"tofu-{name}-{hashlib.sha256(digest.encode()).hexdigest()[:24]}.json"
    if not path.exists():
        found = in_own_process(measure, name)
        KEPT.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(found)), encoding="utf-8")
    entries: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    ways = {title: Way(**way) for title, way in entries["ways"].items()}
    small = tuple(entries["small"]) if entries["small"] else None
    return Found(**{**entries, "ways": ways, "small": small})


def memory_row(name: str) -> tuple[str, ...]:
    """Table 1: the paper's GB, and ours, which are GiB."""
    family, layers, width = name.split("-")
    stated = STATED[family][int(layers)][WIDTHS[family].index(width)]
    gibibytes = 12 * training_of(config_of(name)).parameters / 2**30
    return name, f"{stated:.1f}", f"{gibibytes:.2f}", f"{100 * (gibibytes / stated - 1):+.1f} %"


def search_rows(name: str, found: Found) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Figure 11: megabytes, and seconds to search."""
    best = min(found.ways[method].bytes_sent for method in RIVALS)
    ways = [found.ways.get(method) for method in SEARCHES]
    sent = [megabytes(way.bytes_sent) if way else "-" for way in ways]
    gaps = [f"{100 * way.gap:.2f} %" if way else "-" for way in ways[len(RIVALS) :]]
    seconds = [f"{way.search_seconds:.1f}" if way else "-" for way in ways]
    counts = (str(found.operations), str(found.variables))
    all_of_it = f"{found.planning_seconds:.1f}"
    return (name, *sent, f"{found.ways['exact'].bytes_sent / best:.2f}", *gaps), (name, *counts, *seconds, all_of_it)


def memory_cells(name: str, found: Found) -> tuple[str, ...]:
    """GB of a device's peak. A mark stands for one that fits a K80, another one for one above 80 GB."""
    cells = []
    for method in (*RIVALS, "exact", *PLACEMENT_METHODS):
        peak = found.ways[method].peak
        mark = " *" if peak <= load_profile(HARDWARE).memory_bytes else "" if peak <= 80e9 else " !"
        cells.append(f"{peak / 1e9:.1f}{mark}")
    return (name, *cells)


def throughput_cells(name: str, found: Found) -> tuple[str, ...]:
    """Figures 9 and 10: examples per second, in brackets above the memory of a K80."""
    ideal = DEVICES * found.batch / found.single_seconds
    cells = [f"{ideal:.1f}", "-"]
    if found.small:
        batch, seconds = found.small
        cells[1] = f"{DEVICES * batch / seconds:.1f} ({batch} each)"
    for method in (*PLACEMENT_METHODS, "recursive", "exact"):
        way = found.ways[method]
        rate = f"{found.batch / way.step_seconds:.1f}"
        cells.append(rate if way.peak <= load_profile(HARDWARE).memory_bytes else f"({rate})")
    return (name, *cells)


TABLES = {
    "Table 1: GB of weights, gradients and history": ("model", "the paper", "here, GiB", "difference"),
    "Figure 11: MB sent": (
        "model", *SEARCHES, "exact / best rival", "exact: at most above optimum", f"{OVER_FACTORS}: the same",
    ),
    "Figure 11: seconds to search": (
        "model", "operations", "variables", *SEARCHES, "exact: planning in all",
    ),
    "Predicted and compiled": ("model", "method", "predicted MB", "compiled MB", "difference"),
    "Memory: GB at the peak": ("model", *RIVALS, "exact", *PLACEMENT_METHODS),
    "Figures 9 and 10: examples per second on eight K80, simulated": (
        "model", "ideal", "small batch", *PLACEMENT_METHODS, "Tofu", "exact",
    ),
}  # fmt: skip
NOTES = {
    "Table 1: GB of weights, gradients and history": (
        "The recurrent layers alone reach the paper's figures, so the vocabulary is small (1024). RNN-8 with 6K does "
        "not fit the paper's own series: between 18.6 (6 layers) and 32.1 (10 layers) it states 28.5 instead of 25.4."
    ),
    "Figure 11: MB sent": (
        "The rivals cut over the mesh (2, 2, 2), whose axes are the factors that Tofu recurs over; `exact` over one "
        f"axis of 8, which are some of the same layouts. No search gets more than {SEARCH_SECONDS:.0f} s by the clock: "
        "most that do not close end before, by the work that they count; the others have seconds near the limit."
    ),
    "Figure 11: seconds to search": (
        "Seconds of the processor, of a search alone: the network of costs is in hand when they begin, and they end "
        "with an assignment. Planning in all adds: tracing, rules, the network, the schedule and its memory. "
        "Tofu's own search is reported to take 8.3 s for WResNet-152 and 66.6 s for RNN-10, on 8 workers."
    ),
    "Predicted and compiled": (
        "Tofu's plan of an RNN reduces what comes of a cell's input and of its state one by one. Over 4 steps, where "
        "it was looked at, most of the difference are such reductions that XLA makes once, as `exact` plans them."
    ),
    "Memory: GB at the peak": "With *: fits the 12 GB of a K80; with !: does not fit 80 GB. No search was limited.",
    "Figures 9 and 10: examples per second on eight K80, simulated": (
        "In brackets: what needs more than 12 GB. Ideal: eight devices that need not talk to each other, with memory "
        "enough for the whole batch on each; small batch: those with the largest batch that fits. Operations take what "
        "the roofline says, so a small batch loses by its weights' memory traffic alone."
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*lstm.CONFIGS, *wide_resnet.CONFIGS]
    parser.add_argument("--only", nargs="+", choices=names, help="these models; the document is left as it is")
    only = parser.parse_args(arguments).only
    document = Document("tofu", "The Tofu paper's evaluation", INTRODUCTION, "tofu", writes=not only)
    memory, sent, seconds, checked, peaks, throughput = tables = [
        document.table(header, title) for title, header in TABLES.items()
    ]
    for table in tables:
        table.say([NOTES[table.title]] if table.title in NOTES else [])
    for name in only or names:
        memory.add(memory_row(name))
    with progress() as shown, ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        every = only or names
        for name, found in shown.track(
            zip(every, pool.map(kept, every), strict=True), len(every), description="models"
        ):
            for table, row in zip((sent, seconds), search_rows(name, found), strict=True):
                table.add(row)
            peaks.add(memory_cells(name, found))
            throughput.add(throughput_cells(name, found))
        for name in COMPILED if not only else ():
            _compile(name, checked)
    document.print()


def _compile(name: str, table: Table) -> None:
    changes = ", ".join(f"{value} {key}" for key, value in COMPILED[name].items())
    for method in (*RIVALS, "exact"):
        predicted, read = in_own_process(compiled, name, method)
        difference = f"{100 * (read / predicted - 1):+.2f} %"
        table.add((", ".join(filter(None, (name, changes))), method, megabytes(predicted), megabytes(read), difference))


if __name__ == "__main__":
    main()
