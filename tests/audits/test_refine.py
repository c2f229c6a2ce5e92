"""Plans that the compiler decides on: several ways to plan, compiled, the best one kept."""

from dataclasses import replace
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.audits import refine
from shardplan.compiled.target import TargetNotInstalledError
from shardplan.options import Options

MESH = jax.sharding.AbstractMesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
W = jax.ShapeDtypeStruct((256, 256), jnp.float32)
X = jax.ShapeDtypeStruct((512, 256), jnp.float32)


def _step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


@pytest.mark.parametrize("number", [0, 9, 1.5, True, "2"])
def test_a_number_of_plans_is_checked(number):
    with pytest.raises(shardplan.ArgumentError, match="refine is a number of plans from 1 to 8"):
        shardplan.auto(_step, MESH, refine=number)


def test_a_missing_compiler_is_named_before_anything_is_planned(monkeypatch):
    def missing(*_):
        raise TargetNotInstalledError('pip install "shardplan[audit]"')

    monkeypatch.setattr(refine, "gpu_mesh", missing)
    with pytest.raises(TargetNotInstalledError, match="audit"):
        shardplan.plan(_step, MESH, W, X, refine=2)


@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
@pytest.mark.parametrize("objective", ["bytes", "time"])
def test_the_best_compiled_plan(objective):
    """It is kept, and the statistics have a row for each plan."""
    plan = shardplan.plan(_step, MESH, W, X, refine=3, objective=objective, donate_argnums=0)
    rows = plan.statistics["refined"]
    assert rows[0]["way"] == "as asked" and len(rows) == 3
    (kept,) = [row for row in rows if row["kept"]]
    measure = "compiled_seconds" if objective == "time" else "compiled_bytes"
    assert kept[measure] <= 1.001 * min(row[measure] for row in rows if measure in row)
    assert kept["predicted_bytes"] == plan.communication_bytes
    assert all("compiled" in row["result"] or row["result"] == "the same plan as before" for row in rows)


def test_plans_of_equal_compiled_bytes(monkeypatch):
    """The first one with a true prediction is kept."""
    plan = shardplan.plan(_step, MESH, W, X)
    predicted = {None: 110.0, "time": 100.0, "no islands": 100.0}
    compared = refine._Compared(make=lambda _: plan, target="h100", limit=1e9)
    monkeypatch.setattr(refine, "_same", lambda *_: False)
    for name, bytes_sent in predicted.items():
        found = {"compiled_bytes": 100.0, "compiled_peak_bytes": 1.0, "predicted_bytes": bytes_sent}
        monkeypatch.setattr(refine, "_measured", lambda *_, found=found: found)
        compared.add(name, replace(plan))
    compared.best("compiled_bytes")
    assert [row["kept"] for row in compared.rows] == [False, True, False]


def _compiled_a_tenth_above(monkeypatch, least):
    """Makes plans of the peak that they may have, above ``least``, whose compiled peak is a tenth higher."""
    plan = shardplan.plan(_step, MESH, W, X)

    def make(options):
        limit = options.memory_limit or plan.peak_bytes
        if limit < least * plan.peak_bytes:
            raise shardplan.InfeasibleError("it does not fit")
        found = {"compiled_bytes": 1e9 / limit, "compiled_peak_bytes": 1.1 * limit, "compiled_seconds": 1.0}
        measured[limit] = found | {"predicted_bytes": 0.0, "predicted_peak_bytes": limit}
        return replace(plan, peak_bytes=limit, recipe=replace(plan.recipe, choices=(int(limit), *options.objective)))

    measured: dict[float, dict[str, float]] = {}
    monkeypatch.setattr(refine, "gpu_mesh", lambda *_: None)
    monkeypatch.setattr(refine, "_measured", lambda plan, _: dict(measured[plan.peak_bytes]))
    return make, plan.peak_bytes


def test_a_compiled_peak_above_the_limit(monkeypatch):
    """The next limit is lowered by the excess."""
    make, peak = _compiled_a_tenth_above(monkeypatch, least=0.0)
    plan = refine.refined(make, Options(refine=2, memory_limit=peak))
    asked, lowered = plan.statistics["refined"]
    assert asked["result"] == "compiled, above the limit" and lowered["kept"]
    assert 0.98 * peak < lowered["compiled_peak_bytes"] <= peak


def test_no_compiled_plan_that_fits(monkeypatch):
    """The one with the lowest peak is kept, with a warning."""
    make, peak = _compiled_a_tenth_above(monkeypatch, least=0.95)
    with pytest.warns(shardplan.ShardplanWarning, match="no plan's compiled peak keeps within"):
        plan = refine.refined(make, Options(refine=3, memory_limit=peak))
    rows = plan.statistics["refined"]
    assert [row["result"] for row in rows] == ["compiled, above the limit", "infeasible", "compiled, above the limit"]
    assert plan.peak_bytes == peak


def test_without_islands_every_reduction_is_left_to_xla():
    plan = shardplan.plan(_step, MESH, W, X, islands=False)
    schedule = plan.schedule
    operations = [o for o in plan.program.operations if o.index in schedule.assignment.strategies]
    assert all(schedule.island_dtype(operation) is None for operation in operations)
    assert not schedule.problem.deferred.values
    with pytest.raises(shardplan.ArgumentError, match="reduce_dtype needs islands"):
        shardplan.plan(_step, MESH, W, X, islands=False, reduce_dtype="float32")
