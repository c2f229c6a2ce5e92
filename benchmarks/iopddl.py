"""Problems of the ASPLOS / EuroSys 2025 contest, each in its own process: `python -m benchmarks.iopddl FOLDER`.

The table has the contest's known limits and best published costs. Points are the best published cost over the cost
found, so that 1.0 equals the best of the 20 teams. `--only A B` solves these problems, and prints alone.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.documents import Document, progress
from shardplan.search import iopddl

BEST_COSTS = {"A": 6548641531, "B": 532843, "G": 217039, "M": 49928460991, "S": 1534613444}
SECONDS = {"A": 60, "B": 60, "G": 120, "M": 180, "S": 240}


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one problem. Its cost is recomputed from the printed strategies, on the file's own data."""

    name: str
    variables: int
    cost: float
    bound: float
    peak_share: float
    seconds: float
    memory_bytes: int
    points: float | None

    def cells(self) -> tuple[str, ...]:
        points = "" if self.points is None else f"{self.points:.4f}"
        gap = (self.cost - self.bound) / self.cost if self.cost else 0.0
        return (
            *(self.name, str(self.variables), f"{self.cost:.12g}", points, f"{self.bound:.12g}", f"{gap:.2%}"),
            *(f"{self.peak_share:.3f}", f"{self.seconds:.1f}", f"{self.memory_bytes / 1e9:.2f}"),
        )


HEADER = ("problem", "variables", "cost", "points", "lower bound", "gap", "peak / limit", "seconds", "GB so far")
INTRODUCTION = (
    "The sharding problems of the ASPLOS / EuroSys 2025 contest, each solved within the contest's time limit, start of "
    "the process and reading of the file included. Points: the best published cost over the cost found. GB: the most "
    "that any process held so far."
)


def measure(path: Path, seconds: float, best: float | None) -> Row:
    """Solves a problem in a process of its own."""
    begun = time.monotonic()
    command = [sys.executable, "-m", "shardplan.search.iopddl", str(path), str(seconds)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    took = time.monotonic() - begun
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    choices = json.loads(output[-1])
    bounds = [float(found.group(1)) for line in output if (found := re.search(r"bound (\S+)", line))]
    network = iopddl.load(path)
    cost, peak = network.cost(choices), network.peak(choices)[0]
    share = peak / network.usage_limit if network.usage_limit else 0.0
    if share > 1:
        cost = float("inf")
    return Row(path.name, len(network), cost, bounds[-1], share, took, memory, best / cost if best else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, help="limit for each problem, instead of its own")
    parser.add_argument("--only", nargs="+", help="letters of problems; the document is left as it is")
    options = parser.parse_args()
    writes = not (options.only or options.seconds)
    document = Document("iopddl", "Published sharding problems", INTRODUCTION, "iopddl FOLDER", writes)
    table = document.table(HEADER)
    letters = {path: path.name.split(".")[0][-1] for path in sorted(options.folder.glob("*.json*"))}
    points = []
    with progress() as shown:
        for path in shown.track(
            [p for p in letters if letters[p] in (options.only or letters[p])], description="iopddl"
        ):
            letter = letters[path]
            row = measure(path, options.seconds or SECONDS.get(letter, 60), BEST_COSTS.get(letter))
            points += [] if row.points is None else [row.points]
            table.add(row.cells())
            if points:
                table.say([f"Mean points {sum(points) / len(points):.4f}, least {min(points):.4f}."])
    document.print()


if __name__ == "__main__":
    main()
