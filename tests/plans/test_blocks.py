"""Plans in blocks: asked for, and chosen where a step does not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import shardplan
from shardplan.hardware import load
from shardplan.memory import lifetimes_of
from shardplan.optimize.choose_blocks import BlockCandidates

WIDTH, BATCH, WORDS = 32, 256, 1024


def train(params, batch):
    def loss(params):
        hidden = jnp.tanh(batch["x"] @ params["in"])
        logits = hidden @ params["out"]
        chosen = jnp.take_along_axis(logits, batch["y"][:, None], 1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def arguments():
    keys = jax.random.split(jax.random.key(0), 4)
    params = {"in": jax.random.normal(keys[0], (WIDTH, WIDTH)), "out": jax.random.normal(keys[1], (WIDTH, WORDS))}
    batch = {"x": jax.random.normal(keys[2], (BATCH, WIDTH)), "y": jax.random.randint(keys[3], (BATCH,), 0, WORDS)}
    return params, batch


def assert_equal(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("mesh", "blocks"), [(1, {"batch": 4}), (1, {"1/x": 5}), ("x=8", {"1/y": 2}), ("x=2,y=4", {"batch": 4})]
)
def test_blocks_that_are_asked_for(mesh, blocks):
    """The step computes the same, also where blocks do not divide the batch."""
    planned = shardplan.auto(train, mesh, blocks=blocks)
    assert_equal(planned(*arguments()), train(*arguments()))
    plan = planned.plan(*arguments())
    (row,) = plan.blocks
    assert row["count"] == [*blocks.values()]
    assert row["index"] in ("1/x[0]", "1/y[0]") and f"{row['count'][0]} blocks of" in str(plan)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "count", "most"), [("x=8", 64, 32), ("x=8", 32, None), ("x=2,y=4", 64, None)])
def test_blocks_that_are_smaller_than_the_mesh(mesh, count, most, tmp_path):
    """The plan says how many blocks leave each device a part of every block."""
    plan = shardplan.plan(train, mesh, *arguments(), blocks={"batch": count})
    assert (f"A block of 4 is smaller than a mesh axis: use at most {most} blocks" in str(plan)) == (most is not None)
    plan.save(tmp_path / "plan.json")
    assert shardplan.Plan.load(tmp_path / "plan.json").blocks == plan.blocks


def test_saved_plans_in_blocks(tmp_path):
    """A plan holds its blocks, and the fingerprint of the user's own program."""
    plan = shardplan.plan(train, 1, *arguments(), blocks={"batch": 4})
    plan.save(tmp_path / "plan.json")
    loaded = shardplan.Plan.load(tmp_path / "plan.json")
    assert loaded.blocks == plan.blocks
    assert loaded.fingerprint == shardplan.plan(train, 1, *arguments()).fingerprint
    assert_equal(shardplan.auto(train, 1, blocks={"batch": 4})(*arguments()), train(*arguments()))


@pytest.mark.parametrize("fit", [("blocks",), ("recompute", "blocks")])
def test_a_step_that_fits_in_blocks_alone(fit, tmp_path):
    """The head is run in blocks where no layout fits, and the step computes the same."""
    free = shardplan.plan(train, 1, *arguments(), fit=())
    limit = 0.6 * free.peak_bytes
    with pytest.raises(shardplan.InfeasibleError):
        shardplan.plan(train, 1, *arguments(), memory_limit=limit, fit=())
    planned = shardplan.auto(train, 1, memory_limit=limit, fit=fit)
    plan = planned.plan(*arguments())
    assert plan.peak_bytes <= limit
    assert plan.blocks
    assert "blocks:" in str(plan)
    assert_equal(planned(*arguments()), train(*arguments()))
    plan.save(tmp_path / "plan.json")
    assert shardplan.Plan.load(tmp_path / "plan.json").blocks == plan.blocks


def narrow(params, x):
    """A step with float32 parameters and products in bfloat16, of a first layer and a scan over two."""

    def loss(params):
        first, layers = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params["first"]), params["layers"]
        h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w.astype(h.dtype)), None), x.astype(jnp.bfloat16) @ first, layers)
        return jnp.mean(jnp.square(h.astype(jnp.float32)))

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, gradients), value


def narrow_arguments():
    width, keys = 96, jax.random.split(jax.random.key(2), 3)
    first, layers, x = map(jax.random.normal, keys, ((width, width), (2, width, width), (1024, width)))
    return {"first": first / width**0.5, "layers": layers / width**0.5}, x


def test_bytes_of_sums_over_blocks_of_narrow_products():
    """Gradients are reduced over devices once, in the type of the products, as without blocks."""
    arguments, pins = jax.eval_shape(narrow_arguments), {"1": PartitionSpec("x")}
    free, plan = (shardplan.plan(narrow, "x=8", *arguments, pins=pins, blocks=found) for found in (None, {"batch": 4}))
    assert plan.communication_bytes <= 1.001 * free.communication_bytes


@pytest.mark.long
def test_values_of_sums_over_blocks_of_narrow_products():
    """Gradients are as near as without blocks."""
    arguments = narrow_arguments()
    planned = shardplan.auto(narrow, "x=8", pins={"1": PartitionSpec("x")}, blocks={"batch": 4})
    for one, other in zip(*map(jax.tree.leaves, (planned(*arguments), narrow(*arguments))), strict=True):
        np.testing.assert_allclose(one, other, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize(("waves", "more"), [(8, 0), (1, 1)])
def test_products_that_are_small_in_blocks(waves, more):
    """Eight waves of tiles take no longer in two blocks, and one wave takes twice as long."""
    side, rows = 128, waves * 132 * 128
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((side, side), (rows, side))]
    plan = shardplan.plan(jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2)), 1, *shapes)
    candidates = BlockCandidates(plan.schedule, lifetimes_of(plan.schedule, frozenset())).within(0.9 * plan.peak_bytes)
    (slower,) = {one.slower for one in candidates if one.blocks.counts == (2,) and one.blocks.seeds[0][1] == 0}
    wave = 2 * side**2 * rows / waves / load("h100").flops_per_second("float32")
    assert slower == pytest.approx(more * wave)


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ({"1/z": 2}, "no argument matches `1/z`. The nearest are"),
        ({"1/x": 257}, "has 256 positions, which do not make 257 blocks"),
        ({"1/x[4]": 2}, "without a dimension 4"),
        ({"0/in[0]": 2, "batch": 1}, "numbers of blocks from 2 on"),
        ({"batch": "4"}, "numbers of blocks from 2 on"),
        (4, "blocks map paths of arguments"),
    ],
)
def test_blocks_that_cannot_be(blocks, said):
    """What is wrong with them is said before anything is planned."""
    with pytest.raises(shardplan.ArgumentError, match=said.replace("[", r"\[")):
        shardplan.plan(train, 1, *arguments(), blocks=blocks)


def test_an_index_along_which_nothing_runs_in_blocks():
    """The error says which operation needs the index whole."""
    with pytest.raises(shardplan.ArgumentError, match="nothing runs in blocks of `0`: `sort` at"):
        shardplan.plan(lambda x: jnp.sort(x, axis=0), 1, jnp.ones((8, 2)), blocks={"0": 2})


def convolved(x, kernel, stride):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=numbers)


def image_step(kernels, image):
    """The loss, the last features, and the gradients of kernels and image."""

    def loss(kernels, image):
        x = jax.nn.relu(convolved(image, kernels[0], 1))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        x = jnp.tanh(convolved(x, kernels[1], 2))
        return jnp.mean(jnp.square(x)), x

    (value, features), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(kernels, image)
    return value, features, gradients


def image_arguments(rows: int, columns: int, channels: int = 4):
    keys = jax.random.split(jax.random.key(1), 3)
    shapes = (3, 3, 2, channels), (3, 3, channels, channels), (2, rows, columns, 2)
    first, second, image = map(jax.random.normal, keys, shapes)
    return [first, second], image


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:no mesh axis")
@pytest.mark.parametrize(
    ("mesh", "split", "blocks", "size"),
    [
        ("x=8", (None, "x"), {"1[1]": 2}, (64, 13)),
        ("x=4,y=2", (None, "x", "y"), {"1[1]": 2, "1[2]": 2}, (60, 26)),
        ("x=4,y=2", ("y", "x"), {"1[2]": 3}, (64, 16)),
        ("x=2,y=4", (None, ("x", "y")), {"1[2]": 2}, (64, 13)),
    ],
)
def test_blocks_of_rows_that_devices_split(mesh, split, blocks, size):
    """Every device has a deep halo of the image, exchanged once, and the step computes the same."""
    planned = shardplan.auto(image_step, mesh, blocks=blocks, pins={"1": PartitionSpec(*split)})
    arguments = image_arguments(*size)
    for found, expected in zip(*map(jax.tree.leaves, (planned(*arguments), image_step(*arguments))), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    sent = [one for one in planned.plan(*arguments).collectives if one.kind == "collective-permute"]
    assert 0 < sum(one.times for one in sent) <= 2 * len([axes for axes in split if axes])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:no mesh axis")
def test_an_image_that_fits_in_blocks_alone(tmp_path):
    """Devices split the columns, and each runs tiles of its own part."""

    def train(kernels, image):
        def loss(kernels):
            x = jax.nn.relu(convolved(image, kernels[0], 1))
            return jnp.mean(jnp.square(convolved(x, kernels[1], 1)))

        value, gradients = jax.value_and_grad(loss)(kernels)
        return jax.tree.map(jnp.subtract, kernels, gradients), value

    kernels, image = jax.eval_shape(lambda: image_arguments(2048, 2048, 100))
    arguments = kernels, image.update(shape=(1, *image.shape[1:]))
    free = shardplan.plan(train, "x=8", *arguments, fit=())
    plan = shardplan.plan(train, "x=8", *arguments, memory_limit=0.6 * free.peak_bytes, fit=("blocks",))
    (blocks,) = plan.recipe.blocks
    assert max(index for _, _, index in blocks.mesh) >= 0
    assert plan.communication_bytes < 1.1 * free.communication_bytes
    plan.save(tmp_path / "plan.json")
    assert shardplan.Plan.load(tmp_path / "plan.json").recipe.blocks == plan.recipe.blocks
