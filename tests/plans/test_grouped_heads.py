"""Attention whose key/value heads are fewer than the devices: planned right, and no worse than by hand."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import shardplan
from shardplan.audits.audit import measure
from shardplan.compiled.target import gpu_mesh
from tests.helpers.random_programs import assert_equal_trees, mesh_of, run, scrambled

compiles_for_gpus = pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
pytestmark = pytest.mark.filterwarnings("ignore:no mesh axis")
MESHES = ((8,), (2, 4), (2, 2, 2))
Constrain = Callable[..., Any]


def layer_step(heads: int, kv_heads: int, repeated: bool, constrain: Constrain = lambda x, *_: x) -> Callable[..., Any]:
    """A training step of one layer of attention and its MLP; keys repeated for every head, or queries in groups.

    ``constrain(array, *names)`` places activations by hand; names are batch, heads, kv, group or None.
    """
    groups = heads // kv_heads

    def attention(p: Any, x: Any) -> Any:
        def project(kernel: Any, count: int, name: str) -> Any:
            return constrain((x @ kernel).reshape(*x.shape[:2], count, -1), "batch", None, name, None)

        query = project(p["query"], heads, "heads")
        key, value = (project(p[name], kv_heads, "kv") for name in ("key", "value"))
        if repeated:
            key, value = (constrain(jnp.repeat(a, groups, 2), "batch", None, "heads", None) for a in (key, value))
            scores = constrain(jnp.einsum("bqhd,bkhd->bhqk", query, key), "batch", "heads", None, None)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
            mixed = constrain(mixed, "batch", None, "heads", None)
        else:
            grouped = query.reshape(*x.shape[:2], kv_heads, groups, -1)
            grouped = constrain(grouped, "batch", None, "kv", "group", None)
            scores = constrain(jnp.einsum("bqkgd,btkd->bkgqt", grouped, key), "batch", "kv", "group", None, None)
            mixed = jnp.einsum("bkgqt,btkd->bqkgd", jax.nn.softmax(scores), value)
            mixed = constrain(mixed, "batch", None, "kv", "group", None)
        return constrain(mixed.reshape(*x.shape[:2], -1) @ p["out"], "batch", None, None)

    def loss(p: Any, x: Any, y: Any) -> Any:
        x = x + attention(p, x)
        hidden = jax.nn.silu(constrain(x @ p["up"], "batch", None, "heads"))
        return jnp.mean((constrain(x + hidden @ p["down"], "batch", None, None) - y) ** 2)

    def step(p: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(p, *batch)
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, gradients), value

    return step


def shapes(width: int, heads: int, kv_heads: int, batch: int, sequence: int) -> Any:
    of_kv = width // heads * kv_heads
    sizes = {
        "query": (width, width),
        "key": (width, of_kv),
        "value": (width, of_kv),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in sizes.items()}
    return params, (jax.ShapeDtypeStruct((batch, sequence, width), jnp.float32),) * 2


@pytest.mark.long
@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_drawn_layouts_equal_unplanned(sizes: tuple[int, ...], kv_heads: int, repeated: bool) -> None:
    draw = np.random.default_rng(0)
    step = layer_step(16, kv_heads, repeated)
    args = jax.tree.map(lambda s: jnp.asarray(0.2 * draw.normal(size=s.shape), s.dtype), shapes(64, 16, kv_heads, 2, 8))
    mesh = mesh_of(sizes)
    plan = scrambled(shardplan.plan(step, mesh, *args), 0)
    assert_equal_trees(run(plan, mesh, *args), jax.jit(step)(*args))


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_heads_of_queries_are_split_and_keys_whole(kv_heads: int) -> None:
    """With one example nothing but the heads can share the attention without exchanging scores."""
    plan = shardplan.plan(
        layer_step(16, kv_heads, True), AbstractMesh((8,), ("x",)), *shapes(2048, 16, kv_heads, 1, 2048)
    )
    operations, strategies = plan.schedule.program.operations, plan.schedule.assignment.strategies
    values = plan.schedule.program.values
    scores = [o for o in operations if o.primitive.name == "dot_general" and len(values[o.results[0]].shape) == 4]
    assert scores and all(
        strategies[o.index].results[0][1] == (0,) for o in scores if not strategies[o.index].pending[0]
    )


@compiles_for_gpus
@pytest.mark.long
@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_plans_send_hardly_more_than_layouts_by_hand(sizes: tuple[int, ...], repeated: bool) -> None:
    """Megatron's: heads, columns and rows over all axes but the batch's, keys and values over dividing ones."""
    kv_heads, args = 2, shapes(2048, 16, 2, 2, 1024)
    names = ("x", "y", "z")[: len(sizes)]
    plan = shardplan.plan(layer_step(16, kv_heads, repeated), AbstractMesh(sizes, names), *args)
    audit = shardplan.audit(plan, target="h100")
    assert audit.ok(0.02), str(audit)
    mesh = gpu_mesh("h100", sizes, names)
    data, tensor = (names[:1], names[1:]) if len(sizes) > 1 else ((), names)
    of_kv = tensor[:1] if kv_heads % sizes[names.index(tensor[0])] == 0 else ()
    axes = {"batch": data, "heads": tensor, "kv": of_kv, "group": tensor[len(of_kv) :], None: ()}

    def placed(*entries: str | None) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(axes[entry] or None for entry in entries)))

    columns, rows, whole = placed(None, "heads"), placed("heads"), placed()
    weights = {"query": columns, "key": whole, "value": whole, "out": rows, "up": columns, "down": rows}
    step = layer_step(16, kv_heads, repeated, lambda x, *n: jax.lax.with_sharding_constraint(x, placed(*n)))
    batch = (placed("batch"),) * 2
    by_hand = jax.jit(step, in_shardings=(weights, batch), out_shardings=(weights, whole)).lower(*args)
    assert plan.communication_bytes <= 1.03 * measure(by_hand).communication_bytes
