"""Arrays in host memory: arguments, results and moved values keep their memory kind, and their bytes count there."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.errors import PlanMismatchError
from tests.helpers.random_programs import assert_equal_trees, mesh_of, run, scrambled

DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host
X = jnp.arange(128.0).reshape(16, 8)
WHOLE = P()
OFFLOADED = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=["h"], offload_src="device", offload_dst="pinned_host"
)
needs_audit = pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")


def placed(x: Any, spec: P = WHOLE, kind: str = "pinned_host", mesh: Mesh | None = None) -> Any:
    return jax.device_put(x, NamedSharding(mesh or mesh_of((8,)), spec, memory_kind=kind))


def shape_on_host(*shape: int) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(AbstractMesh((8,), ("x",)), P(), memory_kind="pinned_host")
    return jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)


def kinds(tree: Any) -> list[str]:
    return [leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)]


def as_jit(fn: Any, make: Any, mesh: Mesh | None = None, **options: Any) -> Any:
    """The planned results for new arguments, after their values and memory kinds were held against those of jit."""
    expected = jax.jit(fn)(*make())
    found = shardplan.auto(fn, mesh or mesh_of((8,)), **options)(*make())
    assert_equal_trees(found, expected, 1e-6)
    assert kinds(found) == kinds(expected)
    return found


def momentum(state: Any, x: Any) -> Any:
    """Gradients on the devices, moments on the host."""
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(state["w"])
    moments = 0.9 * jax.device_put(state["m"], DEVICE) + gradient
    return {"w": state["w"] - 0.1 * moments, "m": jax.device_put(moments, HOST)}, loss


def update(moments: Any, w: Any) -> Any:
    moments = jax.device_put(moments, DEVICE) * 0.9 + w
    return jax.device_put(moments, HOST), w - 0.1 * moments


def scanned(stack: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ jax.device_put(w, DEVICE)), jax.device_put(x, HOST)), x, stack)


def carried(moments: Any, xs: Any) -> Any:
    body = lambda m, x: (jax.device_put(jax.device_put(m, DEVICE) + x, HOST), jnp.sum(x))  # noqa: E731
    return jax.lax.scan(body, moments, xs)


def repeated(moments: Any) -> Any:
    doubled = lambda c: (c[0] + 1, jax.device_put(jax.device_put(c[1], DEVICE) * 2, HOST))  # noqa: E731
    return jax.lax.while_loop(lambda c: c[0] < 3, doubled, (0, moments))


def chosen(taken: Any, moments: Any) -> Any:
    return jax.lax.cond(taken, lambda m: jax.device_put(jax.device_put(m, DEVICE) * 2, HOST), lambda m: m, moments)


def offloaded(w: Any, x: Any) -> Any:
    for layer in w:
        body = jax.checkpoint(lambda x, w: jnp.sin(checkpoint_name(jnp.tanh(x @ w), "h") @ w), policy=OFFLOADED)
        x = body(x, layer)
    return jnp.sum(x**2)


def offloaded_in_scan(w: Any, x: Any) -> Any:
    body = lambda x, w: (jnp.sin(checkpoint_name(jnp.tanh(x @ w), "h") @ w), None)  # noqa: E731
    return jnp.sum(jax.lax.scan(jax.checkpoint(body, policy=OFFLOADED), x, w)[0] ** 2)


PROGRAMS: dict[str, tuple[Any, Any]] = {
    "update": (update, lambda: (placed(X, P("x")), X)),
    "state on one device": (update, lambda: (jax.device_put(X, HOST), X)),
    "momentum": (momentum, lambda: ({"w": X[:8] / 100, "m": placed(X[:8])}, X)),
    "passed on": (lambda m, x: (m, x * 2), lambda: (placed(X), X)),
    "computed on the host": (lambda m: (m * 2 + 1, jnp.sum(m)), lambda: (placed(X),)),
    "unpinned": (lambda m, x: (m, m + x), lambda: (placed(X, P("x"), "unpinned_host"), X)),
    "scanned": (scanned, lambda: (placed(jnp.ones((8, 8, 8)) / 8, P("x")), X)),
    "carried": (carried, lambda: (placed(X), jnp.stack([X, X]))),
    "repeated": (repeated, lambda: (placed(X),)),
    "chosen": (chosen, lambda: (jnp.array(True), placed(X))),
    "a tree": (lambda x: jax.device_put({"a": x * 2, "b": x + 1}, HOST), lambda: (X,)),
    "a sharding": (
        lambda x: jax.device_put(x, NamedSharding(mesh_of((8,)), P("x"), memory_kind="pinned_host")),
        lambda: (X,),
    ),
    "types": (
        lambda t: jax.tree.map(lambda a: a * 2, t),
        lambda: ([placed(X.astype(t)) for t in ("bfloat16", "int32")],),
    ),
}


SLOW = ("momentum", "scanned")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in PROGRAMS])
def test_memory_kinds_are_those_of_jit(name: str) -> None:
    """Values and memory kinds of the results are those of jit."""
    as_jit(*PROGRAMS[name])


@pytest.mark.slow
def test_typed_keys_in_host_memory() -> None:
    """Keys stay on the host, of which jit loses sight."""

    def fold(key: Any, x: Any) -> Any:
        here = jax.device_put(key, DEVICE)
        return jax.device_put(jax.random.fold_in(here, 1), HOST), x + jax.random.normal(here, x.shape)

    key, noise = shardplan.auto(fold, mesh_of((8,)))(placed(jax.random.key(0)), X)
    expected = fold(jax.random.key(0), X)
    assert kinds((key, noise)) == ["pinned_host", "device"]
    assert_equal_trees((jax.random.key_data(key), noise), (jax.random.key_data(expected[0]), expected[1]), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("program", [offloaded, lambda w, x: offloaded_in_scan(w, jnp.cos(x))])
def test_offloading_checkpoint_policies(program: Any) -> None:
    """Residuals that a policy offloads are there for the backward pass."""
    found = jax.value_and_grad(program)
    as_jit(found, lambda: (jnp.ones((3, 8, 8)) / 9, X / 10))
    assert shardplan.plan(found, mesh_of((8,)), jnp.ones((3, 8, 8)), X).host_bytes > 0


def test_donated_host_state_over_several_steps() -> None:
    """A donated state on the host comes back there, and the next step takes it by the same plan."""
    step = shardplan.auto(update, mesh_of((2, 4)), donate_argnums=0)
    state, expected = placed(X, P("x"), mesh=mesh_of((2, 4))), X
    for _ in range(3):
        state, _ = step(state, X)
        expected = expected * 0.9 + X
    assert_equal_trees(state, expected, 1e-6)
    assert kinds(state) == ["pinned_host"]
    assert len(step._planned) == 1


def test_host_state_on_explicit_axes() -> None:
    """Results keep their memory kind and have the mesh's types."""
    mesh = mesh_of((8,), explicit=True)
    state, w = shardplan.auto(update, mesh)(placed(X, P("x"), mesh=mesh), X)
    assert kinds((state, w)) == ["pinned_host", "device"]
    assert state.sharding.mesh == mesh


def test_host_arrays_that_pins_lay_out_in_two_ways() -> None:
    """Arrays are resharded on the devices, and return to the host."""
    pins = {"0": P("x"), "1": P(None, "x")}
    found = as_jit(lambda a, b: a * 2 + b, lambda: (placed(X), placed(X)), pins=pins)
    assert kinds(found) == ["pinned_host"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["momentum", "scanned", "carried", "computed on the host"])
def test_any_layouts_of_host_arrays(name: str) -> None:
    """Values and memory kinds are right in layouts that nobody would choose."""
    (fn, make), mesh = PROGRAMS[name], mesh_of((2, 4))
    expected, plan = jax.jit(fn)(*make()), shardplan.plan(fn, mesh, *make())
    for seed in range(2):
        found = run(scrambled(plan, seed), mesh, *make())
        assert_equal_trees(found, expected, 1e-5)
        assert kinds(found) == kinds(expected)


def test_host_bytes_and_the_peak() -> None:
    """The peak of a device is without them, and the printed plan has both."""
    mesh, w = AbstractMesh((8,), ("x",)), jax.ShapeDtypeStruct((1024, 1024), "float32")
    on_host = shardplan.plan(update, mesh, shape_on_host(1024, 1024), w, donate_argnums=(0, 1))
    on_devices = shardplan.plan(update, mesh, w, w, donate_argnums=(0, 1))
    assert on_host.host_bytes == 2**19 and on_devices.host_bytes == 2**19  # what a result puts there
    assert on_host.arguments[0].memory_kind == "pinned_host" and on_devices.arguments[0].memory_kind is None
    assert on_host.fingerprint != on_devices.fingerprint
    assert "0.5 MB per device in host memory" in str(on_host)
    assert "float32<pinned_host>[1024/x, 1024]" in str(on_host) or "float32<pinned_host>[1024, 1024/x]" in str(on_host)
    assert "pinned_host" in on_host.explain("0")
    kept = shardplan.plan(update, mesh, shape_on_host(1024, 1024), w)
    assert kept.host_bytes == 2**20
    unpinned = shardplan.plan(lambda m, x: m + x, mesh_of((8,)), placed(X, P("x"), "unpinned_host"), X)
    assert unpinned.arguments[0].memory_kind == unpinned.leaf_shardings()[0].memory_kind == "unpinned_host"


def test_saved_plans_keep_memory_kinds(tmp_path: Any) -> None:
    """A loaded plan runs with arguments in the same memory, and refuses those in another."""
    mesh, path = mesh_of((8,)), tmp_path / "plan.json"
    plan = shardplan.plan(update, mesh, placed(X), X)
    plan.save(path)
    loaded = shardplan.Plan.load(path, mesh)
    assert loaded.arguments == plan.arguments and loaded.host_bytes == plan.host_bytes > 0
    state, _ = loaded.apply(update)(placed(X), X)
    assert kinds(state) == ["pinned_host"]
    with pytest.raises(PlanMismatchError, match=r"`0` was planned as float32<pinned_host>\[16, 8\] and is float32\[16"):
        loaded.apply(update)(X, X)


def test_kept_plans_are_of_their_memory_kinds(tmp_path: Any, monkeypatch: Any) -> None:
    """The cache has a plan for each memory kind."""
    monkeypatch.setenv("SHARDPLAN_CACHE_DIR", str(tmp_path))
    plans = [shardplan.plan(update, mesh_of((8,)), state, X) for state in (placed(X), X, placed(X), X)]
    assert [plan.statistics["cached"] for plan in plans] == [False, False, True, True]
    assert plans[2].host_bytes == plans[0].host_bytes and plans[2].arguments == plans[0].arguments


def test_lowered_and_bound_with_host_arguments() -> None:
    """`lower`, `bind` and keywords take arguments on the host."""
    step = shardplan.auto(update, mesh_of((8,)))
    plan, state = step.plan(placed(X), w=X), placed(X)
    compiled = step.lower(state, w=X).compile()
    args = [jax.device_put(leaf, place) for leaf, place in zip((state, X), plan.leaf_shardings(), strict=True)]
    found = compiled(args[0], w=args[1])
    assert_equal_trees(found, update(X, X), 1e-6)
    assert kinds(found) == ["pinned_host", "device"]
    assert plan.bind(update, state, w=X).host_bytes == plan.host_bytes


LARGE: dict[str, tuple[Any, Any]] = {
    "momentum": (momentum, lambda: ({"w": shape(4096, 4096), "m": shape_on_host(4096, 4096)}, shape(8192, 4096))),
    "passed on": (lambda m, x: (m, x * 2), lambda: (shape_on_host(4096, 4096), shape(4096, 4096))),
    "one unused": (lambda _, m, x: update(m, x)[0], lambda: (shape(8), shape_on_host(512, 512), shape(512, 512))),
    "scanned": (scanned, lambda: (shape_on_host(8, 2048, 2048), shape(4096, 2048))),
    "chosen": (chosen, lambda: (jax.ShapeDtypeStruct((), "bool"), shape_on_host(2048, 2048))),
    "offloaded": (jax.value_and_grad(offloaded_in_scan), lambda: (shape(3, 2048, 2048), shape(4096, 2048))),
}


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, "float32")


@needs_audit
@pytest.mark.long
@pytest.mark.parametrize("name", LARGE)
def test_host_bytes_are_those_that_are_compiled(name: str) -> None:
    """XLA has as many bytes in host memory as the plan says, and its peak of a device is without them."""
    fn, make = LARGE[name]
    plan = shardplan.plan(fn, AbstractMesh((8,), ("x",)), *make())
    audit = shardplan.audit(plan)
    assert plan.host_bytes == audit.compiled.memory.host > 0
    assert audit.compiled.memory.peak == pytest.approx(plan.peak_bytes, rel=0.15)
    assert audit.ok() and "host memory" in str(audit)
