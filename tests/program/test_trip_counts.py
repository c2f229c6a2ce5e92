"""Trip counts of loops: read from bounds, stated, or assumed with a warning, and their effect on costs."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.errors import ArgumentError, ShardplanWarning
from shardplan.program.tracing import trace_program
from tests.helpers.loop_programs import FORMS

S = jax.ShapeDtypeStruct
WEIGHTS, X = S((4, 64, 64), jnp.float32), S((64, 64), jnp.float32)
MESH = AbstractMesh((8,), ("x",))


def times(fn: Any, *args: Any) -> list[int]:
    """How often each body runs, per step."""
    return [region.times for region in trace_program(fn, args or (WEIGHTS, X)).regions[1:]]


def assumed(fn: Any, *args: Any) -> bool:
    return any(region.assumed for region in trace_program(fn, args or (WEIGHTS, X)).regions)


def halving(x: Any) -> Any:
    return jax.lax.while_loop(lambda v: v.sum() > 1, lambda v: v / 2, x)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("fori", {5}), ("while, counted", {4}), ("nested", {4, 8}), ("map", {4}), ("while", {1})],
)
def test_counts_of_bounds(name: str, expected: set[int]) -> None:
    assert expected <= set(times(FORMS[name]))
    assert assumed(FORMS[name]) == (name == "while")


def test_bounds_that_are_arguments_are_unknown() -> None:
    assert assumed(lambda n, x: jax.lax.fori_loop(0, n, lambda i, v: v * 2, x), S((), jnp.int32), X)


def test_unknown_loop() -> None:
    """It causes a warning."""
    with pytest.warns(ShardplanWarning, match=r"halving.*counted once.*shardplan\.trip_count\(n\)"):
        shardplan.plan(halving, MESH, X)


def test_scalar_loop() -> None:
    """It causes no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shardplan.plan(lambda x: x * halving(x[0, 0]), MESH, X)


def test_stated() -> None:
    def stating(x: Any) -> Any:
        with shardplan.trip_count(100):
            return halving(x)

    assert times(stating, X) == [100, 100]
    assert times(jax.jit(stating), X) == [100, 100]
    assert times(jax.vmap(stating), X) == [100, 100]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shardplan.plan(stating, MESH, X)


def test_stated_around_a_call() -> None:
    def stating(x: Any) -> Any:
        with shardplan.trip_count(3):
            return jax.jit(halving)(x)

    assert times(stating, X) == [3, 3]


def test_stated_for_loops_directly_inside_alone() -> None:
    def outer(x: Any) -> Any:
        with shardplan.trip_count(10):
            return jax.lax.while_loop(lambda v: v.sum() > 1, lambda v: halving(v) / 2, x)

    assert sorted(times(outer, X)) == [10, 10, 10, 10]
    assert assumed(outer, X)


def test_innermost_statement_counts() -> None:
    def stating(x: Any) -> Any:
        with shardplan.trip_count(10), shardplan.trip_count(20):
            return halving(x)

    assert times(stating, X) == [20, 20]


def test_known_and_stated_count() -> None:
    """The known one has precedence."""

    def stating(x: Any) -> Any:
        with shardplan.trip_count(100):
            return jax.lax.while_loop(lambda s: s[0] < 7, lambda s: (s[0] + 1, s[1] * 2), (0, x))

    assert times(stating, X) == [7, 7]


@pytest.mark.parametrize("count", [0, -1, 2.5, True, "3"])
def test_bad_counts(count: Any) -> None:
    with pytest.raises(ArgumentError, match="an integer above 0"):
        shardplan.trip_count(count)


def test_bytes_with_a_stated_count() -> None:
    """The count multiplies them."""

    def repeated(x: Any, w: Any, trips: int) -> Any:
        with shardplan.trip_count(trips):
            return jax.lax.while_loop(lambda v: v.sum() > 1, lambda v: jnp.tanh(v @ w), x)

    pins = {"0": P("x"), "1": P("x")}
    plans = [
        shardplan.plan(repeated, MESH, X, S((64, 64), jnp.float32), n, pins=pins, static_argnums=2) for n in (10, 1000)
    ]
    counts = [Counter(c.times for c in plan.collectives) for plan in plans]
    assert set(counts[0]) <= {1, 10} and set(counts[1]) <= {1, 1000}
    assert plans[0].fingerprint != plans[1].fingerprint


def test_a_loop_that_does_not_run() -> None:
    assert times(lambda x: jax.lax.scan(lambda h, _: (h * 2, None), x, None, length=0)[0], X) == [0]
    plan = shardplan.plan(FORMS["unrolled"], MESH, S((0, 64, 64), jnp.float32), X)
    assert all(c.bytes * c.times == 0 for c in plan.collectives if c.times == 0)


@pytest.mark.parametrize("name", [name for name in FORMS if name.startswith("accumulation")])
def test_accumulated_gradients_are_reduced_once(name: str) -> None:
    weights, x = S((2, 512, 512), jnp.float32), S((32768, 512), jnp.float32)
    plan = shardplan.plan(FORMS[name], MESH, weights, x, pins={"1": P("x")})
    reducing = [c for c in plan.collectives if "reduce" in c.kind and c.bytes > 1e5]
    assert reducing and all(c.times == 1 for c in reducing)


def test_bytes_of_branches() -> None:
    """The branch that sends most counts."""

    def branching(x: Any, w: Any) -> Any:
        return jax.lax.cond(
            x[0, 0] > 0, lambda a: jnp.tanh(a @ w) @ w, lambda a: jnp.sin(a).sum(1, keepdims=True) + a, x
        )

    pins = {"0": P(None, "x"), "1": P("x")}
    plan = shardplan.plan(branching, MESH, X, S((64, 64), jnp.float32), pins=pins)
    regions = {operation.scope: operation.region for operation in plan.program.operations}
    inside = {regions[c.operation.split()[0]] for c in plan.collectives} - {0}
    assert len(inside) == 1
