"""Stencils: slices of padded or concatenated tensors are shifted reads, which send halos alone."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.audits.audit import measure
from shardplan.compiled.target import gpu_mesh
from shardplan.program.tracing import trace_program
from tests.helpers.random_programs import assert_equal_trees, mesh_of, run, scrambled

Step = Callable[[Any], Any]


def laplacian(q: Any) -> Any:
    return q[2:, 1:-1] + q[:-2, 1:-1] + q[1:-1, 2:] + q[1:-1, :-2] - 4 * q[1:-1, 1:-1]


STENCILS: dict[str, Step] = {
    "zeros around": lambda x: laplacian(jnp.pad(x, 1)),
    "edges repeated": lambda x: laplacian(jnp.pad(x, 1, mode="edge")),
    "edges repeated along rows": lambda x: (lambda q: q[2:] - q[:-2])(jnp.pad(x, ((1, 1), (0, 0)), mode="edge")),
    "wrapped": lambda x: laplacian(jnp.pad(x, 1, mode="wrap")),
    "roll": lambda x: jnp.roll(x, 1, 0) - jnp.roll(x, -2, 1),
    "moved history": lambda x: jnp.concatenate([x[1:], 2 * x[:1]]),
    "gradient": lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(laplacian(jnp.pad(x, 1)))))(x),
    "causal convolution": lambda x: sum(jnp.pad(x, ((0, 0), (3, 0)))[:, k : k + 16] * (k + 1) for k in range(4)),
    "all but the edges": lambda x: x.at[1:-1, 1:-1].add(0.1 * laplacian(x)).at[1:].set(x[1:] / x[:-1]),
    "padded with threes, converted": lambda x: (lambda q: q[2:] * q[:-2])(
        jnp.pad(x, ((1, 1), (0, 0)), constant_values=3).astype(jnp.bfloat16)
    ),
}
X = jax.random.normal(jax.random.key(0), (16, 16))


def all_stencils(x: Any) -> list[Any]:
    return [stencil(jnp.cos(x)) for stencil in STENCILS.values()]


def test_sizes_of_values() -> None:
    """All values have the size of the tensor."""
    program = trace_program(all_stencils, (X,))
    made = {program.values[result].shape for operation in program.operations for result in operation.results}
    assert {max(shape, default=0) for shape in made} == {0, 16}


def test_rotated_halves_are_left_alone() -> None:
    program = trace_program(lambda x: jnp.concatenate([-x[:, 8:], x[:, :8]], 1), (X,))
    assert [o.primitive.name for o in program.operations] == ["slice", "neg", "slice", "concatenate"]


@pytest.mark.slow
def test_values() -> None:
    mesh, step = mesh_of((2, 4)), lambda x: STENCILS["all but the edges"](STENCILS["edges repeated"](jnp.cos(x)))
    plan = shardplan.plan(step, mesh, X, pins={"0": P(("x", "y"))})
    assert {c.kind for c in plan.collectives} >= {"collective-permute"}
    np.testing.assert_allclose(run(plan, mesh, X), step(X), rtol=1e-3, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", STENCILS)
def test_drawn_layouts(name: str) -> None:
    """Any layouts give the values of the whole tensor."""
    mesh, stencil = mesh_of((2, 4)), lambda x: STENCILS[name](jnp.cos(x))
    plan = shardplan.plan(stencil, mesh, X, pins={"0": P("x", "y")})
    for seed in range(3):
        assert_equal_trees(run(scrambled(plan, seed), mesh, X), stencil(X))


@pytest.mark.long
@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("zeros around", 2),
        ("edges repeated", 2),
        ("edges repeated along rows", 2),
        ("gradient", 4),
        ("all but the edges", 2),
    ],
)
def test_bytes_of_stencils(name: str, rows: int) -> None:
    """The neighbours' rows are sent, and no other bytes."""
    mesh, shape = gpu_mesh("h100", (8,), ("x",)), jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    plan = shardplan.plan(STENCILS[name], mesh, shape, pins={"0": P("x")})
    assert plan.communication_bytes == rows * 512 * 4
    assert measure(plan.jitted(mesh).lower(shape)).communication_bytes == plan.communication_bytes
