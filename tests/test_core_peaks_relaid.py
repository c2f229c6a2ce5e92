"""Predicted peaks of poolings that nothing has rectified, and of loops that read stacks in another order."""

from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, Mesh

import shardplan
from shardplan.audit import measure
from shardplan.memory.fusion import pointwise_operations
from shardplan.memory.hiding import hiding_order
from shardplan.memory.liveness import Lifetimes
from shardplan.memory.pipelining import held_twice
from shardplan.memory.poolings import IMAGE, zeros_of_poolings
from shardplan.memory.recomputing import kernels_in
from shardplan.memory.relaid import lies_turned
from shardplan.target import gpu_mesh

MESH = AbstractMesh((8,), ("x",))

compiles_for_gpus = pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")


def _lifetimes(plan: shardplan.Plan) -> Lifetimes:
    kernels = kernels_in(plan.schedule)
    order, sending = hiding_order(plan.schedule, kernels)
    return Lifetimes(plan.schedule.problem, order, kernels, sending)


def _pooling(mesh: Mesh | AbstractMesh) -> shardplan.Plan:
    """A plan of the gradient of convolutions whose images are pooled as they are."""

    def step(filters: list[jax.Array], image: jax.Array) -> list[jax.Array]:
        def loss(filters: list[jax.Array]) -> jax.Array:
            x = image
            for kernel in filters:
                x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
                x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
                x = jnp.tanh(x)
            return jnp.sum(x)

        return jax.grad(loss)(filters)

    filters = [jax.ShapeDtypeStruct((3, 3, *channels), jnp.float32) for channels in ((8, 32), (32, 64), (64, 64))]
    image = jax.ShapeDtypeStruct((512, 64, 64, 8), jnp.float32)
    return shardplan.plan(step, mesh, filters, image, pins={"0/*": jax.P(), "1": jax.P("x")})


def test_an_image_is_in_memory_until_its_places_are_found_and_zeros_from_where_they_are_made() -> None:
    plan = _pooling(MESH)
    lifetimes, early = _lifetimes(plan), 0
    gradients = [o for o in plan.program.operations if o.primitive.name == "select_and_scatter_add"]
    for gradient in gradients:
        found, image = lifetimes.put_beside[gradient.index, IMAGE], gradient.operands[IMAGE]
        assert isinstance(image, int) and lifetimes.held[image].end <= found
        early += found < lifetimes.place[gradient.index] - 1
    assert early and len(gradients) == 3
    filled = [operation for operation, *_ in zeros_of_poolings(lifetimes, plan.program)]
    assert filled and all(operation in gradients for operation in filled)


@pytest.mark.slow
@compiles_for_gpus
def test_compiled_poolings_need_what_is_predicted() -> None:
    mesh = gpu_mesh("h100", (8,), ("x",))
    plan = _pooling(mesh)
    assert measure(plan.lower(mesh)).memory.peak == pytest.approx(plan.peak_bytes, rel=0.03)


def _attention(mesh: Mesh | AbstractMesh, keys_first: bool) -> shardplan.Plan:
    """A plan of the gradient of layers whose scores one loop stacks and another one reads: these lie as they are read,
    or, where the product reads its keys first, in another order."""

    def step(weights: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            heads, keys = (x @ w).reshape(*x.shape[:2], 8, 32), x[..., :32]
            over = (((2,), (3,)), ((0,), (0,))) if keys_first else (((3,), (2,)), ((0,), (0,)))
            scores = jax.lax.dot_general(*((keys, heads) if keys_first else (heads, keys)), over)
            scores = jnp.einsum("bkqh->bhqk" if keys_first else "bqhk->bhqk", scores)
            return jnp.tanh(jnp.einsum("bhqk,bkd->bqd", jax.nn.softmax(scores), x)), None

        def loss(weights: jax.Array) -> jax.Array:
            saved = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)
            return jnp.sum(jax.lax.scan(saved, x, weights)[0])

        return jax.grad(loss)(weights)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((6, 256, 256), (64, 256, 256))]
    return shardplan.plan(step, mesh, *shapes, pins={"0": jax.P(), "1": jax.P("x")})


@pytest.mark.parametrize("keys_first", [True, False])
def test_a_stack_that_a_loop_reads_in_another_order_is_copied_before_it(keys_first: bool) -> None:
    plan = _attention(MESH, keys_first)
    program, pointwise = plan.program, pointwise_operations(plan.schedule.problem)
    scores = [v.index for v in program.values if len(v.shape) == 4 and sorted(v.shape) == [8, 64, 256, 256]]
    read = [value for region in program.regions for value in region.inputs if value in scores]
    assert [lies_turned(program, pointwise, value) for value in read] == [True] * len(read) and read
    copied = held_twice(_lifetimes(plan), plan.schedule)
    assert [program.values[gather.value].shape[0] for gather in copied] == [6]


@pytest.mark.parametrize("form", ["NCHW", "NHWC"])
def test_images_with_their_channels_in_front_are_copied_for_a_loop_that_convolves_them(form: str) -> None:
    def step(filters: jax.Array, image: jax.Array) -> jax.Array:
        def layer(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
            numbers = (form, "OIHW", form)
            return jnp.tanh(jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)), None

        return jax.grad(lambda filters: jnp.sum(jax.lax.scan(layer, image, filters)[0]))(filters)

    image = (64, 16, 32, 32) if form == "NCHW" else (64, 32, 32, 16)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4, 16, 16, 3, 3), image)]
    plan = shardplan.plan(step, MESH, *shapes, pins={"0": jax.P(), "1": jax.P("x")})
    program, pointwise = plan.program, pointwise_operations(plan.schedule.problem)
    convolved = {o.operands[0] for o in program.operations if o.primitive.name == "conv_general_dilated"}
    inputs = [value for region in program.regions for value in region.inputs if value in convolved]
    read = [value for value in inputs if program.values[value].shape == image]
    assert read and {lies_turned(program, pointwise, value) for value in read} == {form == "NCHW"}
