"""Cumulative operations: ``out[i] = Sum(j) x[j] if (j <= i)``.

The position splits with the operand whole, and the summed index splits into partial results, as in any reduction.
"""

from shardplan.rules.equation import Equation, Semantics, expression, letters, name_of, sizes_of
from shardplan.rules.expression import Apply, Compare, Expression, Guard, Position, Read, Reduce, Result, index


def _cumulative(reducer: str, before: str = "", after: str = "") -> Semantics:
    """``before`` and ``after``: functions applied to each element and to the reduced value."""

    def rule(equation: Equation) -> Expression:
        shape, axis = equation.inputs[0].shape, equation.params["axis"]
        at, j = letters("i", len(shape)), index("j")
        reached = Compare(">=" if equation.params["reverse"] else "<=", Position(j), Position(at[axis]))
        element = Read(0, (*at[:axis], j, *at[axis + 1 :]))
        body = Reduce(reducer, (name_of(j),), Guard(reached, Apply(before, (element,)) if before else element))
        sizes = sizes_of((at, shape)) | {"j": shape[axis]}
        return expression(equation, sizes, [Result(at, Apply(after, (body,)) if after else body)])

    return rule


RULES: dict[str, Semantics] = {
    "cumsum": _cumulative("sum"),
    "cumprod": _cumulative("prod"),
    "cummax": _cumulative("max"),
    "cummin": _cumulative("min"),
    "cumlogsumexp": _cumulative("sum", "exp", "log"),
}
