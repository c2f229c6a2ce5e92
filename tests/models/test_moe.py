"""Mixture of experts: the layer's values, its plans, and their compiled bytes."""

from __future__ import annotations

import functools
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import shardplan
from shardplan.audits.audit import Audit, measure
from shardplan.compiled.target import gpu_mesh
from shardplan.models import moe
from shardplan.models.logical import logical_axes
from tests.helpers.slow_devices import SLOW_DEVICES

TINY = moe.Config(layers=1, width=8, heads=2, kv_heads=1, hidden=16, experts=4, vocabulary=32, sequence=8, batch=4)
WIDE = replace(moe.BENCHMARK, layers=1)
EXPERTS = "0/params/layers/0/experts/"
MESHES = {"8": {"data": 8}, "2x4": {"data": 2, "model": 4}, "2x2x2": {"data": 2, "model": 2, "more": 2}}


def layer_by_hand(layer: moe.Experts, x: np.ndarray, room: int) -> np.ndarray:
    """Token by token, first choices before second ones; an expert takes `room` tokens of a group (a sequence)."""
    gate, up, down = (np.asarray(kernel[...], np.float64) for kernel in (layer.gate, layer.up, layer.down))
    result = np.zeros_like(x)
    for group, tokens in enumerate(x):
        scores = tokens @ np.asarray(layer.router[...])
        best = np.argsort(-scores, axis=1, kind="stable")[:, : layer.config.chosen]
        weights = np.exp(np.take_along_axis(scores, best, 1))
        weights /= weights.sum(axis=1, keepdims=True)
        taken = np.zeros(layer.config.experts, int)
        for choice in range(layer.config.chosen):
            for number, token in enumerate(tokens):
                expert = best[number, choice]
                taken[expert] += 1
                if taken[expert] <= room:
                    inner = token @ gate[expert]
                    inner = inner / (1 + np.exp(-inner)) * (token @ up[expert])
                    result[group, number] += weights[number, choice] * (inner @ down[expert])
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "room"),
    [
        ({"capacity_factor": 0.5}, 2),
        pytest.param({"capacity_factor": 4.0}, 8, marks=pytest.mark.long),
        pytest.param({"routing": "ragged"}, 8, marks=pytest.mark.long),
    ],
    ids=["dropped", "room for all", "ragged"],
)
def test_a_layer_token_by_token(options: dict, room: int):
    """The layer computes the same for all tokens at once."""
    config = replace(TINY, **options)
    assert config.capacity == room or config.routing == "ragged"
    layer = moe.Experts(config, nnx.Rngs(0))
    layer.router[...] = 50 * layer.router[...]
    x = jax.random.normal(jax.random.key(1), (config.batch, config.sequence, config.width))
    mixed, balance = nnx.jit(moe.Experts.__call__)(layer, x)
    np.testing.assert_allclose(mixed, layer_by_hand(layer, np.asarray(x, np.float64), room), rtol=1e-4, atol=1e-6)
    assert balance > 1.0  # of evenly used experts it is 1


@pytest.mark.long
def test_groups_need_not_be_sequences():
    x = jax.random.normal(jax.random.key(1), (TINY.batch, TINY.sequence, TINY.width))
    config = replace(TINY, capacity_factor=4.0)
    layers = [moe.Experts(replace(config, groups=groups), nnx.Rngs(0)) for groups in (None, 2, 8)]
    results = [nnx.jit(moe.Experts.__call__)(layer, x)[0] for layer in layers]
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(results[2], results[0], rtol=1e-5, atol=1e-7)


def test_published_configurations_have_the_published_sizes():
    assert moe.training(moe.CONFIGS["mixtral-8x7b"]).parameters == 46_702_792_704
    assert moe.training(moe.CONFIGS["mixtral-8x22b"]).parameters == 140_630_071_296
    assert moe.training(replace(moe.CONFIGS["mixtral-8x7b"], layers=2, scan_layers=False)).parameters == (
        moe.training(replace(moe.CONFIGS["mixtral-8x7b"], layers=2)).parameters
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_heads": 3}, "`kv_heads` must divide `heads`"),
        ({"chosen": 5}, "1 to 4 experts: got `chosen=5`"),
        ({"routing": "dense"}, "'capacity' or 'ragged': got 'dense'"),
        ({"groups": 3}, "evenly: got 3"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        moe.training(replace(TINY, **options))


def planned(config: moe.Config, mesh: str) -> shardplan.Plan:
    axes = MESHES[mesh]
    training = moe.training(config)
    devices = AbstractMesh(tuple(axes.values()), tuple(axes))
    return shardplan.plan(training.train_step, devices, training.state, training.batch, donate_argnums=0)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["8", *(pytest.param(mesh, marks=pytest.mark.long) for mesh in ("2x4", "2x2x2"))])
def test_experts_are_split_over_all_devices_and_tokens_travel(mesh: str):
    plan = planned(WIDE, mesh)
    for name in ("gate", "up", "down"):
        experts, *others = plan.layouts[EXPERTS + name]
        axes = {experts} if isinstance(experts, str) else set(experts or ())
        assert axes == set(MESHES[mesh]) and not any(others)
    place_bytes = 2 * WIDE.experts * WIDE.batch * WIDE.capacity * WIDE.width
    moved = sum(c.bytes for c in plan.collectives if c.kind == "all-to-all" and "by_capacity" in c.source)
    assert moved == pytest.approx(4 * 7 / 64 * place_bytes, rel=0.01)  # there and back, forward and backward
    assert plan.gap <= 1e-3


@pytest.mark.slow
def test_layouts_of_sorted_tokens_and_experts():
    """Experts are split along their hidden units."""
    plan = planned(replace(WIDE, routing="ragged"), "8")
    layouts = {name: tuple(plan.layouts[EXPERTS + name]) for name in ("gate", "up", "down")}
    assert layouts == {"gate": (None, None, "data"), "up": (None, None, "data"), "down": (None, "data")}


FORMS: dict[str, dict[str, Any]] = {
    "ragged": {"routing": "ragged"},
    "groups": {"groups": 8, "layers": 2},
    "scanned": {"layers": 2, "scan_layers": True, "checkpoint": True},
    "ragged scanned": {"layers": 2, "routing": "ragged", "scan_layers": True},
}


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_trains_planned_as_unplanned(form: str, mesh: str, tmp_path: Path):
    training = moe.training(replace(moe.SMALL, **FORMS[form]))
    profile = tmp_path / "slow.toml"
    profile.write_text(SLOW_DEVICES)
    step = shardplan.auto(
        training.train_step, jax.make_mesh(tuple(MESHES[mesh].values()), tuple(MESHES[mesh])), hardware=profile
    )
    assert step.plan(training.state, training.batch).communication_bytes > 0
    state, loss = step(training.init(), training.example())
    expected_state, expected_loss = jax.jit(training.train_step)(training.init(), training.example())
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-4)
    for got, expected in zip(*(jax.tree.leaves(s["params"]) for s in (state, expected_state)), strict=True):
        assert np.linalg.norm(got - expected) <= 1e-3 * np.linalg.norm(expected)


def bytes_by_hand(config: moe.Config, mesh: str) -> float:
    """What expert parallelism sends as it is written by hand: experts over all devices, all else as in FSDP."""
    training, axes = moe.training(config), tuple(MESHES[mesh])
    devices = gpu_mesh("h100", tuple(MESHES[mesh].values()), axes)

    def spec(path: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        if "experts" in jax.tree_util.keystr(path) and leaf.ndim == 3:
            return NamedSharding(devices, PartitionSpec(axes))
        divided = [dim for dim, size in enumerate(leaf.shape) if size % 8 == 0]
        dims = [None] * max(divided, key=lambda dim: leaf.shape[dim]) if divided else []
        return NamedSharding(devices, PartitionSpec(*dims, axes) if divided else PartitionSpec())

    state = jax.tree_util.tree_map_with_path(spec, training.state)
    whole, batch = NamedSharding(devices, PartitionSpec()), NamedSharding(devices, PartitionSpec(axes))
    with logical_axes(devices, {"batch": axes, "groups": axes, "experts": axes}):
        step = jax.jit(training.train_step, in_shardings=(state, batch), out_shardings=(state, whole), donate_argnums=0)
        return measure(step.lower(training.state, training.batch)).communication_bytes


@functools.cache
def audited(routing: Literal["capacity", "ragged"], mesh: str) -> Audit:
    config = replace(WIDE, routing=routing, compute_dtype=jnp.bfloat16)
    return shardplan.audit(planned(config, mesh), target="h100")


@pytest.mark.long
@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("routing", ["capacity", "ragged"])
def test_compiled_bytes_of_a_mixture(routing: Literal["capacity", "ragged"], mesh: str):
    """They are the planned ones, and fewer than by hand."""
    audit = audited(routing, mesh)
    assert audit.ok(tolerance=0.02)
    config = replace(WIDE, routing=routing, compute_dtype=jnp.bfloat16)
    assert audit.compiled.communication_bytes < bytes_by_hand(config, mesh)


@pytest.mark.long
@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("routing", ["capacity", "ragged"])
def test_the_compiled_peak_is_near_the_planned_one(routing: Literal["capacity", "ragged"], mesh: str):
    audit = audited(routing, mesh)
    assert audit.predicted_peak_bytes == pytest.approx(audit.compiled.memory.peak, rel=0.15)
