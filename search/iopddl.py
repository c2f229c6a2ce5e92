"""Problems of the ASPLOS / EuroSys 2025 contest on intra-operator parallelism (data: google/iopddl).

python -m shardplan.search.iopddl PROBLEM.json[.gz] SECONDS
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np

from shardplan.search.network import Network

__all__ = ["load"]


def load(path: str | Path) -> Network:
    """The network of a problem file; raises `NetworkError` where the file is malformed."""
    name = str(path)
    opener = gzip.open if name.endswith(".gz") else open
    with opener(name, "rt") as file:
        problem = json.load(file)["problem"]
    return network_of(problem)


def network_of(problem: dict) -> Network:
    nodes, edges = problem["nodes"], problem["edges"]
    net = Network(problem.get("usage_limit"))
    for costs in nodes["costs"]:
        net.add_variable(costs)
    tables: dict[tuple, np.ndarray] = {}
    for members, costs in zip(edges["nodes"], edges["costs"], strict=True):
        u, v = members
        shape = (net.costs[u].size, net.costs[v].size)
        key = (shape, tuple(costs))
        table = tables.get(key)
        if table is None:
            table = tables[key] = np.array(costs, dtype=np.float64).reshape(shape)
        net.add_edge(u, v, table)
    for v, ((start, end), usage) in enumerate(zip(nodes["intervals"], nodes["usages"], strict=True)):
        net.add_usage(v, usage, start, end)
    return net
