"""The page of two sides in a headless Chromium: two plans, a plan and its compiled program, and a notebook's frame."""

import html
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan import ArgumentError, Plan
from shardplan.models import mlp
from tests.pages.test_browser import browser as browser
from tests.pages.test_browser import opened

pytestmark = pytest.mark.slow
needs_compiler = pytest.mark.skipif(find_spec("jax_plugins") is None, reason="the extra `audit` is not installed")

MESH = AbstractMesh((2, 4), ("data", "model"))
TRAINING = mlp.training(mlp.Config(widths=(512, 1024, 512), batch=64))


def plan_of(**options: Any) -> Plan:
    return shardplan.plan(TRAINING.train_step, MESH, TRAINING.state, TRAINING.batch, **options)


@pytest.fixture(scope="module")
def plans() -> tuple[Plan, Plan]:
    return plan_of(), plan_of(pins={"0/params/*/kernel": P("data", "model")})


def rows(page: Any, section: str) -> list[list[str]]:
    found = page.locator(f"#{section} tbody tr:not(.total)").all()
    return [row.locator("td").all_inner_texts() for row in found]


def data_of(path: Path) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    data: dict[str, Any] = json.loads(found)
    return data


def test_two_plans(browser: Any, plans: tuple[Plan, Plan], tmp_path: Path):
    """Totals are those of the plans, layouts that differ have both chips, and the search keeps what matches."""
    one, other = plans
    difference = one.diff(other)
    difference.to_html(tmp_path / "diff.html")
    kinds = data_of(tmp_path / "diff.html")["sections"][1]
    assert [sum(row[n] for row in kinds["rows"]) for n in (2, 3)] == [
        one.communication_bytes,
        other.communication_bytes,
    ]
    for page in opened(browser, tmp_path / "diff.html"):
        assert sum(int(row[1]) for row in rows(page, "arguments-with-different-layouts")) == len(difference.layouts)
        page.locator("#arguments-with-different-layouts .chips").first.hover()
        assert page.locator("#tip .grid i").count() == 8
        page.keyboard.press("/")
        page.keyboard.type("layer_1/kernel")
        kept = [row[0] for row in rows(page, "arguments-with-different-layouts")]
        assert kept and all("layer_1/kernel" in name for name in kept)
        page.locator("canvas").hover()
        assert page.get_by_text(re.compile("of the schedule: this .* other")).is_visible()


@pytest.mark.long
def test_two_programs_on_two_meshes(browser: Any, plans: tuple[Plan, Plan], tmp_path: Path):
    """The page says that the programs differ, and a plan from a file has no memory."""
    square = jax.ShapeDtypeStruct((64, 64), "float32")
    other = shardplan.plan(lambda state, batch: (state, batch @ batch), "data=8", square, square)
    other.save(tmp_path / "other.json")
    loaded = Plan.load(tmp_path / "other.json")
    for found in (other, loaded):
        difference = plans[0].diff(found)
        assert difference and str(difference).startswith("The plans are of two programs, `train_step` (")
        difference.to_html(tmp_path / "diff.html")
        for page in opened(browser, tmp_path / "diff.html"):
            assert "of two programs" in page.locator(".warning").inner_text()
            assert page.locator("canvas").count() == (found is other)
            assert not page.locator(".chips[tabindex]").count()
    with pytest.raises(ArgumentError, match="cannot write the page"):
        plans[0].diff(other).to_html(tmp_path / "missing" / "diff.html")


@needs_compiler
def test_plan_and_compiled_program(browser: Any, plans: tuple[Plan, Plan], tmp_path: Path):
    """Its sums are those of the audit. The curve of the compiled program reaches the compiled peak."""
    audit = shardplan.audit(plans[0])
    audit.to_html(tmp_path / "audit.html")
    sections = {one["id"]: one for one in data_of(tmp_path / "audit.html")["sections"]}
    sent = [sum(row[n] for row in sections["kinds-of-collectives"]["rows"]) for n in (4, 5)]
    assert sent == [audit.predicted_bytes, audit.compiled.communication_bytes]
    predicted, compiled = map(max, sections["memory-over-the-step"]["series"])
    assert predicted == pytest.approx(plans[0].peak_bytes, rel=1e-6)
    assert compiled == pytest.approx(audit.compiled.memory.peak, rel=0.02)
    for page in opened(browser, tmp_path / "audit.html", color_scheme="dark"):
        assert page.locator("h2").count() == len(sections)
        assert len(rows(page, "compiled-collectives")) == len(audit.compiled.collectives)


@pytest.mark.long
def test_page_in_a_notebook(browser: Any, plans: tuple[Plan, Plan], tmp_path: Path):
    """Links work in the frame, and do not lead to the notebook."""
    file = tmp_path / "notebook.html"
    file.write_text(f"<!doctype html><meta charset='utf-8'><body>{plans[0]._repr_html_()}")
    for page in opened(browser, file):
        frame = page.frames[1]
        frame.locator("#tab-memory").click()
        frame.locator("#cursor a").click()
        assert frame.locator("#panel h1").inner_text().startswith("op")
        frame.locator("#panel .close").click()
        assert not frame.locator("#panel").is_visible() and page.url == file.as_uri()
    assert html.escape("<script>") in plans[0]._repr_html_() and "<script>" not in plans[0]._repr_html_()
