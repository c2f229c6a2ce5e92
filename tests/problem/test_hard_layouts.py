"""Hard layouts: sharding constraints inside a planned function, explicit axes, and the mesh in use."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from tests.helpers.random_programs import assert_equal_trees, mesh_of, run, scrambled

X = jnp.arange(64.0).reshape(8, 8)


@pytest.mark.parametrize(
    ("spec", "kept"),
    [
        (P(None, "x"), P(None, "x")),
        (P("x"), P("x")),
        (P("x", "y"), P("x", "y")),
        (P(("y", "x")), P(("y", "x"))),
        (P(), P()),
    ],
    ids=str,
)
def test_constraints_inside_the_function_are_kept(spec: P, kept: P) -> None:
    mesh = mesh_of((2, 4))

    def fn(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, spec))

    step = shardplan.auto(fn, mesh)
    result = step(X)
    assert_equal_trees(result, 2 * X)
    assert result.sharding.is_equivalent_to(NamedSharding(mesh, kept), 2)


def test_constraints_with_open_dimensions() -> None:
    """Open dimensions stay free, and the mesh in use is the planned one."""
    mesh = mesh_of((2, 4))

    def fn(x: Any, w: Any) -> Any:
        hidden = jax.lax.with_sharding_constraint(x @ w, P(P.UNCONSTRAINED, "y"))
        return hidden, (hidden**2).sum()

    with jax.set_mesh(mesh):
        hidden, total = shardplan.auto(fn, mesh)(X, X)
    assert hidden.sharding.spec[1] == "y"
    assert_equal_trees(total, ((X @ X) ** 2).sum())


def test_constraints_of_inner_values() -> None:
    """They are kept."""
    mesh = mesh_of((2, 4))
    made = shardplan.auto(
        lambda: jax.lax.with_sharding_constraint(jnp.zeros((8, 8)), NamedSharding(mesh, P("y"))), mesh
    )
    assert made().sharding.spec == P("y")


def test_constraints_that_no_plan_can_keep() -> None:
    """They are left out, with a warning."""
    mesh = mesh_of((8,))

    def fn(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P(None, "x")))

    with pytest.warns(shardplan.ShardplanWarning, match=r"constraint at test_hard_layouts.py.* is not kept.*pad to 8"):
        assert_equal_trees(shardplan.auto(fn, mesh)(jnp.ones((8, 6))), 2 * jnp.ones((8, 6)))


# ---- layouts that arguments have by their types


def _twice(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w) @ w


def _shaped(mesh: Any, spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(mesh, spec))


def test_arguments_split_by_explicit_axes() -> None:
    """They keep their layout, and the statistics have its price."""
    mesh = mesh_of((2, 4), explicit=True)
    free = shardplan.plan(_twice, mesh, _shaped(mesh, P()), _shaped(mesh, P()))
    assert "pins" not in free.statistics
    plan = shardplan.plan(_twice, mesh, _shaped(mesh, P(None, "y")), _shaped(mesh, P("x")))
    assert [sharding.spec for sharding in plan.leaf_shardings()] == [P(None, "y"), P("x")]
    sent = plan.communication_bytes - free.communication_bytes
    assert plan.statistics["pins"]["communication_bytes"] == sent > 0
    same = shardplan.plan(_twice, mesh_of((2, 4)), *(_shaped(mesh_of((2, 4)), P(None, "y")) for _ in range(2)))
    assert same.communication_bytes == free.communication_bytes  # axes of type Auto say nothing of the type


def test_a_pin_of_an_argument_with_a_layout() -> None:
    """The pin has precedence."""
    mesh = mesh_of((2, 4), explicit=True)
    pins = {"0": P("x", None)}
    plan = shardplan.plan(_twice, mesh, _shaped(mesh, P(None, "y")), _shaped(mesh, P(None, "y")), pins=pins)
    assert [sharding.spec for sharding in plan.leaf_shardings()] == [P("x"), P(None, "y")]


def test_axes_of_other_types_may_split_more_of_an_argument() -> None:
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto))
    plan = shardplan.plan(lambda x, w: x * w, mesh, _shaped(mesh, P("x")), _shaped(mesh, P()), pins={"1": P("x", "y")})
    assert [sharding.spec for sharding in plan.leaf_shardings()] == [P("x", "y"), P("x", "y")]


@pytest.mark.slow
def test_steps_with_explicit_arguments_run_and_are_planned_once() -> None:
    mesh = mesh_of((2, 4), explicit=True)
    w = jax.device_put(jnp.eye(8) + 0.1 * X, NamedSharding(mesh, P(None, "x")))
    x = jax.device_put(X, NamedSharding(mesh, P("y", "x")))

    def step(w: Any, x: Any) -> Any:
        return w - 1e-4 * jax.grad(lambda w: jnp.sum(_twice(x, w)))(w)

    planned = shardplan.auto(step, mesh)
    first = planned(w, x)
    assert_equal_trees(first, step(jnp.eye(8) + 0.1 * X, X))
    made = planned.plan(w, x)
    assert [sharding.spec for sharding in made.leaf_shardings()] == [P(None, "x"), P("y", "x")]
    assert_equal_trees(planned(first, x), step(step(jnp.eye(8) + 0.1 * X, X), X))
    assert planned.plan(first, x) is made


@pytest.mark.long
@pytest.mark.parametrize("explicit", [False, True])
def test_islands_of_a_step_that_is_traced_inside_of_set_mesh(explicit: bool) -> None:
    """Their operations run on a device's blocks: the mesh that they were traced in is not that of an island."""

    def step(x: jax.Array) -> jax.Array:
        gradient = jax.grad(lambda x: jnp.sum(((x - x.mean((0, 1))) / x.std((0, 1))) ** 3))(x)
        return jnp.abs(gradient).sum(1)

    mesh, x = mesh_of((2, 4), explicit), jnp.sin(jnp.arange(8 * 16 * 32.0)).reshape(8, 16, 32)
    with jax.set_mesh(mesh):
        planned = shardplan.auto(step, mesh, pins={"0": P("x", "y")})
        plan = planned.plan(x)
        planned_operations = [plan.program.operations[index] for index in plan.schedule.assignment.strategies]
        assert any(plan.schedule.island_dtype(operation) for operation in planned_operations)
        assert_equal_trees(planned(x), jax.jit(step)(x))
        for seed in range(2):  # other layouts, by the plan's own function
            other = scrambled(plan, seed)
            assert_equal_trees(run(other, mesh, jnp.asarray(x)), jax.jit(step)(x))
    assert_equal_trees(planned(x), jax.jit(step)(x))
