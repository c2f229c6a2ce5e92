"""Steps that do not fit: values that are computed again, their plans, and what is refused."""

from __future__ import annotations

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import shardplan
from shardplan.plans import recomputed_plan
from shardplan.plans.report import bytes_on_device, plan_record

S = jax.ShapeDtypeStruct
LAYERS, WIDTH, BATCH = 6, 64, 4096
RECOMPUTE = ("recompute",)
ARGUMENTS = [S((WIDTH, WIDTH), jnp.float32)] * LAYERS, S((BATCH, WIDTH), jnp.float32)


def layer(y, w):
    return y + jnp.tanh(jax.nn.gelu(y @ w) @ w.T)


def train(weights, x, layer=layer):
    """A step whose residuals are most of its memory."""

    def loss(weights):
        y = x
        for w in weights:
            y = layer(y, w)
        return jnp.mean(y**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def scanned(weights, x):
    """The same step with its layers in a scan, whose carry no slice shows."""

    def loss(weights):
        y, kept = jax.lax.scan(lambda y, w: (layer(jnp.sin(y), w), jnp.max(y)), x, weights)
        return jnp.mean(y**2) + jnp.sum(kept)

    value, gradients = jax.value_and_grad(loss)(weights)
    return weights - 0.1 * gradients, value


def dropping(weights, x):
    """A scanned step with dropout: a literal, the share that is kept, is a constant of the scan."""

    def loss(weights):
        keys = jax.random.split(jax.random.key(0), LAYERS)

        def body(y, slices):
            w, key = slices
            return layer(jnp.where(jax.random.bernoulli(key, 0.9, y.shape), jnp.sin(y), 0.0), w), None

        return jnp.mean(jax.lax.scan(body, x, (weights, keys))[0] ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return weights - 0.1 * gradients, value


SCANNED = S((LAYERS, WIDTH, WIDTH), jnp.float32), ARGUMENTS[1]


def limit_at(share, mesh, step=train, arguments=ARGUMENTS):
    """The bytes of the arguments, and a share of what the plan without a limit holds in addition."""
    free = shardplan.plan(step, mesh, *arguments, memory_limit="80GB")
    state = sum(bytes_on_device(one, free.mesh_axes) for one in free.arguments)
    return state + share * (free.peak_bytes - state)


def values():
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    weights = [0.1 * jax.random.normal(key, (WIDTH, WIDTH)) for key in keys[1:]]
    return weights, jax.random.normal(keys[0], (BATCH, WIDTH))


@pytest.fixture(scope="module")
def plan():
    return shardplan.plan(train, 1, *ARGUMENTS, memory_limit=limit_at(0.5, 1), fit=RECOMPUTE)


@pytest.mark.parametrize(
    ("mesh", "share"),
    [
        (1, 0.5),
        ("x=8", 0.7),
        pytest.param("x=8", 0.4, marks=pytest.mark.long),
        pytest.param("x=2,y=4", 0.35, marks=pytest.mark.long),
    ],
)
def test_values_of_a_recomputed_step(mesh, share):
    """A step that computes values again gives what the plain step gives, in less memory."""
    limit = limit_at(share, mesh)
    planned = shardplan.auto(train, mesh, memory_limit=limit, fit=RECOMPUTE)
    plan = planned.plan(*ARGUMENTS)
    assert plan.peak_bytes <= limit
    assert plan.recomputed
    for found, wanted in zip(*map(jax.tree.leaves, (planned(*values()), jax.jit(train)(*values()))), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "every"), [(1, False), ("x=2,y=4", True)])
def test_values_of_a_scan_whose_slices_are_made_again(mesh, every, monkeypatch):
    """A backward scan makes slices again that a forward scan stacks for it, and gives what the plain step gives."""

    def chosen(graph, *_):
        makers = graph.program.makers
        if every:  # then the carry is stacked
            return frozenset(graph.stacks)
        narrow = [v for v, stack in graph.stacks.items() if makers[stack.made].primitive.name in ("tanh", "sub", "mul")]
        return graph.unread.union(narrow)

    monkeypatch.setattr(recomputed_plan, "choose_recomputed", chosen)
    limit = limit_at(0.4 if every else 0.8, mesh, scanned, SCANNED)
    planned = shardplan.auto(scanned, mesh, memory_limit=limit, fit=RECOMPUTE)
    plan = planned.plan(*SCANNED)
    assert plan.peak_bytes <= limit
    assert plan.recomputed
    forward, backward = (plan.program.regions[o.bodies[0]] for o in plan.program.operations if o.bodies)
    assert any(plan.program.operations[index].again for index in backward.operations)
    assert (forward.inputs[0] in forward.outputs[1:]) == every
    weights, x = values()
    given = jnp.stack(weights), x
    for found, wanted in zip(planned(*given), jax.jit(scanned)(*given), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_values_of_a_scan_whose_constants_are_literals(monkeypatch):
    monkeypatch.setattr(recomputed_plan, "choose_recomputed", lambda graph, *_: frozenset(graph.stacks))
    planned = shardplan.auto(dropping, 1, memory_limit=limit_at(0.6, 1, dropping, SCANNED), fit=RECOMPUTE)
    plan = planned.plan(*SCANNED)
    *_, backward = (operation for operation in plan.program.operations if operation.bodies)
    assert any(not isinstance(operand, int) for operand in backward.operands)
    weights, x = values()
    given = jnp.stack(weights), x
    for found, wanted in zip(planned(*given), jax.jit(dropping)(*given), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("mesh", [1, "x=2,y=4"])
def test_values_of_a_scan_that_stacks_products_instead(mesh, monkeypatch):
    """A forward scan stacks its products, and slices of all that it stacked before are made of them."""

    def all_but_products(graph, *_):
        makers = graph.program.makers
        return frozenset(v for v, stack in graph.stacks.items() if makers[stack.made].primitive.name != "dot_general")

    monkeypatch.setattr(recomputed_plan, "choose_recomputed", all_but_products)
    planned = shardplan.auto(scanned, mesh, memory_limit=limit_at(0.6, mesh, scanned, SCANNED), fit=RECOMPUTE)
    plan = planned.plan(*SCANNED)
    forward, backward = (plan.program.regions[o.bodies[0]] for o in plan.program.operations if o.bodies)
    stacked = {plan.program.makers[made].primitive.name for made in forward.outputs[2:] if made in plan.program.makers}
    assert stacked == {"dot_general"}
    again = {plan.program.operations[i].primitive.name for i in backward.operations if plan.program.operations[i].again}
    assert "tanh" in again and "dot_general" not in again
    assert any(row["bytes"] < 0 for row in plan.recomputed)
    weights, x = values()
    given = jnp.stack(weights), x
    for found, wanted in zip(planned(*given), jax.jit(scanned)(*given), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_the_figures_of_a_recomputed_plan(plan):
    """A plan says what it computes again: in rows, in its text, as JSON, and of an operation."""
    assert sum(row["bytes"] for row in plan.recomputed) > 0
    assert all(row["seconds"] > 0 and row["count"] > 0 for row in plan.recomputed)
    assert "values are computed again" in str(plan)
    assert json.loads(json.dumps(plan_record(plan)))["recomputed"] == list(plan.recomputed)
    again = next(o for o in plan.program.operations if o.again)
    assert "did not keep" in plan.explain(again.scope)


def test_marks_in_the_lowered_step(plan):
    """What is computed again runs in the scope of its operation, with a mark."""
    scopes = {o.scopes for o in plan.program.operations if o.again}
    text = (
        shardplan.auto(train, 1, memory_limit=plan.recipe.options.memory_limit, fit=RECOMPUTE)
        .lower(*ARGUMENTS)
        .as_text(debug_info=True)
    )
    assert any(f"{scope}/" in text for scope in scopes)


def test_a_recomputed_plan_in_a_file(plan, tmp_path):
    """A saved plan knows the user's own program, and makes the same step of it again."""
    plan.save(tmp_path / "plan.json")
    bound = shardplan.Plan.load(tmp_path / "plan.json").bind(train, *ARGUMENTS)
    assert bound.recipe.recomputed == plan.recipe.recomputed
    assert bound.program.fingerprint() == plan.program.fingerprint() != bound.fingerprint
    with pytest.raises(shardplan.PlanMismatchError):
        shardplan.Plan.load(tmp_path / "plan.json").bind(partial(train, layer=lambda y, w: y @ w), *ARGUMENTS)


def test_a_recomputed_plan_in_the_cache(plan, tmp_path, monkeypatch):
    """The cache keeps what is computed again."""
    monkeypatch.setenv("SHARDPLAN_CACHE_DIR", str(tmp_path))
    limit = plan.recipe.options.memory_limit
    first, second = (shardplan.plan(train, 1, *ARGUMENTS, memory_limit=limit, fit=RECOMPUTE) for _ in range(2))
    assert second.statistics["cached"]
    assert (second.recomputed, second.peak_bytes) == (first.recomputed, first.peak_bytes)
    assert second.program.fingerprint() == first.program.fingerprint()


def test_a_step_that_fits():
    """Nothing is computed again where the step fits."""
    plan = shardplan.plan(train, 1, *ARGUMENTS, memory_limit=limit_at(1.0, 1), fit=RECOMPUTE)
    assert plan.recipe.recomputed is None
    assert not plan.recomputed
    assert "again" not in str(plan)


def test_a_time_limit_that_is_over_at_once():
    """A plan that fits is found in the layouts of the plan without a limit, without a search."""
    limit = limit_at(0.5, "x=8")
    plan = shardplan.plan(train, "x=8", *ARGUMENTS, memory_limit=limit, time_limit=1e-6)
    assert plan.recomputed
    assert plan.peak_bytes <= limit


@pytest.mark.slow
def test_layouts_that_fit_and_send_more():
    """They give way to values that are computed again, where that takes less time."""
    limit = limit_at(0.7, "x=2,y=4", scanned, SCANNED)
    layouts, plan = (
        shardplan.plan(scanned, "x=2,y=4", *SCANNED, memory_limit=limit, fit=fit) for fit in ((), RECOMPUTE)
    )
    assert layouts.peak_bytes <= limit
    assert plan.recomputed
    assert plan.communication_bytes < layouts.communication_bytes


def test_no_fit():
    """Without recomputation a step that no layout fits is refused."""
    with pytest.raises(shardplan.InfeasibleError, match="no layout was found"):
        shardplan.plan(train, 1, *ARGUMENTS, memory_limit=limit_at(0.5, 1), fit=())


@pytest.mark.parametrize("fit", ["recompute", ("pages",), ("recompute", "disk"), 1, None])
def test_unknown_words_of_fit(fit):
    """What is no tuple of known words is refused before any work."""
    with pytest.raises(shardplan.ArgumentError, match="fit is a tuple"):
        shardplan.auto(train, 1, fit=fit)


def test_the_least_peak_with_everything_allowed():
    """The error of what does not fit names the least peak, a limit that is kept, and so is the peak of that plan."""
    with pytest.raises(shardplan.InfeasibleError, match="values computed again, as many as save memory") as caught:
        shardplan.plan(train, 1, *ARGUMENTS, memory_limit=limit_at(0.01, 1), fit=RECOMPUTE)
    least = caught.value.least_peak_bytes
    kept = shardplan.plan(train, 1, *ARGUMENTS, memory_limit=1.001 * least, fit=RECOMPUTE).peak_bytes
    assert kept <= 1.001 * least
    assert shardplan.plan(train, 1, *ARGUMENTS, memory_limit=kept, fit=RECOMPUTE).peak_bytes <= kept


def test_a_limit_below_the_state():
    """A limit below the arguments alone is refused with their sum."""
    with pytest.raises(shardplan.InfeasibleError, match="the arguments alone take"):
        shardplan.plan(train, 1, *ARGUMENTS, memory_limit=1e5, fit=RECOMPUTE)


def test_regions_of_the_users_own_checkpoints():
    """What the user's checkpoints compute again is computed as often as before; their inputs may be made again."""

    def products(program):
        return sum(o.primitive.name == "dot_general" for o in program.operations)

    step = partial(train, layer=jax.checkpoint(layer))
    free = shardplan.plan(step, 1, *ARGUMENTS, memory_limit="80GB")
    plan = shardplan.plan(step, 1, *ARGUMENTS, memory_limit=limit_at(0.9, 1, step), fit=RECOMPUTE)
    barriers = [o for o in free.program.operations if o.primitive.name == "optimization_barrier"]
    assert barriers
    assert products(plan.program) <= products(free.program) + 2 * LAYERS  # those of the forward part, once more
    assert plan.peak_bytes < free.peak_bytes


@pytest.mark.long
def test_effects_in_what_is_computed_again():
    """A step that calls back calls back as often as before, and says which values are kept for that."""
    calls = []

    def noisy(y, w):
        drawn = io_callback(lambda: calls.append(1) or np.ones((BATCH, WIDTH), np.float32), ARGUMENTS[1])
        jax.debug.callback(lambda one: calls.append(float(one)), y[0, 0])
        return layer(y, w) * drawn

    step = partial(train, layer=noisy)
    planned = shardplan.auto(step, 1, memory_limit=limit_at(0.7, 1, step), fit=RECOMPUTE)
    plan = planned.plan(*ARGUMENTS)
    assert plan.recomputed
    assert f"{LAYERS} are kept, since what makes them has effects" in str(plan)
    found = jax.block_until_ready(planned(*values()))
    jax.effects_barrier()
    assert len(calls) == 2 * LAYERS
    for one, wanted in zip(*map(jax.tree.leaves, (found, jax.jit(train)(*values()))), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-6)
