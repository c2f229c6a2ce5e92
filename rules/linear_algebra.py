"""Matrix decompositions and solvers: the matrices are hidden, the dimensions before them are free.

Solvers treat the columns of the right-hand side independently, so that columns split too.
"""

from math import prod

from shardplan.rules.equation import Equation, Semantics, expression, letters, sizes_of
from shardplan.rules.expression import Affine, Apply, Constant, Expression, Opaque, Read, Reduce, Result, index


def batched(core_rank: int, *names: str) -> Semantics:
    """Leading dimensions are free, the others are hidden. ``core_rank``: rank of one element of the first operand."""

    def rule(equation: Equation) -> Expression:
        first = equation.inputs[0].shape
        rank = len(first) - core_rank
        b = letters("b", rank)
        reads = tuple(Read(n, (*b, *([None] * (len(t.shape) - rank)))) for n, t in enumerate(equation.inputs))
        name, count = equation.primitive.name, len(equation.outputs)
        sizes, results = sizes_of((b, first[:rank])), []
        flops = prod(first) * max(first[rank:], default=1)
        for n, tensor in enumerate(equation.outputs):
            own = letters("i" if count == 1 else f"i{n}_", len(tensor.shape) - rank)
            sizes |= sizes_of((own, tensor.shape[rank:]))
            function = name if count == 1 else f"{name}_{n}"
            results.append(Result((*b, *own), Opaque(function, reads, own, flops=flops if n == 0 else 1)))
        return expression(equation, sizes, results, names)

    return rule


def _triangular_solve(equation: Equation) -> Expression:
    """``X`` of ``A X = B`` column by column, or of ``X A = B`` row by row."""
    shape = equation.outputs[0].shape
    *b, i, j = letters("i", len(shape))
    left = equation.params["left_side"]
    whole = (*b, None, j) if left else (*b, i, None)
    flops = prod(shape) * (shape[-2] if left else shape[-1])
    reads = (Read(0, (*b, None, None)), Read(1, whole))
    body = Opaque("solve", reads, (i,) if left else (j,), linear=(frozenset({1}),), flops=flops)
    return expression(equation, sizes_of(((*b, i, j), shape)), [Result((*b, i, j), body)], ("a", "b"))


def _tridiagonal_solve(equation: Equation) -> Expression:
    shape = equation.outputs[0].shape
    *b, i, j = letters("i", len(shape))
    diagonals = tuple(Read(n, (*b, None)) for n in range(3))
    body = Opaque("solve", (*diagonals, Read(3, (*b, None, j))), (i,), linear=(frozenset({3}),), flops=8 * prod(shape))
    return expression(
        equation, sizes_of(((*b, i, j), shape)), [Result((*b, i, j), body)], ("lower", "diagonal", "upper", "b")
    )


def _ormqr(equation: Equation) -> Expression:
    """Householder reflectors times a matrix: its columns are free, or its rows if they are on the right."""
    shape = equation.outputs[0].shape
    *b, i, j = letters("i", len(shape))
    left = equation.params["left"]
    whole = (*b, None, j) if left else (*b, i, None)
    reads = (Read(0, (*b, None, None)), Read(1, (*b, None)), Read(2, whole))
    flops = 4 * prod(shape) * equation.inputs[1].shape[-1]
    body = Opaque("reflect", reads, (i,) if left else (j,), linear=(frozenset({2}),), flops=flops)
    return expression(equation, sizes_of(((*b, i, j), shape)), [Result((*b, i, j), body)], ("a", "tau", "c"))


def _symmetric_product(equation: Equation) -> Expression:
    """``alpha * A A^T + beta * C``."""
    shape, inner = equation.outputs[0].shape, equation.inputs[0].shape[-1]
    *b, i, j = letters("i", len(shape))
    k = index("k")
    product = Reduce("sum", ("k",), Apply("*", (Read(0, (*b, i, k)), Read(0, (*b, j, k)))))
    alpha, beta = (Constant(float(equation.params[name])) for name in ("alpha", "beta"))
    body = Apply("+", (Apply("*", (alpha, product)), Apply("*", (beta, Read(1, (*b, i, j))))))
    sizes = sizes_of(((*b, i, j), shape)) | {"k": inner}
    return expression(equation, sizes, [Result((*b, i, j), body)], ("a", "c"))


def _fft(equation: Equation) -> Expression:
    """The transformed dimensions are the last ones."""
    source, shape = equation.inputs[0].shape, equation.outputs[0].shape
    rank = len(shape) - len(equation.params["fft_lengths"])
    at = letters("i", len(shape))
    whole: tuple[Affine | None, ...] = (*at[:rank], *([None] * (len(source) - rank)))
    length = prod(equation.params["fft_lengths"])
    flops = 5 * prod(shape[:rank]) * length * max(1, (length - 1).bit_length())
    body = Opaque("fft", (Read(0, whole),), at[rank:], linear=(frozenset({0}),), flops=flops)
    return expression(equation, sizes_of((at, shape)), [Result(at, body)])


RULES: dict[str, Semantics] = {
    **{
        name: batched(2, "a") for name in ("cholesky", "eig", "eigh", "geqrf", "hessenberg", "lu", "qr", "schur", "svd")
    },
    "tridiagonal": batched(2, "a"),
    "cholesky_update": batched(2, "r", "w"),
    "geqp3": batched(2, "a", "pivots"),
    "householder_product": batched(2, "a", "tau"),
    "lu_pivots_to_permutation": batched(1, "pivots"),
    "triangular_solve": _triangular_solve,
    "tridiagonal_solve": _tridiagonal_solve,
    "ormqr": _ormqr,
    "symmetric_product": _symmetric_product,
    "fft": _fft,
}
