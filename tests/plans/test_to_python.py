"""Plans as Python text: it runs without shardplan, and says what it was compiled to."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan import ArgumentError, Plan
from shardplan.compiled.target import TargetNotInstalledError
from shardplan.plans.to_python import sentence

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
step = planned.sharded(users.step, planned.make_mesh(), params, x)
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


def test_text_runs_without_shardplan(plan: Plan, tmp_path: Path):
    """A process in which the import of shardplan fails computes the same values, in the planned layouts."""
    generator = np.random.default_rng(0)
    params = {name: generator.normal(size=(64, 64)).astype("float32") for name in ("up", "down")}
    x = generator.normal(size=(64, 64)).astype("float32")
    np.savez(tmp_path / "params.npz", allow_pickle=False, **params)
    np.save(tmp_path / "x.npy", x)
    (tmp_path / "planned.py").write_text(plan.to_python())
    (tmp_path / "users.py").write_text(USERS)
    ran = subprocess.run([sys.executable, "-c", PROCESS], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    expected, total = users_step()(params, x)
    with np.load(tmp_path / "results.npz") as found:
        np.testing.assert_allclose(found["total"], total, rtol=1e-4)
        np.testing.assert_allclose(found["up"], expected["up"], rtol=1e-3, atol=1e-3)


@needs_compiler
def test_text_says_what_it_was_compiled_to(plan: Plan):
    text = plan.to_python(users_step())
    assert "Compiled for h100, a device sends" in text
    assert "as planned" in text


def test_text_without_the_function_is_unchecked(plan: Plan):
    assert "was not checked: plan.to_python(fn) compiles it" in plan.to_python()


def test_text_without_the_compiler(plan: Plan, monkeypatch: pytest.MonkeyPatch):
    def missing(*args: object) -> None:
        raise TargetNotInstalledError("not here")

    monkeypatch.setattr("shardplan.plans.to_python.gpu_mesh", missing)
    assert "was not checked: the extra `audit` is not installed" in plan.to_python(users_step())


def test_bytes_beyond_the_tolerance(plan: Plan):
    """Within 2 % the text says "as planned", and beyond it that the plan has further layouts."""
    planned = plan.communication_bytes
    assert "as planned" in sentence(plan, 1.019 * planned, "h100")
    assert "plan.apply(fn) keeps" in sentence(plan, 1.021 * planned, "h100")


def test_steps_that_the_text_cannot_call():
    keyword = shardplan.auto(lambda x, *, w: x @ w, "data=8").plan(SHAPE, w=SHAPE)
    with pytest.raises(ArgumentError, match="this one has keyword arguments"):
        keyword.to_python()
    static = shardplan.auto(lambda x, n: x * n, "data=8", static_argnums=1).plan(SHAPE, 2)
    with pytest.raises(ArgumentError, match="this one has static arguments"):
        static.to_python()


def test_paths_with_quotes():
    plan = shardplan.plan(
        lambda x: x["'\"\\"] + x["b"], "data=8", {"'\"\\": SHAPE, "b": SHAPE}, pins={"0/b": P("data")}
    )
    namespace: dict = {}
    exec(plan.to_python(), namespace)
    assert namespace["ARGUMENTS"] == plan.to_rules()
