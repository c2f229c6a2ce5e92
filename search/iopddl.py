"""Problems of the ASPLOS / EuroSys 2025 contest on intra-operator parallelism (data: google/iopddl).

    python -m shardplan.search.iopddl PROBLEM.json[.gz] SECONDS

prints lines of progress, then as its last line the list of strategies, one index per node. A problem is

    {"problem": {"name": ..., "usage_limit": number or null,
                 "nodes": {"intervals": [[start, end], ...], "costs": [[...], ...], "usages": [[...], ...]},
                 "edges": {"nodes": [[u, v], ...], "costs": [[row-major], ...]}}}

with one entry per node (or edge) in each list; costs of 1e18 stand for what is excluded.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from shardplan.search.methods import METHODS, solve
from shardplan.search.network import Network, NetworkError
from shardplan.search.solution import Progress, Solution

__all__ = ["load", "main", "network_of"]

_SECONDS_BETWEEN_LINES = 1.0


def load(path: str | Path) -> Network:
    """The network of a problem file. Raises `NetworkError` where the file does not describe one."""
    name = str(path)
    opener = gzip.open if name.endswith(".gz") else open
    try:
        with opener(name, "rt", encoding="utf-8") as file:
            content = json.load(file)
    except (json.JSONDecodeError, UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise NetworkError(f"`{name}` is not JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("problem"), dict):
        raise NetworkError(f'`{name}`: expected an object with a "problem"')
    return network_of(content["problem"])


def network_of(problem: dict[str, Any]) -> Network:
    """The network of a problem, as read from JSON; node i is variable i."""
    node_costs = _lists(problem, "nodes", "costs")
    intervals = _lists(problem, "nodes", "intervals", len(node_costs))
    usages = _lists(problem, "nodes", "usages", len(node_costs))
    members = _lists(problem, "edges", "nodes")
    edge_costs = _lists(problem, "edges", "costs", len(members))
    limit = problem.get("usage_limit")
    net = Network(None if limit is None else float(limit))
    for node, costs in enumerate(node_costs):
        net.add_variable(_numbers(costs, f"costs of node {node}"), name=f"node {node}")
    tables: dict[tuple[object, ...], np.ndarray] = {}
    for edge, (ends, costs) in enumerate(zip(members, edge_costs, strict=True)):
        shape = tuple(net.costs[_node(net, v, edge)].size for v in ends)
        key = (shape, tuple(costs))
        table = tables.get(key)
        if table is None:
            values = _numbers(costs, f"costs of edge {edge}")
            if len(shape) not in (1, 2) or values.size != np.prod(shape):
                raise NetworkError(f"edge {edge} of nodes {ends}: expected costs for {shape}, got {values.size}")
            table = tables[key] = values.reshape(shape) if len(shape) == 2 else np.diag(values)
        net.add_edge(ends[0], ends[-1], table)
    for node, (interval, usage) in enumerate(zip(intervals, usages, strict=True)):
        if len(interval) != 2:
            raise NetworkError(f"interval of node {node}: expected [start, end], got {interval}")
        net.add_usage(node, _numbers(usage, f"usages of node {node}"), int(interval[0]), int(interval[1]))
    return net


def _lists(problem: dict[str, Any], part: str, field: str, length: int | None = None) -> list[Any]:
    found = problem.get(part)
    values = found.get(field) if isinstance(found, dict) else None
    if not isinstance(values, list):
        raise NetworkError(f'the problem has no list "{part}" -> "{field}"')
    if length is not None and len(values) != length:
        raise NetworkError(f'"{part}" -> "{field}" has {len(values)} entries, expected {length}')
    return values


def _numbers(values: Any, what: str) -> np.ndarray:
    try:
        array = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise NetworkError(f"{what}: expected a list of numbers") from error
    if array.ndim != 1 or array.size == 0:
        raise NetworkError(f"{what}: expected a list of numbers, at least one")
    return array


def _node(net: Network, v: Any, edge: int) -> int:
    if not isinstance(v, int) or not 0 <= v < len(net):
        raise NetworkError(f"edge {edge} names node {v}; there are {len(net)}")
    return v


class _Printer:
    """Prints progress, at most one line per second."""

    def __init__(self, network: Network) -> None:
        self.limit = network.usage_limit
        self.last = -_SECONDS_BETWEEN_LINES

    def __call__(self, progress: Progress) -> None:
        if progress.seconds - self.last >= _SECONDS_BETWEEN_LINES:
            self.last = progress.seconds
            self.line(progress.seconds, progress.cost, progress.lower_bound, progress.peak_usage)

    def line(self, seconds: float, cost: float, bound: float, usage: float) -> None:
        limit = "" if self.limit is None else f" of {self.limit:.15g}"
        print(f"{seconds:8.2f} s  cost {cost:.15g}  bound {bound:.15g}  usage {usage:.15g}{limit}", flush=True)


def _seconds_since_start() -> float:
    """Since this process began, where the system tells; importing and reading count towards the limit."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
        ticks_per_second = 100.0
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - float(fields[19]) / ticks_per_second)
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0


def run(path: str, seconds: float, method: str = "auto") -> tuple[Network, Solution]:
    """Reads and solves a problem, printing progress. seconds: from the start of the process."""
    network = load(path)
    printer = _Printer(network)
    # A little is kept back for what comes after the search: undoing reductions, and leaving the process.
    left = seconds - _seconds_since_start() - 0.005 * seconds - 0.2
    solution = solve(network, method=method, time_limit=max(left, 0.1), progress=printer)
    printer.line(_seconds_since_start(), solution.cost, solution.lower_bound, solution.peak_usage)
    print(
        f"{solution.status}: gap {solution.gap:.3g}, "
        + ", ".join(f"{k} {v:.2f} s" for k, v in solution.seconds.items())
    )
    return network, solution


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m shardplan.search.iopddl", description="Solves one problem.")
    parser.add_argument("problem", help="a problem file, .json or .json.gz")
    parser.add_argument("seconds", type=float, help="time limit, from the start of the process")
    parser.add_argument("--method", default="auto", choices=sorted(METHODS))
    options = parser.parse_args(arguments)
    try:
        _, solution = run(options.problem, options.seconds, options.method)
    except (NetworkError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(solution.choices.tolist()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
