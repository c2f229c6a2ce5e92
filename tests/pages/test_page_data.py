"""The data of a page: its sums are the plan's, equal layers are one row, names from the program stay text."""

import json
import os
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan import Plan
from shardplan.errors import ArgumentError, PlanMismatchError
from shardplan.models import llama
from shardplan.options import Options
from shardplan.pages.places import places_of
from shardplan.plans.page_head import plan_head, plan_page
from shardplan.program.tracing import trace_program

MESH = AbstractMesh((2, 4), ("data", "model"))
SQUARE = jax.ShapeDtypeStruct((2048, 2048), "float32")
LAYERS = 6


def loss(params: Any, x: jax.Array) -> jax.Array:
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"])
    return jnp.mean(x**2)


def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    value, gradient = jax.value_and_grad(loss)(state["params"], x)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], gradient)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments)
    return {"params": params, "moments": moments}, value


PARAMS = {"layers": [{"w": SQUARE} for _ in range(LAYERS)]}
STATE = {"params": PARAMS, "moments": PARAMS}


def data_of(text: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    data: dict[str, Any] = json.loads(found)
    return data


@pytest.fixture(scope="module")
def plan() -> Plan:
    return shardplan.plan(step, MESH, STATE, SQUARE, donate_argnums=0)


@pytest.fixture(scope="module")
def data(plan: Plan) -> dict[str, Any]:
    return data_of(plan_page(plan))


def profile_of(data: dict[str, Any]) -> np.ndarray:
    """Bytes at each schedule position, from the page's buffers."""
    memory, change = data["memory"], np.zeros(len(data["memory"]["at"]) + 1)
    starts = np.cumsum(memory["buffers"]["start"])
    for start, length, tensor in zip(starts, memory["buffers"]["length"], memory["buffers"]["tensor"], strict=True):
        change[start] += memory["tensors"][tensor][5]
        change[start + length + 1] -= memory["tensors"][tensor][5]
    return np.cumsum(change)[:-1]


def test_bytes_of_collectives(plan: Plan, data: dict[str, Any]):
    """Their sum is `plan.communication_bytes`, also that of the operations that a row lists."""
    assert plan.communication_bytes > 0
    assert sum(row[2] * row[3] * len(row[12]) for row in data["collectives"]) == plan.communication_bytes
    assert sum(len(row[12]) for row in data["collectives"]) == len(plan.collectives)


def test_highest_memory(plan: Plan, data: dict[str, Any]):
    """The highest stack of buffers is `plan.peak_bytes`."""
    assert profile_of(data).max() == pytest.approx(plan.peak_bytes, rel=1e-6)


def test_sums_of_a_loop():
    """A body's collectives count once per iteration, in the page as in the plan."""

    def repeated(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def scanned(w: jax.Array) -> jax.Array:
            return jnp.sum(jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ w), None), x, None, length=5)[0])

        value, gradient = jax.value_and_grad(scanned)(state)
        return state - gradient, value

    plan = shardplan.plan(repeated, MESH, SQUARE, jax.ShapeDtypeStruct((16, 2048), "float32"))
    data = data_of(plan_page(plan))
    assert any(row[3] > 1 for row in data["collectives"])
    assert sum(row[2] * row[3] * len(row[12]) for row in data["collectives"]) == plan.communication_bytes
    assert profile_of(data).max() == pytest.approx(plan.peak_bytes, rel=1e-6)


def branching(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.cond(x[0, 0] > 0, lambda a: jnp.sum((a @ w) @ w.T), jnp.sum, x)


def split_by_hand(x: jax.Array, w: jax.Array) -> jax.Array:
    summed = jax.shard_map(
        lambda a, b: jax.lax.psum(a @ b, "data"), mesh=MESH, in_specs=(P(None, "data"), P("data")), out_specs=P()
    )
    found: jax.Array = summed(x, w)
    return found


@pytest.mark.parametrize("function", [branching, split_by_hand, lambda x, w: (x, jnp.ones((512, 512)), w[0, 0])])
def test_sums_of_other_programs(function: Any):
    """Branches, regions by hand, and results without an operation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", shardplan.errors.ShardplanWarning)
        plan = shardplan.plan(function, MESH, SQUARE, SQUARE)
    data = data_of(plan_page(plan))
    assert sum(row[2] * row[3] * len(row[12]) for row in data["collectives"]) == plan.communication_bytes
    assert profile_of(data).max() == pytest.approx(plan.peak_bytes, rel=1e-6)


def test_arguments_in_host_memory():
    """They have a category of their own, outside of the devices' memory."""
    sharding = NamedSharding(AbstractMesh((8,), ("x",)), P(), memory_kind="pinned_host")
    kept = jax.ShapeDtypeStruct((2048, 2048), "float32", sharding=sharding)
    plan = shardplan.plan(lambda h, x: jax.device_put(h, jax.memory.Space.Device) @ x, sharding.mesh, kept, SQUARE)
    data = data_of(plan_page(plan))
    (row,) = [row for row in data["memory"]["tensors"] if data["categories"][row[0]] == "host memory"]
    assert data["types"][row[3]] == ["float32<pinned_host>", [2048, 2048]]
    assert row[5] * row[7] == plan.host_bytes > 0
    assert profile_of(data).max() == pytest.approx(plan.peak_bytes, rel=1e-6)


def test_state_in_the_tree(plan: Plan, data: dict[str, Any]):
    """Equal layers are one row with a count, per category, and the bytes are those of the arguments."""
    texts, categories, tensors = data["texts"], data["categories"], data["memory"]["tensors"]

    def named(category: str, path: str) -> list[Any]:
        rows = [row for row in tensors if categories[row[0]] == category]
        return [row for row in rows if "/".join(texts[text] for text in (*row[1], row[2])) == path]

    for category, path in (("parameters", "0/params/layers/*/w"), ("optimizer state", "0/moments/layers/*/w")):
        rows = named(category, path)
        assert 0 < len(rows) < LAYERS
        assert sum(row[7] for row in rows) == LAYERS
        assert {data["types"][row[3]][0] for row in rows} == {"float32"}
    arguments = sum(row[5] * row[7] for row in tensors if row[0] < 3)
    mesh = dict(data["mesh"])
    held = 0.0
    for argument in plan.arguments:
        axes = [axis for entry in argument.spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)]
        held += argument.total_bytes / np.prod([mesh[axis] for axis in axes])
    assert arguments == held


def test_operations_by_kind(plan: Plan, data: dict[str, Any]):
    """Every operation has its primitive, its line, its operands and its planned layouts."""
    kinds, program = data["operations"]["kinds"], plan.program
    assert len(data["operations"]["kind"]) == len(program.operations)
    assert len(kinds) < len(program.operations)
    kept = plan.schedule.assignment.values
    for operation, number, operands in zip(
        program.operations, data["operations"]["kind"], data["operations"]["operands"], strict=True
    ):
        kind = kinds[number]
        assert data["texts"][kind[2]] == operation.primitive.name
        assert data["texts"][kind[3]] == operation.source
        for operand, distance in zip((o for o in operation.operands if isinstance(o, int)), operands, strict=True):
            if distance > 0:
                assert operand in program.operations[operation.index - distance].results
            else:
                assert program.inputs[-1 - distance] == operand
        for result, made in zip(operation.results, kind[5], strict=True):
            dims = data["layouts"][made[3]][1] if made[3] >= 0 else None
            assert dims is None or result not in kept or dims == [list(axes) for axes in kept[result]][-len(dims) :]


def test_lanes_of_the_timeline(plan: Plan, data: dict[str, Any]):
    """They are those of `simulate`: the same seconds, and no two events of a lane at a time."""
    found, timeline = shardplan.simulate(plan), data["timeline"]
    assert timeline["nanoseconds"] == pytest.approx(found.seconds * 1e9, abs=1)
    compute = timeline["lanes"][0]
    assert compute["axes"] == []
    assert sum(compute["length"]) == pytest.approx(found.busy_seconds[0] * 1e9, abs=len(compute["length"]))
    assert {tuple(lane["axes"]) for lane in timeline["lanes"][1:]} == {c.axes for c in plan.collectives}
    assert all(gap >= 0 for lane in timeline["lanes"] for gap in lane["gap"])


def test_phases_of_a_training_step(data: dict[str, Any]):
    phases = {data["phases"][data["operations"]["kinds"][number][0]] for number in data["operations"]["kind"]}
    assert phases == {"forward", "backward", "update"}


def test_places_of_scanned_and_recomputed_layers():
    """Bodies of loops have the phase of their loop, and the modules of Flax NNX come from its calls."""
    config = llama.Config(
        2, 64, 4, 2, 128, vocabulary=128, sequence=16, scan_layers=True, checkpoint="nothing_saveable"
    )
    training = llama.training(config)
    places = places_of(trace_program(training.train_step, (training.state, training.batch), {}))
    assert {place.phase for place in places} == {"forward", "backward", "recomputed", "update"}
    of_blocks = [place for place in places if "Block" in place.modules]
    assert {place.phase for place in of_blocks} == {"forward", "backward", "recomputed"}
    assert {"Attention", "MLP", "RMSNorm"} <= {name for place in of_blocks for name in place.modules}


def test_head_of_a_plan(plan: Plan, data: dict[str, Any]):
    head = data["head"]
    assert head["communication_bytes"] == plan.communication_bytes
    assert (head["peak_bytes"], head["verified"]) == (plan.peak_bytes, None)
    assert head["seconds"]["work"] == plan.step_time.work
    assert head["command"] == 'plan.to_html("plan.html")'


@pytest.mark.slow
def test_what_a_plan_computes_again():
    """Its clones are the phase "recomputed", and the words say what they free."""

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for weight in weights:
            x = jnp.tanh(jnp.sin(x @ weight))
        return jnp.sum(x**2)

    step = jax.value_and_grad(loss)
    shapes = [SQUARE] * 4, jax.ShapeDtypeStruct((65536, SQUARE.shape[0]), "float32")
    limit = 0.6 * shardplan.plan(step, MESH, *shapes).peak_bytes
    plan = shardplan.plan(step, MESH, *shapes, memory_limit=limit)
    clones = [operation.index for operation in plan.program.operations if operation.again]
    places = places_of(plan.program)
    assert clones and {places[index].phase for index in clones} == {"recomputed"}
    head = plan_head(plan)
    assert head["recomputed"] and any("values are computed again" in said for said in head["texts"])
    assert head["above"] == pytest.approx(plan.objective / plan.lower_bound - 1)


def test_command_of_a_plan(plan: Plan):
    """It has every option that the command line can give."""
    options = Options(
        memory_limit=2e10,
        objective="time",
        hardware="a100",
        pins={"0/params/layers/0/w": P(None, ("data", "model"))},
        reduce_dtype="bfloat16",
        time_limit=5.0,
        refine=2,
        fit=("recompute",),
        verify=True,
    )
    made = replace(
        plan,
        statistics={**plan.statistics, "step": "train:step"},
        recipe=replace(plan.recipe, options=options),
    )
    assert plan_head(made, compared=True)["command"] == (
        "shardplan report train:step --mesh data=2,model=4 --memory-limit 20000000000B --objective time "
        "--hardware a100 --pin 0/params/layers/0/w=-,data+model --donate 0 --reduce-dtype bfloat16 --time-limit 5 "
        "--refine 2 --recompute --verify --compare -o plan.html"
    )


def test_warnings_of_a_plan():
    """The page repeats them."""

    def halved(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda carry: jnp.sum(carry) > 1, lambda carry: carry / 2, x)

    with pytest.warns(shardplan.errors.ShardplanWarning, match="as often as its data say"):
        plan = shardplan.plan(halved, MESH, SQUARE)
    assert any("as often as its data say" in warning for warning in plan_head(plan)["warnings"])


def test_names_that_look_like_html():
    """They cannot end the page's data, and come back as they are."""
    name = "</script><script>alert(1)</script>"
    plan = shardplan.plan(lambda x: {"y": x[name] * 2}, MESH, {name: SQUARE})
    text = plan_page(plan)
    assert text.count("<script") == 2
    assert "alert(1)" in "".join(data_of(text)["inputs"])


def test_written_page(plan: Plan, tmp_path: Path):
    plan.to_html(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    assert text == plan_page(plan)
    assert not re.findall(r"(?:src|href)=[\"'](?!data:|#)[^\"']*[\"']", text)
    assert [file.name for file in tmp_path.iterdir()] == ["plan.html"]


@pytest.mark.parametrize("place", ["missing/plan.html", "folder", "a\0b"])
def test_path_that_cannot_be_written(plan: Plan, tmp_path: Path, place: str):
    """One sentence, and no half file."""
    (tmp_path / "folder").mkdir()
    with pytest.raises(ArgumentError, match="cannot write the page to"):
        plan.to_html(f"{tmp_path}/{place}")
    assert [file.name for file in tmp_path.rglob("*")] == ["folder"]


def test_full_disk(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The old page stays."""

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "plan.html").write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArgumentError, match="No space left on device"):
        plan.to_html(tmp_path / "plan.html")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("plan.html", "old")]


def test_plan_from_a_file(plan: Plan, tmp_path: Path):
    """It needs its function first. The page is then the same."""
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    with pytest.raises(PlanMismatchError, match="knows no program yet"):
        loaded.to_html(tmp_path / "plan.html")
    assert not (tmp_path / "plan.html").exists()
    assert data_of(plan_page(loaded.bind(step, STATE, SQUARE))) == data_of(plan_page(plan))
