"""References (`jax.new_ref`) as arguments and closed over: a planned step leaves the contents that jit does."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.compiled.target import gpu_mesh
from shardplan.errors import ArgumentError, CallError, PlanMismatchError
from tests.helpers.random_programs import assert_equal_trees, mesh_of

X = jnp.arange(64.0).reshape(8, 8)


def is_ref(leaf: Any) -> bool:
    return isinstance(leaf, jax.ref.Ref)


def contents(tree: Any) -> list[np.ndarray]:
    """What the references of a tree hold."""
    held = [leaf[...] for leaf in jax.tree.leaves(tree) if is_ref(leaf)]
    keys = [jnp.issubdtype(array.dtype, jax.dtypes.prng_key) for array in held]
    return [np.asarray(jax.random.key_data(a) if is_key else a) for a, is_key in zip(held, keys, strict=True)]


def add(ref: Any, x: Any) -> Any:
    ref[...] += x
    return x * 2


def several(a: Any, b: Any, x: Any) -> None:
    a[...] = b[...] @ x
    b.addupdate(x)


def state(state: Any, x: Any) -> Any:
    """A training step whose moments and counter are references among plain weights."""
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(state["w"])
    state["count"][...] += 1
    state["m"][...] = 0.9 * state["m"][...] + gradient
    return state["w"] - 0.1 * state["m"][...], loss


def scanned(ref: Any, xs: Any) -> Any:
    def body(total: Any, x: Any) -> Any:
        ref[...] += x
        return total + ref[0, 0], ref[1]

    return jax.lax.scan(body, 0.0, xs)


def repeated(ref: Any, x: Any) -> None:
    jax.lax.fori_loop(0, 3, lambda i, _: ref.__setitem__(i, ref[i] * 2 + x), None)


def chosen(ref: Any, taken: Any, x: Any) -> Any:
    jax.lax.cond(taken, lambda: ref.__setitem__(0, x[0]), lambda: ref.addupdate(x))
    return x


def draw(key: Any) -> Any:
    key[...], one = jax.random.split(key[...])
    return jax.random.normal(one, (8, 8))


def literal(ref: Any, x: Any) -> Any:
    ref[...] = 0.0
    return x


PROGRAMS: dict[str, tuple[Any, Any]] = {
    "added to": (add, lambda ref: (ref(X), X)),
    "several": (several, lambda ref: (ref(X), ref(X), X / 100)),
    "in a state": (state, lambda ref: ({"w": X / 100, "m": ref(0 * X), "count": ref(jnp.int32(0))}, X)),
    "only read": (lambda ref, x: ref[...] @ x, lambda ref: (ref(X), X)),
    "only written": (lambda ref, x: ref.__setitem__(slice(0, 4), x[:4]), lambda ref: (ref(X), X)),
    "not used": (lambda ref, x: x * 2, lambda ref: (ref(X), X)),
    "set to a literal": (literal, lambda ref: (ref(jnp.float32(3)), X)),
    "in a scan": (scanned, lambda ref: (ref(X), jnp.stack([X, X]))),
    "in a loop": (repeated, lambda ref: (ref(X), jnp.float32(2))),
    "in a branch": (chosen, lambda ref: (ref(X), jnp.array(False), X)),
    "a key": (draw, lambda ref: (ref(jax.random.key(0)),)),
}
SLOW = ("in a state", "in a scan", "a key")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in PROGRAMS])
def test_contents_of_references(name: str) -> None:
    """Results and contents are those of jit, call after call, by one plan."""
    fn, make = PROGRAMS[name]
    expected, found = make(jax.new_ref), make(jax.new_ref)
    jitted, step = jax.jit(fn), shardplan.auto(fn, mesh_of((2, 4)))
    for _ in range(3):
        assert_equal_trees(step(*found), jitted(*expected), 1e-6)
        for one, other in zip(contents(found), contents(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
    assert len(step._planned) == 1


def test_layout_of_a_written_reference() -> None:
    """It is in the plan's layout, in place, and counted once in the peak."""
    ref, mesh = jax.new_ref(X), mesh_of((8,))
    step = shardplan.auto(add, mesh, pins={"0": P("x")})
    step(ref, X)
    assert ref.sharding == NamedSharding(mesh, P("x"))
    plan = step.plan(ref, X)
    assert plan.arguments[0].fed_back and plan.arguments[0].is_ref
    assert "tf.aliasing_output" in step.lower(ref, X).as_text()
    kept = shardplan.plan(lambda s, x: (s + x, x * 2), mesh, X, X, pins={"0": P("x")})
    assert plan.peak_bytes == kept.peak_bytes - 32  # of 256 bytes over 8 devices


@pytest.mark.parametrize("spec", [P("x"), P()])
def test_references_on_explicit_axes(spec: P) -> None:
    """A reference keeps the layout of its type, so that it can be read with others of the mesh."""
    mesh = mesh_of((8,), explicit=True)
    on_mesh = jax.device_put(X, NamedSharding(mesh, spec))
    ref = jax.new_ref(on_mesh)
    doubled = shardplan.auto(add, mesh)(ref, on_mesh)
    assert ref.sharding.mesh == doubled.sharding.mesh == mesh and ref.sharding.is_equivalent_to(on_mesh.sharding, 2)
    assert_equal_trees(ref[...], 2 * X)
    plain = jax.new_ref(X)
    shardplan.auto(add, mesh)(plain, X)
    assert_equal_trees(plain[...], 2 * X)


def test_closed_over_references() -> None:
    """A closed-over reference is read at each call, and changed."""
    ref, mesh = jax.new_ref(X), mesh_of((8,))
    step = shardplan.auto(lambda x: add(ref, x), mesh)
    assert_equal_trees(step(X), 2 * X)
    ref[...] = jnp.zeros_like(X)
    step(X)
    assert_equal_trees(ref[...], X)
    with pytest.raises(CallError, match="`0` is the same Ref as one that the function closes over"):
        shardplan.auto(lambda other: other.addupdate(ref[...]), mesh)(ref)


@pytest.mark.parametrize("fn", [add, lambda ref, x: ref.addupdate(x)], ids=["assigned", "added"])
def test_closed_over_references_on_explicit_axes(fn: Any) -> None:
    """Their types have layouts, which a plan may not keep."""
    mesh = mesh_of((8,), explicit=True)
    ref = jax.new_ref(jax.device_put(X, NamedSharding(mesh, P("x"))))
    with pytest.raises(shardplan.ShardplanError, match=r"closes over a Ref .*Explicit: pass it as an argument"):
        shardplan.auto(lambda x: fn(ref, x), mesh)(X)


def test_references_that_cannot_be_kept() -> None:
    """The same one twice, and donated ones, are refused by path; a step that fails leaves all as it was."""
    ref, mesh = jax.new_ref(X), mesh_of((8,))
    with pytest.raises(CallError, match="`1` is the same Ref as another argument"):
        shardplan.auto(lambda a, b: a.addupdate(b[...]), mesh)(ref, ref)
    with pytest.raises(CallError, match="`0/m` is a Ref in an argument that is donated"):
        shardplan.auto(lambda s, x: add(s["m"], x), mesh, donate_argnums=0)({"m": ref}, X)
    with pytest.raises(ValueError, match="cannot be returned"):
        shardplan.auto(lambda a: a, mesh)(ref)
    assert_equal_trees(ref[...], X)


def test_plans_for_references(tmp_path: Any) -> None:
    """Types of references plan and lower; saved plans run, and refuse arrays in their places."""
    mesh, path = mesh_of((8,)), tmp_path / "plan.json"
    plan = shardplan.plan(add, mesh, jax.typeof(jax.new_ref(X)), X)
    plan.save(path)
    ref, planned = jax.new_ref(X), shardplan.Plan.load(path, mesh).apply(add)
    planned(ref, X)
    assert_equal_trees(ref[...], 2 * X)
    with pytest.raises(PlanMismatchError, match=r"`0` was planned as Ref to float32\[8, 8\] and is float32\[8, 8\]"):
        planned(X, X)
    assert plan.fingerprint != shardplan.plan(lambda a, x: (x * 2, a + x), mesh, X, X).fingerprint


def test_lowered_with_a_reference_by_keyword() -> None:
    """Its layout is the planned one, though jit takes no layouts of keywords."""
    mesh = mesh_of((8,))
    step = shardplan.auto(lambda x, ref: add(ref, x), mesh, pins={"ref": P("x")})
    compiled = step.lower(X, ref=jax.new_ref(X)).compile()
    assert compiled.input_shardings[1]["ref"].spec == P("x")
    ref = jax.new_ref(X)
    step(X, ref=ref)
    assert_equal_trees(ref[...], 2 * X)


@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
def test_a_closed_over_reference_on_compile_only_devices() -> None:
    """Only arguments can be compiled for devices that are not here."""
    ref = jax.new_ref(X)
    plan = shardplan.plan(lambda x: add(ref, x), AbstractMesh((8,), ("x",)), X)
    with pytest.raises(ArgumentError, match=r"closes over a Ref to float32\[8, 8\].*pass it as an argument"):
        plan.lower(gpu_mesh("h100", (8,), ("x",)))
