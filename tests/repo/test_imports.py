"""Who may know whom: the table of import directions, held over every file by reading it (nothing is imported)."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("shardplan", "rules", "search", "models")

# What the files of a folder may import beside the standard library. Names end where a dot may follow.
ALLOWED = {
    "rules": ("shardplan.rules", "jax", "jaxlib", "numpy"),
    "search": ("shardplan.search", "numpy", "ortools"),
    "shardplan": ("shardplan", "jax", "jaxlib", "numpy", "ortools"),
    "models": ("shardplan", "jax", "jaxlib", "numpy", "equinox", "flax", "optax", "rich"),
}
FORBIDDEN = {
    "rules": ("jax.sharding", "jax.experimental"),
    "search": (),
    "shardplan": ("shardplan.models",),
    "models": ("shardplan.rules", "shardplan.search"),
}
INTERNALS_OF_JAX = ("jax._src", "jax.interpreters", "jax.extend", "jaxlib")


def modules_imported(tree: ast.AST) -> list[tuple[int, str]]:
    """Every imported module with its line, also the ones imported inside functions; `from a import b` gives `a.b`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                found.append((node.lineno, "." * node.level + (node.module or "")))
            else:
                found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def violations(folder: str, file_name: str, source: str) -> list[str]:
    """What a file imports against the table, one sentence each."""
    found = []
    for line, module in modules_imported(ast.parse(source)):
        where = f"{folder}/{file_name}:{line} imports `{module}`"
        if module.startswith("."):
            found.append(f"{where}: imports are absolute")
        elif module.split(".")[0] in sys.stdlib_module_names or module.startswith("pydoc_data"):
            continue
        elif not within(module, ALLOWED[folder]) or within(module, FORBIDDEN[folder]):
            found.append(f"{where}: {folder}/ must not know it")
        elif within(module, INTERNALS_OF_JAX) and Path(file_name).name != "_jax.py":
            found.append(f"{where}: only a module named _jax.py touches what JAX may change")
        elif folder == "models" and module.startswith("shardplan.") and "._" in module:
            found.append(f"{where}: models/ knows only what is public")
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_import_directions(folder: str):
    # rglob does not follow links, so the linked folders are read once, as themselves.
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = [
        violation
        for file in files
        for violation in violations(folder, str(file.relative_to(ROOT / folder)), file.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("folder", "line", "reason"),
    [
        ("rules", "from shardplan.plan import Plan", "rules/ must not know it"),
        ("rules", "from jax.sharding import Mesh", "rules/ must not know it"),
        ("rules", "from jax import sharding", "rules/ must not know it"),
        ("rules", "import ortools", "rules/ must not know it"),
        ("rules", "from . import errors", "imports are absolute"),
        ("rules", "from jax.extend.core import Primitive", "_jax.py"),
        ("search", "import jax", "search/ must not know it"),
        ("search", "def f():\n    import jax.numpy as jnp", "search/ must not know it"),
        ("search", "from shardplan import rules", "search/ must not know it"),
        ("shardplan", "from shardplan.models import gpt", "shardplan/ must not know it"),
        ("shardplan", "import flax.linen as nn", "shardplan/ must not know it"),
        ("shardplan", "from jax._src import core", "_jax.py"),
        ("models", "from shardplan import _jax", "only what is public"),
        ("models", "from shardplan.search import solve", "models/ must not know it"),
    ],
)
def test_a_planted_violation_is_found(folder: str, line: str, reason: str):
    (found,) = violations(folder, "planted.py", f"import os\nimport numpy as np\n{line}\n")
    assert reason in found


def test_what_is_allowed_passes():
    assert not violations("rules", "_jax.py", "from jax.extend.core import Primitive\nimport jax.numpy as jnp")
    assert not violations("shardplan", "plan.py", "from shardplan.rules import derive\nfrom shardplan import search")
    assert not violations(
        "models", "demo.py", "import shardplan\nfrom shardplan.compiled.hlo.collectives import collectives\nimport flax"
    )


@pytest.mark.parametrize("folder", ["rules", "search", "models"])
def test_linked_folder(folder: str):
    link = ROOT / "shardplan" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..") / folder
