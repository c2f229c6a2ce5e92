"""Tracing: from a function to values and operations, with names, sources and ties."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import shardplan
from shardplan import _jax
from shardplan.program.program import Constant, Program
from shardplan.program.tracing import trace_program

S = jax.ShapeDtypeStruct
X = S((4, 4), jnp.float32)


def names(program: Program) -> list[str]:
    return [operation.primitive.name for operation in program.operations]


def input_names(program: Program) -> list[str | None]:
    return [program.values[index].name for index in program.inputs]


# ---- flattening


def test_arrays_that_are_moved_together_are_moved_one_by_one():
    program = trace_program(lambda tree: jax.device_put(jax.tree.map(jnp.sin, tree)), ({"a": X, "b": S((8,), "f4")},))
    assert names(program).count("device_put") == 2
    assert all(len(o.operands) == len(o.results) == 1 for o in program.operations)


def test_a_named_value():
    """A name is no operation: the value is that of its operand."""
    program = trace_program(lambda x: jnp.sin(checkpoint_name(jnp.cos(x), "kept")), (X,))
    assert names(program) == ["cos", "sin"]


@jax.custom_jvp
def with_jvp(x: Any) -> Any:
    return jnp.sin(x)


with_jvp.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), tangents[0] * jnp.cos(primals[0])))


@jax.custom_vjp
def with_vjp(x: Any) -> Any:
    return jnp.sin(x)


with_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))


with_vmap = jax.custom_batching.custom_vmap(lambda x: jnp.sin(x))
with_vmap.def_vmap(lambda size, batched, x: (jnp.sin(x), batched[0]))


def solved(x: Any) -> Any:
    """The identity's inverse, whose own body is a sine; the operands of its product and its transpose go unread."""
    return jax.lax.custom_linear_solve(lambda y: y + 0 * x, x, lambda _, y: jnp.sin(y), lambda _, y: jnp.tan(y))


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: jnp.sin(x) + 1, ["sin", "add"]),
        (lambda x: jax.jit(jnp.sin)(x) + 1, ["sin", "add"]),
        (lambda x: jax.jit(lambda y: jax.jit(jnp.sin)(y))(x), ["sin"]),
        (with_jvp, ["sin"]),
        (with_vjp, ["sin"]),
        (jax.grad(lambda x: with_vjp(x).sum()), ["cos", "mul"]),
        (jax.checkpoint(jnp.sin), ["sin"]),
        (lambda x: (jnp.cos(x), jnp.sin(x))[1], ["sin"]),  # what nobody reads is dropped
        (lambda x: jnp.linalg.inv(x) * 0 if False else x, []),
        (lambda x: jax.named_call(jnp.sin, name="layer")(x), ["sin"]),
        (solved, ["sin"]),
        (jax.lax.composite(jnp.sin, "example.sine"), ["sin"]),
        (with_vmap, ["sin"]),
        (lambda x: jax.custom_derivatives.linear_call(lambda _, y: -y, lambda _, t: -t, (), x), ["neg"]),
    ],
)
def test_calls_are_inlined(fn: Any, expected: list[str]) -> None:
    found = [name for name in names(trace_program(fn, (X,))) if name not in ("broadcast_in_dim", "mul")]
    assert found == [name for name in expected if name != "mul"]


def test_calls_and_loops_in_the_forms_of_later_versions_of_jax() -> None:
    """JAX 0.11 and 0.12 keep the body of a composite elsewhere, and say in a tree which operands a scan carries."""

    class Tree(NamedTuple):
        parts: tuple[list[None], ...]

        def unpack(self) -> tuple[list[None], ...]:
            return self.parts

    (composite,) = jax.make_jaxpr(jax.lax.composite(jnp.sin, "example.sine"))(X).eqns
    held = {"jaxpr", "call_jaxpr"} & composite.params.keys()
    for name in ("jaxpr", "call_jaxpr"):
        params = {name: composite.params[next(iter(held))]}
        body = _jax.call_body(composite.replace(params=params))
        assert body is not None and [inside.primitive.name for inside in body.jaxpr.eqns] == ["sin"]
    looped = jax.make_jaxpr(lambda c, xs: jax.lax.scan(lambda s, x: (s + x @ c, s), xs[0], xs))(
        X, S((3, 4, 4), X.dtype)
    )
    scan = next(e for e in looped.eqns if e.primitive.name == "scan")
    params = {name: held for name, held in scan.params.items() if not name.startswith("num_")}
    read = _jax.unbatched(scan.replace(params=params | {"ft_in": Tree(([None], [None] * 2, [None] * 3))})).params
    assert (read["num_consts"], read["num_carry"]) == (1, 2)


def test_rematerialised_regions_stand_behind_a_barrier() -> None:
    program = trace_program(jax.grad(lambda x: jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)))(x).sum()), (X,))
    found = names(program)
    assert found.count("optimization_barrier") == 1
    recomputed = found[found.index("optimization_barrier") :]
    assert "sin" in recomputed and "cos" in recomputed


def test_results_of_rematerialised_regions() -> None:
    """A barrier releases all results of a region together."""
    layer = jax.checkpoint(lambda x, w: jnp.sin(x @ w))
    gradients = jax.grad(lambda ws: layer(layer(layer(X, ws[0]), ws[1]), ws[2]).sum())
    program = trace_program(gradients, ([jnp.ones((X.shape[1],) * 2)] * 3,))
    barriers = [o for o in program.operations if o.primitive.name == "optimization_barrier"]
    # before each of the three regions, and behind those that another one follows; the last one's result is not held
    assert len(barriers) == 5
    made = {result: o.index for o in program.operations for result in o.results}
    for released in barriers[1:4:2]:
        gradient, data = released.operands
        assert isinstance(gradient, int) and isinstance(data, int)
        assert barriers[0].index < made[gradient] < released.index > made[data]


def test_operations_with_effects_are_kept() -> None:
    assert "debug_print" in names(trace_program(lambda x: (jax.debug.print("{}", x[0, 0]), x)[1], (X,)))


def test_loops_and_branches_are_regions_with_their_trips() -> None:
    def fn(x: Any) -> Any:
        def body(carry: Any, row: Any) -> Any:
            inner = jax.lax.fori_loop(0, 3, lambda _, c: jnp.sin(c), carry)
            return inner + row, jax.lax.cond(row.sum() > 0, jnp.cos, jnp.sin, row)

        return jax.lax.scan(body, x[0], x)

    program = trace_program(fn, (X,))
    times = {
        operation.primitive.name: program.regions[operation.region].times
        for operation in program.operations
        if operation.primitive.name in ("sin", "cos", "add")
    }
    assert times["cos"] == 4
    sines = [program.regions[o.region].times for o in program.operations if o.primitive.name == "sin"]
    assert sorted(sines) == [4, 12]
    members = sorted(index for region in program.regions for index in region.operations)
    assert members == list(range(len(program.operations)))


# ---- values


class State(NamedTuple):
    params: Any
    step: Any


def test_names_are_tree_paths() -> None:
    state = State({"layer": [X, {"bias": S((4,), jnp.float32)}]}, S((), jnp.int32))
    program = trace_program(lambda state, *, batch: (state, batch["x"].sum()), (state,), {"batch": {"x": X}})
    assert input_names(program) == ["0/params/layer/0", "0/params/layer/1/bias", "0/step", "batch/x"]
    assert program.output_names == ("0/params/layer/0", "0/params/layer/1/bias", "0/step", "1")


def test_sources_are_lines_of_the_users_code() -> None:
    program = trace_program(lambda x: jnp.sin(x), (X,))
    assert program.operations[0].source.startswith("test_tracing.py:")
    assert "test_sources_are_lines" in program.operations[0].source


def test_sources_inside_of_jaxs_own_functions() -> None:
    """They are the sources of the calls."""

    def lookup(table: Any, ids: Any) -> Any:
        return jnp.take(table, ids, axis=0)

    program = trace_program(lookup, (jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.int32)))
    assert {operation.source.split(" ")[-1] for operation in program.operations} == {
        "(test_sources_inside_of_jaxs_own_functions.<locals>.lookup)"
    }


def test_closed_over_arrays() -> None:
    """They are captured if they are used."""
    weight, unused = jnp.ones((4, 4)), jnp.ones((8, 8))
    program = trace_program(lambda x: (unused + 1, jax.jit(lambda y: y @ weight)(x))[1], (X,))
    assert [array.shape for array in program.captured.values()] == [(4, 4)]


def test_outputs_that_are_inputs_literals_or_the_same() -> None:
    program = trace_program(lambda x: (x, 1.0, jnp.sin(x), jnp.sin(x), x), (X,))
    first, literal, one, _, last = program.outputs
    assert first == last == program.inputs[0]
    assert isinstance(literal, Constant) and literal.aval.weak_type
    assert isinstance(one, int)


def test_bytes_of_values() -> None:
    program = trace_program(lambda *v: v, (S((2, 3), jnp.bfloat16), S((), jnp.bool_), S((0, 4), jnp.float32)))
    assert [program.values[i].total_bytes for i in program.inputs] == [12, 1, 0]
    key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))
    wide = jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))
    program = trace_program(lambda *v: v, (key, wide))
    assert [program.values[i].total_bytes for i in program.inputs] == [24, 16]


def test_weak_types_are_kept() -> None:
    program = trace_program(lambda a, b: (a, b), (S((), jnp.float32, weak_type=True), X))
    assert [program.values[i].weak_type for i in program.inputs] == [True, False]


# ---- ties

TREE = {"w": X, "b": S((4,), jnp.float32)}


def descend(tree: Any, by: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf - 0.1 * by.sum(), tree)


TIES: dict[str, tuple[Any, tuple[Any, ...], list[tuple[str, str]]]] = {
    "state and batch to state and loss": (
        lambda s, x: (descend(s, x), x.sum()),
        (TREE, X),
        [("0/b", "0/b"), ("0/w", "0/w")],
    ),
    "state and batch to state": (lambda s, x: descend(s, x), (TREE, X), [("b", "0/b"), ("w", "0/w")]),
    "batch and state to state": (lambda x, s: descend(s, x), (X, TREE), [("b", "1/b"), ("w", "1/w")]),
    "batch and state to loss and state": (
        lambda x, s: (x.sum(), descend(s, x)),
        (X, TREE),
        [("1/b", "1/b"), ("1/w", "1/w")],
    ),
    "params, optimizer and batch to params, optimizer and loss": (
        lambda p, o, x: (descend(p, x), {"mu": descend(o["mu"], x)}, x.sum()),
        (TREE, {"mu": TREE}, X),
        [("0/b", "0/b"), ("0/w", "0/w"), ("1/mu/b", "1/mu/b"), ("1/mu/w", "1/mu/w")],
    ),
    "loss first": (
        lambda p, x: (x.sum(), descend(p, x)),
        (TREE, X),
        [("1/b", "0/b"), ("1/w", "0/w")],
    ),
    "nested": (
        lambda s, x: ({"model": {"params": descend(s["model"]["params"], x)}}, {"loss": x.sum()}),
        ({"model": {"params": TREE}}, X),
        [("0/model/params/b", "0/model/params/b"), ("0/model/params/w", "0/model/params/w")],
    ),
    "one bare array": (lambda w, x: (w - x.T @ (x @ w), x.sum()), (X, X), [("0", "0")]),
    "passed through": (lambda s, x: (s, x.sum()), (TREE, X), [("0/b", "0/b"), ("0/w", "0/w")]),
    "replaced in place": (lambda s, x: ({"w": s["w"].at[0].set(x[0])}, x), ({"w": X}, X), [("0/w", "0/w"), ("1", "1")]),
    "accumulated in a loop": (
        lambda s, x: jax.lax.fori_loop(0, 3, lambda _, c: descend(c, x), s),
        (TREE, X),
        [("b", "0/b"), ("w", "0/w")],
    ),
    # no ties
    "results that are no update": (lambda x, y: (x @ y, jnp.transpose(x) @ y), (X, X), []),
    "gradients": (jax.grad(lambda p, x: jnp.tanh(x @ p["w"] + p["b"]).sum()), (TREE, X), []),
    "another shape": (lambda s: {"w": s["w"][:2]}, ({"w": X},), []),
    "another type": (lambda s: {"w": s["w"].astype(jnp.bfloat16)}, ({"w": X},), []),
    "two candidates": (lambda a, b: {"w": a["w"] + b["w"]}, ({"w": X}, {"w": X}), []),
}


@pytest.mark.parametrize("name", TIES)
def test_ties(name: str) -> None:
    fn, args, expected = TIES[name]
    program = trace_program(fn, args)
    found = [(program.output_names[o], input_names(program)[i] or "") for o, i in program.ties.items()]
    assert sorted(found) == sorted(expected)


# ---- fingerprints


def test_fingerprints_of_different_programs() -> None:
    """They differ."""
    functions = (jnp.sin, jnp.cos, lambda x: jnp.sum(x, 0), lambda x: jnp.sum(x, 1), lambda x: x + x)
    prints = {trace_program(fn, (X,)).fingerprint() for fn in functions}
    assert len(prints) == len(functions)
    assert trace_program(jnp.sin, (S((4, 8), jnp.float32),)).fingerprint() not in prints
    assert trace_program(lambda x: jnp.sin(x), (X,)).fingerprint() in prints


# ---- conversions out of loops


def scanned(body: Any, times: int = 3) -> Any:
    """A scan that runs over numbers, with what its body closes over."""

    def add(total: Any, x: Any) -> Any:
        return total + jnp.sum(body(x)).astype(jnp.float32), None

    return jax.lax.scan(add, 0.0, jnp.ones(times))[0]


@pytest.mark.parametrize(
    ("fn", "region"),
    [
        (lambda w: scanned(lambda x: w.astype(jnp.bfloat16)), 0),
        (lambda w: scanned(lambda _: scanned(lambda x: w.astype(jnp.bfloat16))), 0),
        (lambda w: scanned(lambda x: w.astype(jnp.bfloat16) * w.sum()), 1),  # the scan also reads it unconverted
        (lambda w: scanned(lambda x: w.astype(jnp.complex64).real), 1),  # that would be held at twice the size
    ],
)
def test_scan_constants_that_are_only_converted(fn: Any, region: int) -> None:
    """They are converted before the scan."""
    program = trace_program(fn, (X,))
    (found,) = [
        operation
        for operation in program.operations
        if operation.primitive.name == "convert_element_type"
        and program.values[operation.results[0]].shape == X.shape
        and program.values[operation.results[0]].dtype != X.dtype
    ]
    assert found.region == region
    jax.block_until_ready(fn(jnp.ones(X.shape)))


# ---- branches of platforms


def test_repeated_sums_and_products() -> None:
    """Sums of one array are computed once, and products as written."""

    def step(x, keys):
        def body(carry, key):  # a sum of its own in each iteration, equal to none outside
            return carry + x.sum() * key + x.sum(), x.max()

        total, largest = jax.lax.scan(body, x.sum(), keys)
        first, again = x.sum(), x.sum()  # results have memory of their own
        return total * x.sum(), jnp.tanh(x @ x) + jnp.sin(x @ x), x.sum(0) + x.sum(1), first, again, largest

    program = trace_program(step, (jnp.ones((4, 4)), jnp.ones(3)))
    names = [[o.primitive.name for o in program.operations if o.region == region] for region in (0, 1)]
    assert [names[0].count(name) for name in ("reduce_sum", "dot_general")] == [5, 2]
    assert [names[1].count(name) for name in ("reduce_sum", "reduce_max")] == [1, 1]


def test_branches_by_platform() -> None:
    """The branch of the platform replaces the choice."""
    square = S((8, 8), jnp.float32)
    program = trace_program(jnp.diag, (square,))  # one branch for TPUs, one for all others
    assert not {"cond", "platform_index"} & {operation.primitive.name for operation in program.operations}
    by_platform = trace_program(lambda x: jax.lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos), (square,))
    assert [operation.primitive.name for operation in by_platform.operations][-1] == "cond"


def _primitive(name: str, function: Any, platform: str | None = None) -> Any:
    primitive = jax.extend.core.Primitive(name)
    primitive.def_abstract_eval(lambda x, **params: jax.core.ShapedArray((x.shape[0],), x.dtype))
    lower = jax.interpreters.mlir.lower_fun(function, multiple_results=False)
    jax.interpreters.mlir.register_lowering(primitive, lower)
    if platform is not None:
        jax.interpreters.mlir.register_lowering(primitive, lambda context, x: lower(context, x), platform)
    return primitive


def test_an_operation_that_is_lowered_as_a_function_is_inlined() -> None:
    rows = _primitive("sums_of_rows", lambda x, power: jnp.sum(x**power, axis=1))
    program = trace_program(lambda x: rows.bind(jnp.sin(x), power=3), [X])
    assert names(program) == ["sin", "integer_pow", "reduce_sum"]
    assert program.operations[-1].source.startswith("test_tracing.py")


def test_lowered_functions_with_a_rule_or_a_kernel() -> None:
    """A described operation, or one with a kernel on some platform, is not inlined."""
    described, kernel = (_primitive(f"sums_{n}", lambda x: jnp.sum(x, axis=1), p) for n, p in ((1, None), (2, "cuda")))
    shardplan.describe(described, "i j -> i")
    assert names(trace_program(lambda x: (described.bind(x), kernel.bind(x)), [X])) == ["sums_1", "sums_2"]


def test_lowered_functions_that_cannot_be_traced() -> None:
    """The operation stays as it is."""

    def wrong(x: Any) -> Any:
        raise NotImplementedError

    assert names(trace_program(_primitive("wrong", wrong).bind, [X])) == ["wrong"]
    assert names(trace_program(_primitive("other", lambda x: x).bind, [X])) == ["other"]  # not of the shape it says


def test_loops_of_equinox_are_split_like_those_of_jax() -> None:
    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            turn = lambda carry: (carry[0] + 1, jnp.tanh(carry[1] @ weights))  # noqa: E731
            loop = functools.partial(eqxi.while_loop, kind="checkpointed", max_steps=8, checkpoints=4)
            return jnp.mean(loop(lambda carry: carry[0] < 5, turn, (jnp.array(0), x))[1] ** 2)

        return weights - 0.1 * jax.grad(loss)(weights)

    assert {"nonbatchable", "unvmap_any", "select_if_vmap", "vprim"}.isdisjoint(
        names(trace_program(step, [S((16, 16), jnp.float32), S((64, 16), jnp.float32)]))
    )
