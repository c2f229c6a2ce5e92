"""Sums over devices in narrow types: planned steps are as near to float64 as unplanned ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import shardplan
from tests.helpers.random_programs import mesh_of
from tests.helpers.slow_devices import SLOW_DEVICES

STEPS = 3
Loss = Callable[[Any, Any], Any]


def numbers(seed: int, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {name: draw.normal(size=shape) / np.sqrt(shape[0]) for name, shape in shapes.items()}


def transformer(p: Any, x: Any) -> Any:
    ids = (8 * jnp.abs(x[:, :8])).astype(jnp.int32) % 24
    h = p["e"][ids]
    scores = jnp.einsum("bte,bse->bts", h @ p["q"], h @ p["k"]) / 4
    h = h + jax.nn.softmax(scores) @ (h @ p["v"])
    h = h + jax.nn.gelu(h @ p["u"]) @ p["d"]
    logits = (h @ p["e"].T).astype(jnp.promote_types(h.dtype, jnp.float32))
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.roll(ids, -1, 1)[..., None], -1))


def layers(p: Any, x: Any) -> Any:
    y = jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] + p["c"]
    return jnp.mean((y - jnp.sin(x[:, :8])) ** 2)


def batch_statistics(p: Any, x: Any) -> Any:
    h = x @ p["w"]
    h = (h - h.mean(0)) * lax.rsqrt(h.var(0) + jnp.asarray(1e-5, h.dtype)) * p["b"]
    return jnp.mean(jnp.square(jnp.tanh(h) @ p["v"] - p["c"])) + jnp.sqrt(jnp.sum(jnp.square(p["v"])))


def recurrent(p: Any, x: Any) -> Any:
    def step(h: Any, _: Any) -> Any:
        return jnp.tanh(h @ p["r"] + x @ p["w"] + p["b"]), None

    last, _ = lax.scan(step, jnp.zeros((len(x), 32), x.dtype), None, length=5)
    return jnp.mean(jnp.square(last @ p["v"] + p["c"]))


def convolved(p: Any, x: Any) -> Any:
    names = ("NHWC", "HWIO", "NHWC")
    h = lax.conv_general_dilated(x.reshape(-1, 4, 4, 1), p["k"], (1, 1), "SAME", dimension_numbers=names)
    return jnp.mean(jnp.square(jax.nn.relu(h + p["c"]).mean((1, 2)) - 1))


SHAPES = {"w": (16, 32), "b": (32,), "v": (32, 8), "c": (8,)}
MATRICES = {"q": (16, 16), "k": (16, 16), "v": (16, 16), "e": (24, 16), "u": (16, 32), "d": (32, 16)}
PROGRAMS: dict[str, tuple[Loss, Any]] = {
    "transformer": (transformer, MATRICES),
    "layers": (layers, SHAPES),
    "batch statistics": (batch_statistics, SHAPES),
    "recurrent": (recurrent, SHAPES | {"r": (32, 32)}),
    "convolved": (convolved, {"k": (3, 3, 1, 8), "c": (8,)}),
}


def training_step(loss: Loss, dtype: Any) -> Callable[[Any, Any], Any]:
    """A step of gradients that are clipped by their global norm, computed in a type."""

    def narrow(p: Any, x: Any) -> Any:
        return loss(*jax.tree.map(lambda a: a.astype(dtype), (p, x)))

    def step(p: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(narrow)(p, x)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients)))
        scale = jnp.minimum(0.05, 0.1 / norm)
        return jax.tree.map(lambda a, g: a - scale.astype(a.dtype) * g.astype(a.dtype), p, gradients), value

    return step


def trained(step: Callable[[Any, Any], Any], given: tuple[Any, Any], dtype: Any) -> np.ndarray:
    """The losses and the parameters after some steps, as one vector."""
    p, x = jax.tree.map(lambda a: jnp.asarray(a, dtype), given)
    losses = []
    for _ in range(STEPS):
        p, loss = step(p, x)
        losses.append(loss)
    return np.concatenate([np.asarray(a, np.float64).ravel() for a in (losses[-1], *jax.tree.leaves(p))])


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(8,), (2, 4)], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_training_in_bfloat16(name: str, sizes: tuple[int, ...], tmp_path: Path):
    """Losses and parameters are at most 1.2 times as far from float64 as unplanned ones, on average over seeds."""
    loss, shapes = PROGRAMS[name]
    seeds = [(numbers(seed, **shapes), numbers(seed + 1000, x=(1, 64, 16))["x"][0]) for seed in range(24)]
    profile = tmp_path / "slow.toml"
    profile.write_text(SLOW_DEVICES)
    narrow = training_step(loss, jnp.bfloat16)
    with jax.enable_x64(True):
        wide = jax.jit(training_step(loss, jnp.float64))
        exact = [trained(wide, given, jnp.float64) for given in seeds]
    errors = []
    for step in (jax.jit(narrow), shardplan.auto(narrow, mesh_of(sizes), hardware=profile)):
        found = [np.abs(trained(step, given, jnp.float32) - e) for given, e in zip(seeds, exact, strict=True)]
        errors.append((np.mean([f[0] for f in found]), np.sqrt(np.mean([np.mean(f[1:] ** 2) for f in found]))))
    (loss_alone, parameters_alone), (loss_planned, parameters_planned) = errors
    assert loss_planned <= 1.2 * loss_alone and parameters_planned <= 1.2 * parameters_alone


@pytest.mark.parametrize("name", ["product", "vector", "sum"])
def test_small_sums_over_devices(name: str):
    """The parts of a small sum in bfloat16 are added up in float32: only the sum is rounded."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(256, 256)), jnp.bfloat16)
    function, other, made = {
        "product": (lambda x, w: w @ x, x[:8], "dot_general"),
        "vector": (lambda x, w: w @ x, x[0], "dot_general"),
        "sum": (lambda x, w: lax.reduce_sum_p.bind(x * w, axes=(0,), out_sharding=None), x, "reduce("),
    }[name]
    planned = shardplan.auto(function, mesh_of((8,)), pins={"0": P("x")})
    text = planned.lower(x, other).as_text()
    [part] = [line for line in text.splitlines() if f"stablehlo.{made}" in line]
    [total] = re.findall(r"stablehlo\.(?:all_reduce|reduce_scatter).*?\}\) : \((.*?)\)", text, re.DOTALL)
    assert part.endswith("xf32>") and total.endswith("xf32>")
    wide = [np.asarray(a, np.float64) for a in (x, other)]
    exact = (wide[0] * wide[1]).sum(0) if name == "sum" else wide[1] @ wide[0]
    np.testing.assert_allclose(np.asarray(planned(x, other), np.float64), exact, rtol=2**-8, atol=1e-2)


def test_terms_of_a_sum_in_bfloat16():
    """Terms of a sum in float32 are rounded no more over devices than on one."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 256)), jnp.bfloat16)

    def function(x: Any) -> Any:
        e = jnp.exp(x)
        return e.sum(1, dtype=jnp.float32), e / e.sum(1, keepdims=True)

    planned = shardplan.auto(function, mesh_of((8,)), pins={"0": P("x")})
    np.testing.assert_allclose(planned(x)[0], np.exp(np.asarray(x, np.float64)).sum(1), rtol=1e-6)


def test_bytes_of_small_and_large_sums():
    """A vector and a small tensor travel in float32, a large one in its own type, unless the user names a type."""
    mesh = AbstractMesh((8,), ("x",))

    def sent(rows: int, columns: int, **options: Any) -> float:
        x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, 65536), (65536, columns)))
        pins = {"0": P(None, "x"), "1": P("x")}
        plan = shardplan.plan(jnp.matmul, mesh, x, w, pins=pins, **options)
        return plan.communication_bytes / (7 / 8 * rows * columns)

    assert sent(64, 64) == sent(128, 128, reduce_dtype="float32") == 4
    assert sent(128, 128) == sent(64, 64, reduce_dtype="bfloat16") == 2
