"""The documents: their Python runs, commands exist, extras are declared, links have targets."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from shardplan.cli import main

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NAMES = [str(document.relative_to(ROOT)) for document in DOCUMENTS]


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    return sorted({line for document in DOCUMENTS for block in blocks(document, "sh") for line in block.splitlines()})


@pytest.mark.slow
@pytest.mark.parametrize(
    "document",
    [
        pytest.param(path, marks=[pytest.mark.long] * (path.name in ("training.md", "frameworks.md", "recompute.md")))
        for path in DOCUMENTS
    ],
    ids=NAMES,
)
def test_python_runs(document: Path):
    namespace: dict[str, Any] = {}
    for block in blocks(document, "python"):
        if "shardplan.audit(" in block and find_spec("jax_plugins") is None:
            continue
        exec(compile(block, str(document), "exec"), namespace)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [pytest.param(line, marks=[pytest.mark.long] * (" compare " in line)) for line in commands()]
)
def test_command(command: str):
    program, *arguments = command.replace("'", "").split()
    if program == "make":
        result = subprocess.run(
            ["make", "--dry-run", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
    elif program == "pip":
        declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert arguments[:2] == ["install", "-e"]
        assert set(re.findall(r"[\w-]+", arguments[2])) <= set(declared)
    elif program == "shardplan":
        if arguments[0] == "audit" and find_spec("jax_plugins") is None:
            pytest.skip("the extra `audit` is not installed")
        assert main(arguments) == 0
    elif program.endswith("/python"):
        assert arguments[0] == "-m"
        assert find_spec(arguments[1]) is not None
    else:
        pytest.fail(f"`{command}` is shown and not tested: say here how")


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_links_and_paths(document: Path):
    text = document.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    missing = [link for link in links if not (document.parent / link).exists()]
    # A path in backticks with a folder and a file ending is a file of this repository.
    paths = re.findall(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|md|ipynb|toml))`", text)
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert not missing


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="the extra `docs` is not installed")
def test_site_builds(tmp_path: Path):
    """Without a warning: each page is in the navigation, each link and anchor exists, each name of the API is found."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr


def test_readme_names_every_extra_and_both_commands():
    readme = (ROOT / "README.md").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in ("make demo", "make test", *extras):
        assert word in readme


def test_continuous_integration_runs_the_tests():
    script = ROOT / ".ci" / "run"
    assert "make test" in script.read_text()
    assert script.stat().st_mode & 0o111
