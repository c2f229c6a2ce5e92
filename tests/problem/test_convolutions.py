"""Random convolutions and poolings: any plan computes the values of NumPy, and XLA never ends the process."""

import os
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan import rules
from shardplan.layout.layout import LayoutSpace, MeshAxes
from shardplan.problem.strategies import StrategyMaker
from shardplan.problem.xla_limits import shard_map_axes
from shardplan.program.tracing import trace_program
from tests.helpers.convolution_programs import Drawn, compares, drawn, plans_of
from tests.helpers.random_programs import assert_equal_trees, mesh_of, run
from tests.helpers.slow_devices import SLOW_DEVICES

EVERY_SIZE = frozenset(range(2, 1000))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(n, marks=pytest.mark.long) for n in range(8, 40))])
@pytest.mark.parametrize("kind", ["negative", "groups"])
def test_drawn_cases(kind: str, seed: int, tmp_path: Path) -> None:
    """The plan for slow devices, and one that nobody would choose, give the values and gradients of NumPy."""
    profile = tmp_path / "slow.toml"
    profile.write_text(SLOW_DEVICES)
    case = drawn(kind, seed)
    for plan in plans_of(case, profile if seed % 2 else "h100").values():
        assert compares(case, plan) < 2e-4


@pytest.mark.long
@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
@pytest.mark.parametrize("kind", ["negative", "groups"])
def test_drawn_cases_compile_each_in_a_process(kind: str) -> None:
    """No case is wrong, and XLA:GPU ends no process."""
    command = [sys.executable, "-m", "tests.helpers.convolution_programs", kind, "100", "12"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=os.environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-2000:]


def choices_of(case: Drawn) -> list[Any]:
    """The convolutions of a case, each with its strategies where every size may be padded."""
    program = trace_program(case.step, case.arrays())
    mesh = MeshAxes(tuple("xyz"[: len(case.mesh)]), case.mesh)
    maker = StrategyMaker(LayoutSpace(mesh, EVERY_SIZE))
    found = [o for o in program.operations if o.primitive.name == "conv_general_dilated"]
    return [(mesh, operation, maker.choices(program, operation)[1].strategies) for operation in found]


@pytest.mark.parametrize("seed", range(12))
def test_strategies_of_drawn_groups_split_whole_groups(seed: int) -> None:
    """Blocks of channels hold whole groups, of data, kernel and result at once, and none needs its neighbours'."""
    for mesh, operation, strategies in choices_of(drawn("groups", seed)):
        params, numbers = operation.params, operation.params["dimension_numbers"]
        for count, dim in zip(
            (params["batch_group_count"], params["feature_group_count"]), numbers.lhs_spec, strict=False
        ):
            if count == 1:
                continue
            for strategy in strategies:
                data, kernel = strategy.operands
                axes = data[dim]
                assert count % mesh.degree(axes) == 0
                assert axes == kernel[numbers.rhs_spec[0]] == strategy.results[0][numbers.out_spec[1]]
                assert not any(halo.operand == 0 and halo.dim == dim for halo in strategy.halos)


def test_channels_between_groups_with_a_padded_size() -> None:
    """Blocks of 3 channels cut through groups of 2, also where some size of the step does not divide."""
    numbers = ("NHWC", "HWIO", "NHWC")

    def step(x: jax.Array, dy: jax.Array, k: jax.Array, a: jax.Array, b: jax.Array) -> Any:
        convolve = lambda k: lax.conv_general_dilated(  # noqa: E731
            x, k, (1, 1), "SAME", feature_group_count=3, dimension_numbers=numbers
        )
        return jax.vjp(convolve, k)[1](dy)[0], (a @ b).sum()

    shapes = [(8, 4, 4, 6), (8, 4, 4, 6), (3, 3, 2, 6), (64, 64), (64, 1001)]
    channels = P(None, None, None, "x")
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    plan = shardplan.plan(step, AbstractMesh((2,), ("x",)), *given, pins=dict.fromkeys("012", channels))
    assert "collective-permute" not in {sent.kind for sent in plan.collectives}


def depthwise(x: Any, k: Any) -> jax.Array:
    """Of images with channels last, to images with channels first."""
    numbers = ("NHWC", "HWIO", "NCHW")
    return lax.conv_general_dilated(x, k, (1, 1), "SAME", feature_group_count=8, dimension_numbers=numbers)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(8,), (2, 4)], ids=str)
def test_depthwise_result_in_another_order(sizes: tuple[int, ...]) -> None:
    """XLA alone takes the channels for another dimension of the result."""
    draw, mesh = np.random.default_rng(0), mesh_of(sizes)
    x, k = (draw.normal(size=shape).astype(np.float32) for shape in [(2, 4, 5, 8), (3, 3, 1, 8)])
    channels = P(None, None, None, "x")
    plan = shardplan.plan(depthwise, mesh, x, k, pins={"0": channels, "1": channels})
    [strategy] = plan.schedule.assignment.strategies.values()
    assert strategy.results[0][1] == (0,)
    assert_equal_trees(run(plan, mesh, x, k), depthwise(x, k))


def grown(x: Any, k: Any) -> jax.Array:
    """282 rows, of which each of two devices gives 141: the second from between two rows of the image on."""
    numbers = ("NHC", "HIO", "NCH")
    return lax.conv_general_dilated(jnp.sin(x), k, (1,), [(0, -1)], (2,), dimension_numbers=numbers)


@pytest.mark.slow
def test_odd_blocks_of_dilated_rows_in_another_order(tmp_path: Path) -> None:
    """XLA alone removes a block's additional rows along the dimension of the channels."""
    profile, mesh, draw = tmp_path / "slow.toml", mesh_of((2,)), np.random.default_rng(0)
    profile.write_text(SLOW_DEVICES)

    def step(x: Any, k: Any) -> jax.Array:
        return lax.with_sharding_constraint(grown(x, k), NamedSharding(mesh, P(None, None, "x")))

    x, k = (draw.normal(size=shape).astype(np.float32) for shape in [(1, 143, 1), (3, 1, 1)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", shardplan.ShardplanWarning)  # of 143 rows, which do not divide
        plan = shardplan.plan(step, mesh, x, k, hardware=profile)
    assert_equal_trees(run(plan, mesh, x, k), grown(x, k))


def weights_gradient(x: jax.Array, dy: jax.Array) -> jax.Array:
    """Sums over rows: the second operand is the window."""
    return lax.conv_general_dilated(x, dy, (1,), [(1, 0)], dimension_numbers=("CHN", "IHO", "HNC"))


def test_uneven_rows_with_an_unused_axis() -> None:
    """XLA would add up the parts of devices that have the same rows."""
    mesh = MeshAxes(("x", "y"), (2, 4))
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(3, 138, 4), (3, 138, 8)]]
    program = trace_program(weights_gradient, shapes)
    [operation] = program.operations
    maker = StrategyMaker(LayoutSpace(mesh, frozenset({138})))
    strategies = maker.choices(program, operation)[1].strategies
    shapes_in_order = [program.values[operation.results[0]].shape, *(shape.shape for shape in shapes)]
    found = 0
    for strategy in strategies:
        layouts = zip(shapes_in_order, (*strategy.results, *strategy.operands), strict=True)
        divided = [(n, mesh.degree(axes)) for shape, one in layouts for n, axes in zip(shape, one or (), strict=True)]
        if any(n % blocks for n, blocks in divided):
            found += 1
            assert strategy.padded
            assert not shard_map_axes(operation, strategy, mesh.splitting)
    assert found


def test_equal_blocks_are_a_matter_of_equal_splits() -> None:
    """Where all sizes of a convolution divide, a padded size elsewhere in the step adds no strategy."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(4, 40, 4), (4, 32, 8)]]
    program, mesh = trace_program(weights_gradient, shapes), MeshAxes(("x",), (2,))
    [operation] = program.operations
    even, padded = (
        StrategyMaker(LayoutSpace(mesh, sizes)).choices(program, operation)[1].strategies
        for sizes in (frozenset[int](), EVERY_SIZE)
    )
    assert even == padded


def test_blocks_that_read_no_row_are_refused() -> None:
    """Every second place between the rows of an image, from the first of these on."""
    between = lambda x, k: lax.conv_general_dilated(x, k, (2,), [(1, 0)], (2,))  # noqa: E731
    rule = rules.rule_of(between, np.ones((2, 2, 4), np.float32), np.ones((1, 2, 1), np.float32))
    assert "x" not in {split.index for split in (*rule.splits(4), *rule.uneven_splits(4))}


def dilated_kernel_gradient(x: Any, kernel: Any, given: Any) -> Any:
    """Of a convolution in groups of dilated rows: the batch is summed over, as channels of a batch in groups."""
    convolved = lambda kernel: lax.conv_general_dilated(  # noqa: E731
        x, kernel, (1,), [(1, 1)], (3,), dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=8
    )
    return jax.vjp(convolved, kernel)[1](given)[0]


def gradient_of_rows_beside_dilated_ones(x: Any, kernel: Any, given: Any) -> Any:
    convolved = lambda kernel: lax.conv_general_dilated(  # noqa: E731
        x, kernel, (1, 1), [(1, 0), (1, 1)], (1, 3), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jax.vjp(convolved, kernel)[1](given)[0]


def strided_rows_of_dilated_ones(x: Any, kernel: Any) -> Any:
    """34 rows of 51, 17 on either of two devices: the second's begin between two of the image."""
    convolved = lax.conv_general_dilated(x, kernel, (3,), [(1, 1)], (2,), dimension_numbers=("NWC", "WIO", "NWC"))
    return jnp.tanh(convolved)


def batch_in_groups(x: Any, kernel: Any) -> Any:
    numbers = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x, kernel, (2,), [(0, 0)], dimension_numbers=numbers, batch_group_count=8)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
@pytest.mark.parametrize(
    "step, shapes, sizes, spec",
    [
        (dilated_kernel_gradient, [(8, 16, 16), (3, 2, 8), (8, 46, 8)], (2,), P("x")),
        (dilated_kernel_gradient, [(8, 16, 16), (3, 2, 8), (8, 46, 8)], (2, 2), P("x", None, "y")),
        (gradient_of_rows_beside_dilated_ones, [(1, 64, 8, 1), (2, 3, 1, 1), (1, 64, 22, 1)], (2,), P(None, "x")),
        (strided_rows_of_dilated_ones, [(1, 51, 1), (2, 1, 1)], (2,), P()),
        (batch_in_groups, [(8, 64, 4), (2, 4, 8)], (2, 2), P(None, "x", "y")),
    ],
)
def test_bytes_of_dilated_data_and_of_batches_in_groups(
    step: Any, shapes: Any, sizes: Any, spec: P, tmp_path: Path
) -> None:
    """XLA sends the planned bytes without an all-gather of the data, and the values are those of the unplanned step."""
    profile = tmp_path / "slow.toml"
    profile.write_text(SLOW_DEVICES)
    draw = np.random.default_rng(0)
    arrays = [draw.normal(size=shape).astype(np.float32) for shape in shapes]
    plan = shardplan.plan(step, mesh_of(sizes), *arrays, pins={"0": spec}, hardware=profile)
    assert shardplan.audit(plan, target="h100").ratio == pytest.approx(1, abs=0.01)
    np.testing.assert_allclose(run(plan, mesh_of(sizes), *arrays), jax.jit(step)(*arrays), rtol=1e-4, atol=1e-4)
