"""Problem files of the contest, and the command that solves them."""

import copy
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardplan.search import NetworkError, iopddl
from shardplan.search.testing import random_networks

PROBLEM: dict[str, Any] = {
    "problem": {
        "name": "made-up",
        "nodes": {
            "intervals": [[0, 4], [1, 3], [5, 5]],
            "costs": [[15, 55, 65], [45, 10], [1]],
            "usages": [[15, 25, 25], [20, 11], [1]],
        },
        "edges": {"nodes": [[0, 1], [2, 1], [1]], "costs": [[30, 40, 50, 10, 0, 1e18], [1, 0], [0, 5]]},
        "usage_limit": 40,
    }
}


def write(path: Path, content: Any) -> Path:
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    return path


def test_the_network_of_a_problem() -> None:
    net = iopddl.network_of(PROBLEM["problem"])
    assert net.usage_limit == 40
    # Costs 15 + 10 + 1, edges 40 + 0 + 5; row-major over the nodes as each edge lists them.
    assert net.cost([0, 1, 0]) == 71
    assert net.cost([2, 1, 0]) == np.inf
    assert net.peak([0, 1, 0]) == (26.0, 1)


@pytest.mark.slow
def test_the_command_prints_the_solution_last(tmp_path: Path) -> None:
    path = write(tmp_path / "problem.json.gz", PROBLEM)
    command = [sys.executable, "-m", "shardplan.search.iopddl", str(path), "30"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    net = iopddl.load(path)
    _, optimum = random_networks.brute_force(net)
    assert net.cost(json.loads(lines[-1])) == optimum
    assert f"cost {optimum:.15g}" in lines[-3]
    assert "bound" in lines[-3] and "usage" in lines[-3]


@pytest.mark.parametrize(
    ("part", "field", "value", "message"),
    [
        ("nodes", "costs", [[15, 55, 65], [], [1]], "costs of node 1"),
        ("nodes", "costs", [[15, 55, 65], [float("nan"), 10], [1]], "`node 1`"),
        ("nodes", "costs", [[15, 55, 65], ["x", 10], [1]], "costs of node 1"),
        ("nodes", "usages", [[15, 25, 25], [20, 11]], '"usages" has 2 entries, expected 3'),
        ("nodes", "usages", [[15, 25, 25], [20], [1]], "`node 1`"),
        ("nodes", "intervals", None, '"nodes" -> "intervals"'),
        ("nodes", "intervals", [[0, 4], [1], [5, 5]], "interval of node 1"),
        ("edges", "nodes", [[0, 9], [2, 1], [1]], "edge 0 names node 9"),
        ("edges", "costs", [[30, 40], [1, 0], [0, 5]], "edge 0"),
    ],
)
def test_malformed_problems_are_refused(part: str, field: str, value: Any, message: str) -> None:
    problem = copy.deepcopy(PROBLEM["problem"])
    problem[part][field] = value
    with pytest.raises(NetworkError, match=message):
        iopddl.network_of(problem)


def test_files_that_are_no_problems_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"problem": ', encoding="utf-8")
    assert iopddl.main([str(broken), "5"]) == 1
    assert "is not JSON" in capsys.readouterr().err
    assert iopddl.main([str(write(tmp_path / "list.json.gz", [1, 2])), "5"]) == 1
    assert iopddl.main([str(tmp_path / "missing.json"), "5"]) == 1
