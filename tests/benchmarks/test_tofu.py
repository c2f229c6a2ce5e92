"""The Tofu benchmark on a model small enough to plan by every search in seconds."""

import math
from dataclasses import replace

import pytest

from benchmarks import tofu
from shardplan.models import lstm

pytestmark = pytest.mark.long
TINY = replace(lstm.SMALL, layers=1, hidden=512, embed=256, sequence=2, batch=64)


@pytest.fixture(scope="module")
def found() -> tofu.Found:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tofu, "config_of", lambda name: TINY)
        return tofu.measure("tiny")


def test_exact_is_at_or_below_every_rival(found: tofu.Found):
    best = min(found.ways[method].bytes_sent for method in tofu.RIVALS)
    assert found.ways[tofu.OVER_FACTORS].bytes_sent <= best
    assert set(found.ways) == {*tofu.SEARCHES, *tofu.PLACEMENT_METHODS}
    assert 0 < found.ways["exact"].search_seconds < found.planning_seconds


def test_throughputs_are_below_the_ideal(found: tofu.Found):
    assert found.small is not None
    assert found.small[0] == TINY.batch, "all of it fits one device"
    for way in found.ways.values():
        assert way.step_seconds >= found.single_seconds / tofu.DEVICES
    name, ideal, *rates = tofu.throughput_cells("tiny", found)
    assert (name, float(ideal)) == ("tiny", pytest.approx(8 * 64 / found.single_seconds, rel=0.01))
    assert all(float(rate.split()[0]) <= float(ideal) * 1.01 for rate in rates)


def test_rows_have_a_cell_per_column(found: tofu.Found):
    sent, seconds = tofu.search_rows("tiny", found)
    missing = replace(found, ways={title: way for title, way in found.ways.items() if title != tofu.OVER_FACTORS})
    rows = (sent, seconds, *tofu.search_rows("tiny", missing))
    widths = [len(tofu.TABLES[f"Figure 11: {what}"]) for what in ("MB sent", "seconds to search")]
    assert [len(row) for row in rows] == 2 * widths
    assert rows[2][6] == "-"
    assert len(tofu.memory_cells("tiny", found)) == len(tofu.TABLES["Memory: GB at the peak"])
    assert tofu.memory_row("rnn-8-8k")[1:] == ("45.3", "45.50", "+0.4 %")


def test_marks_of_memory(found: tofu.Found):
    """Cells have a mark for plans that fit."""
    large = tofu.Way(1e9, 100e9, 1.0)
    cells = tofu.memory_cells("tiny", replace(found, ways=found.ways | {"exact": large}))
    assert cells[-4] == "100.0 !"
    assert all(cell.endswith(" *") for cell in (*cells[1:5], *cells[-3:]))
    assert math.isnan(found.ways["recursive"].gap)
