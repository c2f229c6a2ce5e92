"""What gradients of poolings, and images that convolutions add themselves to, hold, against what is compiled."""

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.audit import audit
from shardplan.memory.pooled import added_poolings, rectifiers_of_poolings
from shardplan.target import gpu_mesh
from shardplan.tracing import trace_program

compiles_for_gpus = pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")

_SHAPE = jax.ShapeDtypeStruct


def _convolved(image: jax.Array, filters: jax.Array, stride: int = 1) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(image, filters.astype(image.dtype), (stride,) * 2, "SAME", None, None, numbers)


def _pooled(image: jax.Array, window: int, padding: Any) -> jax.Array:
    windows = (1, window, window, 1)
    return jax.lax.reduce_window(image, -jnp.inf, jax.lax.max, windows, (1, 2, 2, 1), padding)


def _peaks(loss: Any, *arguments: Any) -> tuple[float, float]:
    """What is compiled for 8 devices, and what is predicted, of a step of gradient descent."""

    def step(weights: Any, *others: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, *others))

    mesh = gpu_mesh("h100", (8,), ("a",))
    plan = shardplan.plan(step, mesh, *arguments, donate_argnums=0, memory_limit=float("inf"))
    return audit(plan, mesh=mesh).compiled.memory.peak, plan.peak_bytes


@pytest.mark.slow
@compiles_for_gpus
@pytest.mark.parametrize(
    ("window", "padding"),
    [(3, "SAME"), (2, "VALID"), (3, ((0, 0), (1, 1), (1, 1), (0, 0)))],
    ids=["behind", "no", "around"],
)
def test_the_places_of_a_rectified_image_are_found_long_before_its_gradient(window: int, padding: Any) -> None:
    """Their kernel makes the largest elements too; gradients of rectifiers read zeros, so that the scatter copies them;
    zeros are larger than an image that is padded in front (1.35, 1.35 and 1.20 times what was counted before)."""

    def loss(weights: Any, image: jax.Array) -> jax.Array:
        image = jax.nn.relu(_convolved(image, weights[0], 2))
        image = _pooled(image, window, padding)
        for filters in weights[1:]:
            image = jax.nn.gelu(_convolved(image, filters))
        return jnp.mean(jnp.square(image.astype("float32")))

    weights = [_SHAPE((7, 7, 4, 64), "float32")] + [_SHAPE((3, 3, 64, 64), "float32")] * 4
    compiled, predicted = _peaks(loss, weights, _SHAPE((256, 256, 256, 4), "bfloat16"))
    assert compiled == pytest.approx(predicted, rel=0.04)


@compiles_for_gpus
def test_images_that_convolutions_add_themselves_to_are_stored_so_that_what_they_are_made_of_is() -> None:
    """In the gradient of a residual block of which the first filters have one element: the mask of a rectifier is not
    stored for two kernels, since one alone computes with it (1.08 times what was counted before)."""

    def loss(weights: Any, image: jax.Array) -> jax.Array:
        for inwards, inner, outwards in weights:
            x = jax.nn.relu(1.5 * _convolved(image, inwards) + 0.5)
            x = jax.nn.relu(1.5 * _convolved(x, inner) + 0.5)
            image = jax.nn.relu(image + (1.5 * _convolved(x, outwards) + 0.5))
        return jnp.mean(jnp.square(image.astype("float32")))

    block = tuple(_SHAPE(shape, "float32") for shape in ((1, 1, 256, 64), (3, 3, 64, 64), (1, 1, 64, 256)))
    compiled, predicted = _peaks(loss, [block] * 4, _SHAPE((64, 160, 160, 256), "bfloat16"))
    assert compiled == pytest.approx(predicted, rel=0.03)


@pytest.mark.slow
@compiles_for_gpus
def test_gradients_of_what_is_put_together_with_an_image_are_cut_out_for_the_pooling_that_adds_to_them() -> None:
    """The part that what is pooled again reads is cut out long before (0.92 of what was counted before)."""

    def loss(weights: Any, image: jax.Array, wanted: jax.Array) -> jax.Array:
        outer, inner, innermost, upwards, last = weights
        image = jax.nn.relu(_convolved(image, outer))
        pooled = jax.nn.relu(_convolved(jax.nn.relu(_convolved(_pooled(image, 2, "VALID"), inner)), innermost))
        numbers = ("NHWC", "HWIO", "NHWC")
        above = jax.lax.conv_transpose(pooled, upwards.astype(image.dtype), (2, 2), "SAME", dimension_numbers=numbers)
        made = _convolved(jnp.concatenate([image, above], axis=-1), last)
        return jnp.mean(jnp.square(made.astype("float32") - wanted))

    shapes = (3, 3, 8, 64), (3, 3, 64, 128), (3, 3, 128, 128), (2, 2, 128, 64), (3, 3, 128, 64)
    weights, (image, wanted) = [_SHAPE(shape, "float32") for shape in shapes], [(32, 256, 256, n) for n in (8, 64)]
    compiled, predicted = _peaks(loss, weights, _SHAPE(image, "bfloat16"), _SHAPE(wanted, "float32"))
    assert compiled == pytest.approx(predicted, rel=0.03)


@pytest.mark.parametrize(("padding", "added"), [("VALID", True), ("SAME", False)])
def test_a_pooling_gradient_that_another_one_is_added_to_scatters_into_that(padding: str, added: bool) -> None:
    def loss(image: jax.Array) -> jax.Array:
        image = jax.nn.relu(2 * image)
        return jnp.sum(_pooled(image, 2 if added else 3, padding) ** 2) + jnp.sum(jnp.tanh(image))

    program = trace_program(jax.grad(loss), (_SHAPE((4, 16, 16, 8), "float32"),), {})
    assert len(added_poolings(program)) == added
    assert len(rectifiers_of_poolings(program)) == (not added)
