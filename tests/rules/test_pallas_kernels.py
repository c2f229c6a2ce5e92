"""Pallas kernels: splits follow from the grid and the block index maps."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.experimental import pallas as pl

from shardplan.rules import Rule, rule_of, verify


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def splits(rule: Rule) -> dict[str, tuple[list[Any], list[Any]]]:
    return {
        split.index: ([slot.dim for slot in split.operands], [slot.reducer or slot.dim for slot in split.results])
        for split in rule.splits(2)
    }


def _add(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...] + y_ref[...]


def _matmul(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...] @ y_ref[...]


def _accumulate(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

    out_ref[...] += x_ref[...] @ y_ref[...]


def _call(kernel: Any, shape: tuple[int, ...], **options: Any) -> Any:
    return pl.pallas_call(kernel, jax.ShapeDtypeStruct(shape, np.float32), interpret=True, **options)


ROWS = pl.BlockSpec((2, 8), lambda i: (i, 0))
PALLAS: dict[str, tuple[Any, list[Any], Any]] = {
    "blocks of rows": (
        _call(_add, (8, 8), grid=(4,), in_specs=[ROWS, ROWS], out_specs=ROWS),
        [ones(8, 8), ones(8, 8)],
        {"g": ([0, 0], [0])},
    ),
    "no grid": (_call(_add, (8, 8)), [ones(8, 8), ones(8, 8)], {}),
    "product": (
        _call(
            _matmul,
            (8, 12),
            grid=(4, 3),
            in_specs=[pl.BlockSpec((2, 6), lambda i, j: (i, 0)), pl.BlockSpec((6, 4), lambda i, j: (0, j))],
            out_specs=pl.BlockSpec((2, 4), lambda i, j: (i, j)),
        ),
        [ones(8, 6), ones(6, 12)],
        {"g0": ([0, None], [0])},
    ),
    "accumulation over the second grid dimension": (
        _call(
            _accumulate,
            (8, 4),
            grid=(4, 2),
            in_specs=[pl.BlockSpec((2, 3), lambda i, k: (i, k)), pl.BlockSpec((3, 4), lambda i, k: (k, 0))],
            out_specs=pl.BlockSpec((2, 4), lambda i, k: (i, 0)),
        ),
        [ones(8, 6), ones(6, 4)],
        {"g0": ([0, None], [0])},
    ),
    "shared by pairs of programs": (
        _call(
            _add,
            (8, 8),
            grid=(4,),
            in_specs=[ROWS, pl.BlockSpec((2, 8), lambda i: (i // 2, 0))],
            out_specs=ROWS,
        ),
        [ones(8, 8), ones(4, 8)],
        {"g": ([0, 0], [0])},
    ),
    "squeezed dimension": (
        _call(
            _add,
            (4, 8, 8),
            grid=(4,),
            in_specs=[pl.BlockSpec((None, 8, 8), lambda i: (i, 0, 0)), pl.BlockSpec((8, 8), lambda i: (0, 0))],
            out_specs=pl.BlockSpec((None, 8, 8), lambda i: (i, 0, 0)),
        ),
        [ones(4, 8, 8), ones(8, 8)],
        {"g": ([0, None], [0])},
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name == "blocks of rows" else name for name in PALLAS]
)
def test_pallas_kernel(name: str) -> None:
    function, operands, expected = PALLAS[name]
    rule = rule_of(function, *operands)
    assert rule.known, rule.reason
    assert splits(rule) == expected
    if expected:
        assert all(verdict.holds for verdict in verify(function, *operands))


def test_overlapping_windows_get_halos() -> None:
    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[:-2] + x_ref[1:-1] + x_ref[2:]

    windows = pl.BlockSpec((pl.Element(6, (1, 1)),), lambda i: (4 * i,))
    call = _call(kernel, (16,), grid=(4,), in_specs=[windows], out_specs=pl.BlockSpec((4,), lambda i: (i,)))
    (split,) = rule_of(call, ones(16)).splits(2)
    assert (split.operands[0].dim, split.operands[0].halo) == (0, (1, 1))


def test_pallas_kernel_with_scratch() -> None:
    """Its grid does not split."""

    def kernel(x_ref: Any, out_ref: Any, memory: Any) -> None:
        out_ref[...] = x_ref[...]

    call = partial(_call, kernel, (8, 8), grid=(4,), in_specs=[ROWS], out_specs=ROWS)
    rule = rule_of(call(scratch_shapes=[pl.MemoryRef(jax.core.ShapedArray((2, 8), np.float32), pl.ANY)]), ones(8, 8))
    assert rule.known and rule.splits(2) == ()


def test_pallas_index_map_that_is_not_affine() -> None:
    spec = pl.BlockSpec((2, 8), lambda i: (i * i % 4, 0))
    call = _call(_add, (8, 8), grid=(4,), in_specs=[ROWS, spec], out_specs=ROWS)
    assert splits(rule_of(call, ones(8, 8), ones(8, 8))) == {"g": ([0, None], [0])}
    call = _call(_add, (8, 8), grid=(4,), in_specs=[ROWS, ROWS], out_specs=spec)
    rule = rule_of(call, ones(8, 8), ones(8, 8))
    assert not rule.known and rule.reason is not None and "not affine" in rule.reason
