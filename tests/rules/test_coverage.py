"""Coverage: every primitive that JAX lowers has a rule or a reason, and the document agrees."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import pytest

from shardplan import rules
from shardplan.rules import table, without_rule
from shardplan.rules._jax import lowered_primitives
from shardplan.rules.coverage import Row

FOLDER = Path(rules.__file__).resolve().parent
DOCUMENT = FOLDER.parent / "docs" / "rules.md"
SINCE_THEN = {
    *("pbroadcast_dynamic", "reduced_vary_cast", "relayout", "unreduced_pmax", "unreduced_pmin"),
    "vary_unreduced_cast",
}
"""Primitives without a rule of JAX 0.11 and 0.12, which 0.10.2 does not have."""


_PRINT = (
    "import json; from shardplan import rules; print(json.dumps([rules.coverage_records(), rules.coverage_markdown()]))"
)


@pytest.fixture(scope="module")
def printed() -> tuple[list[Row], str]:
    """Rows and document of a fresh process: other tests may import further primitives."""
    done = subprocess.run([sys.executable, "-c", _PRINT], capture_output=True, text=True, check=True)
    records, document = json.loads(done.stdout)
    return [Row(**record) for record in records], document


@pytest.fixture(scope="module")
def rows(printed: tuple[list[Row], str]) -> list[Row]:
    return printed[0]


@pytest.mark.slow
def test_every_computing_primitive_has_an_expression(rows: list[Row]) -> None:
    computing = [row for row in rows if row.family != "apart"]
    assert [row.name for row in computing if row.expression is None] == []
    assert {row.name for row in rows} <= {primitive.name for primitive in lowered_primitives()}
    assert len(rows) >= 250


def test_nearly_all_of_them_split(rows: list[Row]) -> None:
    described = [row for row in rows if row.expression is not None]
    splitting = [row for row in described if row.splits]
    assert len(splitting) >= 0.95 * len(described)
    assert all(row.reason is None for row in splitting)
    assert all(row.reason for row in rows if not row.splits)


def test_primitives_without_a_rule() -> None:
    """They exist in JAX, and are not in the table."""
    names = [name for group in without_rule.WITHOUT_RULE.values() for name in group]
    assert max(Counter(names).values()) == 1
    assert not set(names) & set(table.TABLE)
    if jax.__version__ == "0.10.2":
        assert set(names) - {primitive.name for primitive in lowered_primitives()} == SINCE_THEN


def test_every_family_is_registered() -> None:
    files = {path.stem for path in FOLDER.glob("*.py") if "RULES: dict" in path.read_text()}
    assert files == {family.__name__.rpartition(".")[2] for family in table.FAMILIES}


@pytest.mark.skipif(jax.__version__ != "0.10.2", reason="the document is that of JAX 0.10.2")
def test_the_document_is_up_to_date(printed: tuple[list[Row], str]) -> None:
    assert DOCUMENT.read_text() == printed[1], "run `shardplan rules > docs/rules.md`"
