"""Planned steps compute what unplanned ones do, whatever the layouts: on 8 emulated devices."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.layout.layout import LayoutSpace, MeshAxes, to_spec
from tests.helpers import random_operations, random_programs
from tests.helpers.random_programs import (
    assert_equal_trees,
    inputs_of,
    mesh_of,
    random_step,
    random_values,
    run,
    scrambled,
)

MESHES = ((8,), (2, 4), (2, 2, 2), (4, 1), (1,))

pytestmark = [pytest.mark.filterwarnings("ignore:no mesh axis"), pytest.mark.filterwarnings("ignore:the loop at")]


def values(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def scan_step(params: Any, x: Any) -> Any:
    def loss(p: Any) -> Any:
        def layer(carry: Any, w: Any) -> Any:
            return jnp.tanh(carry @ w + p["b"]), carry.sum()

        last, sums = jax.lax.scan(jax.checkpoint(layer), x, p["w"])
        return jnp.mean(last**2) + 0.01 * jnp.sum(sums**2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def accumulating_step(w: Any, x: Any) -> Any:
    def one(_: Any, total: Any) -> Any:
        return total + jax.grad(lambda v: jnp.mean(jnp.sin(x @ v)))(w)

    return w - 0.1 * jax.lax.fori_loop(0, 3, one, jnp.zeros_like(w)), jnp.sum(w**2)


def branching(x: Any, w: Any) -> Any:
    y = jax.lax.cond(x.sum() > 0, lambda a: a @ w, lambda a: (a - 1) @ w.T, x)
    return y, jax.lax.switch(2, [jnp.sin, jnp.cos, lambda v: jnp.sort(v, 0)], y)


def until(x: Any) -> Any:
    return jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.tanh(s[1] @ s[1])), (0, x))


def attention(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, scores, -1e9)), v)


def embedding(table: Any, ids: Any) -> Any:
    def loss(t: Any) -> Any:
        logits = t[ids] @ t.T
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[..., None], -1)
        return -picked.mean()

    return table - jax.grad(loss)(table), loss(table)


def convolution(x: Any, kernel: Any) -> Any:
    def loss(k: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(x, k, (2, 2), "SAME", dimension_numbers=numbers)
        pooled = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return jnp.mean(pooled**2)

    return kernel - jax.grad(loss)(kernel), loss(kernel)


def rolled(w: Any, x: Any) -> Any:
    """A roll joins two slices, and by nothing the first one is empty: partial sums of an empty tensor are added."""
    return jnp.sum(jnp.roll(x @ w, 0, axis=0) ** 2 + jnp.roll(x @ w, 0, axis=1))


def normalised(w: Any, x: Any) -> Any:
    """A batch norm as Equinox has it: its mean over an axis that `vmap` names; no warning of collectives."""

    def one(row: Any) -> Any:
        row = row @ w
        centred = row - jax.lax.pmean(row, "batch")
        return jnp.sin(centred * jax.lax.rsqrt(jax.lax.pmean(centred**2, "batch") + 1e-5))

    return jnp.mean(jax.vmap(one, axis_name="batch")(x) ** 2)


def every_third(x: Any) -> Any:
    """Its gradient is made from nothing, and padded between its elements, on all devices: XLA pads no part of it."""
    picked = x[1:-1:2, ::-3]
    return jnp.sum(picked * jnp.cos(jnp.arange(picked.size).reshape(picked.shape)))


IDS = jnp.asarray(np.random.default_rng(1).integers(0, 32, (8, 16)))

FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "attention": (jax.grad(lambda *a: attention(*a).sum()), tuple(values(4, 8, 8, 4, seed=n) for n in range(3))),
    "embedding": (embedding, (values(32, 16), IDS)),
    "convolution": (convolution, (values(8, 16, 16, 8), values(3, 3, 8, 16, seed=1))),
    "scan": (scan_step, ({"w": values(4, 16, 16), "b": values(16)}, values(8, 16, seed=1))),
    "accumulation": (accumulating_step, (values(16, 16), values(32, 16, seed=1))),
    "branches": (branching, (values(8, 16), values(16, 16, seed=1))),
    "while": (until, (values(8, 8),)),
    "random numbers": (lambda k, x: x + jax.random.normal(k, x.shape), (jax.random.key(0), values(16, 8))),
    "linear algebra": (lambda x: jnp.linalg.solve(x @ x.T + 8 * jnp.eye(8), x), (values(8, 8),)),
    "fft": (lambda x: jnp.abs(jnp.fft.rfft(x, axis=1)), (values(8, 16),)),
    "segment sum": (lambda x: jax.ops.segment_sum(x, jnp.arange(16) % 4, 4), (values(16, 8),)),
    "rolled by nothing": (lambda w, x: w - jax.grad(rolled)(w, x), (values(16, 16), values(8, 16, seed=1))),
    "strided slice": (lambda x: x - jax.grad(every_third)(x), (values(32, 32),)),
    "named batch": (jax.value_and_grad(normalised), (values(16, 16), values(8, 16, seed=1))),
    "histogram": (lambda x: jnp.zeros(8, jnp.int32).at[(x * 3).astype(jnp.int32) % 8].add(1), (values(64),)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    fn, args = FUNCTIONS[name]
    mesh = mesh_of((2, 4), explicit=True)
    assert_equal_trees(shardplan.auto(fn, mesh)(*args), jax.jit(fn)(*args))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sizes", [(8,), (2, 4), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_in_arbitrary_layouts(name: str, sizes: tuple[int, ...], seed: int) -> None:
    """Drawn layouts do not change the results."""
    fn, args = FUNCTIONS[name]
    mesh = mesh_of(sizes)
    plan = scrambled(shardplan.plan(fn, mesh, *args), seed)
    assert_equal_trees(run(plan, mesh, *args), jax.jit(fn)(*args))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accumulation"])
def test_some_functions_in_arbitrary_layouts(name: str) -> None:
    """Drawn layouts do not change the results."""
    fn, args = FUNCTIONS[name]
    mesh = mesh_of((2, 4))
    plan = scrambled(shardplan.plan(fn, mesh, *args), 7)
    assert_equal_trees(run(plan, mesh, *args), jax.jit(fn)(*args))


@pytest.mark.parametrize("ids", [np.int32, np.uint8, np.int16])
@pytest.mark.parametrize("table", [np.float32, np.int32, bool])
def test_lookups_outside_of_a_table_whose_rows_are_split(table: Any, ids: Any) -> None:
    """What is not in the table is filled behind the sum over the devices that have the rows."""
    rows = (np.arange(300 * 8).reshape(300, 8) % 7 - 2).astype(table)
    wanted = np.random.default_rng(0).integers(-400, 400, (8, 6)).astype(ids)
    mesh = mesh_of((2, 4))
    rank_two, rank_three = P("y", "x"), P("y", None, "x")

    def look_up(rows: Any, wanted: Any) -> Any:
        looked_up = jax.lax.with_sharding_constraint(rows[wanted], NamedSharding(mesh, rank_three))
        return looked_up, jnp.take_along_axis(rows, wanted[0, :, None].astype(np.int32), 0, mode="fill", fill_value=5)

    step = shardplan.auto(look_up, mesh, pins={"0": rank_two, "1": P()})
    for found, expected in zip(step(rows, wanted), jax.jit(look_up)(rows, wanted), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert "reduce-scatter" in {c.kind for c in step.plan(rows, wanted).collectives} or table is bool


def strided(w: Any, x: Any) -> Any:
    """Its kernel is smaller than the padding, of which its gradient therefore has less than nothing."""
    numbers = ("NHWC", "HWIO", "NHWC")
    return jnp.sum(jax.lax.conv_general_dilated(x, w, (2, 2), [(1, 1), (1, 1)], dimension_numbers=numbers) ** 2)


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (jax.grad(strided, 1), (values(1, 1, 4, 8), values(2, 64, 32, 4, seed=1))),
        (lambda _, x: jax.lax.pad(x * 2, 0.0, ((0, 0, 0), (-3, 4, 1), (0, 0, 0))), (values(1), values(2, 64, 4))),
    ],
)
def test_dilated_blocks_that_start_between_elements(fn: Any, args: Any) -> None:
    """They are not split: XLA's partitioner fails a check there, and ends the process."""
    mesh = mesh_of((2, 4))
    step = shardplan.auto(fn, mesh, pins={"1": P(None, ("x", "y"))})
    assert_equal_trees(step(*args), jax.jit(fn)(*args))


# ---- random programs


def check_random_program(seed: int, sizes: tuple[int, ...], explicit: bool, scramble: bool, length: int = 8) -> None:
    mesh = mesh_of(sizes, explicit and not scramble)
    params = inputs_of(seed)
    batch = params.pop("p0")
    step = random_step(seed, length)
    expected = jax.jit(step)(params, batch)
    if scramble:
        plan = scrambled(shardplan.plan(step, mesh, params, batch, time_limit=5), seed)
        assert_equal_trees(run(plan, mesh, params, batch), expected)
    else:
        assert_equal_trees(shardplan.auto(step, mesh, time_limit=5)(params, batch), expected)


@pytest.mark.long
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.generate,))
@given(seed=st.integers(0, 10**6), sizes=st.sampled_from(MESHES), explicit=st.booleans(), scramble=st.booleans())
def test_random_programs(seed: int, sizes: tuple[int, ...], explicit: bool, scramble: bool) -> None:
    check_random_program(seed, sizes, explicit, scramble)


@pytest.mark.long
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.generate,))
@given(seed=st.integers(0, 10**6), sizes=st.sampled_from(MESHES), explicit=st.booleans(), scramble=st.booleans())
def test_random_programs_of_more_operations(seed: int, sizes: tuple[int, ...], explicit: bool, scramble: bool) -> None:
    operations = random_programs.OPERATIONS + random_operations.OPERATIONS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_programs, "OPERATIONS", operations)
        check_random_program(seed, sizes, explicit, scramble)


@pytest.mark.slow
@pytest.mark.parametrize("scramble", [False, True])
def test_a_short_random_program(scramble: bool) -> None:
    check_random_program(3, (2, 4), explicit=True, scramble=scramble, length=4)


def check_random_pins(seed: int, sizes: tuple[int, ...]) -> None:
    """A short random function with arguments pinned to layouts that are drawn, and a result constrained to one."""
    mesh, draw = mesh_of(sizes), random.Random(seed)
    arrays = inputs_of(seed)

    def made(inside: Any) -> Any:
        def fn(arrays: Any) -> Any:
            first, *rest = random_values(seed, list(arrays.values()), 3)
            return (first if inside is None else jax.lax.with_sharding_constraint(first, inside), *rest)

        return fn

    expected = jax.jit(made(None))(arrays)
    axes = MeshAxes(mesh.axis_names, sizes)
    space = LayoutSpace(axes)

    def drawn(array: jax.Array) -> P:
        return to_spec(axes, draw.choice(space.domain(array.shape).layouts))

    pins = {f"0/{name}": drawn(array) for name, array in arrays.items()}
    inside = NamedSharding(mesh, drawn(expected[0]))
    planned = shardplan.auto(made(inside), mesh, pins=pins)
    found = planned(arrays)
    assert_equal_trees(found, expected)
    assert planned.plan(arrays).layouts == pins
    assert found[0].sharding.is_equivalent_to(inside, found[0].ndim)


@pytest.mark.parametrize(("seed", "sizes"), [(1, (8,)), (2, (2, 4)), (5, (2, 2, 2))])
def test_pins_and_constraints(seed: int, sizes: tuple[int, ...]) -> None:
    check_random_pins(seed, sizes)


@pytest.mark.long
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.generate,))
@given(seed=st.integers(0, 10**6), sizes=st.sampled_from(MESHES))
def test_random_pins_and_constraints(seed: int, sizes: tuple[int, ...]) -> None:
    check_random_pins(seed, sizes)


# ---- training


def mlp_step(state: Any, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        hidden = jax.nn.gelu(batch["x"] @ params["up"] + params["bias"])
        return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(state["params"])
    moments = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["moments"], gradients)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments)
    return {"params": params, "moments": moments, "step": state["step"] + 1}, value


def check_training(step: Any, state: Any, batch: Any, mesh: Any, **options: Any) -> None:
    """Losses of 5 steps to 1e-4 relative, parameters after them to 1e-3."""
    planned, plain = shardplan.auto(step, mesh, **options), jax.jit(step)
    one, other = state, state
    for _ in range(5):
        one, loss = planned(one, batch)
        other, expected = plain(other, batch)
        assert float(loss) == pytest.approx(float(expected), rel=1e-4)
    assert_equal_trees(one, other, 1e-3)


@pytest.mark.parametrize(
    ("sizes", "explicit"), [*((sizes, False) for sizes in MESHES), ((2, 4), True), ((8,), True)], ids=str
)
def test_five_training_steps(sizes: tuple[int, ...], explicit: bool) -> None:
    params = {"up": values(16, 64), "bias": values(64, seed=1), "down": values(64, 8, seed=2)}
    state = {"params": params, "moments": jax.tree.map(jnp.zeros_like, params), "step": 0}
    batch = {"x": values(32, 16, seed=3), "y": values(32, 8, seed=4)}
    check_training(mlp_step, state, batch, mesh_of(sizes, explicit), donate_argnums=() if explicit else None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pins",
    [{"0/params/*": P("y")}, {"0/*/up": P("x", "y"), "1/*": P(None, ("y", "x"))}],
    ids=str,
)
def test_five_training_steps_with_pins(pins: dict[str, P]) -> None:
    params = {"up": values(16, 64), "down": values(64, 8, seed=2), "bias": values(64, seed=1)}
    state = {"params": params, "moments": jax.tree.map(jnp.zeros_like, params), "step": 0}
    batch = {"x": values(32, 16, seed=3), "y": values(32, 8, seed=4)}
    check_training(mlp_step, state, batch, mesh_of((2, 4)), pins=pins)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sums_in_a_chosen_type(dtype: str) -> None:
    """The results are near those of the unplanned step."""
    x, w = values(64, 128).astype(jnp.bfloat16), values(128, 64, seed=1).astype(jnp.bfloat16)
    mesh = mesh_of((8,))
    pins = {"0": P(None, "x"), "1": P("x")}
    found = shardplan.auto(jnp.matmul, mesh, pins=pins, reduce_dtype=dtype)(x, w)
    expected = x.astype(jnp.float32) @ w.astype(jnp.float32)
    assert found.dtype == jnp.bfloat16
    scale = float(jnp.max(jnp.abs(expected)))
    np.testing.assert_allclose(np.asarray(found, np.float32) / scale, expected / scale, atol=2e-2)
