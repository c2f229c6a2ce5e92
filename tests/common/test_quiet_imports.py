"""Side effects of the library: the time of imports, notices on stderr, the log, the display, units."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.common import progress
from shardplan.common.quiet_imports import without_cuda_notice

ROOT = Path(__file__).parents[2]
IMPORTS = """
import sys, time, jax
started = time.perf_counter()
import shardplan
print(time.perf_counter() - started)
shardplan.auto(lambda x: x, 1)
print([name for name in ("ortools", "pandas") if name in sys.modules])
"""


def run_apart(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "SHARDPLAN_CACHE_DIR": ""}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=True, cwd=ROOT
    )


@pytest.mark.slow
def test_imports_at_start() -> None:
    """OR-tools and its pandas come with the first search that needs them."""
    seconds, heavy = run_apart("-c", IMPORTS).stdout.split("\n")[:2]
    assert float(seconds) < 0.3
    assert heavy == "[]"


@pytest.mark.long
def test_stderr_of_the_command_line() -> None:
    """It is empty: the notice of JAX's CUDA plugin, which found no driver, is left out."""
    assert run_apart("-m", "shardplan", "plan", "shardplan.models.mlp:training", "--mesh", "8").stderr == ""


def test_public_names() -> None:
    """A name is the function, also where the module of that name was imported by itself; modules are there too."""
    import shardplan.auto
    import shardplan.compare

    assert callable(shardplan.auto) and callable(shardplan.compare) and callable(shardplan.audit)
    assert {"auto", "plan", "Plan", "describe"} <= {*dir(shardplan)}
    assert shardplan.hardware.profiles()
    with pytest.raises(AttributeError, match="module `shardplan` has no attribute `magic`; there are audit, auto"):
        shardplan.magic  # type: ignore[attr-defined] # noqa: B018


def test_other_output_during_an_import(capfd: pytest.CaptureFixture[str]) -> None:
    """It follows at the end."""
    with without_cuda_notice(anyhow=True):
        os.write(2, b"I0000 cudart_stub.cc:31] Could not find cuda drivers\nsomething else\n")
    assert capfd.readouterr().err == "something else\n"


def test_log_line_of_a_planning(caplog: pytest.LogCaptureFixture, monkeypatch: Any, tmp_path: Path) -> None:
    """It has the function's name, the bytes, the seconds, and whether the plan is from the cache."""
    monkeypatch.setenv("SHARDPLAN_CACHE_DIR", str(tmp_path))

    def double(x: Any) -> Any:
        return x * 2

    with caplog.at_level(logging.INFO, logger="shardplan"):
        for _ in range(2):
            planned = shardplan.auto(double, 8)
            planned.plan(jnp.ones(8)), planned.plan(jnp.ones(8))
    first, second = caplog.messages
    assert first.startswith("Plan of double over mesh (devices=8): 0.0 MB sent") and first.endswith(" s)")
    assert second.endswith("from the cache)")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_progress_of_a_long_planning(stream: Any, monkeypatch: Any) -> None:
    """On a terminal it shows the stage, and it is erased at the end."""
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "_SECONDS_BEFORE", 0.0)
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN", 0.01)
    with progress.show_progress("step"):
        progress.set_stage("searching 7 choices")
        deadline = time.perf_counter() + 5
        while stream.isatty() and "step, searching 7 choices, 0 s" not in stream.getvalue():
            assert time.perf_counter() < deadline
            time.sleep(0.001)
    assert stream.getvalue().endswith("\r\x1b[K") == stream.isatty()
    assert stream.isatty() or not stream.getvalue()


def test_units_that_fit() -> None:
    plan = shardplan.plan(lambda x: x.sum(), 8, jnp.ones((8, 8)), pins={"0": jax.P()})
    assert "256 B of arguments per device" in str(plan)
