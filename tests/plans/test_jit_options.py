"""What `jax.jit` takes and gives, `shardplan.auto` takes and gives."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from tests.helpers.random_programs import assert_equal_trees, mesh_of

X = np.arange(64.0, dtype=np.float32).reshape(8, 8)
MESH = mesh_of((2, 4))


def step(state: Any, x: Any, mode: str = "train") -> Any:
    if mode != "train":
        return x @ state["w"]
    return {"w": state["w"] - 0.1 * x.T @ (x @ state["w"])}, x.sum()


def state() -> Any:
    return {"w": jnp.asarray(X) + 0}


TRAINED = step(state(), X)
EVALUATED = step(state(), X, "eval")


def placed(plan: Any, tree: Any) -> Any:
    return jax.device_put(tree, plan.in_shardings[0] if isinstance(plan.in_shardings, tuple) else plan.in_shardings)


# ---- static and donated arguments by name


@pytest.mark.parametrize("names", ["mode", ["mode"], ("mode",)], ids=str)
def test_static_names(names: Any) -> None:
    """By keyword and by position, as the one or the other is static for jax.jit."""
    planned = shardplan.auto(step, MESH, static_argnames=names)
    assert_equal_trees(planned(state(), X, mode="eval"), EVALUATED, 1e-6)
    assert_equal_trees(planned(state(), X, "eval"), EVALUATED, 1e-6)
    assert_equal_trees(planned(state(), X), TRAINED, 1e-6)


def test_static_names_of_any_keyword() -> None:
    planned = shardplan.auto(lambda x, **more: x * more["factor"], MESH, static_argnames="factor")
    assert_equal_trees(planned(X, factor=3), 3 * X)


@pytest.mark.parametrize("keyword", [True, False])
def test_donated_names(keyword: bool) -> None:
    planned = shardplan.auto(step, MESH, donate_argnames="state")
    given = jax.device_put(state(), jax.tree.leaves(planned.plan(state(), X).in_shardings)[0])
    results = planned(state=given, x=X) if keyword else planned(given, X)
    assert given["w"].is_deleted()
    assert_equal_trees(results, TRAINED, 1e-6)


def test_donation_by_name_frees_as_by_position() -> None:
    """In the predicted peak too."""

    def peak(by_name: bool = False, **options: Any) -> float:
        planned = shardplan.auto(lambda s, x: {"w": s["w"] * x.sum()}, 1, **options)
        return (planned.plan(s=state(), x=X) if by_name else planned.plan(state(), X)).peak_bytes

    first = peak(donate_argnums=0)
    assert first == peak(donate_argnames="s") == peak(by_name=True, donate_argnames="s") < peak()


# ---- the options of a wrapped jit


def test_options_of_a_jit_are_taken_over() -> None:
    spec = NamedSharding(MESH, P(None, "y"))
    jitted = jax.jit(step, static_argnames="mode", donate_argnums=0, out_shardings=({"w": spec}, None))
    planned = shardplan.auto(jitted, MESH)
    plan = planned.plan(state(), X)
    given = jax.device_put(state(), jax.tree.leaves(plan.in_shardings)[0])
    results = planned(given, X)
    assert given["w"].is_deleted() and results[0]["w"].sharding.spec == P(None, "y")
    assert plan.donated == (0,)
    assert shardplan.auto(jitted, MESH, donate_argnums=1).plan(state(), X).donated == (1,)
    assert_equal_trees(
        shardplan.auto(jax.jit(step, static_argnames="mode"), MESH)(state(), X, mode="e"), EVALUATED, 1e-6
    )


# ---- shardings


@pytest.mark.parametrize("given", [P("x"), (P("x"), None), ({"w": P("x", None)}, P())], ids=str)
def test_layouts_of_arguments(given: Any) -> None:
    planned = shardplan.auto(step, MESH, in_shardings=given)
    assert planned.plan(state(), X).layouts["0/w"] == P("x")
    assert_equal_trees(planned(state(), X), TRAINED, 1e-6)


@pytest.mark.parametrize("spec", [P("y", "x"), P(None, ("x", "y")), P()], ids=str)
@pytest.mark.parametrize("pinned", [None, P("x")], ids=str)
def test_layouts_of_results(spec: P, pinned: Any) -> None:
    """A state that comes in pinned in another way goes out as it is asked to; else it comes in as it goes out."""
    pins = None if pinned is None else {"0/w": pinned}
    planned = shardplan.auto(step, MESH, out_shardings=({"w": NamedSharding(MESH, spec)}, None), pins=pins)
    results = planned(state(), X)
    assert results[0]["w"].sharding.is_equivalent_to(NamedSharding(MESH, spec), 2)
    assert_equal_trees(results, TRAINED, 1e-6)
    came_in = planned.plan(state(), X).in_shardings[0]["w"]
    assert came_in.is_equivalent_to(NamedSharding(MESH, spec if pinned is None else pinned), 2)


def test_layouts_of_results_without_operands() -> None:
    """The results are generated in their requested layouts."""
    made = shardplan.auto(lambda: {"m": jnp.zeros((64, 64)), "n": 0}, MESH, out_shardings={"m": P("x", "y"), "n": None})
    assert made()["m"].sharding.spec == P("x", "y")


def test_layouts_of_results_are_kept_in_a_file(tmp_path: Any) -> None:
    plan = shardplan.plan(step, MESH, state(), X, out_shardings=({"w": P("y")}, P()), static_argnames="mode")
    plan.save(tmp_path / "plan.json")
    results = shardplan.Plan.load(tmp_path / "plan.json", MESH).apply(step)(state(), X)
    assert results[0]["w"].sharding.spec == P("y")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_shardings": (P("x"),)}, "in_shardings has another structure than what it is for"),
        ({"out_shardings": {"w": P()}}, "out_shardings has another structure"),
        ({"out_shardings": "x"}, "out_shardings has `'x'` for `0/w`: a jax.sharding.NamedSharding or PartitionSpec"),
        ({"out_shardings": P("x")}, "out_shardings of `1` is `P.'x',.`, which has more dimensions than"),
        ({"in_shardings": (P("z"), None)}, "in_shardings of `0/w` names the mesh axis `z`; there are x, y"),
        ({"in_shardings": NamedSharding(mesh_of((8,)), P())}, "layout over the mesh .'x': 8. for `0/w`"),
        ({"static_argnames": "mood"}, "static_argnames has the name `mood`, but `step` takes state, x, mode"),
        ({"donate_argnames": 3}, "donate_argnames takes names of arguments, got `3`"),
        ({"static_argnames": "mode", "donate_argnames": "mode"}, "argument 2 of `step` is in static_argnums and in"),
        ({"keep_unused": 1}, "keep_unused is True or False, got `1`"),
        ({"compiler_options": "fast"}, "compiler_options map names of XLA's options to values, got `'fast'`"),
    ],
)
def test_options_that_cannot_be(options: Any, message: str) -> None:
    with pytest.raises(shardplan.ArgumentError, match=message):
        shardplan.auto(step, MESH, **options)(state(), X)


def test_a_size_that_a_layout_does_not_divide() -> None:
    with pytest.raises(shardplan.ArgumentError, match=r"out_shardings of `0` is `P.'y',.`, which splits 6 of"):
        shardplan.auto(lambda x: (x, 1), MESH, out_shardings=(P("y"), None))(np.ones((6, 8)))


def test_text_that_is_not_static() -> None:
    """The advice is the option for the way in which it was given."""
    with pytest.raises(shardplan.CallError, match='list others in static_argnames="mode"'):
        shardplan.auto(step, MESH)(state(), X, mode="eval")
    with pytest.raises(shardplan.CallError, match="list others in static_argnums"):
        shardplan.auto(step, MESH)(state(), X, "eval")


# ---- how it is made


def test_as_a_decorator() -> None:
    @shardplan.auto
    def first(x: Any) -> Any:
        return x @ x

    @shardplan.auto(mesh=MESH, static_argnames="n")
    def second(x: Any, n: int) -> Any:
        return x @ x * n

    assert_equal_trees(first(X), X @ X)
    assert_equal_trees(second(X, n=2), 2 * X @ X)
    assert first.plan(X).device_count == 8 and "second" in repr(second)
    with jax.set_mesh(MESH):
        assert shardplan.auto(lambda x: x @ x).plan(X).mesh_axes == {"x": 2, "y": 4}


@pytest.mark.parametrize(("text", "axes"), [("data=2,model=4", {"data": 2, "model": 4}), ("8", None), ("2x4", None)])
def test_a_mesh_as_text(text: str, axes: Any) -> None:
    planned = shardplan.auto(step, text, memory_limit="80GB")
    assert_equal_trees(planned(state(), X), TRAINED, 1e-6)
    plan = planned.plan(state(), X)
    assert plan.device_count == 8 and axes in (None, plan.mesh_axes)
    assert shardplan.compare(step, text, state(), X, methods=["auto"]).mesh_axes == plan.mesh_axes


def test_options_of_the_compiler() -> None:
    """They reach XLA: it refuses one that it does not know."""
    option = {"xla_embed_ir_in_executable": True}
    assert_equal_trees(shardplan.auto(step, MESH, compiler_options=option)(state(), X), TRAINED, 1e-6)
    with pytest.raises(Exception, match="no_such_option"):
        shardplan.auto(step, MESH, compiler_options={"no_such_option": True})(state(), X)


@pytest.mark.parametrize("keep", [True, False])
def test_unused_arguments(keep: bool) -> None:
    lowered = shardplan.auto(lambda x, y: x * 2, MESH, keep_unused=keep).lower(X, X)
    assert lowered.as_text().count("%arg1") == keep


# ---- what it gives


def test_the_compiled_module_has_the_name_of_the_function() -> None:
    partial = functools.partial(step, mode="train")
    for fn, name in ((step, "step"), (jax.jit(step), "step"), (partial, "step"), (lambda x, y: y, "_lambda")):
        assert f"module @jit_{name} " in shardplan.auto(fn, MESH).lower(state(), X).as_text()
    assert "module @jit_step " in shardplan.auto(step, MESH, static_argnums=2).lower(state(), X, "train").as_text()


def test_stages() -> None:
    planned = shardplan.auto(step, MESH)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (state(), X))
    assert planned.eval_shape(*shapes) == jax.jit(step).eval_shape(*shapes)
    assert_equal_trees(planned.trace(*shapes).lower().compile()(*placed_args(planned)), TRAINED, 1e-6)
    planned.clear_cache()
    assert "0 plans" in repr(planned)


def placed_args(planned: Any) -> Any:
    return jax.device_put((state(), X), planned.plan(state(), X).in_shardings)


def test_export() -> None:
    """An exported step runs on as many devices, with the plan's layouts."""
    planned = shardplan.auto(step, MESH)
    exported = jax.export.export(planned)(state(), X)
    assert exported.nr_devices == 8 and exported.fun_name == "step"
    assert_equal_trees(jax.jit(exported.call)(*placed_args(planned)), TRAINED, 1e-6)


def test_how_it_prints() -> None:
    planned = shardplan.auto(step, MESH)
    plan = planned.plan(state(), X)
    assert repr(planned) == "<shardplan.auto of step over mesh (x=2, y=4), 1 plan>"
    assert repr(plan).startswith("<Plan of step over mesh (x=2, y=4): 0.0") and len(repr(plan)) < 200


def test_a_pickled_plan() -> None:
    """It is what a file of it is: bound to its function again, it runs. A copy is the plan itself."""
    plan = shardplan.plan(step, MESH, state(), X, donate_argnames="state", pins={"1": P("x")})
    again = pickle.loads(pickle.dumps(plan))
    assert (again.layouts, again.peak_bytes, again.donated) == (plan.layouts, plan.peak_bytes, plan.donated)
    assert_equal_trees(again.apply(step)(state(), X), TRAINED, 1e-6)
    assert copy.deepcopy(plan) is copy.copy(plan) is plan


def test_the_report_of_undonated_arguments() -> None:
    """Nothing is donated by default, and the plan reports the possible saving."""
    plan = shardplan.auto(step, 1, static_argnums=2).plan(state(), X, "train")
    assert plan.donated == () and plan.donatable_bytes == {0: 256.0}
    assert "donate_argnums=0 would save up to" in str(plan)
    assert not shardplan.plan(step, 1, state(), X, donate_argnums=0).donatable_bytes
    assert "donate_argnames='state' would" in str(shardplan.auto(step, 1).plan(state=state(), x=X))
