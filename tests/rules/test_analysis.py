"""The split analysis: from text to splits, the facts about expressions, and the time of deriving."""

import time
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

from shardplan.rules import derive, rule_of
from shardplan.rules.expression import index
from shardplan.rules.notation import parse
from shardplan.rules.operations import flat_equations
from shardplan.rules.rule import Rule, forget
from shardplan.rules.samples import samples

Slots = list[Any]

# text, operand shapes, result shapes, blocks, and per index the slots of operands and results: a dimension, a dimension
# with its halo, a reducer, or None for a whole tensor. Indices that are missing here do not split.
SPLITS: list[tuple[str, list[Any], list[Any], int, dict[str, tuple[Slots, Slots]]]] = [
    (
        "i k, k j -> i j",
        [(4, 6), (6, 8)],
        [(4, 8)],
        2,
        {"i": ([0, None], [0]), "k": ([1, 0], ["sum"]), "j": ([None, 1], [1])},
    ),
    ("i k, k j -> i j", [(4, 6), (6, 8)], [(4, 8)], 3, {"k": ([1, 0], ["sum"])}),
    ("i j -> i j", [(5, 7)], [(5, 7)], 2, {}),
    # A dimension of two indices: the major one is contiguous, the minor one interleaved.
    ("(a b) c -> a b c", [(12, 4)], [(3, 4, 4)], 2, {"c": ([1], [2])}),
    ("(a b) c -> a b c", [(12, 4)], [(3, 4, 4)], 3, {"a": ([0], [0])}),
    ("a b c -> (a b) c", [(4, 3, 2)], [(12, 2)], 4, {"a": ([0], [0])}),
    # Flattening splits along the major dimension only where whole rows remain.
    ("out[i] = x[i // 6, i % 6]", [(4, 6)], [(24,)], 4, {"i": ([0], [0])}),
    ("out[i] = x[i // 6, i % 6]", [(4, 6)], [(24,)], 8, {}),
    ("out[i] = x[i // 6, i % 6]", [(4, 6)], [(24,)], 3, {}),
    # Windows
    ("out[i] = Sum(d) x[i + d - 1]? * w[d]", [(8,), (3,)], [(8,)], 2, {"i": ([(0, 1, 1), None], [0])}),
    ("out[i] = Sum(d) x[2*i + d - 2]? * w[d]", [(16,), (5,)], [(8,)], 2, {"i": ([(0, 2, 1), None], [0])}),
    ("out[i] = Sum(d) x[2*i + d] * w[d]", [(16,), (2,)], [(8,)], 4, {"i": ([0, None], [0])}),
    ("out[i] = Sum(d) x[(i + d - 1) / 2]? * w[d]", [(4,), (3,)], [(8,)], 2, {"i": ([(0, 0, 1), None], [0])}),
    ("out[i] = Sum(d) x[i + 3*d - 3]? * w[d]", [(8,), (3,)], [(8,)], 4, {}),  # the halo would reach past the neighbour
    ("out[i] = Sum(d) x[i + d] * w[d]", [(10,), (3,)], [(8,)], 2, {}),  # blocks of 5 are not read in steps of 4
    ("out[d] = Sum(i) x[i + d]? * t[i]", [(8,), (8,)], [(3,)], 2, {"i": ([(0, 0, 2), 0], ["sum"])}),
    ("out[i] = x[7 - i]", [(8,)], [(8,)], 2, {}),
    ("out[i] = x[i + 1]", [(9,)], [(8,)], 2, {}),
    # An index twice in one position: only where both parts grow with it are the ends known.
    ("out[i] = x[i + i // 2]?", [(12,)], [(8,)], 2, {"i": ([0], [0])}),
    ("out[i] = x[i - i // 2]?", [(4,)], [(8,)], 2, {}),
    ("out[i] = x[i + i % 2]?", [(12,)], [(12,)], 4, {}),
    # Lookups
    (
        "out[b, d] = Sum(v) (ids[b] == v) * table[v, d]",
        [(4,), (6, 8)],
        [(4, 8)],
        2,
        {"b": ([0, None], [0]), "d": ([None, 1], [1]), "v": ([None, 0], ["sum"])},
    ),
    # Partial results pass through sums and maxima that enter once, not through functions.
    ("out[i] = x[i] + Sum(k) y[k, i]", [(4,), (6, 4)], [(4,)], 2, {"i": ([0, 1], [0]), "k": ([None, 0], ["sum"])}),
    ("out[i] = log(Sum(k) y[k, i])", [(6, 4)], [(4,)], 2, {"i": ([1], [0])}),
    (
        "out[i] = maximum(x[i], Max(k) y[k, i])",
        [(4,), (6, 4)],
        [(4,)],
        2,
        {"i": ([0, 1], [0]), "k": ([None, 0], ["max"])},
    ),
    ("out[i] = Max(k) Sum(j) y[k, j, i]", [(6, 4, 3)], [(3,)], 2, {"k": ([0], ["max"])}),
    ("out[i] = (Sum(k) x[k, i]) * (Sum(k) y[k, i])", [(4, 3), (4, 3)], [(3,)], 2, {}),
    ("out[i] = Xor(k) x[k, i]", [(4, 3)], [(3,)], 2, {}),
    # Opaque functions give their elements together. An operand that is also read whole stays whole.
    ("out[b, i] = Opaque.sort(x[b, :])[i]", [(4, 6)], [(4, 6)], 2, {"b": ([0], [0])}),
    ("out[i, j] = x[i] * x[j]", [(4,)], [(4, 4)], 2, {"i": ([None], [0]), "j": ([None], [1])}),
    ("out[i] = x[i, i]", [(4, 4)], [(4,)], 2, {}),
    # Several results
    ("i j -> i j, i", [(4, 6)], [(4, 6), (4,)], 2, {"i": ([0], [0, 0]), "j": ([1], [1, "sum"])}),
]


@pytest.mark.parametrize(("text", "operands", "results", "blocks", "expected"), SPLITS)
def test_splits(text: str, operands: list[Any], results: list[Any], blocks: int, expected: dict[str, Any]) -> None:
    rule = Rule("example", parse(text, operands, results))
    found = {
        split.index: (
            [(slot.dim, *slot.halo) if any(slot.halo) else slot.dim for slot in split.operands],
            [slot.reducer or slot.dim for slot in split.results],
        )
        for split in rule.splits(blocks)
    }
    assert found == expected
    assert set(rule.refusals(blocks)) == set(rule.expression.sizes) - set(expected)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("function", "shapes", "linear"),
    [
        (lax.add, [(4,), (4,)], [{0, 1}]),
        (lax.sub, [(4,), (4,)], [{0, 1}]),
        (lax.mul, [(4,), (4,)], [{0}, {1}]),
        (lax.div, [(4,), (4,)], [{0}]),
        (lax.neg, [(4,)], [{0}]),
        (lax.exp, [(4,)], []),
        (lax.max, [(4,), (4,)], []),
        (lax.integer_pow, None, []),
        (lambda x: lax.convert_element_type(x, jnp.bfloat16), [(4,)], [{0}]),
        (lambda x: lax.convert_element_type(x, jnp.int32), [(4,)], []),
        (lambda x, y: lax.concatenate([x, y], 0), [(4,), (4,)], [{0, 1}]),
        (lambda x, y: lax.dot(x, y), [(4, 4), (4, 4)], [{0}, {1}]),
        (lambda x: x.sum(0), [(4, 4)], [{0}]),
        (lambda x: x.max(0), [(4, 4)], []),
        (lambda x: lax.cumsum(x, 0), [(4, 4)], [{0}]),
        (lambda x: x.T, [(4, 4)], [{0}]),
        (lambda x, y: x.at[np.arange(2)].add(y), [(4, 4), (2, 4)], [{0, 2}]),
        (lambda x, y: x.at[np.arange(2)].set(y), [(4, 4), (2, 4)], [{0, 2}]),
        (lambda x, y: lax.select(np.ones(4, bool), x, y), [(4,), (4,)], [{1, 2}]),
    ],
)
def test_sums_pass_through(function: Any, shapes: Any, linear: list[set[int]]) -> None:
    if shapes is None:
        function, shapes = (lambda x: lax.integer_pow(x, 2)), [(4,)]
    closed = jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes])
    equation = flat_equations(closed.jaxpr)[-1]
    rule = derive(equation.primitive, equation.params, *_avals(equation))
    assert [set(operands) for operands in rule.linear] == linear


def _avals(equation: Any) -> list[list[Any]]:
    return [[v.aval for v in side] for side in (equation.invars, equation.outvars)]


@pytest.mark.parametrize(
    ("function", "shapes", "elementwise"),
    [
        (lax.tanh, [(4, 6)], True),
        (lax.add, [(4, 6), ()], True),
        (lambda x: lax.copy_p.bind(x), [(4, 6)], True),
        (lambda x: lax.reshape(x, (4, 6, 1)), [(4, 6)], False),
        (lambda x, y: lax.add_p.bind(x, y), [(4, 1), (4, 6)], False),
        (lambda x: lax.rev(x, (0,)), [(4, 6)], False),
        (lambda x: lax.cumsum(x), [(6,)], False),
        (lambda x: x.T, [(4, 4)], False),
    ],
)
def test_elementwise_is_found(function: Any, shapes: list[Any], elementwise: bool) -> None:
    rule = rule_of(function, *[jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes])
    assert rule.known and rule.elementwise == elementwise


@pytest.mark.parametrize(
    ("function", "shapes", "flops"),
    [
        (lambda x, y: lax.dot(x, y), [(4, 6), (6, 8)], 2 * 4 * 6 * 8),
        (lambda x: x.sum(0), [(4, 6)], 24),
        (lax.tanh, [(4, 6)], 24),
        (lambda x: lax.cumsum(x, 0), [(8, 4)], 32),
        (lambda x, w: lax.conv(x, w, (1,), "SAME"), [(2, 3, 8), (4, 3, 3)], 2 * 2 * 3 * 8 * 4 * 3),
    ],
)
def test_operations_are_counted(function: Any, shapes: list[Any], flops: int) -> None:
    assert rule_of(function, *[jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]).flops == flops


def test_operations_of_lookups() -> None:
    """They cost at most three operations per moved element."""
    table, ids = jax.ShapeDtypeStruct((50000, 64), np.float32), jax.ShapeDtypeStruct((128,), np.int32)
    rows = lambda t, i: jnp.take(t, i, axis=0, mode="clip")  # noqa: E731
    add = lambda t, i: t.at[i].add(1.0, mode="clip")  # noqa: E731
    for function, most in ((rows, 3 * 128 * 64), (add, 3 * (50000 * 64 + 128 * 64))):
        equation = flat_equations(jax.make_jaxpr(function)(table, ids).jaxpr)[-1]
        assert derive(equation.primitive, equation.params, *_avals(equation)).flops <= most


def test_printed_expressions_can_be_read_again() -> None:
    for sample in samples().values():
        for equation in flat_equations(jax.make_jaxpr(sample.function)(*sample.operands).jaxpr):
            expression = derive(equation.primitive, equation.params, *_avals(equation)).expression
            if expression is None:
                continue
            names = f"{', '.join(expression.operands)}: " if expression.operands else ""
            shapes = expression.operand_shapes, expression.result_shapes
            again = parse(names + str(expression), *shapes, sizes=expression.sizes)
            assert str(again) == str(expression)


def test_positions_print_as_written() -> None:
    i, j = index("i"), index("j")
    assert str(i * 2 + j - 1) == "2*i + j - 1"
    assert str(i * -1 + 3) == "3 - i"
    assert str((i * 4 + j) // 3 % 2) == "(4*i + j) // 3 % 2"
    assert str((i + 1).exactly(2) * 2) == "2*((i + 1) / 2)"
    assert str(i - i) == "0"


def test_equal_equations_are_analysed_once() -> None:
    first, second = (rule_of(lax.dot, np.ones((4, 4), np.float32), np.ones((4, 4), np.float32)) for _ in range(2))
    assert first is second
    assert first.splits(2) is second.splits(2)


def test_a_new_contraction_takes_under_a_millisecond() -> None:
    equations = [
        jax.make_jaxpr(lax.dot)(np.ones((4, 4 * n), np.float32), np.ones((4 * n, 8), np.float32)).eqns[0]
        for n in range(1, 60)
    ]
    forget()
    seconds = []
    for equation in equations:
        start = time.perf_counter()
        rule = derive(equation.primitive, equation.params, *_avals(equation))
        assert rule.splits(2)
        seconds.append(time.perf_counter() - start)
    assert sorted(seconds)[len(seconds) // 2] < 1e-3


@pytest.mark.long
def test_an_unrolled_training_step_takes_under_a_second() -> None:
    equations = flat_equations(_gpt_step(layers=24).jaxpr)
    assert len(equations) > 10_000
    forget()
    start = time.perf_counter()
    rules = [derive(equation.primitive, equation.params, *_avals(equation)) for equation in equations]
    for rule in rules:
        rule.splits(8)
    seconds = time.perf_counter() - start
    assert all(rule.known for rule in rules)
    assert seconds < 1


def _gpt_step(layers: int) -> Any:
    """A training step of a GPT with AdamW, every layer traced on its own."""
    optax = pytest.importorskip("optax")
    width, heads, vocabulary, length = 64, 4, 512, 32

    def norm(x: Any, scale: Any, shift: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6) * scale + shift

    def block(p: Any, x: Any) -> Any:
        b, t, d = x.shape
        y = norm(x, p["scale1"], p["shift1"]) @ p["qkv"] + p["bias_qkv"]
        q, k, v = (a.reshape(b, t, heads, d // heads) for a in jnp.split(y, 3, -1))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, t, d)
        x = x + y @ p["out"] + p["bias_out"]
        y = jax.nn.gelu(norm(x, p["scale2"], p["shift2"]) @ p["up"] + p["bias_up"])
        return x + y @ p["down"] + p["bias_down"]

    def loss(p: Any, ids: Any) -> Any:
        x = p["embed"][ids] + p["position"]
        for layer in p["layers"]:
            x = block(layer, x)
        return optax.softmax_cross_entropy_with_integer_labels(x @ p["embed"].T, ids).mean()

    d = width
    shapes: dict[str, tuple[int, ...]] = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    shapes |= {f"bias_{name}": shape[1:] for name, shape in shapes.items()}
    shapes |= dict.fromkeys(("scale1", "shift1", "scale2", "shift2"), (d,))
    layer = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    params = {
        "embed": jax.ShapeDtypeStruct((vocabulary, d), np.float32),
        "position": jax.ShapeDtypeStruct((length, d), np.float32),
        "layers": [layer] * layers,
    }
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def step(p: Any, state: Any, ids: Any) -> Any:
        updates, state = optimiser.update(jax.grad(loss)(p, ids), state, p)
        return optax.apply_updates(p, updates), state

    state = jax.eval_shape(optimiser.init, params)
    return jax.make_jaxpr(step)(params, state, jax.ShapeDtypeStruct((4, length), np.int32))
