"""Plans as Python text: it runs without shardplan, and says what it was compiled to."""

import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan import ArgumentError, Plan
from shardplan.common.tables import size_text
from shardplan.compiled.target import TargetNotInstalledError
from shardplan.models import NAMES, llama, load, mlp
from shardplan.plans.to_python import sentence, whole_text
from tests.helpers.slow_devices import SLOW_DEVICES

SHAPE = jax.ShapeDtypeStruct((64, 64), "float32")
PINS = {"0/up": P(None, "model"), "0/down": P("model"), "1": P("data")}
needs_compiler = pytest.mark.skipif(find_spec("jax_plugins") is None, reason="the extra `audit` is not installed")

USERS = """
import jax.numpy as jnp

def step(params, x):
    y = jnp.tanh(x @ params["up"]) @ params["down"]
    return {"up": params["up"] - y.T @ y, "down": 0.5 * params["down"]}, y.sum()
"""

PROCESS = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "shardplan":
            raise ImportError("shardplan is not here")

sys.meta_path.insert(0, Refuse())
import jax
import numpy as np
import planned
import users

try:
    import shardplan
    raise SystemExit("shardplan was imported")
except ImportError:
    pass
params, x = dict(np.load("params.npz")), np.load("x.npy")
own = () if sys.argv[1] == "whole" else (users.step,)
step = planned.sharded(*own, planned.make_mesh(), params, x)
new, total = step(params, x)
assert new["up"].sharding.spec == jax.P(None, "model"), new["up"].sharding
np.savez("results.npz", total=total, **new)
"""


def users_step():
    namespace: dict = {}
    exec(USERS, namespace)
    return namespace["step"]


@pytest.fixture(scope="module")
def plan() -> Plan:
    params = {"up": SHAPE, "down": SHAPE}
    return shardplan.plan(users_step(), "data=2,model=4", params, SHAPE, pins=PINS)


@pytest.mark.parametrize("form", ["whole", "boundaries"])
def test_text_runs_without_shardplan(plan: Plan, tmp_path: Path, form: str):
    """A process in which the import of shardplan fails computes the same values, in the planned layouts."""
    generator = np.random.default_rng(0)
    params = {name: generator.normal(size=(64, 64)).astype("float32") for name in ("up", "down")}
    x = generator.normal(size=(64, 64)).astype("float32")
    np.savez(tmp_path / "params.npz", allow_pickle=False, **params)
    np.save(tmp_path / "x.npy", x)
    (tmp_path / "planned.py").write_text(plan.to_python(whole=form == "whole"))
    (tmp_path / "users.py").write_text(USERS)
    ran = subprocess.run(
        [sys.executable, "-c", PROCESS, form], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    expected, total = users_step()(params, x)
    with np.load(tmp_path / "results.npz") as found:
        np.testing.assert_allclose(found["total"], total, rtol=1e-4)
        np.testing.assert_allclose(found["up"], expected["up"], rtol=1e-3, atol=1e-3)


@needs_compiler
@pytest.mark.slow
def test_text_says_what_it_was_compiled_to(plan: Plan):
    """Boundaries are enough where they give the plan's bytes. The whole program gives them too."""
    for whole in (None, True):
        text = plan.to_python(users_step(), whole=whole)
        assert "Compiled for h100, a device sends" in text and "as planned" in text
        assert ("def split(" in text) == bool(whole)


@needs_compiler
@pytest.mark.long
def test_boundaries_that_are_not_enough(tmp_path: Path):
    """XLA sends other bytes where the plan has layouts inside, so that the text is the whole program."""
    (tmp_path / "slow.toml").write_text(SLOW_DEVICES)
    training = mlp.training(mlp.SMALL)
    given = training.train_step, "data=2,model=4", training.state, training.batch
    plan = shardplan.plan(*given, hardware=tmp_path / "slow.toml")
    assert "def split(" in plan.to_python(training.train_step)
    boundary = plan.to_python(training.train_step, whole=False)
    assert "def split(" not in boundary and "plan.to_python(fn, whole=True) writes out" in boundary


@needs_compiler
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(8,), (2, 4)])
@pytest.mark.parametrize("name", NAMES)
def test_models_written_out(name: str, sizes: tuple[int, ...], tmp_path: Path):
    """Each model computes the same values from its text, which is compiled to the bytes of the plan within 2 %."""
    (tmp_path / "slow.toml").write_text(SLOW_DEVICES)
    training = load(name).training(load(name).SMALL)
    mesh = jax.sharding.AbstractMesh(sizes, ("data", "model")[: len(sizes)])
    options = {"hardware": tmp_path / "slow.toml"}
    plan = shardplan.plan(training.train_step, mesh, training.state, training.batch, **options)
    text = plan.to_python(whole=True)
    stated = re.search(r"a device sends ([\d.,]+ \w+) per step with these layouts", text)
    assert stated is not None
    if "as planned" not in text:  # then the applied plan sends these bytes too
        assert size_text(shardplan.audit(plan).compiled.communication_bytes) == stated[1]
    namespace: dict = {}
    exec(compile(text, "<text>", "exec"), namespace)
    state, batch = training.init(), training.example()
    found = namespace["sharded"](namespace["make_mesh"](), state, batch)(state, batch)
    expected = jax.jit(training.train_step)(training.init(), batch)
    assert bool(jax.tree.structure(found) == jax.tree.structure(expected))  # type: ignore[operator]
    pairs = list(zip(map(numbers_of, jax.tree.leaves(found)), map(numbers_of, jax.tree.leaves(expected)), strict=True))
    difference = np.sqrt(sum(np.sum((one - other) ** 2) for one, other in pairs))
    assert difference <= 1e-3 * np.sqrt(sum(np.sum(other**2) for _, other in pairs))


def numbers_of(leaf) -> np.ndarray:
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf, np.float64)


@needs_compiler
@pytest.mark.long
def test_lines_of_32_layers():
    """A Llama of 32 unrolled layers is written in 3,000 lines at most."""
    training = llama.training(replace(llama.SMALL, layers=32, width=256, mlp=512))
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    plan = shardplan.plan(training.train_step, mesh, training.state, training.batch)
    assert len(whole_text(plan, "").splitlines()) <= 3000


def test_text_without_the_function_is_unchecked(plan: Plan):
    assert "was not checked: plan.to_python(fn) compiles it" in plan.to_python(whole=False)


def test_text_without_the_compiler(plan: Plan, monkeypatch: pytest.MonkeyPatch):
    def missing(*args: object) -> None:
        raise TargetNotInstalledError("not here")

    monkeypatch.setattr("shardplan.plans.to_python.gpu_mesh", missing)
    assert "was not checked: the extra `audit` is not installed" in plan.to_python(users_step())
    assert "What XLA sends was not checked" in plan.to_python(users_step(), whole=True)


def test_bytes_beyond_the_tolerance(plan: Plan):
    """Within 2 % the text says "as planned", and beyond it that the plan has further layouts."""
    planned = plan.communication_bytes
    assert "as planned" in sentence(plan, 1.019 * planned, "h100")
    assert "whole=True) writes out" in sentence(plan, 1.021 * planned, "h100")


def test_steps_that_the_text_cannot_call():
    keyword = shardplan.auto(lambda x, *, w: x @ w, "data=8").plan(SHAPE, w=SHAPE)
    with pytest.raises(ArgumentError, match="this one has keyword arguments"):
        keyword.to_python()
    static = shardplan.auto(lambda x, n: x * n, "data=8", static_argnums=1).plan(SHAPE, 2)
    with pytest.raises(ArgumentError, match="this one has static arguments"):
        static.to_python()


def test_names_of_the_users_parameters():
    """They are those of the text, unless it needs them itself; the names of leaves are the ends of their paths."""

    def split(state, lax, /, *rows):
        return {"up": state["up"] - lax, "rest": rows[0] @ state["up"]}

    given = {"up": SHAPE}, SHAPE, SHAPE
    text = shardplan.plan(split, "data=8", *given).to_python()
    assert "def step(state, lax_2, argument_2):" in text
    assert "step = sharded(make_mesh(), state, lax_2, argument_2)" in text
    assert "def planned(*given):" in text  # `split` is a function of the text
    namespace: dict = {}
    exec(text, namespace)
    arrays = jax.tree.map(lambda one: np.ones(one.shape, one.dtype), given)
    found = namespace["sharded"](namespace["make_mesh"](), *arrays)(*arrays)
    np.testing.assert_allclose(found["rest"], 64.0)


def test_paths_with_quotes():
    plan = shardplan.plan(
        lambda x: x["'\"\\"] + x["b"], "data=8", {"'\"\\": SHAPE, "b": SHAPE}, pins={"0/b": P("data")}
    )
    namespace: dict = {}
    exec(plan.to_python(whole=False), namespace)
    assert namespace["ARGUMENTS"] == plan.to_rules()
