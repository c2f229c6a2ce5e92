"""Bad input: each has a clear error or warning, and no traceback from inside."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan import ArgumentError, CallError, InfeasibleError, PlanMismatchError, ShardplanError, ShardplanWarning
from tests.helpers.random_programs import assert_equal_trees, mesh_of

X = jnp.ones((8, 8))
ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}


def step(params: Any, x: Any) -> Any:
    return {"w": params["w"] - x.T @ (x @ params["w"])}, (x @ params["w"]).sum()


PARAMS = {"w": X}


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (None, "a mesh was expected, got `None` of type `NoneType`"),
        ("x", "a mesh was expected, got `'x'` of type `str`"),
        ((2, 4), "a mesh was expected, got `.2, 4.` of type `tuple`"),
        (True, "a mesh was expected, got `True` of type `bool`"),
        (dict, "a mesh was expected"),
        (0, "at least one device, got the count `0`"),
        (-8, "at least one device, got the count `-8`"),
        (AbstractMesh((), ()), "the mesh has no axes"),
    ],
    ids=str,
)
def test_no_mesh(mesh: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        shardplan.auto(step, mesh)
    with pytest.raises(ArgumentError, match=message):
        shardplan.plan(step, mesh, PARAMS, X)


def test_a_mesh_axis_that_is_used_twice() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "x"))
    with pytest.raises(ArgumentError, match="axis name `x` is used twice"):
        shardplan.auto(step, mesh)


def test_no_function() -> None:
    with pytest.raises(ArgumentError, match="a function was expected, got `3` of type `int`"):
        shardplan.auto(3, mesh_of((8,)))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_limit": -1}, "memory limit is a number of bytes above 0, got `-1`"),
        ({"memory_limit": 0}, "above 0, got `0`"),
        ({"memory_limit": float("nan")}, "above 0, got `nan`"),
        ({"memory_limit": True}, "above 0, got `True`"),
        ({"memory_limit": "much"}, "a size is written `80GB`, `512MiB` or as a number of bytes, got `much`"),
        ({"verify": "yes"}, "verify is True, False or None, got `'yes'`"),
        ({"memory_limit": jnp.float32(80e9)}, r"a number of bytes above 0, got `Array\("),
        ({"islands": "no"}, "islands is True or False, got `'no'`"),
        ({"time_limit": -1}, "time limit is a number of seconds above 0, got `-1`"),
        ({"time_limit": None}, "time limit is a number of seconds above 0, got `None`"),
        ({"objective": "speed"}, "no objective `speed`: choose 'bytes' or 'time'"),
        ({"objective": ["bytes"]}, "no objective"),
        ({"hardware": "h1000"}, "h1000"),
        ({"hardware": 5}, "a hardware profile is a name .*, got `5`"),
        ({"pins": {0: P("x")}}, "`0` is no path"),
        ({"pins": {"0/w": "x"}}, "pin `0/w` is `'x'`: a jax.sharding.PartitionSpec was expected"),
        ({"pins": [("0/w", P("x"))]}, "pins map path globs to PartitionSpecs, got"),
        ({"reduce_dtype": "float33"}, "reduce_dtype is a floating-point type, got `float33`"),
        ({"reduce_dtype": jnp.int8}, "reduce_dtype is a floating-point type"),
        ({"reduce_dtype": "float8_e4m3fn"}, "reduce_dtype is `float8_e4m3fn`: 8 bits have neither .* Choose bfloat16"),
        ({"reduce_dtype": jnp.float8_e5m2}, "reduce_dtype is `float8_e5m2`: 8 bits"),
        ({"donate_argnums": 2}, "donate_argnums has the position 2, but `step` takes 2 positional arguments"),
        ({"static_argnums": -3}, "static_argnums has the position -3, but `step` takes 2"),
        ({"static_argnums": "x"}, "static_argnums takes positions of arguments, integers, got `'x'`"),
        ({"static_argnums": 0, "donate_argnums": 0}, "argument 0 of `step` is in static_argnums and in donate_argnums"),
    ],
    ids=str,
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        shardplan.auto(step, mesh_of((8,)), **options)


@pytest.mark.parametrize(("dtype", "count"), [("float16", 1), ("bfloat16", 0), ("float32", 0)])
def test_range_of_a_reduce_dtype(dtype: str, count: int) -> None:
    """The warning for a type of smaller range than float32 has its largest number."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        shardplan.auto(step, mesh_of((8,)), reduce_dtype=dtype)
    assert ["`float16`, which ends at 65504" in str(one.message) for one in said] == [True] * count


def test_an_unknown_option() -> None:
    with pytest.raises(ArgumentError, match=r"no option `memory_limits`: did you mean `memory_limit`[?] There are"):
        shardplan.plan(step, mesh_of((8,)), PARAMS, X, memory_limits=3)
    with pytest.raises(ArgumentError, match=r"there is no option `x`[.] .*the step are given by position"):
        shardplan.plan(step, mesh_of((8,)), PARAMS, x=X)


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"0/v": P("x")}, "the pin `0/v` matches no argument; there are `0/w`, `1`"),
        ({"0/w": P("z")}, "the pin `0/w` on `0/w`: .* names the axis `z`; the mesh has x, y"),
        ({"0/w": P("x", "y", "x")}, "3 entries for a tensor of 2 dimensions"),
        ({"0/w": P("x", "x")}, "splits two dimensions over the axis `x`"),
        ({"1": P("x")}, "dimension 0 of .7, 8. over 2 devices, which leaves 1 of its 7 rows.* pad to 8"),
        ({"0/*": P("x"), "0/w": P("y")}, "the pins `0/.` and `0/w` give two layouts to `0/w`: keep one"),
        ({"0/v": P("x"), "1": P("z")}, "(?s)matches no argument.*names the axis `z`"),
    ],
    ids=str,
)
def test_pins(pins: dict[str, P], message: str) -> None:
    planned = shardplan.auto(step, mesh_of((2, 4)), pins=pins)
    with pytest.raises(ArgumentError, match=message):
        planned(PARAMS, jnp.ones((7, 8)))


def test_pins_of_globs_and_open_dimensions() -> None:
    pins = {"0/*": P(P.UNCONSTRAINED, "y"), "0/w": P(P.UNCONSTRAINED, "y"), "1": P("x")}
    plan = shardplan.plan(step, mesh_of((2, 4)), PARAMS, X, pins=pins)
    assert plan.layouts["0/w"][1] == "y" and plan.layouts["1"] == P("x")


def test_a_pinned_state() -> None:
    """It leaves in its pinned layout."""
    plan = shardplan.plan(step, mesh_of((2, 4)), PARAMS, X, pins={"0/w": P("x")})
    assert plan.out_shardings[0]["w"].spec == P("x")


def test_no_plan_within_the_memory_limit() -> None:
    planned = shardplan.auto(step, mesh_of((8,)), memory_limit=63, time_limit=2)
    with pytest.raises(InfeasibleError, match=r"the arguments alone take .* per device.*What helps") as caught:
        planned(PARAMS, X)
    planned = shardplan.auto(step, mesh_of((8,)), memory_limit=caught.value.least_peak_bytes, time_limit=2)
    with pytest.raises(InfeasibleError, match=r"(?s)keeps within .* per device.*What helps"):
        planned(PARAMS, X)


# ---- calls


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((PARAMS,), {}, "`step` cannot be called with these arguments: missing a required argument: 'x'"),
        ((PARAMS, X, X), {}, "too many positional arguments"),
        ((PARAMS, X), {"y": X}, "got an unexpected keyword argument 'y'"),
        ((PARAMS, X), {"x": X}, "multiple values for argument 'x'"),
        ((PARAMS, "text"), {}, "`1` is `'text'` of type `str`: arguments are arrays"),
        (({"w": object}, X), {}, "`0/w` is `.*` of type `type`: arguments are arrays"),
        ((PARAMS,), {"x": {1, 2}}, "`x` is `{1, 2}` of type `set`"),
    ],
    ids=str,
)
def test_arguments_that_do_not_match(args: Any, kwargs: Any, message: str) -> None:
    planned = shardplan.auto(step, mesh_of((8,)))
    for call in (planned, planned.plan, planned.lower):
        with pytest.raises(CallError, match=message) as caught:
            call(*args, **kwargs)
        assert isinstance(caught.value, TypeError) and isinstance(caught.value, ShardplanError)


def test_an_array_that_a_step_before_took() -> None:
    planned = shardplan.auto(step, mesh_of((8,)), donate_argnums=0)
    state = jax.device_put({"w": X + 0}, planned.plan(PARAMS, X).in_shardings[0])
    planned(state, X)
    with pytest.raises(CallError, match=r"`0/w` holds no data any more.*Pass what that step returned"):
        planned(state, X)


def test_a_static_argument_that_cannot_be_hashed() -> None:
    planned = shardplan.auto(lambda x, sizes: x * sizes[0], mesh_of((8,)), static_argnums=1)
    with pytest.raises(CallError, match=r"cannot be hashed .*pass a tuple instead of a list"):
        planned(X, [3])


class OwnError(Exception):
    pass


def failing(x: Any) -> Any:
    raise OwnError("my own", 3)


@pytest.mark.parametrize("entry", ["call", "plan", "lower"])
def test_exceptions_of_the_function(entry: str) -> None:
    """They reach the caller."""
    planned = shardplan.auto(lambda x: failing(x) + 1, mesh_of((8,)))
    call = planned if entry == "call" else getattr(planned, entry)
    with pytest.raises(OwnError) as caught:
        call(X)
    assert caught.value.args == ("my own", 3) and type(caught.value) is OwnError
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "failing"
    # this test, the line that jax.jit too shows of itself, the lambda, and what raised
    assert len(frames) <= 5, frames


def test_errors_of_jax_reach_the_caller() -> None:
    with pytest.raises(TypeError, match="contracting dimensions"):
        shardplan.auto(step, mesh_of((8,)))(PARAMS, jnp.ones((8, 3)))
    with pytest.raises(jax.errors.TracerBoolConversionError):
        shardplan.auto(lambda x: x if x.sum() > 0 else -x, mesh_of((8,)))(X)


# ---- what cannot be split


@pytest.mark.parametrize(
    ("rows", "sizes", "message"),
    [
        (
            13,
            (8,),
            r"no mesh axis \(x=8\) divides dimension 0 of `1` \[13, 8\]: its 13 rows are not split but .* 16 rows",
        ),
        (13, (2, 4), r"no mesh axis \(x=2, y=4\) divides dimension 0 of `1`.* 14 or 16 rows would be"),
        (7, (2, 4), r"its 7 rows .*\. 8 rows would be"),
        (12, (2, 4), None),
        (12, (1,), None),
        (16, (8,), None),
    ],
)
def test_an_undivided_batch(rows: int, sizes: tuple[int, ...], message: str | None) -> None:
    planned = shardplan.auto(step, mesh_of(sizes))
    x = jnp.ones((rows, 8)) / 8
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = planned(PARAMS, x)
        planned(PARAMS, x)
    assert_equal_trees(result, jax.jit(step)(PARAMS, x))
    assert len(caught) == (message is not None)
    if message:
        with pytest.raises(ShardplanWarning, match=message):
            raise caught[0].message  # type: ignore[misc]
        assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("rows", "message"), [(16, None), (13, r"divides dimension 1 of `1` \[3, 13, 8\]: its 13 rows")]
)
def test_undivided_microbatches(rows: int, message: str | None) -> None:
    def accumulated(params: Any, x: Any) -> Any:
        return jax.lax.scan(lambda p, rows: step(p, rows), params, x)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shardplan.plan(accumulated, mesh_of((8,)), PARAMS, jnp.ones((3, rows, 8)))
    assert len(caught) == (message is not None)
    if message:
        with pytest.raises(ShardplanWarning, match=message):
            raise caught[0].message  # type: ignore[misc]


def test_other_tensors_with_an_undivided_batch() -> None:
    """They are split."""

    def wide(params: Any, x: Any) -> Any:
        loss = lambda p: jnp.tanh(x @ p["up"] @ p["down"]).sum()  # noqa: E731
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    params = {"up": jnp.ones((1024, 4096)), "down": jnp.ones((4096, 1024))}
    with pytest.warns(ShardplanWarning, match="no mesh axis"):
        plan = shardplan.plan(wide, mesh_of((8,)), params, jnp.ones((13, 1024)))
    assert plan.layouts["0/up"] != P() and plan.layouts["0/down"] != P()


def unknown_operation(looked_into: bool = False) -> Any:
    primitive = jax.extend.core.Primitive("nobody_described_this")
    primitive.def_impl(lambda x: x * 2)
    primitive.def_abstract_eval(lambda x: x)
    twice = jax.interpreters.mlir.lower_fun(lambda x: x * 2, multiple_results=False)
    jax.interpreters.mlir.register_lowering(primitive, twice if looked_into else lambda context, x: twice(context, x))
    return primitive.bind


def test_an_unknown_operation_lowered_as_a_function() -> None:
    """It is split as its function."""
    operation = unknown_operation(looked_into=True)
    planned = shardplan.auto(lambda x: operation(jnp.sin(x)).sum(1), mesh_of((8,)), pins={"0": P("x")})  # no warning
    assert_equal_trees(planned(X), 2 * jnp.sin(X).sum(1))
    assert planned.plan(X).communication_bytes == 0


def test_an_unknown_operation_runs_whole_with_one_warning() -> None:
    operation = unknown_operation()

    def fn(x: Any) -> Any:
        return (jnp.sin(operation(x @ x)) + operation(x)).sum(0)

    for mesh in (mesh_of((8,)), 8):  # of a device count, several meshes are planned
        planned = shardplan.auto(fn, mesh)
        with pytest.warns(ShardplanWarning) as caught:
            result = planned(X)
        assert_equal_trees(result, jnp.sin(2 * X @ X).sum(0) + 2 * X.sum(0))
        assert len(caught) == 1
        message = str(caught[0].message)
        assert "`nobody_described_this` (2 times, first at test_errors.py" in message
        assert "shardplan.describe" in message
        assert caught[0].filename == __file__


@pytest.mark.parametrize("programs", [[len], 3])
def test_programs_together_without_names(programs):
    with pytest.raises(ArgumentError, match="takes programs by name"):
        shardplan.plan_together(programs, 8)


def test_options_that_are_refused_everywhere():
    """An unknown option of one of several programs, and a value of another type."""
    x = jax.ShapeDtypeStruct((8, 8), "float32")
    with pytest.raises(ArgumentError, match="there is no option `foo`"):
        shardplan.plan_together({"t": (lambda x: x, (x,), 1, {"foo": 1})}, 8)
    with pytest.raises(ArgumentError, match="verify"):
        shardplan.plan(lambda x: x, 8, x, verify="yes")
    with pytest.raises(ArgumentError, match=r"a mesh shape is a tuple of numbers"):
        shardplan.gpu_mesh("h100", 8, "a")
    plan = shardplan.plan(lambda x: x, 8, x)
    with pytest.raises(PlanMismatchError, match=r"a jax.sharding.Mesh of devices was expected, got `'data=8'`"):
        plan.lower("data=8")


OF_A_PLAN = {
    "explain takes a path, an operation or a source line, got `3`": lambda plan: plan.explain(3),
    "`time_limit` is a number of seconds, got `'1'`": lambda plan: plan.explain("0*", time_limit="1"),
    "`limit` is a whole number above 0, got `0`": lambda plan: plan.table(limit=0),
    "`count` is a whole number above 0, got `b'3'`": lambda plan: plan.hotspots(b"3"),
    "the path of a file was expected, got `3`": lambda plan: plan.save(3),
    "the path of a file was expected, got `None`": lambda plan: plan.to_html(None),
    "`comparison` is a result of shardplan.compare, got `3`": lambda plan: plan.to_html("page.html", 3),
    "a plan was expected, got `3`": lambda plan: plan.diff(3),
    "`fn` is a function, got `3`": lambda plan: plan.to_python(3),
    "`whole` is True, False or None, got `'yes'`": lambda plan: plan.to_python(whole="yes"),
    "`fn` is a function, got `b'x'`": lambda plan: plan.apply(b"x"),
    "`init_fn` is a function, got `3`": lambda plan: plan.init(3),
    "`names` is a tree with a PartitionSpec of names at each leaf, got `3`": lambda plan: plan.to_logical_rules(3),
    "the path of a file was expected, got `['a']`": lambda plan: type(plan).load(["a"]),
    "`methods` is a list of names, got `'exact'`": lambda plan: shardplan.compare(
        step, "x=8", PARAMS, X, methods="exact"
    ),
    "no option `memroy_limit`: did you mean `memory_limit`? There are": lambda plan: shardplan.auto(
        step, memroy_limit=1
    ),
    "there is no option `foo`. There are memory_limit,": lambda plan: shardplan.plan(step, "x=8", PARAMS, X, foo=1),
}


def test_arguments_of_another_type() -> None:
    """Each method of a plan says in a sentence what it takes."""
    plan = shardplan.plan(step, "x=8", PARAMS, X)
    for message, call in OF_A_PLAN.items():
        with pytest.raises(ArgumentError) as raised:
            call(plan)
        assert message in str(raised.value)


FULL = """
import resource, signal, sys
from shardplan.common.atomic_files import write_file
from shardplan.errors import ArgumentError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
for content in ("a" * 200, b"a" * 200):
    try:
        write_file("page.html", content, "the page")
    except ArgumentError as error:
        print(error)
"""


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """One sentence, the old file, and no half one."""
    (tmp_path / "page.html").write_text("old")
    ran = subprocess.run(
        [sys.executable, "-c", FULL], cwd=tmp_path, capture_output=True, text=True, check=True, env=ENV
    )
    assert ran.stdout == 2 * "cannot write the page to `page.html`: File too large\n"
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
    assert (tmp_path / "page.html").read_text() == "old"
