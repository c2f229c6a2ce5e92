"""Planning within a memory limit: what a search takes, and how much of the limit its plan uses."""

import time

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan import InfeasibleError
from shardplan.search.limits.usage_prices import Pricing
from tests.helpers.limited_step import MESH, least_peak, plan_within, training


@pytest.mark.long
def test_a_higher_limit_never_sends_more():
    """The orders of earlier schedules do not decide the cost."""
    step, state, batch = training()
    mesh = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
    free = shardplan.plan(step, mesh, state, batch, donate_argnums=0)
    limits = [share * free.peak_bytes for share in (0.85, 0.92, 0.95, 0.98)]
    plans = [shardplan.plan(step, mesh, state, batch, donate_argnums=0, memory_limit=limit) for limit in limits]
    assert all(plan.peak_bytes <= limit for plan, limit in zip(plans, limits, strict=True))
    sent = [plan.communication_bytes for plan in plans]
    assert sent == sorted(sent, reverse=True)
    assert sent[1] < sent[0]  # what is left of the higher limit is used


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "times"), [((4,), 1.0), pytest.param((2, 4), 1.003, marks=pytest.mark.long)])
def test_the_reported_lowest_peak_as_a_limit(sizes, times):
    """The peak that an error reports is a limit that a plan keeps."""
    step, state, batch = training()
    mesh = jax.sharding.AbstractMesh(sizes, ("x", "y")[: len(sizes)])
    limit = times * least_peak(step, mesh, state, batch, donate_argnums=0)
    assert shardplan.plan(step, mesh, state, batch, donate_argnums=0, memory_limit=limit).peak_bytes <= limit


@pytest.mark.parametrize(("share", "stopped"), [(0.4, False), (0.6, True)])
def test_the_error_after_the_time_limit(share, stopped, monkeypatch):
    """It mentions the time limit, but not for a program that is soon proven infeasible."""
    monkeypatch.setattr(time, "perf_counter", time.process_time)  # other processes do not make it late
    monkeypatch.setattr(time, "monotonic", time.process_time)
    step, state, batch = training()
    mesh = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
    limit = share * shardplan.plan(step, mesh, state, batch, donate_argnums=0).peak_bytes
    with pytest.raises(InfeasibleError) as caught:
        shardplan.plan(step, mesh, state, batch, donate_argnums=0, memory_limit=limit, time_limit=1e-6, fit=())
    assert ("was found in the time of its search (`time_limit`) that" in str(caught.value)) == stopped
    assert str(caught.value).endswith(", more time.") == stopped


def test_price_evaluations_within_the_remaining_work(monkeypatch):
    """They take the remaining work, or twice the longest evaluation so far."""
    allowed, inner = [], Pricing._inner

    def watched(pricing, prices):
        solver = inner(pricing, prices)
        left = max(pricing.until - pricing.estimate, 2 * pricing.longest)
        allowed.append(solver.budget.seconds <= left < 60)
        return solver

    monkeypatch.setattr(Pricing, "_inner", watched)
    plan_within()
    assert allowed
    assert all(allowed)


def test_loops_over_generated_values_of_no_elements():
    def step(x, y):
        return jax.lax.scan(lambda carry, part: (jnp.tanh(carry @ x) + part.sum(), None), y @ x, jnp.ones((4, 0)))[0]

    values = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2
    assert least_peak(step, MESH, *values) > 0
