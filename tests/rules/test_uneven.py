"""Splits over blocks that do not divide: proven by execution, with no more rows than needed."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

from shardplan.rules import rule_of, verify


def convolution(stride: int = 1, padding: Any = "SAME", dilation: int = 1) -> Callable[..., jax.Array]:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lambda x, w: lax.conv_general_dilated(
        x, w, (stride, 1), padding, (dilation, 1), dimension_numbers=numbers, precision="highest"
    )


def pooling(window: int, stride: int, padding: str = "VALID") -> Callable[[jax.Array], jax.Array]:
    return lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, window, 2, 1), (1, stride, 2, 1), padding)


def gradient(of: Callable[..., jax.Array]) -> Callable[..., Any]:
    return lambda *operands: jax.vjp(of, *operands)[1](jnp.sin(of(*operands)))


def array(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


STEPS = [
    ("convolution", convolution(), [(1, 21, 4, 2), (3, 3, 2, 2)]),
    ("convolution of 5 rows", convolution(), [(1, 33, 4, 2), (5, 3, 2, 2)]),
    ("strided convolution", convolution(stride=2), [(1, 42, 4, 2), (3, 3, 2, 2)]),
    ("convolution of dilated data", convolution(padding=((1, 1), (1, 1)), dilation=2), [(1, 21, 4, 2), (3, 3, 2, 2)]),
    ("gradient of a convolution", gradient(convolution()), [(1, 21, 4, 2), (3, 3, 2, 2)]),
    ("gradient of a strided one", gradient(convolution(stride=2)), [(1, 42, 4, 2), (3, 3, 2, 2)]),
    ("pooling", pooling(2, 2), [(1, 42, 4, 2)]),
    ("pooling that drops a row", pooling(2, 2), [(1, 43, 4, 2)]),
    ("pooling of overlapping windows", pooling(3, 2, "SAME"), [(1, 42, 4, 2)]),
    ("gradient of a pooling", gradient(pooling(2, 2)), [(1, 42, 4, 2)]),
    ("gradient of one that drops a row", gradient(pooling(2, 2)), [(1, 43, 4, 2)]),
]


@pytest.mark.parametrize(("function", "shapes"), [step[1:] for step in STEPS], ids=[step[0] for step in STEPS])
def test_uneven_splits_hold(function: Callable[..., Any], shapes: list[tuple[int, ...]]):
    verdicts = verify(function, *(array(*shape) for shape in shapes), blocks=(4, 5), uneven=True)
    windowed = [v for v in verdicts if v.operation.startswith(("conv", "reduce_window", "select_and_scatter"))]
    assert windowed
    for verdict in verdicts:
        assert verdict.holds, str(verdict)


def halos(function: Callable[..., Any], *shapes: tuple[int, ...], dim: int = 1) -> list[tuple[int, int]]:
    rule = rule_of(function, *(jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes))
    (split,) = (s for s in rule.uneven_splits(8) if s.operands[0].dim == dim)
    return [slot.halo for slot in split.operands]


def test_neighbours_give_as_many_rows_as_xla_was_seen_to_send():
    assert halos(convolution(), (1, 100, 8, 2), (3, 3, 2, 2)) == [(1, 1), (0, 0)]
    assert halos(pooling(2, 2), (1, 200, 8, 2)) == [(0, 7)]
    assert halos(pooling(2, 2), (1, 312, 8, 2)) == [(0, 7)]


def test_empty_blocks_and_far_neighbours_are_refused():
    assert not [s for s in rule_of(pooling(2, 2), array(1, 18, 4, 2)).uneven_splits(8) if s.operands[0].dim == 1]
    assert not [
        s
        for s in rule_of(convolution(), array(1, 9, 4, 2), array(7, 3, 2, 2)).uneven_splits(4)
        if s.operands[0].dim == 1
    ]
