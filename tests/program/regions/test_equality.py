"""Regions that the user splits by hand, each a ``shard_map``: planned and unplanned values are equal."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.errors import ArgumentError, ShardplanWarning
from tests.helpers.random_programs import assert_equal_trees, mesh_of
from tests.helpers.region_programs import Drawn

X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 32)), jnp.float32)
MESH = AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

pytestmark = pytest.mark.filterwarnings("ignore:`shard_map`")


def assert_drawn(seed: int) -> None:
    drawn = Drawn(seed)
    mesh = mesh_of(drawn.sizes)
    planned = shardplan.auto(drawn.function(mesh), mesh, pins=drawn.pins)
    expected = jax.jit(drawn.function(mesh, over_all=True))(*drawn.arrays)  # XLA:CPU fails for some over fewer axes
    assert_equal_trees(planned(*drawn.arrays), expected)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.long) for seed in (0, 3, 4, 5))])
def test_drawn_programs(seed: int) -> None:
    """Over drawn axes, with drawn specs and collectives, in loops, branches and gradients."""
    assert_drawn(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6, 46))
def test_many_drawn_programs(seed: int) -> None:
    """As above."""
    assert_drawn(seed)


BLOCKS = P("y")


def over_y(body, out=BLOCKS, mesh=MESH, **settings):
    return jax.shard_map(body, mesh=mesh, in_specs=P("y"), out_specs=out, axis_names={"y"}, **settings)


def test_one_axis_of_two() -> None:
    """Operands and results are split as the specs say and whole along the other axis; what is sent is counted."""
    fn = over_y(lambda x: lax.all_to_all(x, "y", 0, 1, tiled=True), P(None, "y"))
    with pytest.warns(ShardplanWarning, match=r"leaves out the mesh axes \(x\)"):
        plan = shardplan.plan(fn, MESH, X, pins={"0": P("y")})
    [exchange] = [one for one in plan.collectives if one.operation.endswith("shard_map")]
    assert (exchange.kind, exchange.axes, exchange.bytes) == ("all-to-all", ("y",), 3 / 4 * X.nbytes / 4)
    assert plan.communication_bytes == exchange.bytes


@pytest.mark.slow
def test_narrow_sum_over_one_axis_of_two() -> None:
    """XLA:CPU aborts on it where it splits the other axis."""
    mesh = mesh_of((2, 4))
    x = X.astype(jnp.bfloat16)
    planned = shardplan.auto(over_y(lambda x: lax.psum(x, "y"), P(), mesh), mesh)
    assert_equal_trees(planned(x), x.reshape(4, 4, 32).sum(0), 1e-2)


@pytest.mark.slow
def test_constraint_over_an_axis_left_out() -> None:
    """It splits nothing inside a region, and is no error."""
    mesh = mesh_of((2, 4))
    fn = over_y(lambda x: lax.psum(lax.with_sharding_constraint(x, P(None, "x")), "y"), P(), mesh)
    assert_equal_trees(shardplan.auto(fn, mesh)(X), X.reshape(4, 4, 32).sum(0))


@pytest.mark.slow
def test_axes_in_another_order_than_the_mesh_has() -> None:
    """Orders that specs name are layouts on a mesh of three axes too."""
    mesh = mesh_of((2, 2, 2))
    fn = jax.shard_map(lambda x: x * lax.axis_index("z"), mesh=mesh, in_specs=P(("z", "x")), out_specs=P(("z", "x")))
    planned = shardplan.auto(fn, mesh, pins={"0": P(("z", "y", "x"))})
    assert_equal_trees(planned(X), jax.jit(fn)(X))


def test_mesh_of_other_axes() -> None:
    """The axes of a region's own mesh are led back to those of the plan that make the same blocks."""
    own = AbstractMesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    fn = jax.shard_map(lambda x: lax.psum(x, ("b", "c")), mesh=own, in_specs=P("a", ("b", "c")), out_specs=P("a"))
    plan = shardplan.plan(fn, MESH, X, pins={"0": P("x", "y")})
    [sent] = plan.collectives
    assert (sent.kind, sent.axes, sent.bytes) == ("all-reduce", ("y",), 2 * 3 / 4 * X.nbytes / 8)


def test_mesh_of_other_devices() -> None:
    """A region over fewer devices than the plan's is an error that names both."""
    own = AbstractMesh((4,), ("y",), axis_types=(AxisType.Auto,))
    with pytest.raises(ArgumentError, match=r"`shard_map` at test_equality.* over 4 devices.* is for 8"):
        shardplan.plan(lambda x: over_y(jnp.sin, mesh=own)(x), MESH, X)


def test_result_without_readers() -> None:
    """Its part of a region is neither run nor counted."""
    fn = jax.shard_map(
        lambda x: (x * 2, lax.psum(x, "y")), mesh=MESH, in_specs=P("x", "y"), out_specs=(P("x", "y"), P("x"))
    )
    assert not shardplan.plan(lambda x: fn(x)[0], MESH, X).collectives


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the `shard_map` at")
def test_region_inside_a_region() -> None:
    """One over the axes that the outer one leaves out is left to XLA."""
    mesh = mesh_of((2, 4))

    def outer(x: jax.Array) -> jax.Array:
        inner = jax.shard_map(lambda x: lax.psum(x, "y"), in_specs=P(None, "y"), out_specs=P(), axis_names={"y"})
        return lax.ppermute(inner(x), "x", [(0, 1), (1, 0)])

    fn = jax.shard_map(outer, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    assert_equal_trees(shardplan.auto(fn, mesh)(X), jax.jit(fn)(X))


def test_loops_inside_are_counted_by_their_lengths() -> None:
    """Known ones by their bounds, others as stated, or once."""

    def halving(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda x: lax.pmax(x.max(), "y") > 1, lambda x: lax.pmean(x, "y") / 2, x)

    def stated(x: jax.Array) -> jax.Array:
        with shardplan.trip_count(5):
            return halving(x)

    def counted(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda c: c[1] < 3, lambda c: (lax.pmean(c[0], "y"), c[1] + 1), (x, 0))[0]

    pins, once = {"0": P("y")}, 2 * 3 / 4 * (X.nbytes / 4 + 4)
    sent = [
        shardplan.plan(over_y(body, check_vma=False), MESH, X, pins=pins).communication_bytes
        for body in (stated, counted)
    ]
    assert sent == [5 * once, 3 * (once - 6)]
    with pytest.warns(ShardplanWarning, match="the loop at .* counted once"):
        assert shardplan.plan(over_y(halving, check_vma=False), MESH, X, pins=pins).communication_bytes == once
