"""Files that somebody has altered, their checksums repaired: an error of this library, or a plan that is right."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan import ArgumentError, Plan, PlanMismatchError, ShardplanError
from shardplan.common.entries import MalformedError, read
from shardplan.hardware import load
from shardplan.plans.cache import VARIABLE
from shardplan.plans.file import checksum

FORMAT = ("format", "format_version", "shardplan_version", "checksum")
REFINED = {"way": "as asked", "kept": True, "result": "compiled", "compiled_seconds": 0.1}


def nested(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


OTHERS: tuple[Any, ...] = (
    *(None, True, -1, 7, 10**30, 10**400, 1.5, float("nan"), float("inf"), "", "nosuch", "1 2"),
    *([], ["data", "data"], [["nosuch"]], {}, {"data": 1}, nested(30), nested(400)),
)
"""What takes the place of an entry."""


def step(w: Any, x: Any) -> Any:
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


ARGS = tuple(np.float32(np.random.default_rng(0).normal(size=shape)) for shape in ((16, 8), (32, 16)))


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A saved plan with all that a file may have."""
    path, profile = tmp_path_factory.mktemp("plans") / "plan.json", load("a100")
    own = type(profile)(**{name: getattr(profile, name) for name in profile.__dataclass_fields__})
    mesh = AbstractMesh((2, 4), ("data", "model"))
    options: dict[str, Any] = {"pins": {"1": P("data")}, "hardware": own, "donate_argnums": 0, "memory_limit": 1e9}
    shardplan.plan(step, mesh, *ARGS, reduce_dtype="bfloat16", **options).save(path)
    found: dict[str, Any] = json.loads(path.read_text())
    meshes = [{"mesh": {"data": 8}, "objective": None, "lower_bound": 1.0}]
    found["statistics"] |= {"meshes": meshes, "refined": [REFINED]}
    return found


def places(entry: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in plain data; of lists, the first element's."""
    if place:
        yield place
    inner = entry.items() if isinstance(entry, dict) else enumerate(entry[:1]) if isinstance(entry, list) else ()
    for name, value in inner:
        yield from places(value, (*place, name))


def altered(document: dict[str, Any], place: tuple[Any, ...], *value: Any) -> dict[str, Any]:
    """A copy with another value at a place, or without it."""
    found = copy.deepcopy(document)
    parent: Any = found
    for name in place[:-1]:
        parent = parent[name]
    if value:
        parent[place[-1]] = value[0]
    else:
        del parent[place[-1]]
    return found


def written(path: Path, document: dict[str, Any]) -> Path:
    content = {name: entry for name, entry in document.items() if name not in FORMAT[:2] + FORMAT[3:]}
    path.write_text(json.dumps(document | {"checksum": checksum(content)}))
    return path


def read_and_print(path: Path) -> Plan | None:
    """What is loaded, printed; None where it is refused."""
    try:
        plan = Plan.load(path)
    except PlanMismatchError:
        return None
    assert str(plan) and plan._repr_html_() and plan.gap >= 0
    assert not plan.diff(plan)
    return plan


@pytest.mark.slow
def test_altered_plans_are_refused_or_print(document: dict[str, Any], tmp_path: Path) -> None:
    """Every entry, missing or of another kind: no error but this library's, while it is read and while it prints."""
    path, found = tmp_path / "plan.json", list(places({n: e for n, e in document.items() if n not in FORMAT}))
    others: list[tuple[Any, ...]] = [(), *((value,) for value in OTHERS)]
    changes = [(place, other) for place in found for other in others]
    assert len(changes) > 1000
    refused = [
        read_and_print(written(path, altered(document, place, *other))) is None
        for place, other in random.Random(0).sample(changes, 300)
    ]
    assert 200 < sum(refused) < 300


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.parametrize("seed", range(4))
def test_altered_plans_run_right_or_not_at_all(document: dict[str, Any], tmp_path: Path, seed: int) -> None:
    """Entries that can be read in more than one way: the plan is refused when it is applied, or computes the same."""
    draw, path, mesh = random.Random(seed), tmp_path / "plan.json", jax.make_mesh((2, 4), ("data", "model"))
    choices = document["choices"].split()
    ran = 0
    for _ in range(12):
        flipped = [str(draw.randrange(4)) if draw.random() < 2 / len(choices) else choice for choice in choices]
        found = altered(document, ("choices",), " ".join(flipped))
        found = altered(found, ("donated",), draw.choice([[0], [1], [7], ["x"], []]))
        with suppress(ShardplanError):
            plan = Plan.load(written(path, found), mesh)
            np.testing.assert_allclose(plan.apply(step)(*ARGS), step(*ARGS), rtol=1e-2, atol=1e-4)
            ran += 1
    assert ran


@pytest.mark.parametrize("choices", ["", "0", "9" * 30, "-1 0", "0 0 0 x", "99999 {}"])
def test_altered_choices_are_refused(document: dict[str, Any], tmp_path: Path, choices: str) -> None:
    """Too few, too many, or none that an operation has."""
    first, _, rest = document["choices"].partition(" ")
    assert first != "99999"
    path = written(tmp_path / "plan.json", altered(document, ("choices",), choices.format(rest)))
    with pytest.raises(PlanMismatchError, match="choices"):
        Plan.load(path).bind(step, *ARGS)


def test_incompatible_choices_are_refused(document: dict[str, Any], tmp_path: Path) -> None:
    """Each is a choice of its variable, and a pin excludes one."""
    loaded = Plan.load(written(tmp_path / "plan.json", document))
    problem = loaded.bind(step, *ARGS).schedule.problem
    choices = list(loaded.recipe.choices)
    pinned = problem.variables.values[problem.program.inputs[1]]
    choices[pinned] = int(np.flatnonzero(np.isinf(problem.network.costs[pinned]))[0])
    path = written(tmp_path / "plan.json", altered(document, ("choices",), " ".join(map(str, choices))))
    with pytest.raises(PlanMismatchError, match="do not go together"):
        Plan.load(path).bind(step, *ARGS)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("mesh",), [["data", 2], ["data", 4]], "different names"),
        (("mesh",), [["data", 0], ["model", 4]], "number of devices"),
        (("arguments", 0, "spec"), ["nosuch"], r"`arguments\[0\]\.spec` is .*axes of the mesh"),
        (("arguments", 1, "shape"), [31, 16], "sizes that its axes divide"),
        (("arguments", 0, "fed_back"), 1, r"`plan\.arguments\[0\]\.fed_back` is `1`: true or false"),
        (("collectives", 0, "bytes"), -1.0, "bytes and times above 0"),
        (("options", "time_limit"), -1, "a time limit is a number of seconds above 0"),
        (("options", "reduce_dtype"), "float7", "reduce_dtype is a floating-point type"),
        (("options", "reduce_dtype"), "1 2", "reduce_dtype is a floating-point type"),
        (("options", "hardware", "flops"), {}, "rates above 0"),
        (("options", "more"), 1, None),
        (("figures", "objective"), "1", r"`plan\.figures\.objective` is `'1'`: a number was expected"),
    ],
)
def test_altered_entries_are_named(
    document: dict[str, Any], tmp_path: Path, place: tuple[Any, ...], value: Any, message: str | None
) -> None:
    """The error says which entry it is, and what is expected there; entries that nobody reads do no harm."""
    path = written(tmp_path / "plan.json", altered(document, place, value))
    if message is None:
        assert read_and_print(path) is not None
        return
    with pytest.raises(PlanMismatchError, match=message):
        Plan.load(path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the cache of plans")
def test_altered_cache_entries_are_planned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache entry is for this program on one of these meshes, or it is ignored."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    first = shardplan.plan(step, 8, *ARGS)
    (path,) = tmp_path.iterdir()
    kept = json.loads(path.read_text())
    monkeypatch.setattr("shardplan.plans.choose_mesh._best", lambda *_: first)
    found = [place for place in places(kept["content"]) if len(place) < 3 and place[0] != "statistics"]
    others: list[tuple[Any, ...]] = [(), *((value,) for value in (None, -1, "nosuch", [1], {"data": 8}))]
    changes = [altered(kept["content"], place, *other) for place in found for other in others]
    taken = 0
    for content in random.Random(0).sample(changes, 60):
        path.write_text(json.dumps({"key": kept["key"], "content": content, "checksum": checksum(content)}))
        plan = shardplan.plan(step, 8, *ARGS)
        assert plan.mesh_axes == first.mesh_axes and str(plan)
        taken += plan.statistics["cached"]
    assert taken < 30


@pytest.mark.filterwarnings("ignore:the cache of plans")
@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"a":' * 50_000 + "1" + "}" * 50_000])
def test_deep_nesting(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists in lists in lists: refused in plans and profiles, and planned again in the cache."""
    for name, error, function in (
        ("p.json", PlanMismatchError, Plan.load),
        ("h.json", ArgumentError, load),
        ("h.toml", ArgumentError, load),
    ):
        (tmp_path / name).write_text("a = " * (name == "h.toml") + text)
        with pytest.raises(error, match=r"nested too deep|no valid"):
            function(tmp_path / name)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "plans"))
    mesh = AbstractMesh((8,), ("data",))
    first = shardplan.plan(step, mesh, *ARGS)
    (entry,) = (tmp_path / "plans").iterdir()
    entry.write_text(text)
    assert str(shardplan.plan(step, mesh, *ARGS)) == str(first)


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_altered_profiles(suffix: str, tmp_path: Path) -> None:
    """Numbers and sections of any other kind: the error says which."""
    path = tmp_path / f"h.{suffix}"
    for other in ("0x" + "f" * 5000, "nan", "-1", '"a"', "[[]]", "{}", "1e400", "true", "9" * 5000):
        entry = f'{{"memory_bytes": {other}}}' if suffix == "json" else f"memory_bytes = {other}\n[axes]\nx = {other}"
        path.write_text(entry)
        with pytest.raises(ArgumentError, match=r"h\."):
            load(path)


def test_entries_of_many_kinds() -> None:
    """What JSON has is read as it is annotated; numbers are no booleans, and none is out of reach."""
    assert read(tuple[int | str, ...], [1, "a"], "it") == (1, "a")
    assert read(P, ["data", None, ["x", "y"]], "it") == P("data", None, ("x", "y"))
    for kind, entry in ((int, True), (int, 1.0), (int, 2**63), (float, float("nan")), (str, 1), (tuple[int, int], [1])):
        with pytest.raises(MalformedError, match="`it` is"):
            read(kind, entry, "it")
