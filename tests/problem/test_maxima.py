"""Maxima and minima over devices: they keep NaNs, and those of a softmax need no integers."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.models import gpt, llama, vit
from shardplan.problem.maxima import from_integers, to_integers
from shardplan.problem.nan_flow import loses_nan
from shardplan.program.tracing import trace_program
from tests.helpers.random_programs import mesh_of, run, scrambled

SEGMENTS = jnp.arange(16) % 4
X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), jnp.float32).at[3, 4].set(jnp.nan).at[0, 0].set(2.0)
MODELS = {
    "gpt": lambda: gpt.training(gpt.Config(layers=1, width=64, heads=8, vocabulary=256, sequence=32, batch=16)),
    "llama": lambda: llama.training(llama.Config(layers=1)),
    "vit": lambda: vit.training(vit.Config(layers=1)),
}
Top = Callable[..., Any]


def softmax(x: Any, top: Top) -> Any:
    e = jnp.exp(x - top(x, 0)[None])
    return e / e.sum(0)


def log_of_sum(x: Any, top: Top) -> Any:
    most = lax.stop_gradient(top(x, 0))
    return jnp.log(jnp.exp(x - most).sum(0)) + most


def log_of_sum_of_finite(x: Any, top: Top) -> Any:
    most = top(x, 0)
    most = lax.stop_gradient(jnp.where(jnp.isfinite(most), most, 0))
    return jnp.log(jnp.exp(x - most).sum(0)) + most


def entropy(x: Any, top: Top) -> Any:
    x = x.T
    shifted = x - top(x, 1)[:, None]
    logs = shifted - jnp.log(jnp.exp(shifted).sum(1, keepdims=True))
    return -jnp.take_along_axis(logs, jnp.arange(8)[:, None], 1).mean()


def attention(x: Any, top: Top) -> Any:
    scores = jnp.where(jnp.tril(jnp.ones((16, 16), bool)), x @ x.T, -1e9)
    e = jnp.exp(scores - top(scores, 1)[:, None])
    return (e / e.sum(1)[:, None]) @ x


def gradient(function: Callable[[Any, Top], Any], top: Top) -> Callable[[Any], Any]:
    """Of the sum of what a function gives, which takes the maximum for a constant."""
    return jax.grad(lambda x: (function(x, lambda y, axes: lax.stop_gradient(top(y, axes))) ** 2).sum())


def masked(x: Any, top: Top) -> Any:
    kept = x > -1
    e = jnp.exp(jnp.where(kept, x, -jnp.inf) - top(jnp.where(kept, x, -jnp.inf), 0))
    return jnp.where(kept, e / jnp.where(kept, e, 0).sum(0), 0)


CARRIED: dict[str, Callable[[Any, Top], Any]] = {
    "softmax": softmax,
    "its gradient": lambda x, top: gradient(softmax, top)(x),
    "log of a sum": log_of_sum,
    "of finite ones": log_of_sum_of_finite,
    "gradient of a log": lambda x, top: gradient(log_of_sum_of_finite, top)(x),
    "entropy": entropy,
    "gradient of an entropy": lambda x, top: gradient(entropy, top)(x),
    "attention": attention,
    "masked": masked,
}

LOST: dict[str, Callable[[Any, Top], Any]] = {
    "maximum": lambda x, top: top(x, 0),
    "scaled": lambda x, top: x / top(x, 0),
    "clipped": lambda x, top: x * jnp.minimum(1, 1 / top(jnp.abs(x), (0, 1))),
    "compared": lambda x, top: jnp.where(x > top(x, 0) - 1, x, 0),
    "softmax of other elements": lambda x, top: jnp.exp(x[::-1] - top(x, 1)[:, None]).sum(1),
    "sum over another dimension": lambda x, top: jnp.exp(x - top(x, 0)).sum(1),
    "unsummed": lambda x, top: jnp.exp(x - top(x, 0)),
    "and kept": lambda x, top: (softmax(x, top), top(x, 0)),
    "in a loop": lambda x, top: lax.fori_loop(0, 2, lambda _, y: y - top(y, 0), x),
    "of sums that skip": lambda x, top: jnp.where(x > 0, jnp.exp(x - top(x, 0)), 0).sum(0),
}


def lost(function: Callable[..., Any], *arguments: Any) -> set[bool]:
    program = trace_program(function, arguments or (X,))
    return {loses_nan(program, o.index) for o in program.operations if o.primitive.name in ("reduce_max", "reduce_min")}


@pytest.mark.parametrize("name", CARRIED)
def test_nan_that_a_later_sum_carries(name: str):
    """Nothing is done for it, and any maximum of the other elements gives the same result."""
    function = CARRIED[name]
    assert lost(lambda x: function(x, jnp.max)) == {False}
    ignoring, keeping = (jax.jit(lambda x, t=top: function(x, t))(X) for top in (jnp.nanmax, jnp.max))
    np.testing.assert_array_equal(np.isnan(ignoring), np.isnan(keeping))


@pytest.mark.parametrize("name", LOST)
def test_nan_that_would_be_lost(name: str):
    """A maximum that ignores NaN gives another result, and is found."""
    function = LOST[name]
    assert True in lost(lambda x: function(x, jnp.max))


def test_maxima_of_library_softmaxes():
    """JAX's own softmax functions, with and without a mask, lose no NaN."""
    assert lost(jax.nn.softmax) == lost(jax.nn.log_softmax) == lost(jax.nn.logsumexp) == {False}
    assert lost(lambda x: jax.nn.softmax(x, 0, where=x > -1)) == {False}
    assert lost(lambda x: jax.grad(lambda y: jax.nn.logsumexp(y, axis=0).sum())(x)) == {False}
    heads = jax.ShapeDtypeStruct((2, 8, 4, 16), jnp.bfloat16)
    assert lost(lambda q: jax.nn.dot_product_attention(q, q, q, is_causal=True), heads) == {False}


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", ["gpt", pytest.param("llama", marks=pytest.mark.long), pytest.param("vit", marks=pytest.mark.long)]
)
def test_maxima_of_models(model: str):
    """No plan has integers: every maximum is that of a softmax."""
    training = MODELS[model]()
    assert lost(training.train_step, training.state, training.batch) == {False}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_integers_are_ordered_as_floats(dtype: str):
    """There and back changes nothing, order included, and NaN comes last or first."""
    values = jnp.asarray([-3, -1e-2, -0.0, 0.0, 1e-2, 3, jnp.nan], dtype)
    for reducer, place in (("max", -1), ("min", 0)):
        integers = to_integers(values, reducer)
        back = from_integers(integers, values.dtype)
        found, expected = back.astype(jnp.float32), values.astype(jnp.float32)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(jnp.signbit(found[:-1]), jnp.signbit(expected[:-1]))
        assert (jnp.diff(integers[:-1]) > 0).all() and jnp.sort(integers)[place] == integers[-1]
    negative = lax.bitcast_convert_type(jnp.asarray(0xFFC00000, jnp.uint32), jnp.float32)  # a NaN with a sign
    assert to_integers(negative, "max") > to_integers(jnp.float32(jnp.inf), "max")


def extremes(x: Any) -> Any:
    return (
        jnp.max(x), jnp.min(x, 0), jnp.linalg.norm(x, ord=jnp.inf), jax.ops.segment_max(x, SEGMENTS, 4),
        jnp.full((4, 8), jnp.inf).at[SEGMENTS].min(x), jnp.max(x.astype(jnp.bfloat16), 0),
        jax.grad(lambda y: jnp.max(y, 0).sum())(jnp.nan_to_num(x)), jnp.nanmax(x), jnp.max(x.reshape(4, 4, 8), (0, 1)),
        jnp.min(x.astype(jnp.float16)), jnp.max((100 * jnp.nan_to_num(x)).astype(jnp.int32), 0), jnp.argmax(x, 0),
        lax.cummax(x, 0), lax.top_k(x, 2)[0], jnp.any(jnp.isnan(x), 0), jax.nn.softmax(x, 0),
    )  # fmt: skip


def test_nan_in_a_maximum_over_devices():
    """A NaN on one of the devices makes the maximum and the minimum NaN."""
    step = shardplan.auto(lambda x: (jnp.max(x), jnp.min(x, 0)), mesh_of((8,)), pins={"0": P("x")})
    assert any(sent.kind in ("all-reduce", "reduce-scatter") for sent in step.plan(X).collectives)
    most, least = step(X)
    assert jnp.isnan(most)
    np.testing.assert_array_equal(least, jnp.min(X, 0))


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(8,), (2, 4)], ids=str)
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), "drawn", "scattered"], ids=str)
def test_nan_in_comparisons_over_devices(sizes: tuple[int, ...], spec: Any):
    """Each comparison gives the result of one device, for any split of the array."""
    mesh = mesh_of(sizes)
    spec = P(("x", "y")[: len(sizes)]) if spec == "scattered" else spec
    plan = shardplan.plan(extremes, mesh, X, pins=None if spec == "drawn" else {"0": spec})
    plan = scrambled(plan, 1) if spec == "drawn" else plan
    for x in (X, jnp.nan_to_num(X)):
        for found, expected in zip(run(plan, mesh, x), jax.jit(extremes)(x), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_bytes_of_maxima():
    """Floats of four bytes are compared in as many, narrower ones in four, and a softmax and integers in their own."""
    mesh, pins = AbstractMesh((8,), ("x",)), {"0": P("x")}

    def sent(function: Callable[..., Any], dtype: Any) -> float:
        x = jax.ShapeDtypeStruct((64, 4096), dtype)
        plan = shardplan.plan(function, mesh, x, pins=pins)
        return plan.communication_bytes / (7 / 8 * 4096)

    assert sent(lambda x: jnp.max(x, 0), jnp.float32) == sent(lambda x: jnp.max(x, 0), jnp.bfloat16) == 4
    assert sent(lambda x: jnp.max(x, 0), jnp.int32) == 4
    # of a softmax the maximum to all devices, the sum to each its part, and what that is divided by to all
    assert sent(lambda x: jax.nn.softmax(x, 0), jnp.bfloat16) == 2 * 2 + 4 + 2


@pytest.mark.slow
@pytest.mark.skipif(find_spec("jax_plugins") is None, reason="needs the extra `audit`")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_maxima_are_compiled_as_planned(dtype: str):
    """XLA:GPU sends the bytes of the plan, as integers."""
    x = jax.ShapeDtypeStruct((64, 4096), dtype)
    plan = shardplan.plan(lambda x: jnp.max(x, 0), AbstractMesh((2, 4), ("x", "y")), x, pins={"0": P(("x", "y"))})
    audit = shardplan.audit(plan)
    assert audit.compiled.communication_bytes == plan.communication_bytes == 7 / 8 * 4096 * 4
