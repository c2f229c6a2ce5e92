"""How near predictions come to the compiled programs, and what planning costs: `python benchmarks/fidelity.py`."""

from cases import DATA_PARALLEL, Document, report

from shardplan.tables import megabytes

INTRODUCTION = (
    "Predicted beside compiled bytes sent per device and step, peak memory, the gap to the lower bound, and seconds: "
    "to plan (tracing included), and to lower and compile the planned step; in brackets the work of it, in seconds of "
    "all cores together. The work of compiling is also a multiple of that of plain `jit` with the plan's input and "
    "output shardings and no constraints (with the bytes that this sends), and of data parallelism."
)


def _percent(part: float, whole: float) -> str:
    return f"{100 * (part / whole - 1):+.2f} %" if whole else "-"


COLUMNS = {
    "predicted MB": lambda m: megabytes(m.predicted_bytes),
    "compiled MB": lambda m: megabytes(m.compiled_bytes),
    "compiled - predicted": lambda m: _percent(m.compiled_bytes, m.predicted_bytes),
    "gap": lambda m: f"{100 * m.gap:.4f} %",
    "predicted peak GB": lambda m: f"{m.predicted_peak / 1e9:.2f}",
    "compiled peak GB": lambda m: f"{m.compiled_peak / 1e9:.2f}",
    "s to plan": lambda m: f"{m.seconds_to_plan:.2f} ({m.plan_work:.2f})",
    "s to compile": lambda m: f"{m.seconds_to_compile:.1f} ({m.compile_work:.1f})",
    "x plain jit": lambda m: f"{m.compile_work / m.unconstrained_work:.2f}",
    "plain jit MB": lambda m: megabytes(m.unconstrained_bytes),
    "x data parallel": lambda m: f"{m.compile_work / m.baseline_work[DATA_PARALLEL.name]:.2f}",
}

FIDELITY = Document("fidelity", INTRODUCTION, COLUMNS, (DATA_PARALLEL,))

if __name__ == "__main__":
    report(FIDELITY)
