"""Reductions over whole dimensions, and the positions of extremes."""

from shardplan.rules.equation import Equation, Semantics, expression, letters, sizes_of
from shardplan.rules.expression import Expression, Opaque, Read, Reduce, Result


def _reduce_by(reducer: str) -> Semantics:
    def rule(equation: Equation) -> Expression:
        shape, axes = equation.inputs[0].shape, equation.params["axes"]
        at = letters("i", len(shape))
        kept = tuple(p for dim, p in enumerate(at) if dim not in axes)
        sizes = sizes_of((kept, (size for dim, size in enumerate(shape) if dim not in axes)))
        sums = sizes_of(([at[dim] for dim in axes], (shape[dim] for dim in axes)))
        body = Reduce(reducer, tuple(sums), Read(0, at)) if sums else Read(0, at)
        return expression(equation, sizes | sums, [Result(kept, body)])

    return rule


def _position_of(name: str) -> Semantics:
    """The position of an extreme. Blocks cannot be combined without the extremes themselves."""

    def rule(equation: Equation) -> Expression:
        shape, axes = equation.inputs[0].shape, equation.params["axes"]
        at = letters("i", len(shape))
        kept = tuple(p for dim, p in enumerate(at) if dim not in axes)
        sizes = sizes_of((kept, (size for dim, size in enumerate(shape) if dim not in axes)))
        read = Read(0, tuple(None if dim in axes else p for dim, p in enumerate(at)))
        return expression(equation, sizes, [Result(kept, Opaque(name, (read,)))])

    return rule


def _reduce(equation: Equation) -> Expression:
    """A reduction by a user's function: several operands at once, each with its initial value."""
    dimensions, count = equation.params["dimensions"], len(equation.outputs)
    shape = equation.inputs[0].shape
    at = letters("i", len(shape))
    kept = tuple(p for dim, p in enumerate(at) if dim not in dimensions)
    sizes = sizes_of((kept, (size for dim, size in enumerate(shape) if dim not in dimensions)))
    whole = tuple(None if dim in dimensions else p for dim, p in enumerate(at))
    reads = tuple(Read(n, whole) for n in range(count)) + tuple(Read(n) for n in range(count, 2 * count))
    return expression(equation, sizes, [Result(kept, Opaque(f"reduce_{n}", reads)) for n in range(count)])


RULES: dict[str, Semantics] = {
    **{f"reduce_{name}": _reduce_by(name) for name in ("sum", "prod", "max", "min", "and", "or", "xor")},
    "argmax": _position_of("argmax"),
    "argmin": _position_of("argmin"),
    "reduce": _reduce,
}
