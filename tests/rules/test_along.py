"""Operations along an index: what they read for a block of it, and what cannot be said."""

from __future__ import annotations

import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from shardplan.rules import Refusal, Span, along_operand, along_result, rule_of
from shardplan.rules.along import span_of
from shardplan.rules.expression import index

SIZES = {"x": 24, "dx": 3, "s": 4}
POSITIONS = [
    index("x"),
    index("x") * 2 + index("dx") - 1,
    index("x") + index("dx") * 2 - 4,
    index("x") * 4 + index("s"),
    index("x") // 4,
    (index("x") + index("dx") - 1).exactly(2),
    index("x") * -1 + 23,
]


@pytest.mark.parametrize("position", POSITIONS, ids=str)
@pytest.mark.parametrize("span", [Span(4, 0, 4), Span(4, -2, 5), Span(8, 0, 8)])
def test_spans_hold_what_blocks_read(position, span: Span):
    """The span has exactly the least and the largest position that the values of a block reach, for every block."""
    found = span_of(position, "x", span, SIZES)
    for block in range(3):
        reached = set()
        for x in range(span.step * block + span.low, span.step * block + span.high):
            for dx, s in itertools.product(range(3), range(4)):
                reached.update(_value(position, {"x": x, "dx": dx, "s": s}))
        assert (min(reached), max(reached) + 1) == (found.step * block + found.low, found.step * block + found.high)


def _value(position, values):
    """The number that a position is, if it is one."""
    total = position.offset
    for coefficient, atom in position.terms:
        if isinstance(atom, str):
            total += coefficient * values[atom]
            continue
        (inner,) = [*_value(atom.of, values)] or (None,)
        if inner is None or (atom.kind == "/" and inner % atom.by):
            return
        total += coefficient * (inner % atom.by if atom.kind == "%" else inner // atom.by)
    yield total


@pytest.mark.parametrize(
    ("position", "span"),
    [
        (index("x") // 4, Span(6, 0, 6)),
        (index("x") % 4, Span(6, 0, 6)),
        ((index("x") + 1).exactly(2), Span(3, 0, 3)),
        ((index("x") * 4 + 1).exactly(4), Span(1, 0, 1)),
        (index("x") * 2 - index("x") // 4, Span(4, 0, 4)),
    ],
    ids=str,
)
def test_spans_that_do_not_advance_in_equal_steps(position, span: Span):
    with pytest.raises(Refusal):
        span_of(position, "x", span, SIZES)


def test_spans_of_two_readers():
    assert Span(4, 0, 4).union(Span(4, -1, 3)) == Span(4, -1, 4)
    with pytest.raises(Refusal, match="in steps of 4 and of 2"):
        Span(4, 0, 4).union(Span(2, 0, 2))


def test_a_transposed_convolution_advances_by_half_a_row():
    x, kernel = jnp.ones((1, 8, 2)), jnp.ones((4, 2, 2))
    rule = rule_of(lambda x, k: lax.conv_transpose(x, k, (2,), "SAME"), x, kernel)
    along = along_result(rule, 0, 1)
    assert (along.operands, along.scale(0)) == ((1, None), Fraction(1, 2))
    assert along.needed(0, Span(4, 0, 4)) == Span(2, -1, 3)


def test_a_gradient_of_weights_is_a_sum_over_rows():
    x, kernel = jnp.ones((1, 8, 2)), jnp.ones((3, 2, 2))

    def convolved(kernel):
        return lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))

    rule = rule_of(lambda g: jax.linear_transpose(convolved, kernel)(g)[0], jnp.ones((1, 8, 2)))
    along = along_operand(rule, 1, 1)
    assert (along.results, along.reducers, along.once) == ((None,), ("sum",), None)
    assert along.needed(0, Span(4, 0, 4)) == Span(4, -1, 5)


@pytest.mark.parametrize(("name", "once"), [("add", 0), ("subtract", 0), ("multiply", 0), ("max", None)])
def test_what_a_scatter_writes_into(name: str, once):
    """It enters sums and products once. A maximum may take it per block."""
    rows = jnp.arange(6)[:, None]
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    scatter = {"add": lax.scatter_add, "subtract": lax.scatter_sub, "multiply": lax.scatter_mul, "max": lax.scatter_max}
    rule = rule_of(lambda x, i, u: scatter[name](x, i, u, numbers), jnp.ones((4, 3)), rows, jnp.ones((6, 3)))
    along = along_operand(rule, 2, 0)
    assert (along.operands, along.once) == ((None, 0, 0), once)


def test_what_no_block_gives():
    with pytest.raises(Refusal, match="it is read whole"):
        along_operand(rule_of(lambda x: jnp.sort(x, 0), jnp.ones((8, 8))), 0, 0)


def test_a_cumulative_sum_depends_on_the_place():
    """Of the summed index as of the result's."""
    rule = rule_of(lambda x: lax.cumsum(x, 0), jnp.ones((8, 8)))
    assert along_operand(rule, 0, 0).placed
    assert along_result(rule, 0, 0).placed
