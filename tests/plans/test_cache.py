"""The cache of plans: what it keeps, what it is keyed by, and that nothing of it can fail a planning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.errors import PlanMismatchError, ShardplanWarning
from shardplan.hardware import load
from shardplan.plans import cache
from shardplan.plans.cache import VARIABLE, Cache, default_cache
from shardplan.rules.registry import forget
from tests.helpers.loop_programs import scan_loss
from tests.helpers.random_programs import assert_equal_trees, mesh_of

S = jax.ShapeDtypeStruct
MESH = AbstractMesh((2, 4), ("x", "y"))
ARGS = (S((4, 64, 64), jnp.float32), S((64, 64), jnp.float32))
PINS = {"0": P(None, "y"), "1": P("x")}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "plans"))
    cache._warned_folders.clear()
    yield tmp_path / "plans"
    cache._warned_folders.clear()


def step(weights: Any, x: Any) -> Any:
    value, gradients = jax.value_and_grad(scan_loss)(weights, x)
    return weights - 0.1 * gradients, value


def make(fn: Any = step, mesh: Any = MESH, args: Any = ARGS, **options: Any) -> shardplan.Plan:
    return shardplan.plan(fn, mesh, *args, **({"pins": PINS} | options))


def assert_same(one: shardplan.Plan, other: shardplan.Plan) -> None:
    assert one.collectives == other.collectives
    assert one.arguments == other.arguments
    assert one.recipe == other.recipe
    assert (one.objective, one.lower_bound, one.peak_bytes) == (other.objective, other.lower_bound, other.peak_bytes)
    assert one.mesh_axes == other.mesh_axes


def test_second_planning_does_not_search(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make()
    assert not first.statistics["cached"] and len(list(folder.iterdir())) == 1
    monkeypatch.setattr("shardplan.plans.pipeline.SEARCHES", None)
    second = make()
    assert second.statistics["cached"] and second.statistics["seconds"]["search"] == 0
    assert_same(first, second)


@pytest.mark.slow
def test_kept_plan_runs_and_explains(folder: Path) -> None:
    mesh = mesh_of((2, 4))
    args = tuple(jnp.asarray(np.random.default_rng(0).normal(size=s.shape) * 0.1, s.dtype) for s in ARGS)
    make(mesh=mesh)
    planned = shardplan.auto(step, mesh, pins=PINS)
    assert planned.plan(*args).statistics["cached"]
    assert_equal_trees(planned(*args), jax.jit(step)(*args))
    assert "0" in planned.plan(*args).explain("0")


def test_source_lines_are_those_of_now(folder: Path) -> None:
    def same(weights: Any, x: Any) -> Any:
        return step(weights, x)

    assert make().program.fingerprint() == make(same).program.fingerprint()
    assert make(same).statistics["cached"]


@pytest.mark.parametrize(
    "other",
    [
        {"mesh": AbstractMesh((2, 4), ("a", "b")), "pins": None},
        {"mesh": AbstractMesh((4, 2), ("x", "y"))},
        {"pins": {"1": P("x")}},
        {"objective": "time"},
        {"hardware": "a100"},
        {"hardware": replace(load("h100"), launch_seconds=1e-5)},
        {"memory_limit": 1e9},
        {"reduce_dtype": "bfloat16"},
        {"time_limit": 30.0},
        {"donate_argnums": 0},
        {"args": (ARGS[0], S((128, 64), jnp.float32))},
        {"fn": lambda w, x: step(w, x * 2)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_other_problems(folder: Path, other: dict[str, Any]) -> None:
    """The cache has no entry for another program, mesh or option."""
    make()
    assert not make(**other).statistics["cached"]
    assert len(list(folder.iterdir())) == 2


def test_other_versions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache has no entry for another version of the library."""
    make()
    monkeypatch.setattr(cache, "library_version", lambda: "0.0.1")
    assert not make().statistics["cached"]
    monkeypatch.setattr(cache, "_code", lambda: "another")
    assert not make().statistics["cached"]


def test_the_files_of_a_version() -> None:
    """The digest covers all files that a plan depends on."""
    make()
    loaded = {Path(m.__file__) for name, m in sys.modules.items() if name.startswith("shardplan.") and m.__file__}
    assert {path for path in loaded if "models" not in path.parts} <= set(cache.code_files())


@pytest.mark.slow
def test_other_descriptions(folder: Path) -> None:
    """The cache has no entry for other descriptions of operations."""
    make()
    shardplan.rules.describe("a foreign function", "i j -> i j")
    try:
        assert not make().statistics["cached"]
        for factor in (2, 3):
            lambdas = eval(f"lambda x: lambda i, j: x[i, j] * {factor}")
            shardplan.rules.describe("a foreign function", lambdas, replace=True)
            assert not make().statistics["cached"]
        assert make().statistics["cached"]
    finally:
        forget("a foreign function")
    assert make().statistics["cached"]


def test_an_entry_for_other_variables_is_refused(folder: Path) -> None:
    make()
    (path,) = folder.iterdir()
    document = json.loads(path.read_text())
    Cache(folder).write(document["key"], document["content"] | {"network": "another"})
    with pytest.raises(PlanMismatchError, match=VARIABLE):
        make().explain("0")


def test_a_kept_plan_is_read_without_rules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make()
    monkeypatch.setattr("shardplan.plans.pipeline.build_problem", None)
    second = make()
    assert second.statistics["cached"] and str(second.in_shardings) == str(first.in_shardings)


def test_warnings_of_a_cached_plan(folder: Path) -> None:
    """They recur at each planning."""

    def endless(x: Any) -> Any:
        return jax.lax.while_loop(lambda y: y.sum() < 1e9, lambda y: y * 2, x)

    for cached in (False, True):
        with pytest.warns(ShardplanWarning, match="runs as often as its data say"):
            assert make(endless, args=ARGS[1:], pins=None).statistics["cached"] is cached


def test_warnings_of_layouts_of_a_cached_plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They recur at each planning, without rules."""
    for _ in range(2):
        with pytest.warns(ShardplanWarning, match="divides dimension 0"):
            plan = make(jnp.sum, args=(S((7, 9), jnp.float32),), pins=None)
        monkeypatch.setattr("shardplan.plans.pipeline.build_problem", None)
    assert plan.statistics["cached"]


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"key": 1}', "\x00" * 100, "half", "changed", "bytes"])
def test_a_torn_entry(folder: Path, damage: str) -> None:
    """It gets one warning, and the program is planned again."""
    first = make()
    (path,) = folder.iterdir()
    text = path.read_text()
    texts = {"half": text[: len(text) // 2], "changed": text.replace('"objective": ', '"objective": 1', 1)}
    path.write_bytes(b"\xff\xfe\x80" if damage == "bytes" else texts.get(damage, damage).encode())
    with pytest.warns(ShardplanWarning, match="torn or was changed") as said:
        second = make()
    assert len(said) == 1 and not second.statistics["cached"]
    assert_same(first, second)
    assert make().statistics["cached"]  # the damaged one was replaced


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets one warning."""
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "plans"))
    cache._warned_folders.clear()
    with pytest.warns(ShardplanWarning, match=rf"cannot be .*\n*.*{VARIABLE}") as said:
        make()
        make()
    assert len(said) == 1


def test_a_failed_write(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No temporary file stays in the folder."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(ShardplanWarning, match="No space left"):
        make()
    assert list(folder.iterdir()) == []


def test_the_variable_is_read_at_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "a"))
    assert default_cache() == Cache(tmp_path / "a")
    monkeypatch.setenv(VARIABLE, "")
    assert default_cache() is None
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == Cache(tmp_path / "shardplan" / "plans")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache() == Cache(tmp_path / "home" / ".cache" / "shardplan" / "plans")


def test_an_empty_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It turns the cache off."""
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    make()
    assert not make().statistics["cached"] and list(tmp_path.iterdir()) == []


def test_meshes_to_choose_from(folder: Path) -> None:
    first, second = make(mesh=8, pins=None), make(mesh=8, pins=None)
    assert second.statistics["cached"] and second.statistics["meshes"] == first.statistics["meshes"]
    assert_same(first, second)
    assert str(first) == str(second)


def test_many_writers_and_readers(folder: Path) -> None:
    contents = [{"choices": str(n) * 50_000} for n in range(8)]

    def write_and_read(number: int) -> bool:
        kept = Cache(folder)
        for _ in range(10):
            kept.write("key", contents[number])
            if kept.read("key", dict) not in contents:
                return False
        return True

    with warnings.catch_warnings(), ThreadPoolExecutor(8) as pool:
        warnings.simplefilter("error")
        assert all(pool.map(write_and_read, range(8)))
    assert [path.name for path in folder.iterdir()] == ["key.json"]


def test_oldest_entries_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_MAX_ENTRIES", 3)
    for number in range(5):
        Cache(folder).write(f"key{number}", {})
        os.utime(folder / f"key{number}.json", (number, number))
    assert sorted(path.stem for path in folder.iterdir()) == ["key2", "key3", "key4"]


@pytest.mark.long
def test_other_processes_find_it(folder: Path) -> None:
    make()
    script = "import tests.plans.test_cache as t; print(t.make().statistics['cached'])"
    environment = os.environ | {"PYTHONHASHSEED": "7", "JAX_PLATFORMS": "cpu"}
    root = Path(__file__).parents[2]
    found = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=root, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["True"]
