"""Arguments that pins put into host memory, for steps that know nothing of it."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.errors import ArgumentError, PlanMismatchError
from shardplan.hardware import load
from shardplan.models import gpt
from tests.helpers.random_programs import assert_equal_trees, mesh_of

MOMENTS = {"0/moments/*": "pinned_host"}
ON_X = NamedSharding(AbstractMesh((8,), ("x",)), P("x"), memory_kind="pinned_host")
S = jax.ShapeDtypeStruct
needs_audit = pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")


def made(optimizer=None, layers=4, width=16, rows=32):
    """A training step of a network with an optimizer, its state and its batch."""
    optimizer = optimizer or optax.adam(1e-2)

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def step(state, x):
        found, gradients = jax.value_and_grad(loss)(state["params"], x)
        updates, moments = optimizer.update(gradients, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, found

    params = [jax.random.normal(jax.random.key(n), (width, width)) / 4 for n in range(layers)]
    state = {"params": params, "moments": optimizer.init(params)}
    return step, state, jax.random.normal(jax.random.key(9), (rows, width))


def kinds(state):
    return {part: {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state[part])} for part in state}


OPTIMIZERS = {
    "adam": optax.adam(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "trust ratios": optax.lamb(1e-2),
    "momentum": optax.sgd(1e-2, momentum=0.9),
}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param("adam", (8,), marks=pytest.mark.slow),
        *(pytest.param(name, (2, 4), marks=pytest.mark.long) for name in OPTIMIZERS),
    ],
)
def test_a_pinned_optimizer_state_over_several_steps(name, shape):
    """The states are those of the plain step, the moments are on the host after each, and one plan runs them all."""
    step, state, x = made(OPTIMIZERS[name])
    planned = shardplan.auto(step, mesh_of(shape), donate_argnums=0, pins=MOMENTS)
    plain = jax.jit(step)
    found, expected = jax.tree.map(jnp.copy, state), state
    for _ in range(3):
        (found, loss), (expected, wanted) = planned(found, x), plain(expected, x)
        assert_equal_trees((found, loss), (expected, wanted), 1e-5)
        assert kinds(found) == {"params": {"device"}, "moments": {"pinned_host"}}
    assert len(planned._planned) == 1


PROGRAMS = {
    "passed on": lambda m, x: (m, x * 2),
    "returned twice": lambda m, x: (m, m["m"] + x, m),
    "only read": lambda m, x: (x, (m["m"] * x).sum()),
    "moved by the step": lambda m, x: (
        jax.device_put({"m": jax.device_put(m["m"], jax.memory.Space.Device) + x}, jax.memory.Space.Host),
        x,
    ),
    "read by the forward part": lambda m, x: (
        jax.tree.map(lambda m: m - jax.grad(lambda w: jnp.tanh(x.T @ w).sum())(m), m),
        x,
    ),
    "carried by a loop": lambda m, x: (jax.lax.scan(lambda m, _: ({"m": m["m"] + x}, None), m, None, length=3)[0], x),
    "with effects": lambda m, x: (jax.debug.callback(lambda _: None, x), ({"m": m["m"] + x}, x))[1],
    "multiplied": lambda m, x: ({"m": m["m"] + jax.grad(lambda w: jnp.tanh(x @ w).sum())(x.T @ m["m"]).sum()}, x),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_pinned_arguments_of_any_step(name):
    """Values are those of the plain step, and the result that replaces a pinned argument is on the host."""
    fn, x = PROGRAMS[name], jnp.arange(128.0).reshape(16, 8) / 99
    found, expected = (
        shardplan.auto(fn, mesh_of((8,)), pins={"0/*": "pinned_host"})({"m": x + 1}, x),
        fn({"m": x + 1}, x),
    )
    assert_equal_trees(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, expected), 1e-5)
    on_host = [leaf.sharding.memory_kind == "pinned_host" for leaf in jax.tree.leaves(found)]
    assert on_host == [name != "only read", *[False] * (len(on_host) - 1)]


@pytest.mark.slow
@pytest.mark.parametrize("pin", [pytest.param("pinned_host", marks=pytest.mark.long), ON_X])
def test_the_figures_of_a_plan_with_state_on_the_host(pin):
    """A plan says which pins, how many bytes, and for how long a device waits; a sharding pins the layout as well."""
    step, state, x = made(layers=8, width=512, rows=4096)
    pins = {"0/moments/*/mu/*": pin}
    plans = [shardplan.plan(step, "x=8", state, x, donate_argnums=0, pins=given) for given in (None, pins)]
    [row] = plans[1].offloaded
    assert (row["module"], row["made_by"], row["count"]) == ("0/moments/*/mu/*", "pin", 8)
    assert row["bytes"] == plans[1].host_bytes == 8 * 512 * 512 * 4 / 8
    assert row["seconds"] == pytest.approx(plans[1].step_time.waiting - plans[0].step_time.waiting, rel=0.01)
    assert "8 arguments wait in host memory: 1.0 MB per device" in str(plans[1])
    assert plans[1].communication_bytes == plans[0].communication_bytes
    assert plans[1].peak_bytes < plans[0].peak_bytes
    pinned = {path for path, spec in plans[1].layouts.items() if spec == P("x")}
    assert pin == "pinned_host" or {f"0/moments/0/mu/{n}" for n in range(8)} <= pinned
    assert plans[1].explain("0/moments/0/mu/0").count("pinned_host")
    with pytest.raises(ArgumentError, match="tensors in host memory"):
        plans[1].to_python()


@pytest.mark.slow
def test_a_saved_plan_with_state_on_the_host(tmp_path, monkeypatch):
    """It runs the user's own step from a file and from the cache, for a state in either memory."""
    monkeypatch.setenv("SHARDPLAN_CACHE_DIR", str(tmp_path))
    step, state, x = made(layers=2)
    plans = [shardplan.plan(step, mesh_of((8,)), state, x, pins=MOMENTS) for _ in range(2)]
    assert [plan.statistics["cached"] for plan in plans] == [False, True]
    assert plans[0].offloaded == plans[1].offloaded
    plans[1].save(tmp_path / "plan")
    loaded = shardplan.Plan.load(tmp_path / "plan", mesh_of((8,)))
    assert loaded.bind(step, state, x).fingerprint == plans[0].fingerprint
    run = loaded.apply(step)
    expected, _ = jax.jit(step)(*jax.jit(step)(state, x)[:1], x)
    found, _ = run(run(state, x)[0], x)
    assert_equal_trees(found, expected, 1e-5)
    assert kinds(found)["moments"] == {"pinned_host"}
    with pytest.raises(PlanMismatchError):
        loaded.bind(lambda state, x: step(state, 2 * x), state, x)


@pytest.mark.slow
def test_programs_next_to_a_step_with_state_on_the_host():
    """`init` and `place` make the state where the plan has it, and an evaluation by `like` keeps the layouts."""
    step, state, x = made(layers=2, width=64)
    planned = shardplan.auto(step, mesh_of((8,)), pins=MOMENTS)
    plan = planned.plan(state, x)
    for there in (plan.init(lambda: state), plan.place(state)):
        assert kinds(there) == {"params": {"device"}, "moments": {"pinned_host"}}
        assert_equal_trees(there, state, 1e-6)
    evaluation = shardplan.plan(lambda params, x: x @ params[0], mesh_of((8,)), state["params"], x, like=planned)
    assert evaluation.layouts["0/0"] == plan.layouts["0/params/0"]
    again = shardplan.plan(step, mesh_of((8,)), state, x, like=planned, pins=MOMENTS)
    assert again.layouts == plan.layouts


@pytest.mark.long
def test_state_on_the_host_of_a_step_that_does_not_fit():
    """Residuals are computed again or wait on the host as well, and the values stay."""
    step, state, x = made(layers=6, width=64, rows=4096)
    options = {"donate_argnums": 0, "pins": MOMENTS, "fit": ("recompute", "host"), "hardware": "gh200"}
    free = shardplan.plan(step, "x=8", state, x, **options)
    planned = shardplan.auto(step, mesh_of((8,)), memory_limit=0.7 * free.peak_bytes, **options)
    plan = planned.plan(state, x)
    assert {row["made_by"] == "pin" for row in (*plan.recomputed, *plan.offloaded)} == {True, False}
    assert sum(row["bytes"] for row in plan.offloaded) == pytest.approx(plan.host_bytes)
    found, _ = planned(jax.tree.map(jnp.copy, state), x)
    assert_equal_trees(found, jax.jit(step)(state, x)[0], 1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pins": {"0/moments/*": "host"}}, "the pin `0/moments/\\*` is `'host'`: .* the memory kind 'pinned_host'"),
        ({"pins": {"0/moments/*": ON_X.with_memory_kind("unpinned_host")}}, "or the memory kind 'pinned_host'"),
        (
            {"pins": {"0/momentum/*": "pinned_host"}},
            "the pin `0/momentum/\\*` matches no argument; there are `0/moments",
        ),
        (
            {"pins": MOMENTS, "hardware": replace(load("h100"), host_bytes_per_second=None)},
            "the pin `0/moments/\\*` is 'pinned_host', and the hardware profile `.*` has no link to the host",
        ),
    ],
)
def test_wrong_pins_of_memory(options, said):
    """Other memories, other paths and profiles without a link to the host are refused with what is meant."""
    step, state, x = made(layers=1)
    with pytest.raises(ArgumentError, match=said):
        shardplan.plan(step, "x=8", state, x, **options)


def test_a_pinned_reference():
    """A reference stays where it is."""
    with pytest.raises(ArgumentError, match="`0` into host memory, which is a Ref"):
        shardplan.plan(lambda r: r[...], "x=8", jax.new_ref(jnp.ones(8)), pins={"0": "pinned_host"})


@needs_audit
@pytest.mark.long
def test_compiled_memory_without_the_moments():
    """XLA has the moments on the host, and the peak of a device is lower by most of them."""
    training = gpt.training(gpt.Config(layers=2, width=256, heads=4, vocabulary=512, sequence=128, batch=16))
    plans = [
        shardplan.plan(training.train_step, "x=8", training.state, training.batch, donate_argnums=0, pins=pins)
        for pins in (None, {"0/opt_state/*": "pinned_host"})
    ]
    before, after = (shardplan.audit(plan).compiled.memory for plan in plans)
    assert after.host == plans[1].host_bytes
    assert before.peak - after.peak > 0.75 * after.host
