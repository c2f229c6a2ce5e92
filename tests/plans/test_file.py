"""Plans as files: written whole, read back, checked, and run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan import ArgumentError, Plan, PlanMismatchError
from shardplan.plans.file import checksum
from shardplan.program.tracing import trace_program

AXES = {"data": 2, "model": 4}
LAYERS = ("up", "down")
PINS = {"0/w/*": P("data", "model"), "1/*": P("data")}


def make_step(rate: float = 0.1, scale: float = 1.0):
    """A training step of two layers with momentum; ``rate`` is a literal of its program, so is ``scale``, unless 1."""

    def step(state, batch):
        def loss_of(w):
            error = jnp.tanh(batch["x"] @ w["up"]) @ w["down"] - batch["y"]
            return jnp.mean(error**2) if scale == 1.0 else scale * jnp.mean(error**2)

        loss, gradient = jax.value_and_grad(loss_of)(state["w"])
        m = {name: 0.9 * state["m"][name] + gradient[name] for name in LAYERS}
        return {"w": {name: state["w"][name] - rate * m[name] for name in LAYERS}, "m": m}, loss

    return step


def make_state():
    generator = np.random.default_rng(0)
    shapes = {"up": (64, 128), "down": (128, 64)}
    w = {name: np.float32(generator.normal(size=shapes[name]) / 8) for name in LAYERS}
    return {"w": w, "m": {name: np.zeros_like(w[name]) for name in LAYERS}}


def make_batch(size: int = 32):
    generator = np.random.default_rng(1)
    return {name: np.float32(generator.normal(size=(size, 64))) for name in ("x", "y")}


STEP = make_step()


@pytest.fixture(scope="module")
def plan() -> Plan:
    mesh = AbstractMesh(tuple(AXES.values()), tuple(AXES))
    return shardplan.plan(STEP, mesh, make_state(), make_batch(), donate_argnums=(0,), pins=PINS)


@pytest.fixture
def file(plan: Plan, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    plan.save(path)
    return path


def changed(file: Path, repair: bool = True, **entries) -> Path:
    """The file with other entries; with ``repair``, as if they had been written so."""
    document = json.loads(file.read_text()) | entries
    if repair:
        content = {k: v for k, v in document.items() if k not in ("format", "format_version", "checksum")}
        document["checksum"] = checksum(content)
    file.write_text(json.dumps(document))
    return file


def test_a_saved_and_loaded_plan(plan: Plan, file: Path):
    """It equals the first one."""
    loaded = Plan.load(file)
    assert str(loaded) == str(plan)
    assert not plan.diff(loaded)
    assert loaded.layouts == plan.layouts
    assert loaded.collectives == plan.collectives
    assert (loaded.objective, loaded.lower_bound, loaded.gap) == (plan.objective, plan.lower_bound, plan.gap)
    assert loaded.mesh_axes == AXES
    assert loaded.fingerprint == plan.fingerprint
    assert loaded.donated == plan.donated
    assert loaded.recipe.options == plan.recipe.options
    assert "<table" in loaded._repr_html_()


def test_a_loaded_plan_can_be_saved_again(file: Path, tmp_path: Path):
    Plan.load(file).save(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads(file.read_text())


def test_a_file_that_cannot_be_written(file: Path, tmp_path: Path):
    with pytest.raises(ArgumentError, match=r"cannot write the plan to `.*nowhere/again\.json`: No such file"):
        Plan.load(file).save(tmp_path / "nowhere" / "again.json")


def test_a_loaded_plan_runs(file: Path):
    step = Plan.load(file, jax.make_mesh((2, 4), ("data", "model"))).apply(STEP)
    reference = jax.jit(STEP)
    state, expected = make_state(), make_state()
    for _ in range(3):
        state, loss = step(state, make_batch())
        expected, wanted = reference(expected, make_batch())
        np.testing.assert_allclose(loss, wanted, rtol=1e-4)
    np.testing.assert_allclose(state["w"]["up"], expected["w"]["up"], rtol=1e-3, atol=1e-5)
    assert state["w"]["up"].sharding.spec == P("data", "model")


def test_binding_gives_the_whole_plan(plan: Plan, file: Path):
    bound = Plan.load(file).bind(STEP, make_state(), make_batch())
    assert bound.explain("op0", 0) == plan.explain("op0", 0)
    assert bound.in_shardings == plan.in_shardings


def test_a_plan_holds_for_other_literals(file: Path):
    """The rate is a literal of the program: that of the function which is run counts, not that which was planned."""
    other = make_step(rate=50.0)
    state, _ = Plan.load(file).apply(other)(make_state(), make_batch())
    expected, _ = jax.jit(other)(make_state(), make_batch())
    np.testing.assert_allclose(state["w"]["up"], expected["w"]["up"], rtol=1e-3, atol=1e-4)
    assert not np.allclose(expected["w"]["up"], jax.jit(STEP)(make_state(), make_batch())[0]["w"]["up"], atol=1e-2)


@pytest.mark.parametrize("attribute", ["in_shardings", "out_shardings", "program", "schedule"])
def test_a_loaded_plan_without_its_function(file: Path, attribute: str):
    """The error says that the plan needs its function."""
    with pytest.raises(PlanMismatchError, match=r"plan\.bind\(fn, \*args\)"):
        getattr(Plan.load(file), attribute)


def test_other_shapes_are_refused_and_named(file: Path):
    with pytest.raises(PlanMismatchError, match=r"`1/x` was planned as float32\[32, 64\] and is float32\[16, 64\]"):
        Plan.load(file).apply(STEP)(make_state(), make_batch(16))


def test_arguments_of_another_structure_are_refused_and_named(file: Path):
    """The function itself fails on them, before there is a program to compare."""
    state = {"parameters": make_state()["w"]}
    with pytest.raises(PlanMismatchError, match=r"`0/w/down` was planned as float32.* and is (?s:.*)fails: "):
        Plan.load(file).apply(STEP)(state, make_batch())


def test_another_function_is_refused(file: Path):
    with pytest.raises(PlanMismatchError, match="another function"):
        Plan.load(file).bind(make_step(scale=2.0), make_state(), make_batch())


def test_another_mesh_is_refused(file: Path):
    with pytest.raises(PlanMismatchError, match=r"for the mesh \{'data': 2, 'model': 4\}, got \{'data': 8\}"):
        Plan.load(file, AbstractMesh((8,), ("data",)))
    with pytest.raises(PlanMismatchError, match="got"):
        Plan.load(file, AbstractMesh((4, 2), ("model", "data")))


@pytest.mark.parametrize("kept", [0, 1, 100, -1])
def test_a_torn_file_is_refused(file: Path, kept: int):
    file.write_text(file.read_text()[:kept])
    with pytest.raises(PlanMismatchError, match="torn, or no plan"):
        Plan.load(file)


@pytest.mark.parametrize(
    ("repair", "entries", "message"),
    [
        (True, {"format": "something else"}, "is no plan of shardplan"),
        (True, {"format_version": 99}, "has format 99"),
        (True, {"shardplan_version": "0.0.1"}, r"was made by shardplan 0\.0\.1"),
        (False, {"donated": [1]}, "its checksum is wrong"),
    ],
)
def test_other_files_are_refused(file: Path, repair: bool, entries: dict, message: str):
    with pytest.raises(PlanMismatchError, match=message):
        Plan.load(changed(file, repair, **entries))


def test_choices_of_another_numbering_are_refused(file: Path):
    loaded = Plan.load(changed(file, network="0" * 64))
    with pytest.raises(PlanMismatchError, match="another version of shardplan"):
        loaded.bind(STEP, make_state(), make_batch())


def test_a_missing_file_is_an_error_of_this_library(tmp_path: Path):
    with pytest.raises(PlanMismatchError, match="cannot read the plan"):
        Plan.load(tmp_path / "nothing.json")


def test_an_interrupted_write(plan: Plan, file: Path, monkeypatch: pytest.MonkeyPatch):
    """The previous file stays."""
    before = file.read_text()
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(ArgumentError, match="disk full"):
        plan.save(file)
    assert file.read_text() == before
    assert list(file.parent.iterdir()) == [file]


def test_all_options_come_back(tmp_path: Path):
    profile = shardplan.hardware.load("a100")
    options = {
        "memory_limit": 1e9,
        "objective": "time",
        "hardware": shardplan.hardware.HardwareProfile(
            **{n: getattr(profile, n) for n in profile.__dataclass_fields__}
        ),
        "pins": {"1": P(None, ("data", "model"))},
        "static_argnums": (2,),
        "reduce_dtype": jnp.bfloat16,
        "time_limit": 5.0,
    }
    mesh = AbstractMesh((2, 4), ("data", "model"))
    shapes = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((64, 64), "float32")
    plan = shardplan.plan(lambda x, w, n: (x @ w) ** n, mesh, *shapes, 2, **options)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    mine, theirs = loaded.recipe.options, plan.recipe.options
    assert mine.hardware == profile
    for name in ("memory_limit", "objective", "pins", "static_argnums", "time_limit"):
        assert getattr(mine, name) == getattr(theirs, name)
    assert mine.reduce_dtype == np.dtype(jnp.bfloat16)
    x = jnp.arange(64 * 64.0).reshape(64, 64) / 4096
    np.testing.assert_allclose(loaded.apply(lambda x, w, n: (x @ w) ** n)(x, x, 2), (x @ x) ** 2, rtol=1e-3)


@pytest.mark.long
def test_fingerprints_are_the_same_in_every_process(plan: Plan):
    """Of the step above, and of one whose parameters hold functions, arrays and enumerations."""
    script = "import tests.plans.test_file as t; print(*t.fingerprints())"
    environment = os.environ | {
        "PYTHONHASHSEED": "7",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    found = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=90
    )
    assert found.stdout.split() == fingerprints()
    assert plan.fingerprint == fingerprints()[0]


def fingerprints() -> list[str]:
    """Of programs of this file."""
    table = np.arange(8.0)

    def many(x):
        x = jax.lax.reduce(x, 0.0, jax.lax.add, (0,)) + jnp.take(table, jnp.argsort(x[0]))
        x = jax.lax.scan(lambda h, row: (jax.checkpoint(own)(jax.nn.relu(h) + row), None), x, jnp.ones((3, 8)))[0]
        return jax.lax.while_loop(lambda h: h.sum() < 9, lambda h: h * 2 + 1, x)

    @jax.custom_vjp
    def own(x):
        return jnp.sin(x)

    own.defvjp(lambda x: (jnp.sin(x), x), lambda x, cotangent: (cotangent * jnp.cos(x),))

    programs = trace_program(STEP, (make_state(), make_batch())), trace_program(many, (np.zeros((8, 8), np.float32),))
    return [program.fingerprint() for program in programs]


@pytest.mark.parametrize(
    "other",
    [
        lambda x, w: x.T @ w,
        lambda x, w: jax.lax.dot(x, w, precision="highest"),
        lambda x, w: jax.lax.dot(x, w, preferred_element_type=jnp.bfloat16),
        lambda x, w: jnp.sum(x @ w, axis=0),
        lambda x, w: jax.lax.fori_loop(0, 3, lambda i, h: h @ w, x),
        lambda x, w: jax.lax.fori_loop(0, 4, lambda i, h: h @ w, x),
    ],
)
def test_fingerprints_of_other_parameters(other):
    """They differ."""
    shapes = jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((8, 8), "float32")
    functions = [
        lambda x, w: x @ w,
        lambda x, w: jnp.sum(x @ w, axis=1),
        lambda x, w: jax.lax.fori_loop(0, 5, lambda i, h: h @ w, x),
    ]
    assert trace_program(other, shapes).fingerprint() not in {
        trace_program(function, shapes).fingerprint() for function in functions
    }
