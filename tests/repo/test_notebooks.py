"""Notebooks: they run from the first cell to the last, and are kept with the outputs that they give."""

from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
# The notebook's kernel is a process of its own; what its client warns about on the way is not ours.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning", "ignore::ResourceWarning")
def test_notebook_runs(path: Path):
    notebook = nbformat.read(path, as_version=4)
    kept = outputs_of(notebook)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    found = outputs_of(notebook)
    assert [kind for kind, _ in found] == [kind for kind, _ in kept]
    stated = [(old, new) for (kind, old), (_, new) in zip(kept, found, strict=True) if kind == "text/markdown"]
    assert stated
    for old, new in stated:  # the figures of the plan
        assert old == new


def outputs_of(notebook: Any) -> list[tuple[str, str]]:
    """The kind of each output, and its text or data. Notices on standard error are none."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            kind = next((kind for kind in ("image/png", "text/markdown", "text/html") if kind in data), "text")
            if output.get("name") != "stderr":
                found.append((kind, str(data.get(kind, ""))))
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_is_kept_with_pictures(path: Path):
    """It has the page of the plan, the timeline, and pictures of layouts, comparison, memory, limit and scaling."""
    kinds = [kind for kind, _ in outputs_of(nbformat.read(path, as_version=4))]
    assert kinds.count("image/png") >= 5 and kinds.count("text/html") >= 3
    assert path.stat().st_size < 1_000_000
