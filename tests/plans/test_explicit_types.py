"""Results on mesh axes of type Explicit: the types that `jax.jit` gives, where a call is of that kind."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from tests.helpers.random_programs import assert_equal_trees, mesh_of

X = np.arange(64.0, dtype=np.float32).reshape(8, 8)


def step(state: Any, x: Any) -> Any:
    return {"w": state["w"] - 0.1 * x.sum() * state["w"]}, (x * 2).sum(0), x.sum(), 1.0


def types_of(tree: Any) -> list[str]:
    return [str(jax.typeof(leaf)) for leaf in jax.tree.leaves(tree)]


def as_jit(fn: Any, mesh: Any, *args: Any) -> Any:
    """The planned results, whose values and types are those of jit, also where the state is fed back."""
    planned = shardplan.auto(fn, mesh)
    found, expected = planned(*args), jax.jit(fn)(*args)
    assert_equal_trees(found, expected, 1e-5)
    assert types_of(found) == types_of(expected)
    again = planned(found[0], *args[1:])
    assert_equal_trees(again, jax.jit(fn)(expected[0], *args[1:]), 1e-5)
    return found


@pytest.mark.parametrize("leaf", [X, jnp.asarray(X), jax.device_put(X, jax.devices()[0])], ids=["numpy", "new", "one"])
def test_arguments_without_a_mesh(leaf: Any) -> None:
    """Results have types without layouts, so that whatever follows takes them, although the mesh has Explicit axes."""
    mesh = mesh_of((2, 4), explicit=True)
    found, *_ = as_jit(
        lambda p, x: ({"a": p["a"] - x.T @ (x @ p["a"]), "b": p["b"]}, x), mesh, {"a": leaf, "b": X}, leaf
    )
    assert set(found["a"].sharding.mesh.axis_types) == {AxisType.Auto}
    jax.jit(lambda p: (p["a"] @ p["b"])[:3])(found)
    found["a"].at[0].set(0) @ jnp.concatenate([found["a"], found["b"]], 1)


@pytest.mark.parametrize("state", [P("x", "y"), P(None, "y"), P()], ids=str)
@pytest.mark.parametrize("explicit", [True, False], ids=["planned for explicit axes", "for automatic ones"])
def test_explicit_arguments(state: P, explicit: bool) -> None:
    """It is the arguments that say the types of results, not the mesh that is planned for."""
    mesh = mesh_of((2, 4), explicit=True)
    w, x = jax.device_put(X, NamedSharding(mesh, state)), jax.device_put(X, NamedSharding(mesh, P("x")))
    found = as_jit(step, mesh_of((2, 4), explicit), {"w": w}, x)
    assert found[0]["w"].sharding.mesh == mesh


def test_one_explicit_argument_among_others() -> None:
    """Results that do not depend on it are whole, as those of jit."""
    mesh = mesh_of((2, 4), explicit=True)
    as_jit(step, mesh, {"w": X}, jax.device_put(X, NamedSharding(mesh, P("x"))))


def test_axes_of_mixed_types() -> None:
    """Axes of type Auto may split results in any way, those of type Explicit as the type has it."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto))
    w, x = (jax.device_put(X, NamedSharding(mesh, P("x"))) for _ in range(2))
    as_jit(step, mesh, {"w": w}, x)


def test_a_state_of_another_result_type() -> None:
    """It need not keep the layout of its argument."""
    mesh = mesh_of((2, 4), explicit=True)
    as_jit(lambda s, x: ({"w": s["w"].T + 1}, x), mesh, {"w": jax.device_put(X, NamedSharding(mesh, P("x", "y")))}, X)


@pytest.mark.parametrize("explicit", [True, False])
def test_a_mesh_of_set_mesh(explicit: bool) -> None:
    """`jax.set_mesh` decides for arguments without a mesh."""
    mesh = mesh_of((2, 4), explicit)
    with jax.set_mesh(mesh):
        found = as_jit(step, mesh, {"w": X}, X)
        as_jit(step, mesh, {"w": jax.device_put(X, P("x"))}, X)
    assert set(found[0]["w"].sharding.mesh.axis_types) == {mesh.axis_types[0]}


def test_other_types_are_another_plan() -> None:
    """As jax.jit traces again for other types."""
    mesh = mesh_of((2, 4), explicit=True)
    planned = shardplan.auto(lambda x: x * 2, mesh)
    for spec in (P("x"), P(None, "y")):
        x = jax.device_put(X, NamedSharding(mesh, spec))
        assert types_of(planned(x)) == types_of(x)


def test_a_kept_plan_gives_the_same_types(tmp_path: Any) -> None:
    """Layouts of results are part of the plan's file, free dimensions too."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto))
    w = jax.device_put(X, NamedSharding(mesh, P("x")))
    plan = shardplan.plan(step, mesh, {"w": w}, w)
    plan.save(tmp_path / "plan.json")
    for one in (plan, shardplan.Plan.load(tmp_path / "plan.json", mesh)):
        assert types_of(one.apply(step)({"w": w}, w)) == types_of(jax.jit(step)({"w": w}, w))


def test_explicit_and_automatic_arguments() -> None:
    """They have no types together: the error names one of each, and what to do."""
    one, other = (jax.device_put(X, NamedSharding(mesh_of((2, 4), explicit), P("x"))) for explicit in (True, False))
    with pytest.raises(
        shardplan.CallError, match="`0` is on mesh axes of type Explicit and `1` on the same axes of type"
    ):
        shardplan.auto(lambda a, b: a + b, mesh_of((2, 4)))(one, other)


# ---- programs that say layouts inside


def layer(p: Any, x: Any) -> Any:
    h = jax.nn.relu(jnp.einsum("bd,dh->bh", x, p["a"]))
    return jnp.einsum("bh,hd->bd", h, p["b"], out_sharding=P("x", None))


def update(p: Any, x: Any, through: Any = layer) -> Any:
    value, gradient = jax.value_and_grad(lambda p: ((through(p, x) - x) ** 2).mean())(p)
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradient), value


def summed(x: Any) -> Any:
    return jax.lax.psum(x, "x")


SAID: dict[str, Any] = {
    "step": update,
    "recomputed": lambda p, x: update(p, x, jax.checkpoint(layer)),
    "loop": lambda p, x: jax.lax.scan(lambda c, _: (layer(p, c), c.sum()), x, None, length=3),
    "loop until": lambda p, x: jax.lax.fori_loop(0, 3, lambda _, c: layer(p, c), x),
    "while": lambda p, x: jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (layer(p, c[0]), c[1] + 1), (x, 0)),
    "branch": lambda p, x: jax.lax.cond(x.sum() > 0, lambda x: layer(p, x), lambda x: x, x),
    "reshard": lambda p, x: jax.sharding.reshard(x @ p["a"], P("x", None)),
    "made": lambda p, x: (jnp.zeros((8, 8), out_sharding=P("x", None)) + x.sum(), jnp.arange(8, out_sharding=P("y"))),
    "rows": lambda p, x: p["a"].at[jnp.arange(4)].get(out_sharding=P(None, "y")),
    "random": lambda p, x: jax.random.normal(jax.random.key(0), (8, 8), out_sharding=P("x")),
    "vmap": lambda p, x: jax.sharding.reshard(jax.vmap(lambda row: row @ p["a"])(x), P()),
    "by hand": lambda p, x: jax.sharding.reshard(
        jax.shard_map(summed, in_specs=P("x", None), out_specs=P(None, None))(x), P("y")
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_typed_layouts_inside_a_program(name: str) -> None:
    """They are constraints of the plan. Types and values are those of jit, also from a cached plan."""
    mesh, fn = mesh_of((2, 4), explicit=True), SAID[name]
    with jax.set_mesh(mesh):
        p = {"a": jax.device_put(X / 64, P(None, "y")), "b": jax.device_put(X / 64, P("y", None))}
        x = jax.device_put(X / 64, P("x", None))
        planned, expected = shardplan.auto(fn, mesh), jax.jit(fn)(p, x)
        for found in (planned(p, x), planned.plan(p, x).apply(fn)(p, x)):
            assert_equal_trees(found, expected, 1e-5)
        assert types_of(planned(p, x)) == types_of(expected)


def test_a_typed_layout_of_a_product() -> None:
    """The product has its requested layout in the compiled program."""
    mesh = mesh_of((2, 4), explicit=True)
    with jax.set_mesh(mesh):
        p = {"a": jax.device_put(X, P(None, "y")), "b": jax.device_put(X, P("y", None))}
        plan = shardplan.plan(lambda p, x: layer(p, x) * 2, mesh, p, jax.device_put(X, P("x", None)))
    assert P("x", None) in plan.program.constraints.values()
