"""Typed PRNG keys as arguments, in one process and in several that share the devices."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from tests.helpers import processes_worker as worker
from tests.helpers.random_programs import mesh_of


@pytest.mark.slow
@pytest.mark.parametrize(
    "impl",
    ["threefry2x32", pytest.param("rbg", marks=pytest.mark.long), pytest.param("unsafe_rbg", marks=pytest.mark.long)],
)
def test_keys_of_all_implementations(impl: str) -> None:
    """Key arrays split over devices, in a donated state, and as results are those of jit."""
    keys, x = jax.random.split(jax.random.key(3, impl=impl), 8), jnp.asarray(worker.X)
    state = {"key": keys[1], "w": x}
    cases: list[tuple[Any, Any, dict[str, Any]]] = [
        (worker.draw_each, (keys, x), {"pins": {"0": P("x")}}),
        (worker.of_state, (state, x), {}),
        (lambda grid: grid.T, (keys.reshape(8, 1),), {}),
    ]
    for fn, args, options in cases:
        expected = jax.jit(fn)(*args)
        found = shardplan.auto(fn, mesh_of((8,)), **options)(*args)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_allclose(worker.words(one), worker.words(other), rtol=1e-6)


@pytest.mark.long
def test_two_processes() -> None:
    """Keys, references and host arrays run where devices belong to several processes, as in one."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    devices = "--xla_force_host_platform_device_count=4"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices, "SHARDPLAN_CACHE_DIR": ""}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.processes_worker", str(index), str(port)],
            cwd=Path(__file__).parents[2],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        printed = [process.communicate(timeout=600)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for output in printed:
        lines = [line for line in output.splitlines() if line.endswith(("True", "False"))]
        assert len(lines) == 9 + 2 and all(line.endswith("True") for line in lines), output
