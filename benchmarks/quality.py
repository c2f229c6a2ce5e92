"""How much plans send beside the usual ways to split the same steps: `python -m benchmarks.quality`."""

from collections.abc import Callable

from benchmarks.cases import DATA_PARALLEL, FSDP, PLAN, Document, Measured, report
from shardplan.tables import megabytes

INTRODUCTION = (
    "Bytes that one device sends per step, read from the compiled programs: the plan beside data parallelism and FSDP "
    "by `in_shardings`, all at the same precision of reductions unless the step says otherwise."
)


def _beside(name: str) -> Callable[[Measured], str]:
    return lambda m: f"{m.ways[PLAN].bytes_sent / m.ways[name].bytes_sent:.3f}"


def _megabytes_of(name: str) -> Callable[[Measured], str]:
    return lambda m: megabytes(m.ways[name].bytes_sent)


def _reduced_in_bf16(m: Measured) -> str:
    """The part of the reductions' bytes that sums in bf16."""
    reduced = [m.ways[name].reduced_bytes for name in WAYS]
    return " / ".join(f"{100 * way.get('bf16', 0) / max(sum(way.values()), 1):.0f} %" for way in reduced)


def _memory(m: Measured) -> str:
    return " / ".join(f"{m.ways[name].peak / 1e9:.2f}" for name in WAYS)


WAYS = (PLAN, DATA_PARALLEL.name, FSDP.name)
COLUMNS = {
    "plan MB": _megabytes_of(PLAN),
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
