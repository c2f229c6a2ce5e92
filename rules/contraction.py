"""Contractions: products of tensors, summed over shared dimensions.

A matrix product is ``out[i, j] = Sum(k) lhs[i, k] * rhs[k, j]``; batch dimensions appear in both operands and the
result.
"""

from shardplan.rules.equation import Equation, Rule, expression, letters, sizes_of
from shardplan.rules.expression import Affine, Apply, Expression, Read, Reduce, Result, Term

Dims = tuple[int, ...]


def contract(sums: tuple[str, ...], body: Term) -> Term:
    """The sum over the indices, if there are any."""
    return Reduce("sum", sums, body) if sums else body


def _dot_general(equation: Equation) -> Expression:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = equation.params["dimension_numbers"]
    lhs, rhs = equation.inputs
    lhs_free = [d for d in range(len(lhs.shape)) if d not in lhs_contract and d not in lhs_batch]
    rhs_free = [d for d in range(len(rhs.shape)) if d not in rhs_contract and d not in rhs_batch]
    b, i, j, k = (
        letters(name, len(dims))
        for name, dims in (("b", lhs_batch), ("i", lhs_free), ("j", rhs_free), ("k", lhs_contract))
    )
    lhs_at = _placed(len(lhs.shape), (lhs_batch, b), (lhs_free, i), (lhs_contract, k))
    rhs_at = _placed(len(rhs.shape), (rhs_batch, b), (rhs_free, j), (rhs_contract, k))
    sizes = sizes_of((b + i, (lhs.shape[d] for d in (*lhs_batch, *lhs_free))), (j, (rhs.shape[d] for d in rhs_free)))
    sums = sizes_of((k, (lhs.shape[d] for d in lhs_contract)))
    product = Apply("*", (Read(0, lhs_at), Read(1, rhs_at)))
    result = Result(b + i + j, contract(tuple(sums), product))
    return expression(equation, sizes | sums, [result], ("lhs", "rhs"))


def _placed(rank: int, *groups: tuple[Dims | list[int], tuple[Affine, ...]]) -> tuple[Affine, ...]:
    """Positions by dimension, from groups of dimensions and their positions."""
    by_dim = {dim: position for dims, positions in groups for dim, position in zip(dims, positions, strict=True)}
    return tuple(by_dim[dim] for dim in range(rank))


RULES: dict[str, Rule] = {"dot_general": _dot_general}
