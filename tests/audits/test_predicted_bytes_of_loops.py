"""What plans of loops and branches predict is what XLA compiles for the GPU target: bytes within 3 %."""

from __future__ import annotations

from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.audits.audit import measure
from shardplan.compiled.target import gpu_mesh
from shardplan.models import gpt
from tests.helpers.loop_programs import FORMS

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`"),
    pytest.mark.filterwarnings("ignore:the loop at"),
]

WEIGHTS = jax.ShapeDtypeStruct((4, 1024, 1024), jnp.float32)
X = jax.ShapeDtypeStruct((2048, 1024), jnp.float32)


@pytest.mark.parametrize("sizes", [(8,), (2, 4)], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_bytes(name: str, sizes: tuple[int, ...]) -> None:
    mesh = gpu_mesh("h100", sizes, ("x", "y")[: len(sizes)])
    plan = shardplan.plan(FORMS[name], mesh, WEIGHTS, X)
    compiled = measure(plan.lower(mesh), mesh_axes=plan.mesh_axes).communication_bytes
    assert compiled == pytest.approx(plan.communication_bytes, rel=0.03, abs=1000)


def test_blocks_of_scanned_layers() -> None:
    """Gradients of bfloat16 products are reduced once, as without blocks, and weights are gathered once."""
    sizes = gpt.Config(layers=2, vocabulary=8192, batch=64, sequence=256, compute_dtype=jnp.bfloat16, scan_layers=True)
    training = gpt.training(sizes)
    mesh = gpu_mesh("h100", (8,), ("x",))
    free, plan = (
        shardplan.plan(training.train_step, mesh, training.state, training.batch, donate_argnums=0, blocks=blocks)
        for blocks in (None, {"batch": 4})
    )
    compiled = measure(plan.lower(mesh), mesh_axes=plan.mesh_axes).communication_bytes
    assert compiled == pytest.approx(plan.communication_bytes, rel=0.001)
    assert compiled <= 1.001 * free.communication_bytes


@pytest.mark.parametrize("spec", [jax.P(None, None, "x"), jax.P(None, "x")], ids=str)
def test_all_gathered_slices(spec: jax.P) -> None:
    """They are no copy of their stack."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        body = jax.checkpoint(lambda x, one: (jnp.tanh(x @ one.astype(x.dtype)), None))
        return jnp.sum(jax.lax.scan(body, x, w)[0])

    w, x = jax.ShapeDtypeStruct((32, 2048, 2048), jnp.float32), jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16)
    mesh = gpu_mesh("h100", (8,), ("x",))
    plan = shardplan.plan(jax.grad(loss), mesh, w, x, pins={"0": spec, "1": jax.P("x")})
    compiled = measure(plan.lower(mesh), mesh_axes=plan.mesh_axes)
    assert compiled.communication_bytes == pytest.approx(plan.communication_bytes, rel=0.01)
    assert compiled.memory.peak < 1.1 * plan.peak_bytes
