"""Compiles steps and puts them on file: `python -m tests.fidelity.record`.

Options: `--only 'flax/*'`, and for the last part `--part report --drawn 900 920`. Each step is planned
without a memory limit, and where `--tight` is given also half way between its least peak and that, and compiled for
H100. Records of steps that are not asked for stay. A row takes 5 to 60 seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from fnmatch import fnmatch

import shardplan
from benchmarks.documents import progress
from benchmarks.measuring import TARGET, least_peak
from benchmarks.processes import in_own_process
from shardplan.compiled.program import bytes_by_operation, measure
from shardplan.compiled.target import gpu_mesh
from shardplan.plans.plan import Plan
from tests.fidelity.records import PARTS, Record, in_words, read, write
from tests.fidelity.steps import MESHES, names, part_of, step_of


def record(step: str, mesh: str, tight: bool) -> Record:
    """Plans a step, compiles it, and says what came of it."""
    found, sizes = step_of(step), MESHES[mesh]
    devices = gpu_mesh(TARGET, tuple(sizes.values()), tuple(sizes))

    def plan(memory_limit: float) -> Plan:
        given = {"donate_argnums": found.donated, "memory_limit": memory_limit}
        return shardplan.plan(found.function, devices, *found.arguments, **given)

    chosen, limit = plan(float("inf")), None
    if tight:
        limit = 0.5 * (least_peak(plan) + chosen.peak_bytes)
        chosen = plan(limit)
    report = measure(chosen.lower(devices), sizes, live_ranges=True)
    live = bytes_by_operation(report)
    return Record(
        step=step,
        mesh=mesh,
        limit=limit,
        peak=report.memory.peak,
        live=[int(live.get(operation.index, 0) // 1024) for operation in chosen.program.operations],
        **in_words(chosen.schedule),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="steps whose names match, as 'flax/*'")
    parser.add_argument("--mesh", nargs="+", choices=MESHES, default=("8", "2x4"))
    parser.add_argument("--tight", action="store_true", help="within a memory limit too")
    parser.add_argument("--part", choices=PARTS, help="the part that takes the records (default: by the step's name)")
    parser.add_argument("--drawn", nargs=2, type=int, metavar=("FIRST", "LAST"), help="drawn steps of these seeds")
    options = parser.parse_args(arguments)
    wanted = [f"drawn/{seed}" for seed in range(*options.drawn)] if options.drawn else names()
    kinds = (False, True) if options.tight else (False,)
    jobs = [(s, m, t) for s in wanted if fnmatch(s, options.only) for m in options.mesh for t in kinds]
    kept = {part: {_key(one): one for one in read(part)} for part in PARTS}
    with progress() as shown:
        for job in shown.track(jobs, description="recording"):
            part = options.part or part_of(job[0])
            kept[part][job] = in_own_process(record, *job)
            write(part, kept[part].values())


def _key(one: Record) -> tuple[str, str, bool]:
    return one.step, one.mesh, one.limit is not None


if __name__ == "__main__":
    main()
