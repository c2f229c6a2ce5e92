"""How near predictions come to the compiled programs, and what planning costs: `python -m benchmarks.fidelity`."""

from collections.abc import Callable

from benchmarks.cases import DATA_PARALLEL, PLAN, UNCONSTRAINED, Compiled, Document, Measured, Planned, report
from shardplan.tables import megabytes

INTRODUCTION = (
    "Predicted beside compiled bytes sent per device and step, peak memory, the gap to the lower bound, and seconds: "
    "to plan (tracing included), and to lower and compile the planned step; in brackets the work of it, in seconds of "
    "all cores together. The work of compiling is also a multiple of that of plain `jit` with the plan's input and "
    "output shardings and no constraints (with the bytes that this sends), and of data parallelism."
)


def _percent(part: float, whole: float) -> str:
    return f"{100 * (part / whole - 1):+.2f} %" if whole else "-"


def _times_the_work_of(name: str) -> Callable[[Measured], str]:
    return lambda m: f"{m.ways[PLAN].work / m.ways[name].work:.2f}"


def _seconds(of: Planned | Compiled) -> str:
    return f"{of.seconds:.2f} ({of.work:.2f})"


COLUMNS = {
    "predicted MB": lambda m: megabytes(m.planned.bytes_sent),
    "compiled MB": lambda m: megabytes(m.ways[PLAN].bytes_sent),
    "compiled - predicted": lambda m: _percent(m.ways[PLAN].bytes_sent, m.planned.bytes_sent),
    "gap": lambda m: f"{100 * m.planned.gap:.4f} %",
    "predicted peak GB": lambda m: f"{m.planned.peak / 1e9:.2f}",
    "compiled peak GB": lambda m: f"{m.ways[PLAN].peak / 1e9:.2f}",
    "s to plan": lambda m: _seconds(m.planned),
    "s to compile": lambda m: _seconds(m.ways[PLAN]),
    "x plain jit": _times_the_work_of(UNCONSTRAINED),
    "plain jit MB": lambda m: megabytes(m.ways[UNCONSTRAINED].bytes_sent),
    "x data parallel": _times_the_work_of(DATA_PARALLEL.name),
}
FIDELITY = Document("fidelity", INTRODUCTION, COLUMNS, (UNCONSTRAINED, DATA_PARALLEL))

if __name__ == "__main__":
    report(FIDELITY)
