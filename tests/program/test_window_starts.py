"""Windows that begin inside a tensor: they read the shifted tensor from its first row on."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.program.tracing import trace_program
from shardplan.program.window_starts import extreme_element
from tests.helpers.random_programs import assert_equal_trees, mesh_of, run

Read = Callable[[Any, Any], Any]
"""A function of an image and of how its rows are padded."""

K = jnp.asarray(np.random.default_rng(1).normal(size=(3, 1, 4, 4)), jnp.float32)


def convolved(stride: int = 1, base: int = 1, columns: tuple[int, int] = (0, 0)) -> Read:
    """A convolution whose columns are not padded: XLA:CPU then reads past the end of rows that begin inside."""
    numbers = ("NHWC", "HWIO", "NHWC")
    return lambda x, rows: lax.conv_general_dilated(
        x, K, (stride, 1), [rows, columns], (base, 1), dimension_numbers=numbers
    )


def pooled(reducer: Any, start: Any, base: int = 1, window: tuple[int, int] = (3, 2)) -> Read:
    def pool(x: Any, rows: tuple[int, int]) -> Any:
        padding = [(0, 0), rows, (0, 0), (0, 0)]
        return lax.reduce_window(x, start, reducer, (1, *window, 1), (1, 2, 2, 1), padding, (1, base, 1, 1))

    return pool


def largest_with_place(x: Any, rows: tuple[int, int]) -> Any:
    def larger(one: Any, other: Any) -> Any:
        return tuple(lax.select(one[0] > other[0], a, b) for a, b in zip(one, other, strict=True))

    places = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    padding = [(0, 0), rows, (0, 0), (0, 0)]
    return lax.reduce_window((x, places), (-jnp.inf, -1), larger, (1, 3, 1, 1), (1, 1, 1, 1), padding)


def tangents(x: Any, rows: tuple[int, int]) -> Any:
    return jax.jvp(lambda x: pooled(lax.max, -jnp.inf)(x, rows), (x,), (jnp.sin(x),))


READS: dict[str, tuple[Read, float, int, tuple[int, int]]] = {
    # name: function, what it pads with, dilation of rows, padding of rows
    "convolution": (convolved(), 0, 1, (-1, 1)),
    "convolution, strided": (convolved(2, columns=(1, 1)), 0, 1, (-2, 1)),
    "convolution, rows left out at both ends": (convolved(), 0, 1, (-1, -3)),
    "convolution of dilated rows": (convolved(base=2), 0, 2, (-3, 2)),
    "convolution of nothing but padding": (convolved(), 0, 1, (-17, 6)),
    "largest": (pooled(lax.max, -jnp.inf), -np.inf, 1, (-1, 1)),
    "least": (pooled(lax.min, jnp.inf), np.inf, 1, (-3, 0)),
    "sum of dilated rows": (pooled(lax.add, 0.0, 3), 0, 3, (-4, 2)),
    "single elements": (pooled(lax.max, -jnp.inf, window=(1, 1)), -np.inf, 1, (-2, -1)),
    "single elements, of the user": (pooled(lambda x, y: jnp.maximum(x, y), 0.5, window=(1, 1)), 0.5, 1, (-3, 0)),
    "single elements to the end": (pooled(lax.add, 0.0, window=(1, 1)), 0, 1, (0, -5)),
    "single elements of dilated rows": (pooled(lax.add, 0.0, 3, (1, 1)), 0, 3, (-4, 2)),
    "largest, of the user": (pooled(lambda x, y: jnp.maximum(x, y), 0.5), 0.5, 1, (-2, 1)),
    "largest with its place": (largest_with_place, -np.inf, 1, (-1, 0)),
    "tangents of the largest": (tangents, -np.inf, 1, (-2, 2)),
    "pad": (lambda x, rows: lax.pad(x, 0.5, [(0, 0, 0), (*rows, 1), (0, 0, 0), (0, 0, 0)]), 0.5, 2, (-3, 1)),
}
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 16, 6, 4)), jnp.float32)


def all_reads(x: Any) -> dict[str, Any]:
    return {name: read(x, rows) for name, (read, *_, rows) in READS.items()}


def test_no_window_begins_inside() -> None:
    """Nor does one of single elements end inside, at which XLA ends the process."""
    for operation in trace_program(all_reads, (X,)).operations:
        params = operation.params
        if operation.primitive.name == "pad":
            assert all(low >= 0 or not inner for low, _, inner in params["padding_config"])
        else:
            assert all(low >= 0 for low, _ in params.get("padding", ()))
        if set(params.get("window_dimensions", ())) == {1}:
            assert all(high >= 0 for _, high in params["padding"])


@pytest.mark.long
@pytest.mark.parametrize("islands", [True, False])
def test_values(islands: bool) -> None:
    """Those of the image cut by hand; the unplanned step is wrong on a CPU."""
    mesh = mesh_of((8,))
    plan = shardplan.plan(all_reads, mesh, X, pins={"0": P(None, "x")}, islands=islands)
    found = run(plan, mesh, X)
    for name, (read, _, dilation, (low, high)) in READS.items():
        if name == "convolution of nothing but padding":
            assert not np.any(found[name])
            continue
        rows = -(low // dilation)
        front, behind = low + rows * dilation, max(high, 0)
        cut = X[:, rows : X.shape[1] + min(high, 0)]
        assert_equal_trees(found[name], _placed(name, read(cut, (front, behind)), rows))


def _placed(name: str, result: Any, rows: int) -> Any:
    """A result of a cut image; places are counted from the first row of the whole one."""
    return (result[0], jnp.where(result[1] < 0, -1, result[1] + rows)) if "place" in name else result


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bfloat16, jnp.bool_])
@pytest.mark.parametrize("name", ["max", "min"])
def test_filling_of_every_type(name: str, dtype: Any) -> None:
    """A pooling pads with the element that never wins."""
    x = jnp.asarray([[3, 1, 2, -5, 4]]).astype(dtype)
    reducer = {"max": lax.max, "min": lax.min}[name]
    if dtype == jnp.bool_:
        reducer = {"max": lax.bitwise_or, "min": lax.bitwise_and}[name]
    start = extreme_element(jnp.dtype(dtype), name == "max")
    pool = lambda x: lax.reduce_window(x, start, reducer, (1, 2), (1, 1), [(0, 0), (-1, 2)])  # noqa: E731
    plan = shardplan.plan(pool, mesh_of((1,)), x)
    expected = lax.reduce_window(x[:, 1:], start, reducer, (1, 2), (1, 1), [(0, 0), (0, 2)])
    np.testing.assert_array_equal(run(plan, mesh_of((1,)), x), expected)
