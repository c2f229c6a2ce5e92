"""Sums of convolutions run in islands where XLA would move the whole, and come out as in the unplanned step."""

from importlib.util import find_spec
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.compiled.target import gpu_mesh
from tests.helpers.random_programs import assert_equal_trees, mesh_of, run, scrambled
from tests.helpers.slow_devices import SLOW_DEVICES

STEPS = {
    "convolution": nn.Conv(16, (3, 3)),
    "of one pixel": nn.Conv(16, (1, 1), strides=(2, 2)),
    "transposed": nn.ConvTranspose(16, (2, 2), strides=(2, 2)),
    "transposed, overlapping": nn.ConvTranspose(16, (3, 3), strides=(2, 2)),
    "grouped": nn.Conv(16, (2, 2), strides=(2, 2), feature_group_count=4),
    "depthwise": nn.Conv(16, (3, 3), feature_group_count=16),
}


def gradients(module: nn.Module, shape: tuple[int, ...]):
    """A step of gradients with respect to weights and images, and its arguments' shapes."""
    images = jax.ShapeDtypeStruct(shape, jnp.float32)
    weights = jax.eval_shape(lambda x: module.init(jax.random.key(0), x), images)

    def step(weights, images):
        loss = lambda weights, images: jnp.sum(jnp.sin(module.apply(weights, jnp.cos(images))))  # noqa: E731
        return jax.grad(loss, argnums=(0, 1))(weights, images)

    return step, weights, images


PINS = [P(None, ("x", "y")), P(("x", "y")), pytest.param(P(None, "x", None, "y"), marks=pytest.mark.long)]


@pytest.mark.slow
@pytest.mark.parametrize("pin", PINS, ids=["space", "batch", "space and channels"])
@pytest.mark.parametrize("name", [n if n[:2] == "tr" else pytest.param(n, marks=pytest.mark.long) for n in STEPS])
def test_gradients_are_those_of_the_unplanned_step(name: str, pin: P, tmp_path: Path):
    step, weights, images = gradients(STEPS[name], (8, 32, 16, 16))
    key = jax.random.key(0)
    arrays = jax.tree.map(lambda leaf: jax.random.normal(key, leaf.shape), (weights, images))
    profile = tmp_path / "slow.toml"
    profile.write_text(SLOW_DEVICES)
    planned = shardplan.auto(step, jax.make_mesh((2, 4), ("x", "y")), hardware=profile, pins={"1": pin})
    for one, other in zip(*map(jax.tree.leaves, (planned(*arrays), jax.jit(step)(*arrays))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "sizes",
    [(2, 4), pytest.param((2, 2, 2), marks=pytest.mark.long), pytest.param((4, 2), marks=pytest.mark.long)],
    ids=str,
)
def test_space_and_channels_split_at_once(sizes: tuple[int, ...]):
    """XLA alone adds the parts of devices that have the same channels as well: images are larger than the kernel."""
    space, channels = ("x", "y") if len(sizes) == 2 else (("x", "z"), "y")
    mesh = jax.make_mesh(sizes, ("x", "y", "z")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))

    def convolve(images, kernel):
        return jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def constrained(images, kernel):
        wanted = NamedSharding(mesh, P(None, space, None, channels))
        return jax.lax.with_sharding_constraint(convolve(images, kernel), wanted)

    draw = np.random.default_rng(0)
    images, kernel = (draw.normal(size=shape).astype(np.float32) for shape in [(2, 16, 8, 4), (3, 3, 4, 4)])
    pins = {"0": P(None, space), "1": P(None, None, None, channels)}
    found = shardplan.auto(constrained, mesh, pins=pins)(images, kernel)
    np.testing.assert_allclose(found, convolve(images, kernel), rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sizes", [(2, 4), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("name", ["depthwise", "convolution"])
def test_gradients_in_arbitrary_layouts(name: str, sizes: tuple[int, ...], seed: int):
    """XLA alone would add up repeated parts over an axis that splits nothing of a convolution."""
    step, weights, images = gradients(STEPS[name], (4, 16, 8, 16))
    arrays = jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(seed), leaf.shape), (weights, images))
    mesh = mesh_of(sizes)
    plan = scrambled(shardplan.plan(step, mesh, *arrays), seed)
    assert_equal_trees(run(plan, mesh, *arrays), jax.jit(step)(*arrays))


def test_a_search_whose_merging_decides_all_is_proven():
    step, weights, images = gradients(STEPS["transposed, overlapping"], (1, 512, 512, 16))
    mesh = AbstractMesh((2, 4), ("x", "y"))
    plan = shardplan.plan(step, mesh, weights, images, pins={"1": P(None, ("x", "y"))})
    assert plan.gap < 1e-6


@pytest.mark.long
@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
@pytest.mark.parametrize("sizes", [(8,), (2, 4)], ids=str)
@pytest.mark.parametrize("name", ["transposed", "transposed, overlapping", "convolution"])
def test_compiled_bytes_are_the_planned_ones(name: str, sizes: tuple[int, ...]):
    axes = ("x", "y")[: len(sizes)]
    step, weights, images = gradients(STEPS[name], (1, 512, 512, 16))
    plan = shardplan.plan(step, gpu_mesh("h100", sizes, axes), weights, images, pins={"1": P(None, axes)})
    audit = shardplan.audit(plan)
    assert audit.predicted_bytes > 0
    assert audit.ok()


@pytest.mark.long
@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
@pytest.mark.parametrize("order", [("x", "y"), ("y", "x")], ids="".join)
@pytest.mark.parametrize("name", ["grouped", "depthwise"])
def test_grouped_convolutions(name: str, order: tuple[str, str]):
    """Their sums are scattered in any order of axes."""
    step, weights, images = gradients(STEPS[name], (64, 32, 32, 16))
    pins = {"1": P(order), "0/*/kernel": P(None, None, None, order)}
    loss = lambda weights, images: jax.tree.map(jnp.subtract, weights, step(weights, images)[0])  # noqa: E731
    plan = shardplan.plan(loss, gpu_mesh("h100", (2, 4), ("x", "y")), weights, images, pins=pins)
    assert "reduce-scatter" in [sent.kind for sent in plan.collectives]
    assert shardplan.audit(plan).ok()
    planned = shardplan.auto(loss, jax.make_mesh((2, 4), ("x", "y")), pins=pins)
    arrays = jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(0), leaf.shape), (weights, images))
    for one, other in zip(*map(jax.tree.leaves, (planned(*arrays), jax.jit(loss)(*arrays))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)


def test_without_islands_nothing_is_summed_over_dilated_space():
    step, weights, images = gradients(STEPS["transposed"], (1, 512, 512, 16))
    mesh = jax.sharding.AbstractMesh((8,), ("x",))
    plans = [shardplan.plan(step, mesh, weights, images, pins={"1": P(None, "x")}, islands=i) for i in (True, False)]
    assert 100 * plans[0].communication_bytes < plans[1].communication_bytes


@pytest.mark.long
@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
@pytest.mark.parametrize("size", [512, 64], ids=["space alone", "channels too"])
def test_sums_over_two_dimensions_of_space(size: int):
    """The compiled bytes are the planned ones: no scattered sums, and no split by channels."""
    step, weights, images = gradients(nn.Conv(256, (3, 3)), (1, size, size, 256))
    pins = {"1": P(None, "x", "y"), "0/*/kernel": P()} if size == 64 else {"1": P(None, "x", "y")}
    plan = shardplan.plan(step, gpu_mesh("h100", (2, 4), ("x", "y")), weights, images, pins=pins)
    assert shardplan.audit(plan).ok()


@pytest.mark.slow
def test_weight_gradients_per_example():
    """They run in an island without collectives."""

    def norms(w, images):
        def loss(w, image):
            return jnp.sum(jax.lax.conv(image[None], w, (2, 2), "SAME") ** 2)

        return jnp.sum(jax.vmap(jax.grad(loss), (None, 0))(w, images) ** 2, (1, 2, 3, 4))

    mesh = mesh_of((8,))
    key_of_weights, key_of_images = jax.random.split(jax.random.key(0))
    w = jax.random.normal(key_of_weights, (8, 8, 3, 3))
    images = jax.random.normal(key_of_images, (16, 8, 8, 8))
    pins = {"1": P(mesh.axis_names[0])}
    plan = shardplan.plan(norms, mesh, w, images, pins=pins)
    grouped = [o for o in plan.program.operations if o.params.get("feature_group_count", 1) > 1]
    assert grouped and all(plan.schedule.island_dtype(operation) is not None for operation in grouped)
    found = shardplan.auto(norms, mesh, pins=pins)(w, images)
    np.testing.assert_allclose(found, norms(w, images), rtol=2e-5)


@pytest.mark.long
@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
@pytest.mark.parametrize("order", [("x", "y"), ("y", "x")], ids="".join)
@pytest.mark.parametrize("images", [P(None, ("x", "y")), P(None, ("y", "x")), P(None, "y", "x")], ids=str)
def test_weight_gradients_with_halos(order: tuple[str, str], images: P):
    """They are scattered in the order of the mesh."""
    convolve, weights, image = gradients(nn.Conv(64, (3, 3)), (1, 64, 64, 64))
    mesh = gpu_mesh("h100", (2, 4), ("x", "y"))

    def step(weights, images):
        kernel = convolve(weights, images)[0]["params"]["kernel"]
        return jax.lax.with_sharding_constraint(kernel, NamedSharding(mesh, P(None, None, None, order)))

    plan = shardplan.plan(step, mesh, weights, image, pins={"1": images})
    sent = [(c.kind, c.axes) for c in plan.collectives if c.tensor.startswith("value") and c.bytes > 1e4]
    assert [axes for kind, axes in sent if kind == "reduce-scatter"] == [("x", "y")]
    assert "all-reduce" not in dict(sent)
    assert shardplan.audit(plan).ok()
