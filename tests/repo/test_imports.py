"""Who may import whom, held over every file by reading it.

Three tables: what the linked folders may know of the rest, the order of the packages of `shardplan/`, and that of the
packages of `search/`. An import that is for types alone, or inside a function, counts like any other.
"""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("shardplan", "rules", "search", "models")

# Allowed imports of the files of a folder, in addition to the standard library. Names end where a dot may follow.
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


def test_allowed_imports():
    """They pass."""
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


# A package or module may import those of the lines above its own, and a package its own modules.
ORDER = {
    "shardplan": (
        ("errors", "_jax", "memoize"),
        ("common",),
        ("hardware",),
        ("layout",),
        ("options",),
        ("program",),
        ("frameworks",),
        ("problem",),
        ("memory",),
        ("timing",),
        ("apply", "source"),
        ("optimize",),
        ("compiled",),
        ("pages",),
        ("plans",),
        ("audits",),
        ("auto",),
        ("compare_plot",),
        ("compare", "together"),
        ("cli_arguments",),
        ("cli",),
        ("__main__",),
    ),
    "shardplan.search": (
        ("network", "solution", "budget", "or_tools"),
        ("graph",),
        ("run", "bounds"),
        ("solver",),
        ("structure",),
        ("limits",),
        ("improve", "rivals"),
        ("exact", "marginals"),
        ("methods",),
        ("testing", "iopddl", "__init__"),
    ),
}

# Whose inside other packages do not import: its face is the package itself, or those packages alone may.
INSIDES = {"shardplan.memory": (), "shardplan.compiled.hlo": ("compiled", "audits")}

# Imports inside functions and for types alone: what takes long to load and few need, and adapters to frameworks.
LATE = {"shardplan", "shardplan.cli", "shardplan.frameworks", "shardplan.frameworks.nnx"}

# Public names are imported when they are asked for.
FACE = "shardplan"


def sources(package: str) -> dict[str, str]:
    """The modules of a package, without the linked folders of `shardplan/`, with their texts."""
    root = ROOT / "search" if package == "shardplan.search" else ROOT / "shardplan"
    found = {}
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if package == "shardplan" and parts[0] in FOLDERS:
            continue
        found[".".join((package, *parts)).removesuffix(".__init__")] = file.read_text()
    return found


MODULES = {package: sources(package) for package in ORDER}


def imported(package: str, source: str) -> set[str]:
    """The modules of a package that a source imports."""
    found = set()
    for _, name in modules_imported(ast.parse(source)):
        while name.startswith(package + ".") and name not in MODULES[package]:
            name = name.rpartition(".")[0]
        if name in MODULES[package] and name != FACE:
            found.add(name)
    return found


def against_the_order(package: str, module: str, source: str) -> list[str]:
    """The imports of a module that its line of `ORDER` does not allow, one sentence each."""
    levels = {stage: level for level, stages in enumerate(ORDER[package]) for stage in stages}

    def stage(name: str) -> str:
        return name.removeprefix(package).removeprefix(".").split(".")[0] or "__init__"

    own = stage(module)

    def inside(other: str) -> bool:
        return stage(other) == own and other.count(".") > package.count(".") + 1

    others = imported(package, source)
    return sorted(f"{module} imports {one}" for one in others if levels[stage(one)] >= levels[own] and not inside(one))


@pytest.mark.parametrize("package", ORDER)
def test_order_of_packages(package: str):
    """Every module imports only packages of earlier stages, and modules of its own."""
    modules = {name: text for name, text in MODULES[package].items() if name != FACE}
    assert not [found for name, text in modules.items() for found in against_the_order(package, name, text)]


@pytest.mark.parametrize("package", ORDER)
def test_circles(package: str):
    """No modules import each other in a circle: sorting them raises where some do."""
    graph = {name: imported(package, text) - {name} for name, text in MODULES[package].items() if name != FACE}
    assert list(TopologicalSorter(graph).static_order())


def into_insides(module: str, source: str) -> list[str]:
    """The imports of modules behind the face of another package, one sentence each."""
    return [
        f"{module} imports {other}"
        for package, may in INSIDES.items()
        for other in imported("shardplan", source)
        if other.startswith(package + ".") and not module.startswith(package)
        if module.split(".")[1] not in may
    ]


def test_insides_are_private():
    """Other packages import the memory model from its face, and HLO is read by those who compile and audit."""
    modules = {name: text for name, text in MODULES["shardplan"].items() if name != FACE}
    assert not [found for name, text in modules.items() for found in into_insides(name, text)]


def late_imports(source: str) -> list[str]:
    """The modules of the library that a source imports inside a function or for types alone."""
    tree, found = ast.parse(source), []
    for node in ast.walk(tree):
        typed = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if typed or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found += [name for _, name in modules_imported(node) if within(name, ("shardplan",))]
    return found


@pytest.mark.parametrize("package", ORDER)
def test_imports_stand_at_the_top(package: str):
    """A type-only circle is a circle: no module of the library is imported late but by those that say why."""
    found = {name: late_imports(text) for name, text in MODULES[package].items() if name not in LATE}
    assert not {name: late for name, late in found.items() if late}


def test_top_level_is_small():
    """Packages are stages. The other modules are the public face, and modules that all packages use."""
    assert len([name for name in MODULES["shardplan"] if name.count(".") == 1 and not _is_package(name)]) <= 14


def _is_package(name: str) -> bool:
    return any(other.startswith(name + ".") for other in MODULES["shardplan"])


@pytest.mark.slow
def test_public_names_after_imports_of_submodules():
    """`shardplan.plan` and the other public names stay the same after any imports, in any order."""
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "import shardplan\n"
        "assert all(callable(getattr(shardplan, name)) for name in ('plan', 'audit', 'auto', 'compare', 'simulate'))\n"
    )
    names = [name for package in ORDER for name in MODULES[package] if not name.endswith("__main__")]
    optional = ("shardplan.frameworks.equinox", "shardplan.frameworks.linen", "shardplan.frameworks.nnx")
    chosen = [name for name in names if name not in optional]
    subprocess.run([sys.executable, "-c", script, *chosen], check=True, cwd=ROOT, capture_output=True)


@pytest.mark.parametrize(
    ("package", "module", "line"),
    [
        ("shardplan", "shardplan.layout.mesh", "from shardplan.plans.plan import Plan"),
        ("shardplan", "shardplan.timing.tasks", "from shardplan.apply import replay"),
        ("shardplan", "shardplan.problem.schedule", "def f():\n    import shardplan.memory.model"),
        ("shardplan", "shardplan.options", "from shardplan.program.program import Program"),
        ("shardplan.search", "shardplan.search.graph.tables", "from shardplan.search.run import Run"),
        ("shardplan.search", "shardplan.search.run", "from shardplan.search.bounds.trws import Sweeper"),
        ("shardplan.search", "shardplan.search.exact", "import shardplan.search.methods"),
    ],
)
def test_a_planted_import_against_the_order(package: str, module: str, line: str):
    assert len(against_the_order(package, module, line)) == 1


def test_planted_late_and_inside_imports():
    assert late_imports("def f():\n    from shardplan.plans.plan import Plan") == ["shardplan.plans.plan.Plan"]
    assert late_imports("if TYPE_CHECKING:\n    from shardplan.plans.plan import Plan")
    assert into_insides("shardplan.optimize.state", "from shardplan.memory.kernels import whole_kernels")
    assert not into_insides("shardplan.optimize.state", "from shardplan.memory import Lifetimes")


def test_an_import_in_the_order_passes():
    source = "from shardplan.search.graph.graph import Graph\nfrom shardplan.search.bounds import trws"
    assert not against_the_order("shardplan.search", "shardplan.search.bounds.lagrangian", source)
