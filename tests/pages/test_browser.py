"""The page in a headless Chromium: views, search, filter, drawings, links and keys, without an error on the console.

The browser is that of the variable SHARDPLAN_CHROMIUM, of the system, or of `playwright install chromium`. Tests skip
where none is installed. With SHARDPLAN_NEEDS_BROWSER=1, as in `.ci/run`, they fail there.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh

import shardplan
from shardplan import Plan
from shardplan.models import llama

pytestmark = pytest.mark.slow

MESH = AbstractMesh((2, 4), ("data", "model"))
VIEWS = ("tensors", "collectives", "memory", "program", "timeline")


def missing(reason: str) -> None:
    if os.environ.get("SHARDPLAN_NEEDS_BROWSER"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if find_spec("playwright") is None:
        missing("Playwright is not installed: it is in the extra `dev`")
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome")
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        found = [os.environ.get("SHARDPLAN_CHROMIUM"), *map(shutil.which, names), own if Path(own).exists() else None]
        path = next(filter(None, found), None)
        if path is None:
            missing("no Chromium: `apt-get install chromium`, `playwright install chromium`, or SHARDPLAN_CHROMIUM")
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def plan() -> Plan:
    config = replace(llama.SMALL, width=512, mlp=1024, layers=3, sequence=256)
    training = llama.training(config)
    return shardplan.plan(training.train_step, MESH, training.state, training.batch, donate_argnums=0)


@pytest.fixture(scope="module")
def file(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    plan.to_html(path)
    return path


def opened(browser: Any, path: Path, fragment: str = "", **options: Any) -> Iterator[Any]:
    """A page whose console has no message, and which loads nothing but itself."""
    page = browser.new_page(**options)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda one: said.extend([] if one.url.startswith(("file:", "data:")) else [one.url]))
    page.goto(f"{path.as_uri()}{fragment}")
    yield page
    page.close()
    assert not said


@pytest.fixture
def page(browser: Any, file: Path) -> Iterator[Any]:
    yield from opened(browser, file)


def selected(page: Any) -> str:
    found: str = page.locator("[role=tab][aria-selected=true]").get_attribute("data-view")
    return found


def test_views_by_clicks_and_keys(page: Any):
    for number, view in enumerate(VIEWS):
        page.locator(f"#tab-{view}").click()
        page.wait_for_url(re.compile(f"#{view}$"))
        assert selected(page) == view
        page.keyboard.press(str((number + 1) % 5 + 1))
        page.wait_for_url(re.compile(f"#{VIEWS[(number + 1) % 5]}$"))
        assert selected(page) == VIEWS[(number + 1) % 5]
    page.locator("#tab-tensors").click()
    page.keyboard.press("ArrowRight")
    page.wait_for_url(re.compile("#collectives$"))


def test_sums_that_are_shown(page: Any, plan: Plan):
    """The bytes of the table of collectives, and the bytes at the peak, are those of the plan."""
    page.keyboard.press("2")
    sent = page.locator("#sent")
    assert float(sent.get_attribute("data-bytes")) == plan.communication_bytes
    assert sent.inner_text() in page.locator(".figure").first.inner_text()
    page.keyboard.press("3")
    assert float(page.locator("#held").get_attribute("data-bytes")) == pytest.approx(plan.peak_bytes, rel=1e-6)
    assert page.locator("#held").inner_text() in page.locator(".figure").nth(1).inner_text()


def test_search_of_tensors(page: Any):
    page.keyboard.press("/")
    page.keyboard.type("mlp/up")
    rows = page.locator("table[role=treegrid] tbody tr")
    assert any("kernel" in text for text in rows.all_inner_texts())
    assert not any("query" in text for text in rows.all_inner_texts())
    page.locator("input[type=search]").fill("no such tensor")
    assert page.get_by_text("Nothing matches").is_visible()


def test_filter_of_whole_tensors(browser: Any, tmp_path: Path):
    """It keeps tensors over 1 MB that no mesh axis splits."""
    large, small = (jax.ShapeDtypeStruct((n, n), "float32") for n in (1024, 64))
    pins = {"0": jax.sharding.PartitionSpec(), "1": jax.sharding.PartitionSpec("data")}
    plan = shardplan.plan(lambda x, y, z: (x @ y, z @ z), MESH, large, large, small, pins=pins)
    plan.to_html(tmp_path / "plan.html")
    for page in opened(browser, tmp_path / "plan.html"):
        page.locator("#whole").check()
        leaves = page.locator("table[role=treegrid] tbody tr:not([aria-expanded])").all_inner_texts()
        assert any(text.split()[0] == "0" for text in leaves)
        assert not any(text.split()[0] in ("1", "2") for text in leaves)


def test_tree_by_keys(page: Any):
    row = page.locator("table[role=treegrid] tbody tr").first
    row.focus()
    count = page.locator("table[role=treegrid] tbody tr").count()
    page.keyboard.press("ArrowLeft")
    assert page.locator("table[role=treegrid] tbody tr").count() < count
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.locator("tr:focus").get_attribute("aria-level") == "2"
    page.keyboard.press("ArrowLeft")
    assert page.locator("tr:focus").get_attribute("aria-level") == "1"


def test_mesh_on_hover(page: Any):
    """Each device of the mesh is drawn."""
    page.locator("input[type=search]").fill("mlp up kernel")
    page.locator(".chips[tabindex]").first.hover()
    assert page.locator("#tip").is_visible()
    assert page.locator("#tip .grid i").count() == 8
    page.locator("h1").first.hover()
    assert not page.locator("#tip").is_visible()


def test_link_to_an_operation(browser: Any, file: Path, plan: Plan):
    """It opens with its source line. Links lead to operands, and Escape closes it."""
    operation = next(o for o in plan.program.operations if o.primitive.name == "dot_general")
    for page in opened(browser, file, f"#op{operation.index}"):
        panel = page.locator("#panel")
        assert f"op{operation.index} dot_general" in panel.inner_text()
        assert operation.source in panel.inner_text()
        panel.locator("a").first.click()
        page.wait_for_url(re.compile(f"#(?!op{operation.index}$)"))
        assert not panel.locator("h1").inner_text().startswith(f"op{operation.index} ")
        page.keyboard.press("Escape")
        assert not panel.is_visible()


def test_prices_of_other_layouts(browser: Any, file: Path, plan: Plan):
    """They are those of `explain` without time, of operations that send and of large arguments."""
    for page in opened(browser, file):
        names = page.evaluate("Object.keys(D.why)")
        for name in (names[0], next(one for one in names if one.startswith("arg"))):
            page.evaluate(f"location.hash = '#{name}'")
            page.wait_for_url(re.compile(f"#{name}$"))
            path = plan.arguments[int(name[3:])].path if name.startswith("arg") else name
            explained = plan.explain(path, time_limit=0)
            label, price = page.evaluate(f"D.why['{name}'][0]")
            assert f"{label}: {price}" in explained
            assert label in page.locator("#panel").inner_text() and price in page.locator("#panel").inner_text()


def test_link_to_a_missing_operation(browser: Any, file: Path):
    for page in opened(browser, file, "#op99999999"):
        assert "There is no op99999999" in page.locator("#panel").inner_text()


def test_treemap_filters_the_table(page: Any, plan: Plan):
    page.keyboard.press("2")
    page.locator("svg.map g").first.click()
    assert 0 < float(page.locator("#sent").get_attribute("data-bytes")) < plan.communication_bytes


def test_curve_of_the_compiled_step(browser: Any, plan: Plan, tmp_path: Path):
    """A verified plan has it in the memory view."""
    held = {operation.index: 3e9 + operation.index for operation in plan.program.operations}
    replace(plan, held=held).to_html(tmp_path / "plan.html")
    for page in opened(browser, tmp_path / "plan.html", "#memory"):
        assert page.locator("#compiled").inner_text() == "line: the compiled step, at most 3.00 GB"


def test_cursor_of_the_memory(page: Any):
    """The tensors at the cursor add up to the bytes that are held there."""
    page.keyboard.press("3")
    page.locator("canvas").focus()
    page.keyboard.press("Home")
    first = page.locator("#cursor").inner_text()
    assert first.startswith("Position 0:")
    page.keyboard.press("PageDown")
    assert page.locator("#cursor").inner_text() != first
    held = page.evaluate("[liveAt(MEMORY.peak).reduce((sum, one) => sum + one.bytes, 0), MEMORY.total[MEMORY.peak]]")
    assert held[0] == held[1] > 0


def test_timeline_zooms_and_opens(page: Any):
    page.keyboard.press("5")
    canvas = page.locator("canvas")
    canvas.focus()
    whole = canvas.screenshot()
    page.keyboard.press("+")
    assert canvas.screenshot() != whole
    page.keyboard.press("0")
    box = canvas.bounding_box()
    lane = page.evaluate("TIMELINE[0]")
    longest = max(range(len(lane["length"])), key=lambda place: lane["length"][place])
    share = (lane["start"][longest] + lane["length"][longest] / 2) / page.evaluate("D.timeline.nanoseconds")
    page.mouse.click(box["x"] + 150 + share * (box["width"] - 156), box["y"] + 34)
    page.wait_for_url(re.compile(f"#op{lane['operation'][longest]}$"))
    assert page.locator("#panel").is_visible()


def test_timeline_for_perfetto(page: Any, plan: Plan):
    """The trace has the events of the simulation, a thread per lane."""
    page.keyboard.press("5")
    with page.expect_download() as download:
        page.get_by_text("Save for Perfetto").click()
    events = json.loads(Path(download.value.path()).read_text())["traceEvents"]
    lanes = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert lanes == {"compute", *("network of " + ", ".join(one.axes) for one in plan.collectives)}
    simulated = shardplan.simulate(plan)
    assert max(event.get("ts", 0) + event.get("dur", 0) for event in events) == pytest.approx(1e6 * simulated.seconds)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_of_the_system(browser: Any, file: Path, scheme: str):
    for page in opened(browser, file, color_scheme=scheme):
        dark = "getComputedStyle(document.body).backgroundColor === 'rgb(20, 23, 27)'"
        assert page.evaluate(dark) == (scheme == "dark")
        page.get_by_text("Light or dark").click()
        assert page.evaluate(dark) == (scheme == "light")


def test_names_that_look_like_html(browser: Any, tmp_path: Path):
    """They are shown as text, and run nothing."""
    name = "<script>document.title='run'</script><img src=x onerror=alert(1)>"
    square = jax.ShapeDtypeStruct((512, 512), "float32")
    shardplan.plan(lambda x: {"y": x[name] @ x[name]}, MESH, {name: square}).to_html(tmp_path / "plan.html")
    for page in opened(browser, tmp_path / "plan.html", "#arg0"):
        assert name in page.locator("#panel").inner_text()
        assert page.title() != "run"
        assert not page.locator("img").count()


@pytest.mark.long
def test_page_of_32_layers(browser: Any, tmp_path: Path):
    """An unrolled Llama of 32 layers has a page under 2 MB, which opens under 2 s."""
    training = llama.training(replace(llama.SMALL, layers=32, width=256, mlp=512))
    plan = shardplan.plan(training.train_step, MESH, training.state, training.batch)
    path = tmp_path / "plan.html"
    plan.to_html(path)
    assert len(plan.program.operations) > 10_000
    assert path.stat().st_size < 2_000_000
    started = time.monotonic()
    for page in opened(browser, path):
        assert time.monotonic() - started < 2
        page.locator("input[type=search]").fill("parameters mlp up kernel")
        assert "×32" in page.locator("main").inner_text()
