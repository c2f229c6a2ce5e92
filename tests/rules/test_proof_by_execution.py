"""Every split of every family is run: whole, block by block, put together, compared.

Quick tests take a few examples per family; the slow one counts at least 2,000 distinct cases of (operation, shapes,
index, number of blocks), none of which may differ.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from jax import lax

from shardplan.rules import Rule, Slot, Split, verify, verify_linear
from shardplan.rules.operations import operations
from shardplan.rules.verify import verify_operation
from tests.helpers import random_compute_ops as rules_cases
from tests.helpers import random_index_ops as rules_moves
from tests.helpers.random_compute_ops import Case

FAMILIES = rules_cases.FAMILIES | rules_moves.FAMILIES


def proven(family: str, examples: int) -> set[tuple[Any, ...]]:
    """Run ``examples`` random cases of a family; every split must hold. Returns the distinct cases."""
    found: set[tuple[Any, ...]] = set()

    @seed(1)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(FAMILIES[family]())
    def check(case: Case) -> None:
        function, operands = case
        for verdict in verify(function, *operands):
            assert verdict.holds, str(verdict)
            found.add((verdict.operation, verdict.shapes, verdict.index, verdict.blocks))

    check()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_pending_sums_pass(family: str) -> None:
    @seed(2)
    @settings(max_examples=4, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(FAMILIES[family]())
    def check(case: Case) -> None:
        function, operands = case
        for verdict in verify_linear(function, *operands):
            assert verdict.holds, str(verdict)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_splits_hold(family: str) -> None:
    proven(family, 4)


@pytest.mark.long
def test_two_thousand_cases_hold() -> None:
    counts = {family: len(proven(family, 60)) for family in FAMILIES}
    assert sum(counts.values()) >= 2000, counts


def _forged(function: Any, operands: list[Any], split: Split) -> str | None:
    """The verdict on a split that somebody made up for the only operation of ``function``."""
    (operation,) = operations(function, *operands)
    rule = Rule(operation.name, operation.rule.expression, _splits={2: (split,)})
    (verdict,) = verify_operation(replace(operation, rule=rule), (2,))
    return verdict.problem


def _smoothed(x: Any) -> Any:
    return lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "SAME")


def _rows(x: Any, i: Any) -> Any:
    return lax.gather(x, i, lax.GatherDimensionNumbers((1,), (0,), (0,)), (1, 6), mode="clip")


X, Y = rules_cases.numbers(8, 6), rules_cases.numbers(6, 4)
IDS = np.array([[0], [7], [3], [3]], np.int32)
BLOCK, COLUMNS, WHOLE, SUM, MAX = Slot(0), Slot(1), Slot(), Slot(reducer="sum"), Slot(reducer="max")


@pytest.mark.parametrize(
    ("function", "operands", "true", "false"),
    [
        (
            lax.dot,
            [X, Y],
            ([COLUMNS, BLOCK], SUM),
            [([COLUMNS, BLOCK], MAX), ([WHOLE, WHOLE], SUM), ([BLOCK, BLOCK], SUM)],
        ),
        (
            lax.dot,
            [X, Y],
            ([BLOCK, WHOLE], BLOCK),
            [([COLUMNS, WHOLE], BLOCK), ([BLOCK, COLUMNS], BLOCK), ([BLOCK, WHOLE], COLUMNS)],
        ),
        (
            _smoothed,
            [X],
            ([Slot(0, (1, 1))], BLOCK),
            [([Slot(0, (1, 0))], BLOCK), ([Slot(0, (0, 1))], BLOCK), ([BLOCK], BLOCK)],
        ),
        (lambda x: lax.cumsum(x, 0), [X], ([WHOLE], BLOCK), [([BLOCK], BLOCK), ([BLOCK], MAX)]),
        (lambda x: lax.sort(x, dimension=1), [X], ([BLOCK], BLOCK), [([COLUMNS], COLUMNS), ([COLUMNS], BLOCK)]),
        (lambda x: lax.rev(x, (1,)), [X], ([BLOCK], BLOCK), [([COLUMNS], COLUMNS)]),
        (lambda x: x.max(1), [X], ([COLUMNS], MAX), [([COLUMNS], SUM), ([COLUMNS], WHOLE)]),
        (lambda x: lax.reshape(x, (4, 12)), [X], ([BLOCK], BLOCK), [([COLUMNS], BLOCK), ([COLUMNS], COLUMNS)]),
        (
            _rows,
            [X, IDS],
            ([BLOCK, WHOLE], SUM),
            [([BLOCK, WHOLE], BLOCK), ([BLOCK, BLOCK], BLOCK), ([COLUMNS, WHOLE], BLOCK)],
        ),
    ],
)
def test_false_splits_are_refuted(function: Any, operands: Any, true: Any, false: Any) -> None:
    """The proof must be able to fail: of one operation it accepts the true split and refutes the false ones."""
    assert _forged(function, operands, Split("i", tuple(true[0]), (true[1],))) is None
    for slots, result in false:
        assert _forged(function, operands, Split("i", tuple(slots), (result,))) is not None, (slots, result)
