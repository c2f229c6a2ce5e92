"""Fused attention: the kernels need a GPU, and plain implementations replace them in the proofs."""

from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from shardplan.rules._jax import lowered_primitives
from shardplan.rules.operations import Operation
from shardplan.rules.rule import Rule, derive
from shardplan.rules.verify import verify_operation

BATCH, LENGTH, KEY_LENGTH, HEADS, WIDTH = 4, 6, 5, 8, 2
ABSENT = [np.zeros((0,), np.float32)] + [np.zeros((0,), np.int32)] * 6
PRIMITIVES = {primitive.name: primitive for primitive in lowered_primitives()}
PARAMS = {
    "scale": 1.0,
    "seed": 0,
    "dropout_rate": 0.0,
    "mask_type": 0,
    "sliding_window_length": 0,
}
BIASES = [None, (BATCH, HEADS), (1, HEADS), (1, 1)]


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape) + sum(shape)).normal(size=shape).astype(np.float32)


def operands(group: int, layout: int, bias: tuple[int, int] | None) -> list[np.ndarray]:
    query = noise(BATCH, LENGTH, HEADS, WIDTH)
    key, value = (noise(BATCH, KEY_LENGTH, HEADS // group, WIDTH) + n for n in range(2))
    tensors = [query, key, value]
    if layout == 1:
        tensors = [tensor.swapaxes(1, 2).copy() for tensor in tensors]
    absent = list(ABSENT)
    if bias is not None:
        absent[0] = noise(*bias, LENGTH, KEY_LENGTH)
    return tensors + absent


def forward(layout: int, q: Any, k: Any, v: Any, bias: Any) -> tuple[Any, Any]:
    """What the kernel computes: attention and the logarithms of the softmax's sums."""
    if layout == 1:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    scores = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, group, 2))
    if bias.size:
        scores = scores + bias
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), jnp.repeat(v, group, 2))
    return (out.swapaxes(1, 2) if layout == 1 else out), jax.scipy.special.logsumexp(scores, -1)


def rule_for(name: str, given: list[np.ndarray], results: list[Any], **params: Any) -> Rule:
    specs = [[jax.ShapeDtypeStruct(t.shape, t.dtype) for t in side] for side in (given, results)]
    return derive(PRIMITIVES[name], params, *specs)


def holds(rule: Rule, given: list[np.ndarray], run: Any, indices: set[str]) -> None:
    assert rule.known, rule.reason
    assert {split.index for split in rule.splits(2)} == indices
    verdicts = verify_operation(Operation("attention", rule, tuple(given), run), (2,))
    assert verdicts
    assert all(verdict.holds for verdict in verdicts), [str(v) for v in verdicts if not v.holds]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "layout"), [*(pytest.param(n, 0, marks=pytest.mark.long) for n in (1, 2)), (1, 1), (4, 1)]
)
def test_forward(group: int, layout: int) -> None:
    for bias in BIASES if group == 1 and layout == 0 else BIASES[:2]:
        given = operands(group, layout, bias)

        def run(q: Any, k: Any, v: Any, bias: Any, *_: Any) -> list[Any]:
            return list(forward(layout, q, k, v, bias))

        rule = rule_for(
            "dot_product_attention_fwd_wrapper", given, run(*given), layout=layout, is_training=True, **PARAMS
        )
        holds(rule, given, run, {"b", "k"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "layout"), [*(pytest.param(n, 0, marks=pytest.mark.long) for n in (1, 2)), (1, 1), (4, 1)]
)
def test_backward(group: int, layout: int) -> None:
    for bias in BIASES if group == 1 and layout == 0 else BIASES[:2]:
        given = operands(group, layout, bias)
        out, statistics = forward(layout, *given[:4])
        given += [np.asarray(statistics), np.asarray(out), noise(*out.shape)]

        def run(q: Any, k: Any, v: Any, bias: Any, *rest: Any) -> list[Any]:
            gradients = jax.vjp(lambda *x: forward(layout, *x)[0], q, k, v, bias)[1](rest[-1])
            return list(gradients if bias.size else gradients[:3])

        rule = rule_for("dot_product_attention_bwd", given, run(*given), layout=layout, **PARAMS)
        holds(rule, given, run, {"b", "k"})


def test_eight_bit_forward_reports_the_largest_of_everything() -> None:
    scale = np.ones((1, 1, 1, 1), np.float32)
    given = operands(1, 0, None)[:3] + [scale] * 6

    def run(q: Any, k: Any, v: Any, *_: Any) -> list[Any]:
        out, statistics = forward(0, q, k, v, jnp.zeros(0))
        return [out, abs(statistics).max().reshape(1, 1, 1, 1), abs(out).max().reshape(1, 1, 1, 1), statistics]

    rule = rule_for("dot_product_attention_fp8_fwd", given, run(*given), layout=0, is_training=True)
    assert [slot.reducer for slot in rule.splits(2)[0].results] == [None, "max", "max", None]
    assert {split.index for split in rule.splits(2)} == {"b", "k"}


def test_packed_sequences_keep_their_segments_together() -> None:
    given = operands(1, 0, None)
    given[4:8] = [np.zeros((BATCH, 3), np.int32)] * 4
    out = noise(BATCH, LENGTH, HEADS, WIDTH), noise(BATCH * 3, HEADS, LENGTH)
    rule = rule_for("dot_product_attention_fwd", given, list(out), layout=0, is_training=True, **PARAMS)
    (batches, _) = rule.splits(2)
    assert [slot.dim for slot in batches.results] == [0, 0]
    assert [slot.dim for slot in batches.operands] == [0, 0, 0, None, 0, 0, 0, 0, None, None]


def test_flops_are_those_of_the_products() -> None:
    given = operands(1, 0, None)
    out = noise(BATCH, LENGTH, HEADS, WIDTH)
    rule = rule_for("dot_product_attention_fwd", given, [out], layout=0, is_training=False, **PARAMS)
    assert rule.flops == 2 * 2 * BATCH * HEADS * LENGTH * KEY_LENGTH * WIDTH
