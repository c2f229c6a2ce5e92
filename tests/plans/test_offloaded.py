"""Steps that do not fit: values that wait in host memory, alone or with others that are computed again."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import shardplan
from shardplan.errors import ArgumentError, PlanMismatchError
from shardplan.hardware import load
from shardplan.plans import feedback
from shardplan.plans.mesh_profile import VARIABLE
from shardplan.plans.report import plan_record
from tests.plans.test_recompute import ARGUMENTS, SCANNED, limit_at, scanned, train, values

S = jax.ShapeDtypeStruct
HOST = {"fit": ("host",), "hardware": "h100"}
ON_HOST = NamedSharding(AbstractMesh((1,), ("x",)), PartitionSpec(), memory_kind="pinned_host")
needs_audit = pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")


@pytest.fixture(scope="module")
def plan():
    return shardplan.plan(train, 1, *ARGUMENTS, memory_limit=limit_at(0.5, 1), **HOST)


@pytest.mark.parametrize(
    ("mesh", "share", "fit"),
    [
        pytest.param(1, 0.5, ("host",), marks=pytest.mark.slow),
        pytest.param("x=8", 0.6, ("host",), marks=pytest.mark.long),
        pytest.param("x=8", 0.5, ("recompute", "host"), marks=pytest.mark.long),
    ],
)
def test_values_of_an_offloaded_step(mesh, share, fit):
    """A step whose values wait on the host gives what the plain step gives, in less memory of a device."""
    limit = limit_at(share, mesh)
    planned = shardplan.auto(train, mesh, memory_limit=limit, fit=fit, hardware="gh200")
    plan = planned.plan(*ARGUMENTS)
    assert plan.peak_bytes <= limit
    assert plan.offloaded and plan.host_bytes > 0
    for found, wanted in zip(*map(jax.tree.leaves, (planned(*values()), jax.jit(train)(*values()))), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [1, pytest.param("x=2,y=4", marks=pytest.mark.long)])
def test_values_of_a_scan_whose_stacks_wait_on_the_host(mesh):
    """Slices go to the host in one scan and come back in another, and the step gives what the plain step gives."""
    limit = limit_at(0.6, mesh, scanned, SCANNED)
    planned = shardplan.auto(scanned, mesh, memory_limit=limit, **HOST)
    plan = planned.plan(*SCANNED)
    assert plan.peak_bytes <= limit
    assert plan.host_bytes == sum(row["bytes"] for row in plan.offloaded) > 0
    assert all(o.region for o in plan.program.operations if o.primitive.name == "device_put")
    weights, x = values()
    given = jnp.stack(weights), x
    for found, wanted in zip(planned(*given), jax.jit(scanned)(*given), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_the_figures_of_an_offloaded_plan(plan):
    """A plan says what waits on the host: in rows, in its text, as JSON, and of an operation."""
    assert sum(row["bytes"] for row in plan.offloaded) == plan.host_bytes > 0
    assert not plan.recomputed
    assert "values wait in host memory" in str(plan) and "computed again" not in str(plan)
    assert json.loads(json.dumps(plan_record(plan)))["offloaded"] == list(plan.offloaded)
    waits = sum(row["seconds"] for row in plan.offloaded)
    assert plan.step_time.waiting == pytest.approx(waits, rel=0.2)
    moved = [o for o in plan.program.operations if o.primitive.name == "device_put"]
    assert len(moved) == 2 * sum(row["count"] for row in plan.offloaded)
    assert "jax.memory.Space.Host" in plan.to_python()
    assert "to host memory" in plan.explain(moved[0].scope) and "from host memory" in plan.explain(moved[-1].scope)


def test_an_offloaded_plan_in_a_file(plan, tmp_path):
    """A saved plan makes the same step of the user's own program again, and is refused with stages it does not have."""
    plan.save(tmp_path / "plan.json")
    loaded = shardplan.Plan.load(tmp_path / "plan.json")
    bound = loaded.bind(train, *ARGUMENTS)
    assert bound.recipe.offloaded == plan.recipe.offloaded
    assert bound.program.fingerprint() == plan.program.fingerprint() != bound.fingerprint
    elsewhere = replace(plan.recipe.offloaded[0], away=10**6)
    with pytest.raises(PlanMismatchError, match="than the program has"):
        replace(loaded, recipe=replace(loaded.recipe, offloaded=(elsewhere,))).bind(train, *ARGUMENTS)


def test_an_offloaded_plan_in_the_cache(plan, tmp_path, monkeypatch):
    """The cache keeps what waits on the host."""
    monkeypatch.setenv("SHARDPLAN_CACHE_DIR", str(tmp_path))
    limit = plan.recipe.options.memory_limit
    first, second = (shardplan.plan(train, 1, *ARGUMENTS, memory_limit=limit, **HOST) for _ in range(2))
    assert second.statistics["cached"]
    assert (second.offloaded, second.peak_bytes) == (first.offloaded, first.peak_bytes)
    assert second.program.fingerprint() == first.program.fingerprint()


def test_host_memory_is_a_limit(plan):
    """No more waits on the host than its memory holds."""
    room, limit = 0.5 * plan.host_bytes, limit_at(0.8, 1)
    found = shardplan.plan(train, 1, *ARGUMENTS, memory_limit=limit, host_memory=room, **HOST)
    assert 0 < found.host_bytes <= room
    with pytest.raises(shardplan.InfeasibleError, match="in host memory"):
        shardplan.plan(train, 1, *ARGUMENTS, memory_limit=plan.peak_bytes, host_memory=room, **HOST)


@pytest.mark.slow
def test_a_fast_link_to_the_host():
    """Where copies hide behind kernels, values wait on the host rather than being computed again."""
    arguments = [S((512, 512), jnp.float32)] * 6, S((32768, 512), jnp.float32)
    limit = limit_at(0.6, 1, arguments=arguments)
    given = {"memory_limit": limit, "fit": ("recompute", "host")}
    fast = replace(load("h100"), host_bytes_per_second=1e13)
    slow = replace(load("h100"), host_bytes_per_second=1e9)
    plans = [shardplan.plan(train, 1, *arguments, hardware=one, **given) for one in (fast, slow)]
    assert [bool(one.offloaded) for one in plans] == [True, False]
    assert plans[0].step_time.seconds < plans[1].step_time.seconds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fit": ("host",), "hardware": "cpu"}, "`cpu` has no link to the host"),
        ({"host_memory": "64GB"}, "add 'host' to fit"),
        ({"fit": ("host",), "host_memory": -1}, "host_memory is a number of bytes above 0"),
    ],
)
def test_mistakes(options, message):
    """Options that go with no host memory are refused before any work."""
    with pytest.raises(ArgumentError, match=message):
        shardplan.auto(train, 1, **options)


def test_devices_without_a_link_to_their_host(monkeypatch):
    """The profile of the mesh's own devices counts where none is given."""
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ArgumentError, match="no link to the host"):
        shardplan.auto(train, jax.make_mesh((1,), ("x",)), fit=("host",)).plan(*ARGUMENTS)


@needs_audit
@pytest.mark.long
@pytest.mark.parametrize("step", [train, scanned])
def test_an_offloaded_step_compiled(step):
    """XLA has as many bytes on the host as planned, and so many fewer on a device."""
    weights = [S((512, 512), jnp.float32)] * 6 if step is train else S((6, 512, 512), jnp.float32)
    arguments = weights, S((32768, 512), jnp.float32)
    limit = limit_at(0.6, 1, step, arguments)
    free, plan = (shardplan.plan(step, 1, *arguments, memory_limit=one, **HOST) for one in ("80GB", limit))
    before, after = (shardplan.audit(one).compiled.memory for one in (free, plan))
    assert after.host == plan.host_bytes > 0
    assert after.peak == pytest.approx(plan.peak_bytes, rel=0.1)
    assert before.peak - after.peak > 0.7 * plan.host_bytes


@pytest.mark.slow
def test_a_limit_that_recomputation_alone_keeps(monkeypatch):
    """Where what waits on the host is compiled to more than predicted, the plan is one without it."""

    def compile_(judge, plan):
        peak = (1.5 if plan.recipe.offloaded else 1.0) * plan.peak_bytes
        memory = SimpleNamespace(peak=int(peak))
        return SimpleNamespace(memory=memory, compile_seconds=1.0, live_ranges=None, hlo_text="", executable=None)

    monkeypatch.setattr(feedback._Judge, "compile", compile_)
    fast = replace(load("h100"), host_bytes_per_second=1e12)
    given = {"memory_limit": limit_at(0.5, 1), "fit": ("recompute", "host"), "hardware": fast}
    assert shardplan.plan(train, 1, *ARGUMENTS, **given).offloaded
    plan = shardplan.plan(train, 1, *ARGUMENTS, **given, verify=True)
    assert plan.recomputed and not plan.offloaded and plan.peak_bytes <= given["memory_limit"]
    assert plan.recipe.options.fit == given["fit"] and len(plan.verified["rounds"]) > 1
