"""All tables, one after another: `python -m benchmarks.all`.

Each table is written row by row. An interrupted run continues: compiled results are in `build/benchmarks`. `--skip
large` leaves tables out. On two cores that had other work for a quarter of the time it took 65 minutes: planning_time
10, quality 27, fidelity 8, tofu 17, all others 3.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

# `iopddl` needs a folder of problems that is not part of this repository, and `devices` GPUs: they are not among them.
TABLES = ("planning_time", "quality", "fidelity", "tofu", "scaling", "hosts", "large", "large_images", "xla")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--skip", nargs="+", choices=TABLES, default=[], help="leave these out")
    skipped = parser.parse_args(arguments).skip
    started = time.perf_counter()
    failed = []
    for name in (table for table in TABLES if table not in skipped):
        print(f"\n== {name}, after {(time.perf_counter() - started) / 60:.1f} minutes", file=sys.stderr, flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode:
            failed.append(name)
    print(f"\n{(time.perf_counter() - started) / 60:.1f} minutes", file=sys.stderr)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
