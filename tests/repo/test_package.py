"""The installed package: the wheel has the linked folders, the type checker reads them, ruff finds no fault."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("shardplan", "rules", "search", "models")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The repository's sources in a folder of their own, to build and to break; the links stay links."""
    target = tmp_path / "repository"
    ignore = shutil.ignore_patterns(".git", ".venv", "*.egg-info", ".*_cache", "build", "dist", "__pycache__")
    shutil.copytree(ROOT, target, symlinks=True, ignore=ignore)
    return target


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [("check",), ("format", "--check")])
def test_ruff(arguments: tuple[str, ...]):
    result = run(sys.executable, "-m", "ruff", *arguments, ".")
    assert result.returncode == 0, result.stdout


@pytest.mark.long
def test_wheel_holds_the_linked_folders(copy: Path):
    result = run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", ".", cwd=copy)
    assert result.returncode == 0, result.stderr
    (wheel,) = (copy / "dist").glob("shardplan-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        archive.extractall(copy / "installed")
    assert {name.split("/")[0] for name in files} == {"shardplan"}
    for folder in FOLDERS:
        package = "shardplan" if folder == "shardplan" else f"shardplan/{folder}"
        sources = {f"{package}/{file.relative_to(ROOT / folder)}" for file in (ROOT / folder).rglob("*.py")}
        assert sources <= files
    data = {
        str(file.relative_to(ROOT))
        for folder in ("gpu_targets", "hardware_profiles")
        for file in (ROOT / "shardplan" / folder).glob("*.*")
    }
    pages = {f"shardplan/pages/page.{name}" for name in ("html", "css", "js")}
    assert data | pages | {"shardplan/py.typed"} <= files
    probe = "import shardplan.rules, shardplan.search; print(shardplan.rules.__file__, shardplan.auto)"
    # From its folder, which comes first on the path, before this repository.
    result = run(sys.executable, "-W", "error", "-c", probe, cwd=copy / "installed")
    assert result.stdout.startswith(str(copy / "installed" / "shardplan" / "rules")), result.stderr


@pytest.mark.long
def test_type_checker_finds_exactly_the_planted_errors(copy: Path):
    """A checker that reads nothing reports no errors: so plant one in each folder, and expect those and no others."""
    for folder in FOLDERS:
        (copy / folder / "planted.py").write_text('number: int = "text"\n')
    result = run(sys.executable, "-m", "mypy", "--no-error-summary", cwd=copy)
    errors = {line for line in result.stdout.splitlines() if ": error: " in line}
    planted = {line for line in errors if "planted.py:1: error: Incompatible types in assignment" in line}
    assert len(planted) == len(FOLDERS), result.stdout + result.stderr
    assert not errors - planted
