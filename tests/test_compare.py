"""Comparisons: baselines are what their names say, and never beat the planner."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan import ArgumentError
from shardplan.compare import CHECKPOINTS
from shardplan.layout.layout import MeshAxes
from shardplan.models import gpt, mlp
from shardplan.options import Options
from shardplan.plans.pipeline import build_problem
from shardplan.plans.report import planned_traffic
from shardplan.problem.baselines import BASELINES, follow_examples
from shardplan.problem.tofu_annotations import annotate
from shardplan.program.tracing import trace_program
from shardplan.search import METHODS
from shardplan.search.methods import Method
from shardplan.search.run import Run

TRAINING = mlp.training(mlp.Config(widths=(512, 2048, 512), batch=256))
STEP = TRAINING.train_step, AbstractMesh((8,), ("data",)), TRAINING.state, TRAINING.batch
PARAMETER_BYTES = 4 * TRAINING.parameters
RING = 7 / 8


@pytest.fixture(scope="module")
def comparison() -> shardplan.Comparison:
    return shardplan.compare(*STEP)


def test_order_of_rows(comparison: shardplan.Comparison):
    """It is that of the methods."""
    assert [row.method for row in comparison] == ["exact", "data_parallel", "zero1", "fsdp", "tensor_parallel"]
    assert len(comparison) == 5
    assert comparison["fsdp"] is list(comparison)[3]
    with pytest.raises(KeyError, match="`nothing` was not compared"):
        comparison["nothing"]


@pytest.mark.parametrize("method", BASELINES)
def test_no_baseline_beats_the_bound(comparison: shardplan.Comparison, method: str):
    row, exact = comparison[method], comparison["exact"]
    assert row.objective >= exact.lower_bound * (1 - 1e-9)
    assert row.lower_bound == exact.lower_bound
    assert row.gap == pytest.approx(1 - exact.lower_bound / row.objective)


@pytest.mark.parametrize("method", ["data_parallel", "zero1", "fsdp"])
def test_baselines_send_each_parameter_twice(comparison: shardplan.Comparison, method: str):
    """By ring: an all-reduce of the gradients, or a reduce-scatter and an all-gather; and the loss."""
    assert comparison[method].communication_bytes == pytest.approx(2 * RING * PARAMETER_BYTES, rel=1e-4)


def test_data_parallelism_is_all_reduces_alone(comparison: shardplan.Comparison):
    plan = comparison["data_parallel"].plan
    assert plan is not None
    assert {kind for kind, _ in planned_traffic(plan)} == {"all-reduce"}
    assert all(a.spec == (P() if a.fed_back else P("data")) for a in plan.arguments)


def test_zero1_splits_the_optimizer_alone(comparison: shardplan.Comparison):
    plan = comparison["zero1"].plan
    assert plan is not None
    for path, spec in plan.layouts.items():
        if path.startswith("0/params"):
            assert spec == P()
        elif "/mu/" in path or "/nu/" in path:
            assert "data" in spec


def test_fsdp_splits_the_largest_dimension(comparison: shardplan.Comparison):
    plan = comparison["fsdp"].plan
    assert plan is not None
    assert plan.layouts["0/params/layer_0/kernel"] == P(None, "data")
    assert plan.layouts["0/params/layer_1/kernel"] == P("data")
    assert plan.layouts["0/opt_state/0/mu/layer_1/kernel"] == P("data")
    held = {method: comparison[method].peak_bytes for method in ("data_parallel", "zero1", "fsdp")}
    assert held["fsdp"] < held["zero1"] < held["data_parallel"]


def test_tensor_parallelism_never_splits_examples(comparison: shardplan.Comparison):
    plan = comparison["tensor_parallel"].plan
    assert plan is not None
    assert plan.layouts["1/inputs"] in (P(), P(None, "data"))


def test_tensor_parallelism_on_two_axes():
    mesh = AbstractMesh((2, 4), ("data", "model"))
    found = shardplan.compare(STEP[0], mesh, *STEP[2:], methods=("exact", "tensor_parallel"))
    plan = found["tensor_parallel"].plan
    assert plan is not None
    for argument in plan.arguments:
        if argument.fed_back:
            assert "data" not in str(argument.spec)
        else:
            assert argument.spec[0] == "data"
    assert found["exact"].lower_bound <= found["tensor_parallel"].objective


def test_baselines_use_every_axis_of_a_mesh(comparison: shardplan.Comparison):
    both = shardplan.compare(STEP[0], AbstractMesh((2, 4), ("data", "model")), *STEP[2:], methods=("data_parallel",))
    (row,) = both
    assert row.plan is not None
    assert row.plan.layouts["1/inputs"] == P(("data", "model"))
    assert row.communication_bytes == pytest.approx(comparison["data_parallel"].communication_bytes)


def test_printed(comparison: shardplan.Comparison):
    text, drawn = str(comparison), comparison._repr_html_()
    assert "Mesh (data=8)" in text
    for row in comparison:
        assert row.method in text
        assert row.method in drawn
    assert f"{comparison['fsdp'].communication_bytes / 1e6:,.1f}" in text


def test_baselines_above_the_memory_limit(comparison: shardplan.Comparison):
    limit = 0.9 * comparison["data_parallel"].peak_bytes
    found = shardplan.compare(*STEP, methods=("exact", "data_parallel"), memory_limit=limit)
    assert found["exact"].note == ""
    assert found["exact"].peak_bytes <= limit
    assert found["data_parallel"].note == "does not fit the memory"


def test_row_without_a_plan():
    """It has the reason."""
    found = shardplan.compare(*STEP, methods=("exact",), memory_limit=1000)
    assert found["exact"].plan is None
    assert "the arguments alone take" in found["exact"].note
    assert math.isnan(found["exact"].communication_bytes)
    assert "the arguments alone take" in str(found)


def test_a_number_of_devices():
    found = shardplan.compare(STEP[0], 8, *STEP[2:], methods=("exact", "fsdp"))
    assert math.prod(found.mesh_axes.values()) == 8
    assert found["exact"].objective <= found["fsdp"].objective


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"methods": ("magic",)}, "there is no method `magic`; there are data_parallel"),
        ({"methods": ()}, "there is no method that is none|there are data_parallel"),
        ({"speed": 3}, "there is no option `speed`"),
        ({"objective": "beauty"}, "there is no objective `beauty`"),
    ],
)
def test_wrong_arguments(arguments: dict, message: str):
    with pytest.raises(ArgumentError, match=message):
        shardplan.compare(*STEP, **arguments)


def test_a_function_without_state_has_no_baselines():
    shape = jax.ShapeDtypeStruct((64, 64), "float32")
    found = shardplan.compare(lambda x, w: x @ w, STEP[1], shape, shape, methods=("exact", "fsdp"))
    assert found["exact"].plan is not None
    assert "replaces no argument" in found["fsdp"].note


@pytest.mark.parametrize("batch", [(), (jax.ShapeDtypeStruct((0, 8), "float32"),)])
def test_a_step_without_a_batch(batch):
    """The row has the reason."""

    def step(state, *batch):
        return {"w": state["w"] - jnp.tanh(state["w"])}

    found = shardplan.compare(step, STEP[1], {"w": jnp.ones((8, 8))}, *batch, methods=("data_parallel",))
    assert "replaces all its arguments: none is a batch" in found["data_parallel"].note


def test_an_undivided_batch():
    odd = mlp.training(mlp.Config(widths=(64, 64), batch=7))
    found = shardplan.compare(odd.train_step, STEP[1], odd.state, odd.batch, methods=("data_parallel",))
    assert "no mesh axis divides the batch of 7" in found["data_parallel"].note


def test_examples_are_followed_through_a_transformer():
    """All values between the tokens and the loss carry the examples. The sums over them are the gradients."""
    training = gpt.training(gpt.Config(layers=1, width=64, heads=4, vocabulary=256, sequence=32, batch=16))
    program = trace_program(training.train_step, (training.state, training.batch))
    examples = follow_examples(program, MeshAxes(("data",), (8,)))
    state = {program.inputs[position] for position in program.ties.values()}
    assert not state & {*examples.dims, *examples.sums}
    for value, dim in examples.dims.items():
        assert program.values[value].shape[dim] == 16
    lost = [
        operation.primitive.name
        for operation in program.operations
        if any(isinstance(o, int) and o in examples.dims for o in operation.operands)
        and not {*operation.results} & {*examples.dims, *examples.sums}
    ]
    assert not lost
    shapes = {program.values[value].shape for value in examples.sums}
    assert {leaf.shape for leaf in jax.tree.leaves(training.state["params"]) if leaf.ndim == 2} <= shapes | {(32, 64)}


def test_examples_are_followed_through_loops():
    def step(state, batch):
        def loss(weights):
            return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch, weights)[0] ** 2)

        value, gradient = jax.value_and_grad(loss)(state)
        return state - gradient, value

    shapes = jax.ShapeDtypeStruct((4, 128, 128), "float32"), jax.ShapeDtypeStruct((64, 128), "float32")
    found = shardplan.compare(step, STEP[1], *shapes, methods=("data_parallel",))
    assert found["data_parallel"].communication_bytes == pytest.approx(2 * RING * 4 * 4 * 128 * 128, rel=1e-3)


def test_annotations_of_a_network():
    """Per mesh axis, the dimension of a tensor, or the number of an operation's index, equal for the same index."""
    shapes = jax.ShapeDtypeStruct((16, 8), "float32"), jax.ShapeDtypeStruct((8, 32), "float32")
    program = trace_program(lambda x, w: x @ w, shapes)
    problem = build_problem(program, AbstractMesh((2, 4), ("data", "model")), Options())
    annotate(problem)
    network = problem.network
    assert set(network.annotations) == set(range(len(network)))
    variable = problem.variables_of(program.inputs[0])[0]
    assert variable is not None
    assert network.annotations[variable].size == 16 * 8 * 4
    for layout, noted in zip(
        problem.domain(program.inputs[0]).layouts, network.annotations[variable].layouts, strict=True
    ):
        assert all(axis in layout[dim] for axis, dim in enumerate(noted) if dim is not None)
        assert sum(dim is not None for dim in noted) == sum(len(axes) for axes in layout)
    operation = problem.variable_of_operation(0)
    assert operation is not None
    strategies, noted = problem.choices[0].strategies, network.annotations[operation].layouts
    for strategy, indices in zip(strategies, noted, strict=True):
        assert strategy is not None
        assert sum(index is not None for index in indices) == {1: 0, 2: 1, 4: 1, 8: 2}[strategy.degree]
    assert {index for indices in noted for index in indices} == {None, 0, 1, 2}


def test_a_search_without_a_bound(monkeypatch: pytest.MonkeyPatch):
    """Any method of the search can be a row; the network that it gets is annotated."""
    seen = []

    def cheapest_alone(search: Run) -> None:
        seen.append(len(search.network.annotations) == len(search.network))
        search.offer(np.array([int(costs.argmin()) for costs in search.network.costs]))

    method = Method(cheapest_alone, proves=False, limits=False, annotated=True)
    monkeypatch.setitem(METHODS, "cheapest_alone", method)
    found = shardplan.compare(*STEP, methods=("cheapest_alone", "exact"))
    row = found["cheapest_alone"]
    assert seen[0]
    assert row.plan is not None
    assert "without a bound" in str(row.plan)
    assert row.lower_bound == found["exact"].lower_bound
    assert row.objective >= found["exact"].objective
    assert "lower bound" in str(row.plan.diff(found["exact"].plan))  # type: ignore[arg-type]


def test_plot(tmp_path: Path):
    """It is written in the format of the path, and another format is refused."""
    pytest.importorskip("matplotlib")
    square = jax.ShapeDtypeStruct((256, 256), "float32")
    found = shardplan.compare(lambda x, w: (x, x @ w), "data=8", square, square, methods=("exact", "fsdp"))
    found.save_plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    found.save_plot(tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()
    for path in ("plot.unknown", "missing/plot.png"):
        with pytest.raises(ArgumentError, match="cannot write the plot to"):
            found.save_plot(tmp_path / path)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.long
def test_checkpoints_where_a_step_does_not_fit():
    """Policies by hand are compared then: that around every layer keeps least, and repeats what `exact` need not."""
    training = gpt.training(gpt.Config(2, width=64, heads=4, vocabulary=256, sequence=128, batch=64))
    step = training.train_step, 1, training.state, training.batch
    free = shardplan.plan(*step, donate_argnums=0)
    found = shardplan.compare(*step, donate_argnums=0, memory_limit=0.6 * free.peak_bytes, fit=("recompute",))
    assert [row.method for row in found][5:] == list(CHECKPOINTS)
    policies = [found[method] for method in CHECKPOINTS]
    assert min(policies, key=lambda row: row.peak_bytes).method == "checkpoint:nothing_saveable"
    assert found["exact"].plan.recomputed and found["exact"].peak_bytes <= 0.6 * free.peak_bytes
    fitting = [row for row in policies if not row.note]
    assert fitting and all(found["exact"].step_seconds <= 1.02 * row.step_seconds for row in fitting)
