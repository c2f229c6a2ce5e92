"""How much plans send beside the usual ways to split the same steps: `python benchmarks/quality.py`."""

from cases import DATA_PARALLEL, FSDP, Document, Measured, report

from shardplan.tables import megabytes

INTRODUCTION = (
    "Bytes that one device sends per step, read from the compiled programs: the plan beside data parallelism and FSDP "
    "by `in_shardings`, all at the same precision of reductions unless the step says otherwise."
)


def _beside(name: str):
    return lambda m: f"{m.compiled_bytes / m.baseline_bytes[name]:.3f}"


def _megabytes_of(name: str):
    return lambda m: megabytes(m.baseline_bytes[name])


def _reduced_in_bf16(m: Measured) -> str:
    """The part of the reductions' bytes that sums in bf16."""
    ways = (m.reduced_bytes, *m.baseline_reduced.values())
    return " / ".join(f"{100 * way.get('bf16', 0) / max(sum(way.values()), 1):.0f} %" for way in ways)


def _memory(m: Measured) -> str:
    return " / ".join(f"{peak / 1e9:.2f}" for peak in (m.compiled_peak, *m.baseline_peaks.values()))


COLUMNS = {
    "plan MB": lambda m: megabytes(m.compiled_bytes),
    "data parallel MB": _megabytes_of(DATA_PARALLEL.name),
    "FSDP MB": _megabytes_of(FSDP.name),
    "plan / data parallel": _beside(DATA_PARALLEL.name),
    "plan / FSDP": _beside(FSDP.name),
    "peak GB (plan / data parallel / FSDP)": _memory,
    "reduced in bf16 (the same)": _reduced_in_bf16,
}

QUALITY = Document("quality", INTRODUCTION, COLUMNS, (DATA_PARALLEL, FSDP))

if __name__ == "__main__":
    report(QUALITY)
