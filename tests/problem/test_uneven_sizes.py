"""Sizes that the mesh does not divide: their plans, their values, and the warnings."""

from __future__ import annotations

import warnings
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import shardplan
from shardplan.errors import ShardplanWarning
from shardplan.hardware import load
from shardplan.layout.layout import LayoutSpace, MeshAxes, padding
from shardplan.problem.uneven_sizes import padded_sizes
from shardplan.problem.xla_limits import usable_padded_splits
from shardplan.program.tracing import trace_program
from shardplan.rules import rule_of
from shardplan.rules.samples import samples
from tests.helpers.random_programs import assert_equal_trees, mesh_of, run, scrambled
from tests.helpers.uneven_programs import FAMILIES, padded_plan, padded_primitives

compiles_for_gpus = pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")


def values(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.1, jnp.float32)


def language_step(params: Any, ids: Any) -> Any:
    """One attention layer between an embedding and logits that share their table."""

    def loss(p: Any) -> Any:
        h = p["table"][ids]
        q, k, v = (jnp.einsum("btd,dhe->bthe", h, w) for w in p["qkv"])
        scores = jax.nn.softmax(jnp.einsum("bqhe,bkhe->bhqk", q, k))
        h = h + jnp.einsum("bhqk,bkhe,hed->bqd", scores, v, p["out"])
        logits = jax.nn.log_softmax(h @ p["table"].T)
        return -jnp.take_along_axis(logits, ids[..., None], -1).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def arguments(vocabulary: int, heads: int, batch: int, width: int = 24) -> Any:
    params = {
        "table": values(vocabulary, width),
        "qkv": tuple(values(width, heads, 2, seed=n) for n in range(3)),
        "out": values(heads, 2, width, seed=3),
    }
    ids = jnp.asarray(np.random.default_rng(4).integers(0, vocabulary, (batch, 6)))
    return params, ids


CASES = {"vocabulary": (101, 8, 8), "heads": (64, 12, 8), "batch": (64, 8, 6), "all": (101, 3, 5)}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:no mesh axis")
def test_planned_equals_unplanned() -> None:
    args = arguments(*CASES["heads"])
    assert_equal_trees(shardplan.auto(language_step, mesh_of((8,)))(*args), jax.jit(language_step)(*args))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:no mesh axis")
@pytest.mark.parametrize("sizes", [(8,), (2, 4)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_drawn_layouts_equal_unplanned(name: str, sizes: tuple[int, ...]) -> None:
    args, mesh = arguments(*CASES[name]), mesh_of(sizes)
    plan = scrambled(shardplan.plan(language_step, mesh, *args), 0)
    assert_equal_trees(run(plan, mesh, *args), jax.jit(language_step)(*args))


def test_an_undivided_vocabulary() -> None:
    """It causes a warning."""
    args = jax.eval_shape(lambda: arguments(50257, 12, 16, 96))
    with pytest.warns(ShardplanWarning, match=r"divides 50257, dimension 0 of `0/table` .*padded.*50264 would be"):
        plan = shardplan.plan(language_step, mesh_of((8,)), *args)
    assert plan.layouts["0/table"] in (jax.P(), jax.P(None, "x"))


def test_a_long_size_that_no_product_has() -> None:
    """It stays whole, with a warning."""
    table = jax.ShapeDtypeStruct((50257, 24), jnp.float32)
    with pytest.warns(ShardplanWarning, match=r"divides 50257.*not split, which can cost much"):
        plan = shardplan.plan(lambda t, x: (t * 0.9, x.sum()), mesh_of((8,)), table, jax.ShapeDtypeStruct((8,), "f4"))
    assert plan.schedule.space.padded == frozenset()


def test_heads_that_one_axis_divides() -> None:
    """They cause no warning."""
    args = jax.eval_shape(lambda: arguments(50304, 12, 16, 96))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shardplan.plan(language_step, mesh_of((2, 4)), *args)


def test_an_undivided_batch() -> None:
    """It causes a warning."""
    with pytest.warns(ShardplanWarning, match=r"divides dimension 0 of `1` \[6, 6\]: its 6 rows.*8 rows would be"):
        shardplan.plan(language_step, mesh_of((8,)), *arguments(64, 8, 6))


def test_filters_of_a_frozen_network_are_no_batch() -> None:
    def step(filters: Any, images: Any, frozen: Any) -> Any:
        def loss(filters: Any) -> Any:
            mine, other = (jax.lax.conv(images, some, (1, 1), "SAME") for some in (filters, frozen))
            return jnp.mean((mine - other) ** 2)

        return filters - jax.grad(loss)(filters)

    filters, images = (jax.ShapeDtypeStruct(shape, "f4") for shape in ((3, 3, 8, 8), (16, 3, 8, 8)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shardplan.plan(step, mesh_of((8,)), filters, images, filters)


# ---- padded inside of the step


QUICK = ("products", "sums", "lookups", "scatters")
EVERY = [
    pytest.param(name, sizes, marks=() if name in QUICK and sizes == (8,) else pytest.mark.long, id=f"{name}-{sizes}")
    for name in FAMILIES
    for sizes in ((8,), (2, 4), (2, 2, 2))
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes"), EVERY)
def test_padded_splits_equal_unplanned(name: str, sizes: tuple[int, ...]) -> None:
    fn, args, primitives = FAMILIES[name]
    mesh = mesh_of(sizes)
    plan = padded_plan(fn, mesh, args)
    if sizes == (8,):
        assert primitives <= padded_primitives(plan)
    assert_equal_trees(run(plan, mesh, *args), jax.jit(fn)(*args))


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(8,), (2, 4), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_padded_training_equals_unplanned(name: str, sizes: tuple[int, ...]) -> None:
    args, mesh = arguments(*CASES[name]), mesh_of(sizes)
    plan = padded_plan(language_step, mesh, args)
    assert_equal_trees(run(plan, mesh, *args), jax.jit(language_step)(*args))


def undivided(plan: shardplan.Plan) -> list[str]:
    """Arguments whose planned layout does not divide them."""
    sizes = plan.mesh_axes
    return [
        argument.path
        for argument in plan.arguments
        for size, names in zip(argument.shape, argument.spec, strict=False)
        for blocks in [np.prod([sizes[name] for name in np.atleast_1d(names or ())], dtype=int)]
        if size % blocks
    ]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:no mesh axis")
@pytest.mark.parametrize("sizes", [(8,), (2, 4)], ids=str)
def test_bytes_of_an_undivided_vocabulary(sizes: tuple[int, ...]) -> None:
    """It costs at most two more exchanges than a divided one: of the table, split by features, and its gradient."""
    mesh = AbstractMesh(sizes, ("x", "y")[: len(sizes)])
    plan, even = (shardplan.plan(language_step, mesh, *big_arguments(size)) for size in (50257, 50304))
    exchange = 50304 * 512 * 4 * 7 / 64
    assert plan.communication_bytes < even.communication_bytes + 2 * exchange
    assert padded_primitives(plan) >= {"dot_general", "reduce_max", "exp"}
    assert not undivided(plan) and plan.gap < 1e-3


def big_arguments(vocabulary: int) -> Any:
    return jax.eval_shape(lambda: arguments(vocabulary, 16, 256, 512))


@pytest.mark.long
@compiles_for_gpus
@pytest.mark.filterwarnings("ignore:no mesh axis")
@pytest.mark.parametrize("sizes", [(8,), pytest.param((2, 4), marks=pytest.mark.long)], ids=str)
def test_compiled_bytes_of_padded_splits(sizes: tuple[int, ...]) -> None:
    """XLA sends the planned bytes."""
    plan = shardplan.plan(language_step, AbstractMesh(sizes, ("x", "y")[: len(sizes)]), *big_arguments(50257))
    audit = shardplan.audit(plan, target="h100")
    assert audit.ok(0.02), str(audit)
    assert audit.unexplained_bytes < 0.01 * audit.predicted_bytes


@compiles_for_gpus
@pytest.mark.long
@pytest.mark.parametrize("sizes", [(8,), (2, 4)], ids=str)
@pytest.mark.parametrize("name", ["elements", "softmaxes", "lookups", "attention", "sums"])
def test_compiled_bytes_of_drawn_padded_splits(name: str, sizes: tuple[int, ...]) -> None:
    """XLA sends at most the planned bytes."""
    fn, args, _ = FAMILIES[name]
    plan = padded_plan(fn, AbstractMesh(sizes, ("x", "y")[: len(sizes)]), args)
    audit = shardplan.audit(plan, target="h100")
    sent = sum(operation.compiled_bytes for operation in audit.operations)
    assert sent <= 1.02 * audit.predicted_bytes + 64, audit.details()


def test_programs_that_divide_are_padded_nowhere() -> None:
    program = trace_program(language_step, arguments(64, 8, 8))
    assert padded_sizes(program, MeshAxes(("x", "y"), (2, 2))) == {6}  # the sequence, over both
    assert padded_sizes(program, MeshAxes(("x",), (2,))) == frozenset()
    assert padded_sizes(trace_program(language_step, arguments(101, 12, 8)), MeshAxes(("x",), (8,))) == {101, 12, 6}


def test_domains_of_padded_sizes() -> None:
    """Only padded sizes have domains of their own."""
    space = LayoutSpace(MeshAxes(("x", "y"), (2, 4)), frozenset({101}))
    assert space.domain((101, 64)).padded and not space.domain((12, 64)).padded
    assert space.domain((12, 64)) is space.domain((20, 64))


@pytest.mark.parametrize(("size", "blocks", "pads"), [(12, 8, True), (12, 4, False), (9, 8, False), (50257, 8, True)])
def test_padding_is_limited(size: int, blocks: int, pads: bool) -> None:
    space = LayoutSpace(MeshAxes(("x",), (blocks,)), frozenset({size}))
    domain = space.domain((size,))
    assert bool(domain.padded) == pads == space.pads(size, blocks)
    if pads:
        per_device = size / domain.degrees[domain.position[((0,),)]]
        assert per_device == pytest.approx((size + padding(size, blocks)) / blocks)


def test_padded_and_even_splits_of_one_index() -> None:
    """The padded split of an index is its even split."""
    checked = 0
    for sample in samples().values():
        try:
            rule = rule_of(sample.function, *sample.operands)
        except shardplan.ShardplanError:
            continue  # several operations
        for split in rule.padded_splits:
            if rule.size(split.index) % 2 == 0:
                checked += 1
                assert split in rule.splits(2)
    assert checked > 100


def test_updates_of_a_scatter_are_not_padded() -> None:
    """XLA was measured to write their padding into the first row."""
    shapes = [
        jax.ShapeDtypeStruct((64, 8), "f4"),
        jax.ShapeDtypeStruct((21, 1), "i4"),
        jax.ShapeDtypeStruct((21, 8), "f4"),
    ]
    rule = rule_of(scatter_add, *shapes)
    assert {split.index for split in rule.padded_splits} > {split.index for split in usable_padded_splits(rule)}
    assert all(slot.reducer is None for split in usable_padded_splits(rule) for slot in split.results)


def scatter_add(x: jax.Array, ids: jax.Array, updates: jax.Array) -> jax.Array:
    rows = jax.lax.ScatterDimensionNumbers((1,), (0,), (0,))
    return jax.lax.scatter_add(x, ids, updates, rows)


def test_a_shifted_index_is_not_padded() -> None:
    shapes = jax.ShapeDtypeStruct((21, 21), jnp.float32)
    kept = [split.index for split in rule_of(lambda x: jax.lax.rev(x, (1,)), shapes).padded_splits]
    assert kept == ["i0"]


def test_blocks_that_cross_larger_blocks() -> None:
    """50 rows over 4 devices are 13 each, over 2 of them 25: the halves are no pairs of quarters."""
    plan = padded_plan(lambda a: jnp.sin(jnp.sin(a)) @ a.T, AbstractMesh((2, 2), ("x", "y")), (values(50, 6),))
    problem = plan.schedule.problem
    domain = problem.space.domain((50, 6))
    path = problem.transitions.path(domain, ((0, 1), ()), ((0,), ()))
    assert [step.kind for step in path] == ["all-gather", "slice"] and path[0].fraction > 0.75


@pytest.mark.filterwarnings("ignore:no mesh axis")
def test_the_gradient_of_a_sort_of_rows_that_no_axis_divides():
    """The places that it scatters to are unsigned: XLA aborts where it pads those."""
    mesh, weights, batch = mesh_of((8,)), values(12, 20), values(12, 12, seed=1)
    gradient = jax.grad(lambda w, x: jnp.sum(jnp.sort(x @ w, axis=0) ** 2))
    h100 = load("h100")
    slow = replace(h100, flops=dict.fromkeys(h100.flops, 1e9), memory_bytes_per_second=1e9)
    assert_equal_trees(shardplan.auto(gradient, mesh, hardware=slow)(weights, batch), gradient(weights, batch))
