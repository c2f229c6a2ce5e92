"""Sorts and top-k: the sorted dimension is hidden, the others are free."""

from shardplan.rules.equation import Equation, Semantics, expression, letters, sizes_of
from shardplan.rules.expression import Expression, Opaque, Read, Result


def _sort(equation: Equation) -> Expression:
    """All operands are permuted into the order of the first ``num_keys``."""
    dim, shape = equation.params["dimension"], equation.inputs[0].shape
    at = letters("i", len(shape))
    reads = tuple(Read(n, (*at[:dim], None, *at[dim + 1 :])) for n in range(len(equation.inputs)))
    several = len(equation.outputs) > 1
    results = [
        Result(at, Opaque(f"sort_{n}" if several else "sort", reads, (at[dim],))) for n in range(len(equation.outputs))
    ]
    return expression(equation, sizes_of((at, shape)), results)


def _top_k(equation: Equation) -> Expression:
    axis = equation.params.get("axis", equation.params.get("reduction_dimension", -1)) % len(equation.inputs[0].shape)
    shape = equation.outputs[0].shape
    at = letters("i", len(shape))
    read = Read(0, (*at[:axis], None, *at[axis + 1 :]))
    results = [Result(at, Opaque(name, (read,), (at[axis],))) for name in ("top", "top_at")]
    return expression(equation, sizes_of((at, shape)), results)


RULES: dict[str, Semantics] = {"sort": _sort, "top_k": _top_k, "approx_top_k": _top_k}
