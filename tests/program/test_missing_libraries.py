"""Libraries that are not installed: plans are made without them, and compiling names what is missing."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan import _jax
from shardplan.errors import ShardplanError
from tests.helpers.random_programs import mesh_of

MESH = AbstractMesh((8,), ("x",))
HEADS = jax.ShapeDtypeStruct((16, 128, 8, 64), jnp.bfloat16)

without_cudnn = pytest.mark.skipif(_jax.has_cudnn(), reason="cuDNN is installed")
compiles_for_gpus = pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")


def attention(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")


def loss(q: Any, k: Any, v: Any) -> Any:
    return jnp.square(jax.checkpoint(attention)(q, k, v).astype(jnp.float32)).mean()


@without_cudnn
@pytest.mark.parametrize("fn", [attention, jax.grad(loss, (0, 1, 2))], ids=["forward", "gradient"])
def test_attention_of_cudnn_is_planned(fn: Any) -> None:
    """Its batches keep their split, without cuDNN."""
    plan = shardplan.plan(fn, MESH, HEADS, HEADS, HEADS, pins={"*": P("x")})
    assert plan.communication_bytes == 0
    names = {operation.primitive.name for operation in plan.program.operations}
    assert any(name.startswith("dot_product_attention_fwd") for name in names)


@without_cudnn
def test_attention_of_wide_heads_is_planned() -> None:
    """As for the newest GPU, whichever is here."""
    wide = jax.ShapeDtypeStruct((16, 128, 8, 256), jnp.bfloat16)
    assert shardplan.plan(attention, MESH, wide, wide, wide, pins={"*": P("x")}).communication_bytes == 0


@without_cudnn
def test_compiling_attention_without_cudnn() -> None:
    """The error names the operation, and the package to install. Unplanned steps fail as before."""
    step = shardplan.auto(attention, mesh_of((8,)))
    with pytest.raises(ShardplanError, match=r"at test_missing_libraries\.py:\d+ \(attention\) .*nvidia-cudnn-cu12"):
        step.lower(HEADS, HEADS, HEADS)
    with pytest.raises(RuntimeError, match="cuDNN"):
        jax.jit(lambda q: attention(q, q, q)).trace(HEADS)


def foreign(x: Any) -> Any:
    return jax.ffi.ffi_call("of_nobody", x)(x) * 2


UNREGISTERED = (
    r"`of_nobody`, which an `ffi_call` at test_missing_libraries\.py:\d+ \(foreign\) calls, .*register_ffi_target"
)


@pytest.mark.filterwarnings("ignore:`ffi_call`")
def test_calling_an_unregistered_target() -> None:
    """The error names the operation, its target, and where to register it."""
    with pytest.raises(ShardplanError, match=UNREGISTERED + r"\('of_nobody', \.\.\., platform='cpu'\)"):
        shardplan.auto(foreign, mesh_of((8,)))(jnp.ones((8, 8)))


@compiles_for_gpus
@pytest.mark.filterwarnings("ignore:`ffi_call`")
def test_audit_of_an_unregistered_target() -> None:
    """The error names the platform that it compiles for."""
    plan = shardplan.plan(foreign, MESH, jax.ShapeDtypeStruct((8, 8), jnp.float32))
    with pytest.raises(ShardplanError, match=UNREGISTERED + r".*CUDA"):
        shardplan.audit(plan)
