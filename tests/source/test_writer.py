"""Traced programs as Python text: the text computes the same values, and repeated layers are functions."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardplan
from shardplan.errors import ArgumentError

pytestmark = pytest.mark.slow

SQUARE = jax.ShapeDtypeStruct((64, 64), "float32")
MESH = "data=2,model=4"


def arrays(*shapes: Any) -> list[Any]:
    generator = np.random.default_rng(0)
    return [jax.tree.map(lambda s: generator.normal(size=s.shape).astype(s.dtype), shape) for shape in shapes]


def written(fn: Any, *shapes: Any) -> tuple[str, Any, list[Any]]:
    """The text of a planned function, its results, and the arguments."""
    text = shardplan.plan(fn, MESH, *shapes).to_python(whole=True)
    namespace: dict[str, Any] = {}
    exec(compile(text, "<text>", "exec"), namespace)
    given = arrays(*shapes)
    return text, namespace["sharded"](namespace["make_mesh"](), *given)(*given), given


def check(fn: Any, *shapes: Any) -> str:
    """The text of a function, whose values are those of the function."""
    text, found, given = written(fn, *shapes)
    expected = jax.jit(fn)(*given)
    assert bool(jax.tree.structure(found) == jax.tree.structure(expected))  # type: ignore[operator]
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(np.asarray(one, "float64"), np.asarray(other, "float64"), rtol=2e-4, atol=2e-4)
    return text


def test_loops_and_branches():
    def step(x, w):
        carry, stack = jax.lax.scan(lambda c, one: (jnp.tanh(c @ w), c[0] * one), x, x, reverse=True)
        count, doubled = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, 0.5 * c[1] @ w), (0, carry))
        return jax.lax.cond(stack[0, 0] > 0, lambda a: a + 1, lambda a: a - w, doubled), count

    text = check(step, SQUARE, SQUARE)
    assert "scanned(" in text and "lax.while_loop(" in text and "lax.switch(" in text


@pytest.mark.long
def test_many_operations():
    def step(x, ids):
        y = jnp.sort(x, axis=0)[::-1].at[3].add(1.0)
        z = jnp.where(y > 0, jnp.sqrt(jnp.abs(y)), jnp.inf)[:, :32].T
        best, places = jax.lax.top_k(x, 3)
        bits = jax.lax.bitcast_convert_type(x, jnp.int32) >> 3
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(3), 2), (64,))
        signs = jnp.sign(x).astype(jnp.bfloat16)
        half = (signs @ signs).astype(jnp.float32)
        windows = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2), (2, 2), "VALID")
        rows = x[ids] + jnp.cumsum(noise) - jnp.pad(x, ((0, 1), (2, 0)))[:64, 2:]
        return {"a": [z.at[0].set(2), best], "b": (places, bits, None)}, half, windows, rows, jnp.argmax(x, 1)

    check(step, SQUARE, jax.ShapeDtypeStruct((64,), "int32"))


def test_closed_over_arrays():
    table = jnp.asarray([[1.0, jnp.inf], [-2.5, 3.0]])
    assert "CONSTANT_0 = np.array([" in check(lambda x: x[:2, :2] / table, SQUARE)


@pytest.mark.long
def test_repeated_layers():
    """Equal layers are one function, forward and backward."""

    def loss(params, x):
        for layer in params:
            x = jnp.tanh(jnp.sin(x @ layer["up"]) @ layer["down"]) + 0.1 * jnp.cos(x)
        return jnp.mean(x**2)

    def step(params, x):
        gradients = jax.grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    text = check(step, [{"up": SQUARE, "down": SQUARE}] * 6, SQUARE)
    called = re.findall(r'"""(\w+).*, called (\d+) times\."""', text)
    assert ("Forward", "5") in called and ("Backward", "5") in called
    assert text.count("lax.tanh(") == 2  # of the first layer, which reads an argument, and of the function


def test_operation_without_a_public_form():
    def step(x):
        return jax.pure_callback(lambda a: a, SQUARE, x)

    with pytest.raises(ArgumentError, match="to_python"):
        shardplan.plan(step, MESH, SQUARE).to_python()


class Pair(NamedTuple):
    first: Any
    second: Any


def test_results_of_other_classes():
    """They have the structure of an argument that they replace, and are dictionaries by name elsewhere."""

    def step(pair, x):
        return {"new": Pair(pair.first + x, pair.second), "other": [Pair((x, x + 1), x)]}

    _, found, (pair, x) = written(step, Pair(SQUARE, SQUARE), SQUARE)
    assert isinstance(found["new"], Pair)
    np.testing.assert_allclose(found["new"].first, pair.first + x, rtol=1e-6)
    assert set(found["other"][0]) == {"first/0", "first/1", "second"}
    np.testing.assert_allclose(found["other"][0]["first/1"], x + 1, rtol=1e-6)
