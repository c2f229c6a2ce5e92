"""`shardplan.auto` in the place of `jax.jit`: the same calls, the same results."""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from tests.helpers.random_programs import assert_equal_trees, mesh_of

X = jnp.arange(64.0).reshape(8, 8)


@pytest.fixture
def mesh() -> Mesh:
    return mesh_of((8,))


def product(x: Any, y: Any) -> Any:
    return {"matrix": x @ y + 1, "total": (x * y).sum()}


def scaled(x: Any, factor: int, y: Any) -> Any:
    return x * factor + y


def as_jit(fn: Any, mesh: Any, *args: Any, **options: Any) -> Any:
    """The planned results, after they were held against those of jit."""
    static = options.get("static_argnums", ())
    found = shardplan.auto(fn, mesh, **options)(*args)
    expected = jax.jit(fn, static_argnums=static)(*args)
    assert_equal_trees(found, expected, 1e-6)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.aval.weak_type == other.aval.weak_type
    return found


# ---- arguments


@pytest.mark.parametrize("static", [1, -2, (1,), [1, 1]], ids=str)
def test_static_arguments(mesh: Mesh, static: Any) -> None:
    as_jit(scaled, mesh, X, 3, X, static_argnums=static)


def test_static_argument_by_keyword(mesh: Mesh) -> None:
    step = shardplan.auto(scaled, mesh, static_argnums=1)
    assert_equal_trees(step(X, factor=3, y=X), scaled(X, 3, X))
    assert_equal_trees(step(X, factor=4, y=X), scaled(X, 4, X))


def test_static_arguments_of_a_function_with_any_number(mesh: Mesh) -> None:
    step = shardplan.auto(lambda *values: values[0] * values[-1], mesh, static_argnums=-1)
    assert_equal_trees(step(X, X, 3), X * 3)


def test_keyword_arguments(mesh: Mesh) -> None:
    step = shardplan.auto(product, mesh)
    expected = product(X, 2 * X)
    assert_equal_trees(step(X, y=2 * X), expected)
    assert_equal_trees(step(y=2 * X, x=X), expected)
    assert_equal_trees(step.lower(X, y=2 * X).compile()(X, y=2 * X), expected)


def test_lower_and_compile(mesh: Mesh) -> None:
    assert_equal_trees(shardplan.auto(product, mesh).lower(X, X).compile()(X, X), product(X, X))


def empty_batches(a: Any) -> Any:
    return jnp.sum(jnp.sin(a.reshape(4, 4, 4)[:0]) @ a.reshape(4, 4, 4)[:0])


TYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "python scalars": (lambda a, b: (a + b, a * 2, -b), (1, 2.5)),
    "weak types": (lambda a, b: (a + b, a * 2, b), (1.5, X)),
    "numpy": (product, (np.ones((8, 8)), np.ones((8, 8), np.float64))),
    "numpy scalar": (lambda a: a * 2, (np.float32(3),)),
    "bfloat16": (product, (X.astype(jnp.bfloat16), X.astype(jnp.bfloat16))),
    "int8": (product, (X.astype(jnp.int8), X.astype(jnp.int8))),
    "complex": (product, (X.astype(jnp.complex64), 1j * X)),
    "bool": (lambda a: (a.any(), a.all(0), ~a), (X > 3,)),
    "rank 0": (lambda a: a * 2, (jnp.float32(3),)),
    "no elements": (
        lambda a, b: (a @ b, jnp.concatenate([a, a]), a.sum(), jnp.sort(a)),
        (jnp.zeros((0, 8)), jnp.ones((8, 8))),
    ),
    "no elements between": (
        jax.grad(
            lambda a, b, e: jnp.sum(jnp.tanh(a @ b) + (a @ e) @ e.T + jnp.cumsum(e.T @ a, 0).sum(0) + empty_batches(a))
        ),
        (X, jnp.ones((8, 8)), jnp.ones((8, 0))),
    ),
    "no trips": (
        jax.grad(lambda a, b, e: jax.lax.scan(lambda c, x: (c @ a * x.sum(), c), a @ b, e)[0].sum()),
        (X, jnp.ones((8, 8)), jnp.ones((0, 8))),
    ),
    "no arguments": (lambda: jnp.ones(3), ()),
    "no leaves": (lambda tree: tree, ({},)),
    "None": (lambda tree, nothing: (tree, nothing, None), ({"a": None, "b": X}, None)),
    "literal results": (lambda a: (1, 2.5, True, np.float32(2), a), (X,)),
    "passed through": (lambda a, b: (a, a, b, a * 2), (X, 3)),
}


@pytest.mark.parametrize("name", TYPES)
def test_types_of_arguments_and_results(mesh: Mesh, name: str) -> None:
    fn, args = TYPES[name]
    as_jit(fn, mesh, *args)


def test_keys(mesh: Mesh) -> None:
    for key in (jax.random.key(0), jax.random.key(0, impl="rbg")):
        step = shardplan.auto(lambda k: (jax.random.key_data(jax.random.split(k, 8)), k), mesh)
        data, same = step(key)
        assert_equal_trees(data, jax.random.key_data(jax.random.split(key, 8)))
        assert same.dtype == key.dtype
    old = jax.random.PRNGKey(3)
    assert_equal_trees(
        shardplan.auto(lambda k: jax.random.normal(k, (8, 8)), mesh)(old), jax.random.normal(old, (8, 8)), 1e-6
    )


# ---- what is called


class Layer:
    def __init__(self) -> None:
        self.weight = X

    def method(self, x: Any) -> Any:
        return self.weight @ x

    __call__ = method

    @functools.partial(shardplan.auto, mesh=8, static_argnums=0)
    def planned(self, x: Any) -> Any:
        return self.weight @ x


@pytest.mark.parametrize(
    "fn",
    [functools.partial(jnp.matmul, X), Layer().method, Layer(), jax.jit(Layer().method), lambda x: Layer().method(x)],
    ids=["partial", "method", "callable", "jit", "lambda"],
)
def test_kinds_of_functions(mesh: Mesh, fn: Any) -> None:
    assert_equal_trees(shardplan.auto(fn, mesh)(X), X @ X)


def test_as_a_decorator_of_a_method() -> None:
    assert_equal_trees(Layer().planned(X), X @ X)


def test_names_and_documentation_are_kept(mesh: Mesh) -> None:
    assert shardplan.auto(product, mesh).__name__ == "product"  # type: ignore[attr-defined]


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, lambda f: jax.value_and_grad(lambda x: f(x).sum())])
def test_inside_of_another_trace_it_runs_unplanned(mesh: Mesh, transform: Any) -> None:
    step = shardplan.auto(lambda x: jnp.sin(x) @ X, mesh)
    with pytest.warns(shardplan.ShardplanWarning, match="Differentiate and transform first"):
        found = transform(step)(X)
    assert_equal_trees(found, transform(lambda x: jnp.sin(x) @ X)(X), 1e-6)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, lambda f: jax.grad(lambda x: f(x).sum())])
def test_functions_that_close_over_traced_values(mesh: Mesh, transform: Any) -> None:
    """They run unplanned. No argument shows the trace."""
    with pytest.warns(shardplan.ShardplanWarning, match="Differentiate and transform first"):
        found = transform(lambda w: shardplan.auto(lambda x: jnp.sin(x) @ w, mesh)(X))(X)
    assert_equal_trees(found, transform(lambda w: jnp.sin(X) @ w)(X), 1e-6)
    with pytest.raises(shardplan.CallError, match="`<lambda>` reads values of another function that is being traced"):
        jax.eval_shape(lambda w: shardplan.plan(lambda x: x @ w, mesh, X).gap, X)


def test_a_plan_above_jaxs_memory(mesh: Mesh, monkeypatch: Any) -> None:
    """The warning comes before the compilation."""
    monkeypatch.setattr(sys.modules["shardplan.plans.runner"], "memory_for_arrays", lambda mesh: 1)
    with pytest.warns(shardplan.ShardplanWarning, match="XLA_PYTHON_CLIENT_MEM_FRACTION=0.92"):
        shardplan.auto(lambda x: x @ x, mesh)(X)


# ---- plans are kept


def test_a_plan_per_abstract_signature(mesh: Mesh) -> None:
    traces = []

    def fn(x: Any, flag: bool = True) -> Any:
        traces.append(x.shape)
        return x * 2 if flag else x

    step = shardplan.auto(fn, mesh, static_argnums=1)
    for x in (X, X + 1, np.asarray(X), jax.device_put(X, jax.devices()[3])):
        step(x)
    step.plan(jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert traces == [(8, 8)]
    assert step.plan(X) is step.plan(X)
    step(jnp.ones((16, 8)))
    step(X.astype(jnp.bfloat16))
    step(X, False)
    step(X, flag=False)
    assert len(traces) == 5


def test_settings_of_jax_make_another_plan(mesh: Mesh) -> None:
    step = shardplan.auto(lambda x: x @ x, mesh)
    first = step.plan(X)
    with jax.default_matmul_precision("highest"):
        assert step.plan(X) is not first


# ---- where arguments lie


def test_arguments_on_other_devices(mesh: Mesh) -> None:
    """They are moved to the planned layouts."""
    step = shardplan.auto(product, mesh)
    explicit = mesh_of((2, 4), explicit=True)
    places = [
        jax.devices()[3],
        NamedSharding(mesh, P(None, "x")),
        NamedSharding(mesh_of((4, 2)), P("y", "x")),
        NamedSharding(explicit, P("x", "y")),
        NamedSharding(mesh_of((4,)), P("x")),
    ]
    for place in places:
        assert_equal_trees(step(jax.device_put(X, place), X), product(X, X))


def test_layouts_of_results(mesh: Mesh) -> None:
    """They are those of the arguments that results replace."""

    def step(state: Any, x: Any) -> Any:
        return {"w": state["w"] - 0.01 * x.T @ (x @ state["w"])}, x.sum()

    planned = shardplan.auto(step, mesh)
    big = jnp.ones((16, 64))
    state = {"w": jnp.ones((64, 64))}
    plan = planned.plan(state, big)
    first, _ = planned(state, big)
    second, _ = planned(first, big)
    assert first["w"].sharding == plan.in_shardings[0]["w"] == second["w"].sharding


def donated(step: Any, *args: Any) -> list[bool]:
    step(*args)
    return [arg.is_deleted() for arg in args]


@pytest.mark.parametrize("argnums", [0, -2, (0, 0), [-2]], ids=str)
def test_donation(mesh: Mesh, argnums: Any) -> None:
    def fn(a: Any, b: Any) -> Any:
        return a + b, b.sum()

    step = shardplan.auto(fn, mesh, donate_argnums=argnums)
    places = jax.tree.leaves(step.plan(X, X).in_shardings)
    assert donated(step, *(jax.device_put(X + 0, place) for place in places)) == [True, False]
    assert_equal_trees(step(X + 0, X), fn(X, X))


def test_donation_with_static_and_keyword_arguments(mesh: Mesh) -> None:
    step = shardplan.auto(lambda x, factor, y: (x * factor, y + 1), mesh, static_argnums=1, donate_argnums=(0, 2))
    plan = step.plan(X, 3, y=X)
    assert plan.donated == (0, "y")
    place = jax.tree.leaves(plan.in_shardings)[0]
    x, y = (jax.device_put(X + n, place) for n in range(2))
    assert_equal_trees(step(x, 3, y=y), (X * 3, X + 2))
    assert x.is_deleted() and y.is_deleted()


# ---- meshes


def test_programs_that_call_back_run_on_an_explicit_mesh() -> None:
    def step(x: Any) -> Any:
        total = jax.pure_callback(lambda a: np.asarray(a).sum(), jax.ShapeDtypeStruct((), x.dtype), x)
        return x * 2, total

    explicit = mesh_of((2, 4), explicit=True)
    planned = shardplan.auto(step, explicit)
    results = planned(jax.device_put(X, NamedSharding(explicit, P("x"))))
    assert_equal_trees(results, jax.jit(step)(X))
    assert results[0].sharding.mesh == explicit
    assert_equal_trees(planned(results[0]), jax.jit(step)(X * 2))


def test_results_on_an_explicit_mesh_have_its_types() -> None:
    explicit = mesh_of((2, 4), explicit=True)
    x = jax.device_put(X, NamedSharding(explicit, P("x", "y")))
    step = shardplan.auto(product, explicit)
    result = step(x, x)
    assert result["matrix"].sharding.mesh == explicit
    with jax.set_mesh(explicit):
        assert_equal_trees(result["matrix"] + 1, X @ X + 2)
    assert_equal_trees(step(result["matrix"], x), product(X @ X + 1, X))


def test_closed_over_arrays_in_any_layout() -> None:
    explicit = mesh_of((2, 4), explicit=True)
    places = [jax.devices()[3], NamedSharding(mesh_of((2, 4)), P("x")), NamedSharding(explicit, P("x", "y"))]
    for place in places:
        weight = jax.device_put(X, place)
        assert_equal_trees(shardplan.auto(lambda x: x @ weight, explicit)(X), X @ X)  # noqa: B023


@pytest.mark.parametrize("explicit", [False, True])
def test_inside_of_set_mesh(explicit: bool) -> None:
    mesh = mesh_of((2, 4), explicit)
    with jax.set_mesh(mesh):
        x = jnp.arange(64.0).reshape(8, 8)
        step = shardplan.auto(product, mesh)
        result = step(x, x)["matrix"]
        assert_equal_trees(jnp.sum(result @ x), jnp.sum((X @ X + 1) @ X))
        assert_equal_trees(step(result, x), product(X @ X + 1, X))


@pytest.mark.parametrize("count", [8, 6, 1])
@pytest.mark.filterwarnings("ignore:no mesh axis")
def test_a_number_of_devices(count: int) -> None:
    step = shardplan.auto(product, count)
    assert step.plan(X, X).device_count == count
    assert_equal_trees(step(X, X), product(X, X))


@pytest.mark.parametrize("sizes", [(1,), (4,), (4, 1), (2, 2, 2)])
def test_meshes(sizes: tuple[int, ...]) -> None:
    assert_equal_trees(shardplan.auto(product, mesh_of(sizes))(X, X), product(X, X))


def test_manual_axes_are_planned_as_others() -> None:
    manual, explicit = AxisType.Manual, AxisType.Explicit
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(manual, explicit))
    for kinds in (mesh, jax.make_mesh((8,), ("x",), axis_types=(manual,))):
        assert_equal_trees(shardplan.auto(product, kinds)(X, X), product(X, X), 1e-6)


def test_some_of_the_devices() -> None:
    mesh = Mesh(np.array(jax.devices()[4:]), ("x",), axis_types=(AxisType.Auto,))
    result = shardplan.auto(product, mesh)(X, X)
    assert result["matrix"].devices() == set(jax.devices()[4:])


def test_a_mesh_without_devices() -> None:
    """It gives a plan, and an error at the call."""
    step = shardplan.auto(product, AbstractMesh((64,), ("x",)))
    x = jnp.ones((64, 64))
    assert step.plan(x, x).device_count == 64
    with pytest.raises(shardplan.PlanMismatchError, match="has no devices"):
        step(x, x)


# ---- effects


@pytest.mark.parametrize("ordered", [False, True])
def test_callbacks_run_once_per_step(mesh: Mesh, ordered: bool) -> None:
    seen: list[float] = []

    def fn(x: Any) -> Any:
        jax.experimental.io_callback(lambda v: seen.append(float(v)), None, x.sum(), ordered=ordered)
        return x * 2

    step = shardplan.auto(fn, mesh)
    step(X)
    step(X + 1)
    jax.effects_barrier()
    assert sorted(seen) == [2016.0, 2080.0]


def test_printing(mesh: Mesh, capfd: pytest.CaptureFixture[str]) -> None:
    def fn(x: Any, ordered: bool) -> Any:
        jax.debug.print("total {}", x.sum(), ordered=ordered)
        return x * 2

    step = shardplan.auto(fn, mesh, static_argnums=1)
    step(X, False)
    with pytest.warns(shardplan.ShardplanWarning, match="order JAX keeps on one device alone"):
        assert_equal_trees(step(X, True), 2 * X)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("total 2016.0") == 2


def test_pure_callbacks(mesh: Mesh) -> None:
    assert_equal_trees(shardplan.auto(lambda x: jax.pure_callback(lambda v: np.asarray(v) * 2, x, x), mesh)(X), 2 * X)


def test_references_inside_the_function(mesh: Mesh) -> None:
    def fn(x: Any) -> Any:
        ref = jax.new_ref(x)
        ref[...] = ref[...] * 2
        return ref[...] + 1

    assert_equal_trees(shardplan.auto(fn, mesh)(X), 2 * X + 1)
    assert shardplan.plan(fn, mesh, X).layouts["0"] != P()
