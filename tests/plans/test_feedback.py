"""Plans near their memory limit: compiled, corrected by what the compiler says, or refused."""

from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import shardplan
from shardplan.compiled.program import bytes_by_operation, measure
from shardplan.compiled.target import TargetNotInstalledError, gpu_mesh
from shardplan.options import Options
from shardplan.plans import feedback
from tests.helpers.limited_step import MESH, training

compiles_for_gpus = pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")


def _report(peak):
    memory = SimpleNamespace(peak=int(peak))
    return SimpleNamespace(memory=memory, compile_seconds=1.0, live_ranges=None, hlo_text="", executable=None)


def _planned(limit, **options):
    step, state, batch = training()
    return shardplan.plan(step, MESH, state, batch, donate_argnums=0, memory_limit=limit, **{"fit": (), **options})


@pytest.fixture(scope="module")
def free_peak():
    return _planned(float("inf")).peak_bytes


def _judged(monkeypatch, peaks):
    """Lets the compiler say these multiples of each predicted peak, one after another; gives what it was asked."""
    asked = []

    def compile_(judge, plan):
        asked.append(plan)
        return _report(peaks[len(asked) - 1] * plan.peak_bytes)

    monkeypatch.setattr(feedback._Judge, "compile", compile_)
    return asked


def test_a_plan_far_below_its_limit_is_not_compiled(monkeypatch, free_peak):
    asked = _judged(monkeypatch, [])
    plan = _planned(2 * free_peak, verify=True)
    assert not asked and plan.verified is None and "predicted" in str(plan)


def test_a_compiled_peak_within_the_limit_is_the_plan_s(monkeypatch, free_peak):
    _judged(monkeypatch, [0.99])
    plan = _planned(1.05 * free_peak, verify=True)
    assert plan.peak_bytes == int(0.99 * free_peak)
    assert plan.verified["target"] == "h100" and len(plan.verified["rounds"]) == 1
    assert "compiled for h100" in str(plan)
    assert plan.recipe.options.memory_limit == 1.05 * free_peak


def test_a_compiled_peak_above_the_limit(monkeypatch, free_peak):
    """The excess of the first plan counts in the second search, which finds a leaner plan."""
    asked = _judged(monkeypatch, [1.1, 1.0])
    limit = 1.02 * free_peak
    plan = _planned(limit, verify=True)
    first, second = plan.verified["rounds"]
    assert first["compiled_peak_bytes"] > limit >= second["compiled_peak_bytes"] == plan.peak_bytes
    assert asked[0].recipe.choices != asked[1].recipe.choices
    assert plan.recipe.options == replace(asked[0].recipe.options, verify=True)


@pytest.mark.long
def test_no_compiled_peak_within_the_limit(monkeypatch, free_peak):
    """The plan is refused."""
    asked = _judged(monkeypatch, [2.0] * 9)
    with pytest.raises(shardplan.InfeasibleError, match="whose compiled peak keeps within") as caught:
        _planned(1.02 * free_peak, verify=True)
    assert 1 <= len(asked) <= 2 + feedback.MOST_ROUNDS
    assert caught.value.least_peak_bytes == min(int(2.0 * plan.peak_bytes) for plan in asked)


@pytest.mark.long
def test_before_a_refusal_the_least_predicted_peak_is_compiled(monkeypatch, free_peak):
    """What was cut off may be more than need be: here nothing is left, yet the leanest plan compiles within."""
    asked = _judged(monkeypatch, [2.0, 1.0])
    plan = _planned(1.02 * free_peak, verify=True)
    assert len(asked) == 2 and plan.peak_bytes < asked[0].peak_bytes


def test_without_a_compiler_a_reserve_is_kept_free(monkeypatch, free_peak):
    def missing(*_):
        raise TargetNotInstalledError('pip install "shardplan[audit]"')

    monkeypatch.setattr(feedback, "gpu_mesh", missing)
    with pytest.warns(shardplan.ShardplanWarning, match=r"keeps 16% of its memory limit free.*shardplan\[audit\]"):
        plan = _planned(1.02 * free_peak, verify=True)
    assert plan.peak_bytes <= (1 - feedback.RESERVE) * 1.02 * free_peak and plan.verified is None


def test_searches_of_all_rounds_share_the_time_limit(monkeypatch):
    asked = _judged(monkeypatch, [1.1] * 9)
    hurried = _planned(float("inf"), time_limit=1e-6).peak_bytes
    with pytest.raises(shardplan.InfeasibleError):
        _planned(1.02 * hurried, verify=True, time_limit=1e-6)
    assert len(asked) == 1


@compiles_for_gpus
@pytest.mark.slow
def test_live_ranges_add_up_to_the_compiled_peak():
    """Also those of a loop's carries, and each operation of the plan has its bytes."""

    def step(ws, x):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jax.grad(lambda ws: jnp.mean(jax.lax.scan(layer, x, ws)[0] ** 2))(ws)

    mesh = gpu_mesh("h100", (8,), ("x",))
    shapes = jax.ShapeDtypeStruct((6, 512, 512), jnp.float32), jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    plan = shardplan.plan(step, mesh, *shapes)
    report = measure(plan.lower(mesh), {"x": 8}, live_ranges=True)
    assert report.live_ranges.peak == pytest.approx(report.memory.peak, rel=1e-4)
    found = bytes_by_operation(report)
    assert max(found.values()) == report.live_ranges.peak
    assert {operation.index for operation in plan.program.operations} >= found.keys()


@compiles_for_gpus
@pytest.mark.slow
def test_a_peak_that_is_predicted_too_low():
    """The plan is verified: the workspace of a `top_k` is not predicted."""
    step = lambda x: jax.lax.top_k(x, 8)  # noqa: E731
    mesh, shape = gpu_mesh("h100", (8,), ("x",)), jax.ShapeDtypeStruct((64, 2**16), jnp.float32)
    options = {"pins": {"0": jax.P(None, "x")}}
    free = shardplan.plan(step, mesh, shape, **options)
    compiled = measure(free.lower(mesh), {"x": 8}).memory.peak
    assert compiled > 1.05 * free.peak_bytes
    with pytest.raises(shardplan.InfeasibleError, match="compiled peak"):
        shardplan.plan(step, mesh, shape, memory_limit=1.05 * free.peak_bytes, verify=True, **options)
    plan = shardplan.plan(step, mesh, shape, memory_limit=1.01 * compiled, verify=True, **options)
    assert plan.peak_bytes <= 1.01 * compiled


@compiles_for_gpus
def test_gpus_of_several_processes_are_compiled_for_as_a_target(monkeypatch):
    """One process alone cannot compile for the devices of others: it compiles for their type."""
    mesh = gpu_mesh("h100", (8,), ("x",))
    assert feedback.target_of(mesh, Options()) == mesh.devices.flat[0].device_kind
    monkeypatch.setattr(feedback, "has_gpus", lambda mesh: True)
    monkeypatch.setattr(feedback, "can_run", lambda device: True)
    devices = np.array([SimpleNamespace(process_index=n // 4, device_kind="NVIDIA H100") for n in range(8)])
    several = MagicMock(spec=Mesh, devices=devices)
    assert feedback.target_of(several, Options(hardware="h200")) == "h200"
