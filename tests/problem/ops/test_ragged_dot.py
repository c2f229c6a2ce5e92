"""Ragged dots: every split of rows, groups and matrices, run with all kinds of group sizes."""

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import shardplan
from shardplan import rules
from shardplan.audits.audit import measure
from shardplan.compiled.target import gpu_mesh
from shardplan.problem.ops.ragged_dot import axes_of_groups, axes_of_rows
from shardplan.problem.schedule import Schedule
from shardplan.problem.xla_limits import needs_island, usable_splits
from shardplan.search import solve
from tests.helpers.random_programs import assert_equal_trees, mesh_of, scrambled, with_schedule

ROWS, INNER, OUTER, GROUPS = 64, 32, 48, 8
Numbers = jax.lax.RaggedDotDimensionNumbers
OF_MATRICES = Numbers((((0,), (0,)), ((), ())), [0], [])
OF_ROWS = Numbers((((1,), (2,)), ((), ())), [0], [0])
GROUP_SIZES = ([8] * 8, [0, 0, 64, 0, 0, 0, 0, 0], [0] * 8, [3, 0, 5, 20, 0, 1, 30, 5], [0, 0, 0, 10, 0, 0, 0, 3])


def shaped(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


SIZES = jax.ShapeDtypeStruct((GROUPS,), jnp.int32)
FORMS = {
    "product": (jax.lax.ragged_dot, (shaped(ROWS, INNER), shaped(GROUPS, INNER, OUTER), SIZES)),
    "gradient of the matrices": (
        lambda x, y, sizes: jax.lax.ragged_dot_general(x, y, sizes, OF_MATRICES),
        (shaped(ROWS, INNER), shaped(ROWS, OUTER), SIZES),
    ),
    "gradient of the rows": (
        lambda y, w, sizes: jax.lax.ragged_dot_general(y, w, sizes, OF_ROWS),
        (shaped(ROWS, OUTER), shaped(GROUPS, INNER, OUTER), SIZES),
    ),
}


def strategies(plan: shardplan.Plan) -> tuple[Any, Any]:
    """The product of a planned program, and the ways in which it can be split."""
    (product,) = (o for o in plan.schedule.program.operations if o.primitive.name == "ragged_dot_general")
    return product, plan.schedule.problem.choices[product.index].strategies


def split_as(plan: shardplan.Plan, number: int) -> shardplan.Plan:
    """The best plan with one of the strategies of its product."""
    problem = plan.schedule.problem
    variable = problem.variable_of_operation(strategies(plan)[0].index)
    assert variable is not None
    costs = problem.network.costs[variable]
    problem.network.costs[variable] = np.where(np.arange(len(costs)) == number, costs, 1e12)
    choices = solve(problem.network, time_limit=5.0, gap=0.5).choices
    problem.network.costs[variable] = costs
    return with_schedule(plan, Schedule(problem, problem.decode(choices)))


@pytest.mark.parametrize("form", FORMS)
def test_rows_groups_and_both_sides_of_the_matrices_split(form: str):
    function, operands = FORMS[form]
    assert {split.index for split in usable_splits(rules.rule_of(function, *operands), 8)} == {"i", "j", "k", "g"}


def test_rows_whose_groups_differ_by_batch_are_not_split():
    numbers = Numbers((((2,), (2,)), ((0,), (0,))), [1], [1])
    rule = rules.rule_of(
        lambda x, w, sizes: jax.lax.ragged_dot_general(x, w, sizes, numbers),
        *(shaped(4, ROWS, INNER), shaped(4, GROUPS, INNER, OUTER), jax.ShapeDtypeStruct((4, GROUPS), jnp.int32)),
    )
    assert {split.index for split in usable_splits(rule, 4)} == {"b", "j", "k"}


def experts(rows: Any, weights: Any, sizes: Any) -> Any:
    """One step of experts with a hidden layer, each the expert of some rows."""

    def loss(weights: Any, rows: Any) -> Any:
        hidden = jnp.tanh(jax.lax.ragged_dot(rows, weights[0], sizes))
        return jnp.sum(jax.lax.ragged_dot(hidden, weights[1], sizes) ** 2)

    value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(weights, rows)
    return value, jax.tree.map(lambda w, g: w - 0.01 * g, (weights, rows), gradients)


def runner(plan: shardplan.Plan, mesh: Mesh) -> Any:
    """The planned step, compiled once, for arguments in any layout."""
    step = plan.jitted(mesh)

    def run(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        placed = [jax.device_put(leaf, s) for leaf, s in zip(leaves, plan.leaf_shardings(mesh), strict=True)]
        return step(*jax.tree.unflatten(structure, placed))

    return run


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_drawn_layouts_and_group_sizes(seed: int):
    """Any layouts give the values of one device."""
    mesh, keys = mesh_of((2, 4)), jax.random.split(jax.random.key(0), 3)
    shapes = ((ROWS, INNER), (GROUPS, INNER, OUTER), (GROUPS, OUTER, INNER))
    rows, *weights = (jax.random.normal(key, shape) / 4 for key, shape in zip(keys, shapes, strict=True))
    planned = runner(scrambled(shardplan.plan(experts, mesh, rows, weights, SIZES), seed), mesh)
    for sizes in (jnp.array(sizes, jnp.int32) for sizes in GROUP_SIZES):
        assert_equal_trees(planned(rows, weights, sizes), experts(rows, weights, sizes))


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("form", FORMS)
def test_every_strategy_of_a_product(form: str, every: bool):
    """Each strategy gives the values of one device."""
    function: Any
    mesh, (function, operands) = mesh_of((2, 4)), FORMS[form]
    keys = jax.random.split(jax.random.key(0))
    arrays = [jax.random.normal(key, operand.shape) for key, operand in zip(keys, operands, strict=False)]
    plan = shardplan.plan(function, mesh, *operands)
    product, found = strategies(plan)
    numbers = [n for n, s in enumerate(found) if every or (axes_of_rows(product, s) and axes_of_groups(product, s))]
    for number in numbers if every else numbers[:1]:
        planned = runner(split_as(plan, number), mesh)
        for sizes in (jnp.array(sizes, jnp.int32) for sizes in GROUP_SIZES):
            assert_equal_trees(planned(*arrays, sizes), function(*arrays, sizes))


def test_small_matrices():
    """Data parallelism: rows and their results stay on their device, and the matrices' gradients are summed."""
    rows = shaped(8 * 4096, INNER)
    weights = [shaped(GROUPS, INNER, OUTER), shaped(GROUPS, OUTER, INNER)]
    plan = shardplan.plan(experts, 8, rows, weights, SIZES)
    moved = 2 * 4 * GROUPS * INNER * OUTER
    assert plan.communication_bytes <= 2 * 7 / 8 * moved + 100
    assert plan.gap <= 1e-3


@pytest.mark.long
@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
@pytest.mark.parametrize("form", FORMS)
def test_compiled_bytes_of_a_product(form: str):
    """XLA sends the planned bytes."""
    function, operands = FORMS[form]
    mesh: Mesh = gpu_mesh("h100", (2, 4), ("x", "y"))
    plan = shardplan.plan(function, mesh, *operands)
    product, found = strategies(plan)
    assert sum(needs_island(product, strategy) for strategy in found) > len(found) / 2
    for number in range(0, len(found), 4):
        split = split_as(plan, number)
        planned = sum(sent.bytes * sent.times for sent in split.schedule.collectives())
        assert measure(split.jitted(mesh).lower(*operands)).communication_bytes == pytest.approx(planned, rel=0.01)


def test_memory_of_the_gradient_of_matrices():
    """It has copies of both operands for all groups."""
    function = FORMS["gradient of the matrices"][0]
    narrow, wide = shaped(4096, 64), shaped(4096, 512)
    sizes = jax.ShapeDtypeStruct((GROUPS,), jnp.int32)
    peaks = [shardplan.plan(function, 1, *both, sizes).peak_bytes for both in ((narrow, wide), (wide, narrow))]
    masked = GROUPS * 4096 * (64 + 512) * 4
    assert (
        peaks == [pytest.approx(masked + 4096 * (64 + 512) * 4, rel=0.05)] * 2
    )  # compiled: 90.2 MB, of which 4.2 for cuBLAS


@pytest.mark.slow
def test_gradients_of_generated_matrices() -> None:
    """Matrices without operands have gradients through them."""

    def step(x: Any, sizes: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(jax.lax.ragged_dot(x, jnp.full((4, 64, 64), 0.5) * 1.0, sizes) ** 2))(x)

    x, sizes = jnp.ones((512, 64)), jnp.full(4, 128, jnp.int32)
    assert_equal_trees(shardplan.auto(step, mesh_of((8,)))(x, sizes), step(x, sizes))
