"""Users' descriptions: their rules, and the refused ones."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir

from shardplan.rules import Rule, RuleError, describe, rule_of, verify
from shardplan.rules.lambdas import Opaque, Sum
from shardplan.rules.registry import forget


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def splits(rule: Rule, n: int = 2) -> dict[str, tuple[list[Any], list[Any]]]:
    """Per index: the dimension split of every operand, and of every result (or its reducer)."""
    return {
        split.index: ([slot.dim for slot in split.operands], [slot.reducer or slot.dim for slot in split.results])
        for split in rule.splits(n)
    }


def holds(function: Callable[..., Any], *operands: Any) -> None:
    verdicts = verify(function, *operands)
    assert verdicts
    assert all(verdict.holds for verdict in verdicts), [str(verdict) for verdict in verdicts]


@pytest.fixture
def primitive() -> Iterator[Primitive]:
    """A primitive that nobody knows: a matrix product."""
    found = Primitive("user_matmul")
    found.def_impl(lambda x, y: x @ y)
    found.def_abstract_eval(lambda x, y: jax.core.ShapedArray((x.shape[0], y.shape[1]), x.dtype))
    mlir.register_lowering(found, mlir.lower_fun(lambda x, y: x @ y, multiple_results=False))
    yield found
    forget(found)


def test_unknown_primitive(primitive: Primitive) -> None:
    """The error tells how to describe it."""
    rule = rule_of(primitive.bind, ones(4, 6), ones(6, 8))
    assert not rule.known
    assert rule.splits(2) == ()
    assert rule.reason is not None and "shardplan.describe" in rule.reason and "user_matmul" in rule.reason


def test_primitive(primitive: Primitive) -> None:
    assert describe(primitive, "i k, k j -> i j", check=True) is primitive
    rule = rule_of(primitive.bind, ones(4, 6), ones(6, 8))
    assert str(rule.expression) == "out[i, j] = Sum(k) x[i, k] * y[k, j]"
    assert splits(rule) == {"i": ([0, None], [0]), "k": ([1, 0], ["sum"]), "j": ([None, 1], [1])}
    assert rule.flops == 2 * 4 * 6 * 8
    holds(primitive.bind, ones(4, 6), ones(6, 8))


def test_second_description_is_refused(primitive: Primitive) -> None:
    describe(primitive, "i k, k j -> i j")
    with pytest.raises(RuleError, match=r"described already, as 'i k, k j -> i j': pass `replace=True`"):
        describe(primitive, "i :, : j -> i j")
    describe(primitive, "i k, k j -> i j")  # saying the same again is no second description
    describe(primitive, "i :, : j -> i j", replace=True)
    assert set(splits(rule_of(primitive.bind, ones(4, 6), ones(6, 8)))) == {"i", "j"}


def test_refuted_description_is_not_registered(primitive: Primitive) -> None:
    with pytest.raises(RuleError, match=r"(?s)refuted by execution.*user_matmul: k in 2 blocks is wrong"):
        describe(primitive, "out[i, j] = Max(k) x[i, k] * y[k, j]", check=True, operands=[ones(4, 6), ones(6, 8)])
    assert not rule_of(primitive.bind, ones(4, 6), ones(6, 8)).known


def test_check_without_operands_that_fit(primitive: Primitive) -> None:
    with pytest.raises(RuleError, match="pass `operands`"):
        describe(primitive, "i, j -> i j", check=True)
    with pytest.raises(RuleError, match="pass `operands`"):
        describe(primitive, "out[i, j] = Sum(k) x[i, k] * y[k, j]", check=True)
    describe(primitive, "out[i, j] = Sum(k) x[i, k] * y[k, j]", check=True, operands=[ones(4, 6), ones(6, 8)])


def test_description_by_lambda(primitive: Primitive) -> None:
    describe(
        primitive,
        lambda x, y: lambda i, j: Sum(lambda k: x[i, k] * y[k, j]),
        check=True,
        operands=[ones(4, 6), ones(6, 8)],
    )
    rule = rule_of(primitive.bind, ones(4, 6), ones(6, 8))
    assert str(rule.expression) == "out[i, j] = Sum(k) x[i, k] * y[k, j]"
    assert set(splits(rule)) == {"i", "j", "k"}


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (lambda x: lambda i, j: x[i, j], r"takes 1 operands, but there are 2"),
        (lambda x, y: lambda i, j: x[i], r"`x` is read at 1 positions, but its shape is \(4, 6\)"),
        (lambda x, y: (lambda i, j: x[i, j], lambda i: x[i, 0]), r"gives 2 results, but there are 1"),
        (lambda x, y: lambda i, j: x[i, j] + y[j, i], r"`j` runs from 0 to 7, but the dimension of `x` has size 6"),
        (lambda x, y: lambda i, j: x[i, x[i, j]], r"a position must be affine"),
        (lambda x, y: lambda i, j: Opaque.f(x[i, 1:])[j], r"only whole dimensions can be sliced"),
        (lambda x, y: lambda i, j: "x", r"a `str` has no place in an expression"),
        (lambda x, y: lambda i, j: Sum(lambda k: x[i, k])[j], r"only what an `Opaque` function gives"),
    ],
)
def test_lambda_that_does_not_fit(primitive: Primitive, said: Any, problem: str) -> None:
    describe(primitive, said)
    with pytest.raises(RuleError, match=problem):
        rule_of(primitive.bind, ones(4, 6), ones(6, 8))


@pytest.mark.parametrize(
    ("text", "problem", "marked"),
    [
        ("i k, k j -> i z", "index `z` of the result is in no operand", "z"),
        ("i k, k j", "expected `operands -> results`", " "),
        ("i k -> i j -> k", "expected one `->`", "->"),
        ("i + k, k j -> i j", r"`\+` does not belong here", "+"),
        ("(i k, k j -> i j", r"`,` does not belong here", ","),
    ],
)
def test_text_that_makes_no_sense(primitive: Primitive, text: str, problem: str, marked: str) -> None:
    with pytest.raises(RuleError, match=problem) as caught:
        describe(primitive, text)
    _, quoted, mark = str(caught.value).splitlines()
    assert text in quoted
    assert quoted[mark.index("^") :].startswith(marked) or marked == " "


@pytest.mark.parametrize(
    ("text", "problem", "marked"),
    [
        ("i k, k j, j -> i j", r"it names 3 operands, but there are 2: \(4, 6\), \(6, 8\)", None),
        ("i k, k j a -> i j", r"operand 1 has 3 dimensions here, but its shape is \(6, 8\)", None),
        ("i k, j k -> i j", r"`k` is 6 elsewhere, but 8 in the tensor of shape \(6, 8\)", "k"),
        ("(i a) k, k j -> i j a", r"result 0 has 3 dimensions here, but its shape is \(4, 8\)", None),
        ("out[i, j] = Sum(k) x[i, k] * y[k, l]", r"index `l` in `y\[k, l\]` is neither .* has shape \(6, 8\)", "l"),
        ("out[i, j] = Sum(k) x[i, k + 1] * y[k, j]", r"`k \+ 1` runs from 1 to 6, .* shape is \(4, 6\)", "x[i, k + 1]"),
        ("out[i, j] = Sum(k) x[i] * y[k, j]", r"`x` has 1 positions here, but its shape is \(4, 6\)", "x"),
        ("out[i, j] = Sum(k) x[i, k*j] * y[k, j]", r"must be affine: `k \* j` is not; `x` has shape \(4, 6\)", "*"),
        ("out[i, j] = Sum(k) x[i, sin(k)] * y[k, j]", r"must be affine in the indices: `sin` .* shape \(4, 6\)", "sin"),
        ("out[i] = Sum(k) x[i, k] * y[k, i]", r"result 0 has 1 positions, but its shape is \(4, 8\)", None),
        ("out[i, 2*j] = Sum(k) x[i, k] * y[k, j]", r"`2\*j` covers 0 to 14 of a dimension of size 8", "2*j"),
        ("out[i, j] = Sum(k) x[i, k] * z[k, j] * y[k, j]", r"`y` is neither an index nor one of the operands", "y"),
        ("out[i, j] = x[i, :] y[:, j]", r"`y` does not belong here", "y"),
        ("out[i, j] = f(x[i, :]", r"it names|expected `\)`", None),
    ],
)
def test_description_that_does_not_fit(primitive: Primitive, text: str, problem: str, marked: str | None) -> None:
    describe(primitive, text)
    with pytest.raises(RuleError, match=problem) as caught:
        rule_of(primitive.bind, ones(4, 6), ones(6, 8))
    assert text in str(caught.value)
    if marked is not None:
        quoted, mark = str(caught.value).splitlines()[1:3]
        assert quoted[mark.index("^") :].startswith(marked)


@pytest.mark.slow
def test_whole_function_is_one_operation() -> None:
    def normalised(x: Any, scale: Any) -> Any:
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True)) * scale

    whole = describe(normalised, "... :, : -> ... :", check=True)
    operands = ones(4, 6, 8), ones(8)
    rule = rule_of(whole, *operands)
    assert rule.primitive == "whole_call"
    assert splits(rule) == {"batch0": ([0, None], [0]), "batch1": ([1, None], [1])}
    assert not rule.elementwise and rule.linear == ()
    np.testing.assert_allclose(jax.jit(whole)(*operands), normalised(*operands), rtol=1e-6)
    holds(whole, *operands)


@pytest.mark.slow
def test_whole_function_is_differentiated_and_batched_inside() -> None:
    whole = describe(lambda x: (x * x, [x.sum(1)]), "b i -> b i, b")
    x = ones(4, 6) * 3
    slope = jax.grad(lambda x: whole(x)[0].sum())(x)
    np.testing.assert_allclose(slope, 2 * x)
    np.testing.assert_allclose(jax.vmap(whole)(x[None])[1][0][0], x.sum(1))
    assert splits(rule_of(whole, x)) == {"b": ([0], [0, 0]), "i": ([1], [1, "sum"])}
    holds(whole, x)
    assert str(jax.tree.structure(whole(x))) == str(jax.tree.structure((0, [0])))


def test_custom_vjp_as_a_whole() -> None:
    @jax.custom_vjp
    def clipped(x: Any) -> Any:
        return jnp.clip(x, -1, 1)

    forward = describe(lambda x: (jnp.clip(x, -1, 1), x), "i j -> i j, i j")
    backward = describe(lambda x, t: (t * (abs(x) < 1),), "i j, i j -> i j")
    clipped.defvjp(forward, backward)
    names = [str(e.primitive) for e in jax.make_jaxpr(jax.grad(lambda x: clipped(x).sum()))(ones(4, 6)).jaxpr.eqns]
    assert names.count("whole_call") == 2
    inference = describe(clipped, "i j -> i j")
    assert rule_of(inference, ones(4, 6)).elementwise


def _attention(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.where(jnp.tril(jnp.ones((8, 8), bool)), jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def _pooled(x: Any, w: Any) -> Any:
    return jax.nn.relu(jax.lax.conv(x, w, (1, 1), "SAME")).mean((2, 3))


# What follows from the bodies of functions, of which nothing is said: the splits of every index in 2 blocks.
DERIVED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "softmax": (jax.nn.softmax, [(8, 6)], [([0], [0]), ([None], [1])]),
    "attention": (
        _attention,
        [(2, 8, 4, 6)] * 3,
        [
            ([0, 0, 0], [0]),
            ([1, None, None], [1]),
            ([2, 2, 2], [2]),
            ([None, None, 3], [3]),
            ([None, None, 1], ["sum"]),
        ],
    ),
    "layers": (
        lambda x, w, v: jax.nn.gelu(x @ w) @ v,
        [(8, 4), (4, 12), (12, 6)],
        [([0, None, None], [0]), ([None, None, 1], [1]), ([None, 1, 0], ["sum"])],
    ),
    "solve": (jnp.linalg.solve, [(4, 3, 3), (4, 3, 2)], [([0, 0], [0]), ([None, 2], [2])]),
    "convolution": (_pooled, [(4, 4, 8, 8), (8, 4, 3, 3)], [([0, None], [0]), ([None, 0], [1])]),
    "two results": (lambda x: (x * x, x[:, 0]), [(8, 3)], [([0], [0, 0])]),
}


@pytest.mark.parametrize("name", DERIVED)
def test_expression_of_a_body(name: str) -> None:
    function, shapes, expected = DERIVED[name]
    noise = np.random.default_rng(0)
    operands = [noise.normal(size=shape).astype(np.float32) for shape in shapes]
    whole = describe(function)
    assert list(splits(rule_of(whole, *operands)).values()) == expected
    holds(whole, *operands)


def test_body_with_a_loop_has_no_expression() -> None:
    whole = describe(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: x * 2, x))
    rule = rule_of(whole, ones(4, 6))
    assert not rule.known and rule.reason is not None and "`scan`" in rule.reason


def test_primitive_needs_an_expression(primitive: Primitive) -> None:
    with pytest.raises(RuleError, match="needs an expression"):
        describe(primitive)


def test_stencil_gets_halos() -> None:
    def smoothed(x: Any) -> Any:
        padded = jnp.pad(x, ((1, 1), (0, 0)))
        return padded[:-2] + padded[1:-1] + padded[2:]

    whole = describe(smoothed, "out[i, j] = x[i - 1, j]? + x[i, j] + x[i + 1, j]?", check=True, operands=[ones(8, 4)])
    (rows, columns) = rule_of(whole, ones(8, 4)).splits(4)
    assert (rows.index, rows.operands[0].dim, rows.operands[0].halo) == ("i", 0, (1, 1))
    assert (columns.index, columns.operands[0].halo) == ("j", (0, 0))


def test_halo_that_is_too_small_is_refuted() -> None:
    def smoothed(x: Any) -> Any:
        padded = jnp.pad(x, (1, 1))
        return padded[:-2] + padded[1:-1] + padded[2:]

    with pytest.raises(RuleError, match="refuted by execution"):
        describe(smoothed, "out[i] = x[i - 1]? + x[i]", check=True, operands=[ones(8)])


def test_foreign_function() -> None:
    call = jax.ffi.ffi_call("user_target", jax.ShapeDtypeStruct((4, 8), np.float32))
    rule = rule_of(call, ones(4, 6), ones(6, 8))
    assert not rule.known and rule.reason is not None and 'describe("user_target"' in rule.reason
    try:
        describe("user_target", "i :, : j -> i j")
        assert set(splits(rule_of(call, ones(4, 6), ones(6, 8)))) == {"i", "j"}
        with pytest.raises(RuleError, match="describe the function that calls it"):
            describe("user_target", "i :, : j -> i j", check=True)
    finally:
        forget("user_target")


@pytest.mark.parametrize(
    ("rule", "options", "expected"),
    [
        ("i k, k j -> i j", {"reduction_factors": ("k",)}, {"i", "j", "k"}),
        ("i k, k j -> i j", {}, {"i", "j"}),
        ("i k, k j -> i j", {"reduction_factors": ("k",), "need_replication_factors": ("j",)}, {"i", "k"}),
        ("... k, k j -> ... j", {}, {"batch0_0", "j"}),
        ("(a b) k, k j -> (a b) j", {"a": 2, "b": 2}, {"a", "j"}),
    ],
)
def test_custom_partitioning(rule: str, options: dict[str, Any], expected: set[str]) -> None:
    """It has a rule of its own."""

    @custom_partitioning
    def product(x: Any, y: Any) -> Any:
        return x @ y

    product.def_partition(
        partition=lambda mesh, operands, result: (mesh, jnp.matmul, result.sharding, [o.sharding for o in operands]),
        sharding_rule=rule,
        **options,
    )
    assert set(splits(rule_of(product, ones(4, 6), ones(6, 8)))) == expected
    holds(product, ones(4, 6), ones(6, 8))


def test_second_description_of_a_known_primitive() -> None:
    """It needs `replace=True`."""
    with pytest.raises(RuleError, match="has a rule of this library"):
        describe(jax.lax.dot_general_p, "i j, j k -> i k")
    doubled = describe(lambda a: a * 2, "i j -> i j")
    with pytest.raises(RuleError, match="described already"):
        describe(doubled, "i : -> i :")
    again = describe(doubled, "i : -> i :", replace=True)
    assert [split.index for split in rule_of(again, np.ones((4, 4))).splits(2)] == ["i"]
