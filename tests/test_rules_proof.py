"""Every split of every family is run: whole, block by block, put together, compared.

Quick tests take a few examples per family; the slow one counts at least 2,000 distinct cases of (operation, shapes,
index, number of blocks), none of which may differ.
"""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings

from shardplan.rules import verify, verify_linear
from tests import rules_cases, rules_moves
from tests.rules_cases import Case

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


@pytest.mark.parametrize("family", FAMILIES)
def test_splits_hold(family: str) -> None:
    proven(family, 4)


@pytest.mark.slow
def test_two_thousand_cases_hold() -> None:
    counts = {family: len(proven(family, 60)) for family in FAMILIES}
    assert sum(counts.values()) >= 2000, counts
