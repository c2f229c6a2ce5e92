"""Loops and branches are planned inside, and compute what the unplanned function does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.apply.workarounds.pin_dimension_order import gathered_slices
from shardplan.layout.layout import Layout, LayoutSpace, MeshAxes, to_spec
from shardplan.problem.loop_carry_sums import in_parts, initial_layouts
from tests.helpers.loop_programs import FORMS
from tests.helpers.random_programs import assert_equal_trees, mesh_of, run, scrambled

WEIGHTS = jnp.asarray(np.random.default_rng(0).normal(size=(4, 64, 64)) * 0.15, jnp.float32)
X = jnp.asarray(np.random.default_rng(1).normal(size=(64, 64)), jnp.float32)

PINS: dict[tuple[int, ...], dict[str, P]] = {
    (8,): {"1": P("x")},
    (2, 4): {"0": P(None, None, "y"), "1": P("x")},
}
"""Small programs are cheapest unsplit: pins make them split."""

pytestmark = pytest.mark.filterwarnings("ignore:the loop at")


def assert_planned(name: str, sizes: tuple[int, ...]) -> shardplan.Plan:
    planned = shardplan.auto(FORMS[name], mesh_of(sizes), pins=PINS[sizes], time_limit=10)
    assert_equal_trees(planned(WEIGHTS, X), jax.jit(FORMS[name])(WEIGHTS, X))
    plan = planned.plan(WEIGHTS, X)
    assert any(plan.layouts.values())
    return plan


QUICK = (
    "scan",
    "nested",
    "checkpoint, dots",
    "while, many",
    "scan of a literal",
    "cond",
    "accumulation, scanned",
    "accumulation, nested",
    "custom rules",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_planned_equals_unplanned(name: str) -> None:
    assert_planned(name, (2, 4))


@pytest.mark.long
@pytest.mark.parametrize("sizes", PINS, ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_every_form(name: str, sizes: tuple[int, ...]) -> None:
    assert_planned(name, sizes)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", FORMS)
def test_every_form_in_drawn_layouts(name: str, seed: int) -> None:
    mesh = mesh_of((2, 4))
    plan = scrambled(shardplan.plan(FORMS[name], mesh, WEIGHTS, X), seed)
    assert_equal_trees(run(plan, mesh, WEIGHTS, X), jax.jit(FORMS[name])(WEIGHTS, X))


@pytest.mark.parametrize("target", [((0, 1), (), ()), ((1,), (0,), ()), ((0,), (), (1,))], ids=str)
def test_initial_values_of_partial_sums(target: Layout) -> None:
    """The sum over all devices is the initial value."""
    mesh, axes = mesh_of((2, 4)), MeshAxes(("x", "y"), (2, 4))
    found = initial_layouts(LayoutSpace(axes).domain(X.shape), target)
    assert (target[1], target[2]) in found and len(found) > 2

    @jax.jit
    def parts(x: jax.Array) -> list[jax.Array]:
        placed = [jax.lax.with_sharding_constraint(x, NamedSharding(mesh, to_spec(axes, one))) for one in found]
        return [in_parts(y, one, target, mesh, axes) for y, one in zip(placed, found, strict=True)]

    for made in parts(X):
        assert made.sharding.spec == to_spec(axes, target) and len(made) == axes.degree(target[0])
        np.testing.assert_array_equal(made.sum(0), X)


def test_callbacks_inside_bodies(capfd: pytest.CaptureFixture[str]) -> None:
    def printing(weights: jax.Array, x: jax.Array) -> jax.Array:
        def body(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            h = jnp.tanh(h @ w)
            jax.debug.print("norm {}", jnp.round(jnp.linalg.norm(h)))
            jax.debug.print("one layer")
            return h, None

        return jax.lax.scan(body, x, weights)[0]

    planned = shardplan.auto(printing, mesh_of((2, 4)), pins=PINS[2, 4])
    expected = jax.block_until_ready(jax.jit(printing)(WEIGHTS, X))
    jax.effects_barrier()
    unplanned = capfd.readouterr().out.splitlines()
    assert_equal_trees(jax.block_until_ready(planned(WEIGHTS, X)), expected)
    jax.effects_barrier()
    assert set(capfd.readouterr().out.splitlines()) == set(unplanned)


def test_pure_callback_inside_a_branch() -> None:
    def calling(weights: jax.Array, x: jax.Array) -> jax.Array:
        def on_host(h: jax.Array) -> jax.Array:
            return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(h.shape, h.dtype), h, vmap_method="expand_dims")

        return jax.lax.cond(x.sum() > 1e9, lambda h: h @ weights[0], on_host, x)

    planned = shardplan.auto(calling, mesh_of((8,)), pins=PINS[8,])
    assert_equal_trees(planned(WEIGHTS, X), jax.jit(calling)(WEIGHTS, X))


@pytest.mark.parametrize("looped", [False, True])
def test_shard_map_region_on_the_same_mesh(looped: bool) -> None:
    mesh = mesh_of((2, 4))

    def rows(h: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.psum(h @ w, "y")

    region = jax.shard_map(rows, mesh=mesh, in_specs=(P("x", "y"), P("y", None)), out_specs=P("x", None))

    def fn(weights: jax.Array, x: jax.Array) -> jax.Array:
        if looped:
            x = jax.lax.scan(lambda h, w: (jnp.tanh(region(h, w)), None), x, weights)[0]
        return region(jnp.tanh(x), weights[0]).sum(0)

    planned = shardplan.auto(fn, mesh)
    assert_equal_trees(planned(WEIGHTS, X), jax.jit(fn)(WEIGHTS, X))
    # its own sum counts as what it sends: of half the rows, over 4 devices, once more than the loop runs
    runs = 1 + looped * WEIGHTS.shape[0]
    called = [c for c in planned.plan(WEIGHTS, X).collectives if c.operation.endswith("shard_map")]
    sums = [c for c in called if c.kind == "all-reduce" and c.axes == ("y",)]
    assert sum(c.bytes * c.times for c in sums) == runs * 2 * 3 / 4 * X.nbytes / 2


@pytest.mark.slow
def test_gradient_through_a_shard_map_region() -> None:
    mesh = mesh_of((8,))
    region = jax.shard_map(
        lambda h, w: jax.lax.psum(h @ w, "x"), mesh=mesh, in_specs=(P(None, "x"), P("x", None)), out_specs=P()
    )

    def step(weights: jax.Array, x: jax.Array) -> jax.Array:
        return weights - jax.grad(lambda v: (region(jnp.tanh(x @ v[0]), v[1]) ** 2).mean())(weights)

    planned = shardplan.auto(step, mesh)
    assert_equal_trees(planned(WEIGHTS, X), jax.jit(step)(WEIGHTS, X))


@pytest.mark.slow
def test_random_numbers_inside_a_loop() -> None:
    def dropping(weights: jax.Array, x: jax.Array) -> jax.Array:
        def body(carry: tuple[jax.Array, jax.Array], w: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
            h, key = carry
            key, used = jax.random.split(key)
            kept = jax.random.bernoulli(used, 0.5, h.shape)
            return (jnp.where(kept, jnp.tanh(h @ w), 0), key), None

        return jax.lax.scan(body, (x, jax.random.key(3)), weights)[0][0]

    planned = shardplan.auto(dropping, mesh_of((2, 4)), pins=PINS[2, 4])
    assert_equal_trees(planned(WEIGHTS, X), jax.jit(dropping)(WEIGHTS, X))


def test_mesh_of_one_device() -> None:
    planned = shardplan.auto(FORMS["checkpoint"], mesh_of((1,)))
    assert_equal_trees(planned(WEIGHTS, X), jax.jit(FORMS["checkpoint"])(WEIGHTS, X))
    assert planned.plan(WEIGHTS, X).communication_bytes == 0


@pytest.mark.long
def test_slices_gathered_along_their_last_dimension() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, one: (jnp.tanh(x @ one.astype(x.dtype)), None), x, w)
        return jnp.sum(x.astype(w.dtype) ** 2)

    x, w = jnp.tile(X, (64, 1)).astype(jnp.bfloat16), WEIGHTS
    planned = shardplan.auto(jax.grad(loss), mesh_of((8,)), pins={"0": P(None, None, "x"), "1": P("x")})
    assert gathered_slices(planned.plan(w, x).schedule)
    found, expected = planned(w, x), jax.jit(jax.grad(loss))(w, x)
    assert jnp.linalg.norm(found - expected) < 4e-3 * jnp.linalg.norm(expected)  # bfloat16 keeps 8 bits


def accumulated(checkpoint: bool):
    """Gradients of three layers, added up over four parts of a batch."""

    def layer(x, w):
        return jnp.tanh(x @ w[0]) @ w[1]

    def loss(ws, x):
        for w in ws:
            x = (jax.checkpoint(layer) if checkpoint else layer)(x, w)
        return jnp.sum(x**2)

    def step(ws, x):
        def part(total, rows):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(ws, rows)), None

        total = jax.lax.scan(part, jax.tree.map(jnp.zeros_like, ws), x.reshape(4, -1, x.shape[-1]))[0]
        return jax.tree.map(lambda w, g: w - 1e-4 * g, ws, total)

    return step


@pytest.mark.long
def test_gradients_of_rematerialised_layers_in_a_loop():
    """They are reduced after the loop."""
    draw = np.random.default_rng(0)
    ws = [tuple(jnp.asarray(draw.normal(size=s), jnp.float32) / 4 for s in ((16, 32), (32, 16))) for _ in range(3)]
    x = jnp.asarray(draw.normal(size=(256, 16)), jnp.float32)
    mesh = mesh_of((8,))
    plain, plan = (shardplan.plan(accumulated(again), mesh, ws, x) for again in (False, True))
    assert plan.communication_bytes == plain.communication_bytes
    expected = accumulated(False)(ws, x)
    assert_equal_trees(run(plan, mesh, ws, x), expected)
    for seed in range(3):
        assert_equal_trees(run(scrambled(plan, seed), mesh, ws, x), expected)
