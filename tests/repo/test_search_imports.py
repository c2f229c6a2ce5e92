"""The order of the packages of `search/`, held over every file by reading its imports (nothing is imported)."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "search"
PREFIX = "shardplan.search"
# A package or module may import those of lines above its own, and a package its own modules.
ORDER = (
    ("network", "solution", "budget", "or_tools"),
    ("graph",),
    ("run", "bounds"),
    ("solver",),
    ("structure",),
    ("limits",),
    ("improve", "rivals"),
    ("exact",),
    ("methods",),
    ("testing", "iopddl", "__init__"),
)
LEVEL = {stage: level for level, stages in enumerate(ORDER) for stage in stages}
MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file.read_text()
    for file in ROOT.rglob("*.py")
}


def imported(source: str) -> set[str]:
    """The modules of `search/` that a source imports, type-only and function-local imports too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name == PREFIX or name.startswith(PREFIX + "."):
                module = name.removeprefix(PREFIX).removeprefix(".")
                while module and module not in MODULES:
                    module = module.rpartition(".")[0]
                found.add(module or "__init__")
    return found


def against_the_order(module: str, source: str) -> list[str]:
    """The imports of a module that its line of `ORDER` does not allow."""
    own = module.split(".")[0]
    stages = {other: other.split(".")[0] for other in imported(source)}
    return sorted(
        f"{module} imports {other}"
        for other, stage in stages.items()
        if LEVEL[stage] >= LEVEL[own] and not (stage == own and "." in other)
    )


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_of_a_module(module: str):
    """Every module imports only what stands before it in the order."""
    assert not against_the_order(module, MODULES[module])


def test_import_circles():
    """No modules import each other in a circle: sorting them raises where some do."""
    assert list(TopologicalSorter({module: imported(source) for module, source in MODULES.items()}).static_order())


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("graph.tables", "from shardplan.search.run import Run"),
        ("run", "from shardplan.search.bounds.trws import Sweeper"),
        ("solver.diving", "def f():\n    from shardplan.search.limits import knapsack"),
        ("exact", "import shardplan.search.methods"),
        ("rivals.tofu", "from shardplan.search import solve"),
    ],
)
def test_planted_import(module: str, line: str):
    """An import against the order is found."""
    assert len(against_the_order(module, line)) == 1


def test_planted_import_in_the_order():
    """An import of an earlier package, and of the own one, is allowed."""
    source = "from shardplan.search.graph.graph import Graph\nfrom shardplan.search.bounds import trws"
    assert not against_the_order("bounds.lagrangian", source)
    assert imported(source) == {"graph.graph", "bounds.trws"}
