"""A number of devices, or hosts by devices: the meshes that they make, compared."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.errors import ArgumentError, InfeasibleError
from shardplan.hardware import HardwareProfile
from shardplan.layout.mesh import hosts_by_devices, shapes_of
from tests.helpers.random_programs import assert_equal_trees

S = jax.ShapeDtypeStruct


def step(params: Any, x: Any) -> Any:
    def loss(p: Any) -> Any:
        h = x
        for up, down in p:
            h = h + jnp.tanh(h @ up) @ down
        return (h**2).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


PARAMS = [(S((1024, 4096), jnp.float32), S((4096, 1024), jnp.float32))] * 2
X = S((2048, 1024), jnp.float32)


@pytest.mark.parametrize(
    ("devices", "ordered", "expected"),
    [
        (1, False, [(1,)]),
        (7, False, [(7,)]),
        (8, False, [(8,), (2, 4)]),
        (8, True, [(8,), (2, 4), (4, 2)]),
        (36, False, [(36,), (2, 18), (3, 12), (4, 9), (6, 6)]),
        ("1x8", False, [(8,), (2, 4)]),
        ("8x1", False, [(8,)]),
        ("2x8", True, [(2, 8), (2, 2, 4), (2, 4, 2)]),
        ("1x1", False, [(1,)]),
    ],
)
def test_shapes(devices: int | str, ordered: bool, expected: list[tuple[int, ...]]) -> None:
    meshes = shapes_of(devices, ordered)
    assert [mesh.axis_sizes for mesh in meshes] == expected
    if isinstance(devices, str) and hosts_by_devices(devices)[0] > 1:
        assert all(mesh.axis_names[0] == "hosts" for mesh in meshes)


@pytest.mark.parametrize("mesh", ["", "2x", "x8", "0x8", "2x0", "2 x 8", "two", "2x8x4", "-2x8"])
def test_bad_texts(mesh: str) -> None:
    with pytest.raises(ArgumentError, match="as in `2x8`"):
        shardplan.plan(step, mesh, PARAMS, X)


def test_the_best_of_several_meshes() -> None:
    """The plan has a row for each mesh."""
    plan = shardplan.plan(step, 16, PARAMS, X)
    rows = plan.statistics["meshes"]
    assert {tuple(row["mesh"].values()) for row in rows} == {(16,), (2, 8), (4, 4)}
    best = next(row for row in rows if row["mesh"] == plan.mesh_axes)
    assert (best["objective"], best["lower_bound"]) == (plan.objective, plan.lower_bound)
    assert all(row["lower_bound"] >= 0.98 * plan.lower_bound for row in rows)
    assert all(row["objective"] is None or row["objective"] >= plan.objective for row in rows)
    for row in rows:
        sizes = tuple(row["mesh"].values())
        alone = shardplan.plan(step, jax.sharding.AbstractMesh(sizes, tuple(row["mesh"])), PARAMS, X)
        assert alone.objective >= plan.objective * (1 - 1e-6)
        assert alone.objective >= row["lower_bound"] * (1 - 1e-6)


def test_meshes_that_cannot_be_the_best() -> None:
    """They are not planned in full."""
    rows = shardplan.plan(step, 16, PARAMS, X).statistics["meshes"]
    assert any(row["objective"] is None for row in rows)


def test_the_table_is_printed() -> None:
    text = str(shardplan.plan(step, 8, PARAMS, X))
    assert "at least" in text and "outer=2, inner=4" in text and "devices=8" in text


@pytest.mark.filterwarnings("ignore:no mesh axis")
def test_one_shape_has_no_table() -> None:
    plan = shardplan.plan(step, 7, PARAMS, S((2051, 1024), jnp.float32))
    assert "meshes" not in plan.statistics and plan.mesh_axes == {"devices": 7}


def test_pins_choose_among_the_meshes() -> None:
    plan = shardplan.plan(step, 16, PARAMS, X, pins={"1": P("outer")})
    assert set(plan.mesh_axes) == {"outer", "inner"}
    assert plan.layouts["1"][0] == "outer"
    assert shardplan.plan(step, 16, PARAMS, X, pins={"1": P("devices")}).mesh_axes == {"devices": 16}


def test_nothing_fits() -> None:
    with pytest.raises(InfeasibleError, match="the arguments alone take"):
        shardplan.plan(step, 2, PARAMS[:1], X, memory_limit=1e5)


def test_the_axis_across_hosts_costs_what_its_network_costs() -> None:
    """Two hosts of four send little between them; the profile's hosts of eight would not tell."""
    apart = shardplan.plan(step, "2x4", PARAMS, X, objective="time")
    together = shardplan.plan(step, "1x8", PARAMS, X, objective="time")
    assert apart.objective > together.objective
    hardware = apart.recipe.options.hardware
    assert isinstance(hardware, HardwareProfile) and hardware.devices_per_host == 4
    network = apart.schedule.problem.prices.per_byte((0,))
    inside = [apart.schedule.problem.prices.per_byte((axis,)) for axis in range(1, len(apart.mesh_axes))]
    assert all(network > 5 * price for price in inside)


@pytest.mark.parametrize("mesh", [8, "2x4"])
def test_a_run_on_the_first_devices(mesh: int | str) -> None:
    """A plan over a number of devices computes the results of the unplanned step."""
    draw = np.random.default_rng(0)
    params = [tuple(jnp.asarray(draw.normal(size=s) * 0.1, jnp.float32) for s in ((32, 64), (64, 32)))]
    x = jnp.asarray(draw.normal(size=(64, 32)), jnp.float32)
    planned = shardplan.auto(step, mesh)
    assert_equal_trees(planned(params, x), jax.jit(step)(params, x))
