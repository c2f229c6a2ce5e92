"""The hardware profile of a mesh's own devices, and what a plan says of work that is repeated."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.compiled.target import gpu_mesh
from shardplan.plans import mesh_profile as devices
from shardplan.plans.mesh_profile import profile_of
from tests.helpers.random_programs import mesh_of

SHAPE = jax.ShapeDtypeStruct
PARAMS = {"a": SHAPE((256, 512), jnp.float32), "b": SHAPE((512, 512), jnp.float32)}
BATCH = SHAPE((512, 256), jnp.float32)


def step(p: Any, x: Any) -> Any:
    value, gradients = jax.value_and_grad(lambda p: (jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) ** 2).mean())(p)
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), value


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No profile stands for that of the devices."""
    monkeypatch.delenv(devices.VARIABLE)


def test_a_small_model_on_cpu_devices(own: None) -> None:
    """It is split: CPU devices compute so slowly that what it sends costs less than repeating its work."""
    plan = shardplan.plan(step, mesh_of((8,)), PARAMS, BATCH)
    assert plan.recipe.options.hardware == "cpu" and any(plan.layouts.values())
    assert str(plan).splitlines()[0] == "Plan over mesh (x=8), 8 devices"


def test_memory_of_cpu_devices(own: None) -> None:
    """Hosts share their memory: no limit follows from the profile, as it does from that of a GPU."""
    large = SHAPE((2**18, 2**17), jnp.float32)
    assert shardplan.plan(lambda x: x + 1, mesh_of((8,)), large, pins={"0": P()}).peak_bytes > 1e11
    with pytest.raises(shardplan.InfeasibleError):
        shardplan.plan(lambda x: x + 1, mesh_of((8,)), large, pins={"0": P()}, hardware="h100")


@pytest.mark.parametrize("target", ["a100", "h100", "h200", "b200"])
def test_gpus(own: None, target: str) -> None:
    """The profile is that of the GPU type."""
    assert profile_of(gpu_mesh(target, (2,), ("x",))) == target


@pytest.mark.parametrize(
    ("kind", "capability", "profile"),
    [
        ("NVIDIA GB300", 10.3, "b200"),
        ("NVIDIA H20", 9.0, "h100"),
        ("NVIDIA L40S", 8.9, "a100"),
        ("Tesla V100-SXM2-16GB", 7.0, "a100"),
        ("Tesla K40m", 3.5, "k80"),
        ("AMD Instinct MI300X", 9.0, "h100"),
    ],
)
def test_other_gpus(caplog: pytest.LogCaptureFixture, kind: str, capability: float, profile: str) -> None:
    """The nearest profile is taken, and the log says so."""
    devices._of_device.cache_clear()
    assert devices._of_device("gpu", kind, capability, True) == profile
    assert f"no hardware profile of `{kind}`: {profile} is the nearest" in caplog.text


def test_meshes_without_devices(own: None, caplog: pytest.LogCaptureFixture) -> None:
    """They have the profile of an H100, which the log says once."""
    devices._say_default.cache_clear()
    with caplog.at_level(logging.INFO, "shardplan"):
        assert [profile_of(mesh) for mesh in (AbstractMesh((8,), ("x",)), 8, "2x8")] == ["h100"] * 3
    assert caplog.text.count("hardware profile h100") == 1


def test_a_profile_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands for that of the devices, not for one that is given."""
    monkeypatch.setenv(devices.VARIABLE, "a100")
    assert profile_of(mesh_of((8,))) == profile_of(8) == "a100"
    plan = shardplan.plan(jnp.sin, mesh_of((8,)), SHAPE((8,), jnp.float32), hardware="b200")
    assert plan.recipe.options.hardware == "b200"
    monkeypatch.setenv(devices.VARIABLE, "h1000")
    with pytest.raises(shardplan.ArgumentError, match="no hardware profile `h1000`"):
        shardplan.plan(jnp.sin, mesh_of((8,)), SHAPE((8,), jnp.float32))


@pytest.mark.parametrize(("objective", "cost"), [("bytes", "as much as sending 0.9 MB"), ("time", " ms, and no")])
def test_a_plan_that_splits_nothing(objective: str, cost: str) -> None:
    """Its first line has this, and the rates that make it cheapest."""
    plan = shardplan.plan(step, mesh_of((8,)), PARAMS, BATCH, objective=objective)
    first = str(plan).splitlines()[0]
    assert "8 devices: nothing is split: by h100's rates repeating 943.8 MFLOP costs" in first and cost in first
    assert not any(plan.layouts.values()) and "nothing is split" in plan._repr_html_()


def test_a_plan_that_repeats_most_of_its_work() -> None:
    """A large split step has no such line. One with a whole result has the repeated share."""
    rows, weights = SHAPE((512, 512), jnp.float32), {"a": SHAPE((512, 512), jnp.float32)}

    def square(x: Any, p: Any) -> Any:
        return x + 1, (p["a"] @ p["a"]) @ p["a"]

    plan = shardplan.plan(square, mesh_of((8,)), rows, weights, pins={"0": P("x")}, out_shardings=(None, P()))
    share = plan.statistics["repeated"]["share"]
    assert share > 0.5 and f"devices repeat {share:.0%} of their work: by h100's rates" in str(plan).splitlines()[0]
    batch = {"a": PARAMS["a"], "b": PARAMS["b"]}, SHAPE((65536, 256), jnp.float32)
    assert str(shardplan.plan(step, mesh_of((8,)), *batch)).splitlines()[0].endswith("8 devices")
