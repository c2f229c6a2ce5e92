"""The demo: its tables, its run without the GPU compiler, and the command line."""

import io
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from rich.console import Console

import shardplan
from shardplan.compiled.target import TargetNotInstalledError
from shardplan.models import demo, gpt
from shardplan.models.demo_report import collective_table, data_parallel, fully_sharded, layout_table

ROOT = Path(__file__).parents[2]
TINY = gpt.Config(layers=2, width=64, heads=8, vocabulary=256, sequence=32, batch=16)


@pytest.fixture
def console() -> Console:
    return Console(width=120, record=True, highlight=False, file=io.StringIO())


@pytest.mark.parametrize(
    ("shape", "spec"),
    [((), ()), ((3,), ()), ((16,), ("data",)), ((16, 24), (None, "data")), ((24, 20), ("data",)), ((0, 3), ())],
)
def test_baselines_of_the_demo(shape: tuple[int, ...], spec: tuple[str | None, ...]):
    """They split the dimensions that divide."""
    leaf = jax.ShapeDtypeStruct(shape, "float32")
    assert tuple(fully_sharded(leaf, 8)) == spec
    assert tuple(data_parallel(leaf, 8)) == ()


@pytest.mark.long
def test_tables_account_for_the_whole_plan(console: Console):
    training = gpt.training(TINY)
    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    plan = shardplan.plan(training.train_step, mesh, training.state, training.batch)
    console.print(layout_table(plan))
    console.print(collective_table(plan))
    lines = [line.strip("│").split("│") for line in console.export_text().splitlines() if line.startswith("│")]
    tensors = sum(int(line[-1]) for line in lines if "float32[" in line[1])
    assert tensors == 3 * len(jax.tree.leaves(training.state["params"]))  # with their two moments
    kilobytes = sum(float(line[-1].replace(",", "")) for line in lines if "float32[" not in line[1])
    assert kilobytes == pytest.approx(plan.communication_bytes / 1e3, rel=0.01)


@pytest.mark.slow
def test_demo_without_the_gpu_compiler(console: Console, monkeypatch: pytest.MonkeyPatch):
    """It prints that, and continues."""

    def missing(*_: object, **__: object):
        raise TargetNotInstalledError("pip install 'shardplan[audit]'")

    monkeypatch.setattr(demo, "LARGE", TINY)
    monkeypatch.setattr(shardplan, "audit", missing)
    demo.audit(console)
    printed = console.export_text()
    assert "The audit is left out" in printed
    assert "pip install 'shardplan[audit]'" in printed
    assert "MB sent per device and step" in printed


@pytest.mark.long
def test_training_agrees_and_learns(console: Console, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "SMALL", replace(TINY, layers=1))
    assert demo.train(console, steps=8)
    printed = console.export_text()
    assert "they agree" in printed
    planned = [float(loss) for loss in re.findall(r"^ +\d +([\d.]+) +[\d.]+ +[\d.e+-]+$", printed, re.MULTILINE)]
    assert len(planned) == 5
    assert planned[-1] < planned[0]


@pytest.mark.long
def test_whole_demo_from_the_command_line():
    command = [sys.executable, "-m", "shardplan.cli", "demo"]
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    printed = result.stdout
    assert "they agree" in printed
    losses = [float(loss) for loss in re.findall(r"^step +\d+: loss ([\d.]+)", printed, re.MULTILINE)]
    assert losses[-1] < 0.9 * losses[0]
    rows = re.findall(r"│ (shardplan|data parallelism|FSDP) +│ +([\d,.]+) │", printed)
    sent = {name: float(number.replace(",", "")) for name, number in rows}
    assert sent["shardplan"] < sent["FSDP"] < sent["data parallelism"]
