"""Layouts to take along: trees of specs, rules by path, logical axis rules."""

from fnmatch import fnmatchcase
from pathlib import Path

import flax.linen as nn
import jax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan import ArgumentError, Plan, PlanMismatchError
from shardplan.models import NAMES, load, mlp
from shardplan.plans.result_layouts import entries_of
from shardplan.plans.sharding_rules import logical_rules, sharding_rules
from tests.helpers.slow_devices import SLOW_DEVICES

MESH = AbstractMesh((2, 4), ("data", "model"))
MESHES = ("data=8", "data=2,model=4")
QUICK, SLOW = {("mlp", "data=2,model=4")}, {("gpt", "data=8")}
MARKS = {True: pytest.mark.slow, False: pytest.mark.long}
CASES = [
    pytest.param(name, mesh, marks=[] if (name, mesh) in QUICK else [MARKS[(name, mesh) in SLOW]])
    for name in NAMES
    for mesh in MESHES
]


def first_match(rules: list[tuple[str, P]], path: str) -> P:
    return next(spec for pattern, spec in rules if fnmatchcase(path, pattern))


def holds(rules: list[tuple[str, P]], layouts: dict[str, P]) -> bool:
    return all(entries_of(first_match(rules, path)) == entries_of(spec) for path, spec in layouts.items())


@pytest.fixture(scope="module")
def plan() -> Plan:
    training = mlp.training(mlp.Config(widths=(512, 2048, 512, 2048, 512), batch=256))
    return shardplan.plan(training.train_step, MESH, training.state, training.batch)


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_rules_of_a_model(name: str, mesh: str, tmp_path: Path):
    """The rules give every layout back, by a list shorter than that of the paths."""
    profile = tmp_path / "slow.toml"
    profile.write_text(SLOW_DEVICES)
    module = load(name)
    training = module.training(module.SMALL)
    plan = shardplan.plan(training.train_step, mesh, training.state, training.batch, hardware=profile)
    rules = plan.to_rules()
    assert holds(rules, plan.layouts)
    assert 1 < len(rules) <= max(9, len(plan.layouts) // 2)


def test_rules_of_more_layers():
    """Rules of a few layers hold for further ones, and a rule for one layer comes before that of all."""
    few = {f"0/layer_{n}/{kind}": P("data") if n else P() for n in range(3) for kind in ("kernel", "up/kernel")}
    few |= {"0/step": P(), "1/x": P("data")}
    rules = sharding_rules(few)
    assert holds(rules, few) and len(rules) <= 3
    assert first_match(rules, "0/layer_17/kernel") == P("data")


def test_rules_of_names_with_wildcards():
    layouts = {"0/[a]": P("data"), "0/a": P(), "0/*": P(None, "data"), "0/?": P("model")}
    assert holds(sharding_rules(layouts), layouts)


def test_rules_of_no_arguments():
    assert sharding_rules({}) == []


def test_rules_of_results(plan: Plan):
    rules = plan.to_rules(results=True)
    results = dict(zip(plan.program.output_names, jax.tree.leaves(plan.out_shardings), strict=True))
    assert holds(rules, {path: sharding.spec for path, sharding in results.items()})


def test_rules_of_a_saved_plan(plan: Plan, tmp_path: Path):
    """Those of arguments need no program."""
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.to_rules() == plan.to_rules()
    with pytest.raises(PlanMismatchError, match="bind"):
        loaded.to_rules(results=True)


def test_specs(plan: Plan):
    """They have the structures of arguments and results."""
    (state, batch), (new_state, loss) = plan.specs()
    assert state["params"]["layer_1"]["kernel"] == plan.layouts["0/params/layer_1/kernel"]
    assert batch["inputs"] == plan.layouts["1/inputs"]
    assert (new_state, loss) == (state, P())


def test_specs_of_keyword_arguments():
    shape = jax.ShapeDtypeStruct((64, 64), "float32")
    plan = shardplan.auto(lambda x, *, w: x @ w, MESH, pins={"w": P("data")}).plan(shape, w=shape)
    assert plan.specs()[0][1] == {"w": P("data")}


NAMES_OF = {
    "up": P("embed", "mlp"),
    "down": P("mlp", "embed"),
    "heads": P("embed", "heads", None),
    "bias": P("embed"),
    "scalar": P(),
}


def test_logical_rules_by_flax():
    """Flax gives every layout back from the rules, where names compete for mesh axes too."""
    layouts = {
        "up": P(None, ("model", "data")),
        "down": P(("model", "data")),
        "heads": P("data", "model"),
        "bias": P("data"),
        "scalar": P(),
    }
    rules = logical_rules(layouts, NAMES_OF)
    for path, names in NAMES_OF.items():
        assert entries_of(nn.logical_to_mesh_axes(names, rules)) == entries_of(layouts[path])


def test_layouts_that_no_logical_rules_give():
    """The error names the dimensions."""
    layouts = {path: P() for path in NAMES_OF} | {"up": P("data"), "bias": P("model")}
    with pytest.raises(ArgumentError, match=r"`bias` has `embed` over model; `up` has `embed` over data"):
        logical_rules(layouts, NAMES_OF)


def test_logical_names_that_do_not_fit():
    with pytest.raises(ArgumentError, match=r"`up` has logical names and no layout"):
        logical_rules({"down": P()}, {"up": P("embed")})
    with pytest.raises(ArgumentError, match="along a dimension without a name"):
        logical_rules({"w": P(None, "data")}, {"w": P("embed")})


def test_logical_rules_of_a_plan(plan: Plan):
    """All kernels are split in the same way, so that one name for each dimension is enough."""
    pinned = shardplan.plan(
        lambda s, x: x @ s["up"] @ s["down"],
        MESH,
        {name: jax.ShapeDtypeStruct((64, 64), "float32") for name in ("up", "down")},
        jax.ShapeDtypeStruct((8, 64), "float32"),
        pins={"0/up": P(None, "model"), "0/down": P("model")},
    )
    names = ({"up": P("embed", "mlp"), "down": P("mlp", "embed")},)
    assert pinned.to_logical_rules(names) == [("mlp", "model")]
