"""The user's own sharding constraints inside a planned function are hard constraints of the plan."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from tests.core_programs import assert_equal_trees, mesh_of

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


def test_constraints_leave_open_dimensions_open_and_take_the_mesh_in_use() -> None:
    mesh = mesh_of((2, 4))

    def fn(x: Any, w: Any) -> Any:
        hidden = jax.lax.with_sharding_constraint(x @ w, P(P.UNCONSTRAINED, "y"))
        return hidden, (hidden**2).sum()

    with jax.set_mesh(mesh):
        hidden, total = shardplan.auto(fn, mesh)(X, X)
    assert hidden.sharding.spec[1] == "y"
    assert_equal_trees(total, ((X @ X) ** 2).sum())


def test_constraints_of_what_is_made_inside_are_kept() -> None:
    mesh = mesh_of((2, 4))
    made = shardplan.auto(
        lambda: jax.lax.with_sharding_constraint(jnp.zeros((8, 8)), NamedSharding(mesh, P("y"))), mesh
    )
    assert made().sharding.spec == P("y")


def test_layouts_of_explicit_programs_are_refused_with_a_hint() -> None:
    mesh = mesh_of((2, 4), explicit=True)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="of type Auto") as caught:
        shardplan.auto(lambda x: jax.sharding.reshard(x, P("x")), mesh)(X)
    assert "with_sharding_constraint" in "".join(caught.value.__notes__)


def test_constraints_that_no_plan_can_keep_are_left_out_with_a_warning() -> None:
    mesh = mesh_of((8,))

    def fn(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P(None, "x")))

    with pytest.warns(
        shardplan.ShardplanWarning, match=r"constraint at test_core_constraints.py.* is not kept.*pad to 8"
    ):
        assert_equal_trees(shardplan.auto(fn, mesh)(jnp.ones((8, 6))), 2 * jnp.ones((8, 6)))
