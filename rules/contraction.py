"""Contractions: products of tensors, summed over shared dimensions.

A matrix product is ``out[i, j] = Sum(k) lhs[i, k] * rhs[k, j]``; batch dimensions appear in both operands and the
result.
"""

from shardplan.rules.equation import Equation, Semantics, expression, letters, sizes_of
from shardplan.rules.expression import (
    ZERO,
    Affine,
    Apply,
    Compare,
    Expression,
    Position,
    Read,
    Reduce,
    Result,
    Term,
    index,
)

Dims = tuple[int, ...]


def contract(sums: tuple[str, ...], body: Term) -> Term:
    """The sum over the indices, if there are any."""
    return Reduce("sum", sums, body) if sums else body


def _dot_general(equation: Equation) -> Expression:
    return _product(equation, *equation.params["dimension_numbers"])


def _product(
    equation: Equation, contracted: tuple[Dims, Dims], batched: tuple[Dims, Dims], groups: Dims = ()
) -> Expression:
    """The product of the first two operands. ``groups``: dimensions of the right-hand side that index ``g`` runs
    over."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = contracted, batched
    lhs, rhs = equation.inputs[:2]
    lhs_free = [d for d in range(len(lhs.shape)) if d not in lhs_contract and d not in lhs_batch]
    rhs_free = [d for d in range(len(rhs.shape)) if d not in rhs_contract and d not in rhs_batch and d not in groups]
    b, i, j, k = (
        letters(name, len(dims))
        for name, dims in (("b", lhs_batch), ("i", lhs_free), ("j", rhs_free), ("k", lhs_contract))
    )
    lhs_at = _placed(len(lhs.shape), (lhs_batch, b), (lhs_free, i), (lhs_contract, k))
    g = letters("g", len(groups))
    rhs_at = _placed(len(rhs.shape), (rhs_batch, b), (rhs_free, j), (rhs_contract, k), (groups, g))
    sizes = sizes_of((b + i, (lhs.shape[d] for d in (*lhs_batch, *lhs_free))), (j, (rhs.shape[d] for d in rhs_free)))
    sums = sizes_of((k, (lhs.shape[d] for d in lhs_contract)))
    product = Apply("*", (Read(0, lhs_at), Read(1, rhs_at)))
    result = Result(b + i + j, contract(tuple(sums), product))
    return expression(equation, sizes | sums, [result], ("lhs", "rhs", "", "")[: len(equation.inputs)])


def _placed(rank: int, *groups: tuple[Dims | list[int], tuple[Affine, ...]]) -> tuple[Affine, ...]:
    """Positions by dimension, from groups of dimensions and their positions."""
    by_dim = {dim: position for dims, positions in groups for dim, position in zip(dims, positions, strict=True)}
    return tuple(by_dim[dim] for dim in range(rank))


def _scaled_dot(equation: Equation) -> Expression:
    """A ``dot_general`` whose operands are multiplied by scales, each for a run of the contracted index."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = equation.params["dimension_numbers"]
    return _scaled(equation, (tuple(lhs_contract), tuple(rhs_contract)), (tuple(lhs_batch), tuple(rhs_batch)))


def _scaled_matmul(equation: Equation) -> Expression:
    """``(b, m, k)`` times ``(b, n, k)``, both with scales for runs of ``k``."""
    return _scaled(equation, ((2,), (2,)), ((0,), (0,)))


def _scaled(equation: Equation, contracted: tuple[Dims, Dims], batched: tuple[Dims, Dims]) -> Expression:
    plain = _product(equation, contracted, batched)
    (result,) = plain.results
    assert isinstance(result.body, Reduce) and isinstance(result.body.body, Apply)
    factors = []
    for operand, read in enumerate(result.body.body.arguments):
        assert isinstance(read, Read)
        shape, scales = equation.inputs[operand].shape, equation.inputs[2 + operand].shape
        at = tuple(_run(p, size, count) for p, size, count in zip(read.at, shape, scales, strict=True) if p is not None)
        factors.append(Apply("*", (read, Read(2 + operand, at))))
    body = Reduce("sum", result.body.indices, Apply("*", tuple(factors)))
    names = ("lhs", "rhs", "lhs_scale", "rhs_scale")
    return expression(equation, plain.sizes, [Result(result.at, body)], names)


def _run(position: Affine, size: int, count: int) -> Affine:
    """The scale of a position, where ``count`` scales serve ``size`` positions."""
    return position // (size // count) if count > 1 else ZERO


def _ragged_dot_general(equation: Equation) -> Expression:
    """A contraction in which rows belong to groups of given sizes, one after another.

    If the ragged dimension is free, each group has its own right-hand side; if it is contracted, each group gives its
    own result; if it is a batch dimension, rows past the last group give nothing.
    """
    numbers = equation.params["ragged_dot_dimension_numbers"]
    contracted, batched = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    group_dims = tuple(numbers.rhs_group_dimensions)
    plain = _product(equation, contracted, batched, group_dims)
    (result,) = plain.results
    body = result.body.body if isinstance(result.body, Reduce) else result.body
    sums = result.body.indices if isinstance(result.body, Reduce) else ()
    assert isinstance(body, Apply) and isinstance(body.arguments[0], Read)
    lhs_at = [p for p in body.arguments[0].at if p is not None]
    sizes_at = _group_sizes_at(equation, lhs_at, ragged, contracted[0], batched[0])
    g, groups = index("g"), equation.inputs[2].shape[-1]
    group = Apply("group", (Position(lhs_at[ragged]), Read(2, sizes_at)))
    sizes, at = dict(plain.sizes) | {"g": groups}, result.at
    if ragged in batched[0]:
        del sizes["g"]
        body = Apply("*", (Apply("in_a_group", group.arguments), body))
    else:
        body = Apply("*", (Compare("==", group, Position(g)), body))
        if ragged in contracted[0]:
            at = (g, *at)
        else:
            sums = ("g", *sums)
    return expression(equation, sizes, [Result(at, contract(sums, body))], ("lhs", "rhs", "group_sizes"))


def _group_sizes_at(
    equation: Equation, lhs_at: list[Affine], ragged: int, contracted: Dims, batched: Dims
) -> tuple[Affine | None, ...]:
    """Group sizes are given once, or for every position of the dimensions before the ragged one (batches first)."""
    rank = len(equation.inputs[2].shape)
    if rank == 1:
        return (None,)
    free = [d for d in range(len(lhs_at)) if d not in contracted and d not in batched]
    kind = next(dims for dims in (list(batched), list(contracted), free) if ragged in dims)
    before = kind[: kind.index(ragged)]
    prefix = before if ragged in batched else [*batched, *before]
    return (*(lhs_at[d] for d in prefix), None)


RULES: dict[str, Semantics] = {
    "dot_general": _dot_general,
    "scaled_dot": _scaled_dot,
    "scaled_matmul": _scaled_matmul,
    "scaled_matmul_wrapper": _scaled_matmul,
    "ragged_dot_general": _ragged_dot_general,
}
