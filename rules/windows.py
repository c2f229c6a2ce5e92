"""Pooling: reductions over sliding windows, and the scatter of gradients back into them."""

from shardplan.rules.convolution import window_position
from shardplan.rules.equation import Equation, Semantics, Tensor, expression, letters, name_of
from shardplan.rules.expression import ZERO, Affine, Apply, Expression, Read, Reduce, Result, Term

At = tuple[Affine, ...]


def _windows(
    equation: Equation, operand: Tensor, result: Tensor
) -> tuple[At, At, bool, dict[str, int], dict[str, int]]:
    """Result positions, positions read, whether those may be outside, sizes of the result's and of the windows'
    indices."""
    params, rank = equation.params, len(result.shape)
    ones = (1,) * rank
    base = params.get("base_dilation") or ones
    dilation = params.get("window_dilation") or ones
    xs, dxs = letters("x", rank), letters("dx", rank)
    sizes, windows, read = {}, {}, []
    for dim, (x, dx) in enumerate(zip(xs, dxs, strict=True)):
        sizes[name_of(x)] = result.shape[dim]
        if params["window_dimensions"][dim] > 1:
            windows[name_of(dx)] = params["window_dimensions"][dim]
        else:
            dx = ZERO
        stride, low = params["window_strides"][dim], params["padding"][dim][0]
        read.append(window_position(x, dx, stride, dilation[dim], low, base[dim]))
    padded = any(low > 0 or high > 0 for low, high in params["padding"]) or any(step > 1 for step in base)
    return xs, tuple(read), padded, sizes, windows


def _reduce_window_by(reducer: str) -> Semantics:
    def rule(equation: Equation) -> Expression:
        xs, read, padded, sizes, windows = _windows(equation, equation.inputs[0], equation.outputs[0])
        body = Reduce(reducer, tuple(windows), Read(0, read, padded)) if windows else Read(0, read, padded)
        return expression(equation, sizes | windows, [Result(xs, body)])

    return rule


def _reduce_window(equation: Equation) -> Expression:
    """A reduction by a user's function: several operands at once, each with its initial value."""
    count = len(equation.outputs)
    xs, read, padded, sizes, windows = _windows(equation, equation.inputs[0], equation.outputs[0])
    reads = tuple(Read(n, read, padded) for n in range(count)) + tuple(Read(n) for n in range(count, 2 * count))
    results = [Result(xs, Reduce("function", tuple(windows), Apply(f"reduce_{n}", reads))) for n in range(count)]
    return expression(equation, sizes | windows, results)


def _select_and_scatter_add(equation: Equation) -> Expression:
    return _collect(equation, source=0, operand=1)


def _select_and_scatter(equation: Equation) -> Expression:
    """A scatter with a user's functions that select and combine, and an initial value."""
    plain = _collect(equation, source=1, operand=0)
    (result,) = plain.results
    body = Apply("scatter", (Read(2), _unsummed(result.body)))
    return expression(equation, plain.sizes, [Result(result.at, body)], ("x", "source", "initial"))


def _unsummed(body: Term) -> Term:
    return Reduce("collected", body.indices, body.body) if isinstance(body, Reduce) else body


def _collect(equation: Equation, source: int, operand: int) -> Expression:
    """The gradient of max pooling: an element collects the sources of the windows in which it is the selected one.

    Window ``(v + pad - w) / stride`` has element ``v`` at place ``w``. ``source`` and ``operand`` are the numbers of
    the operands.
    """
    params, shape = equation.params, equation.inputs[operand].shape
    rank = len(shape)
    vs, ws, us = letters("i", rank), letters("w", rank), letters("u", rank)
    sizes, places, window_at, element_at = {}, {}, [], []
    for dim in range(rank):
        sizes[name_of(vs[dim])] = shape[dim]
        window, stride, low = (
            params["window_dimensions"][dim],
            params["window_strides"][dim],
            params["padding"][dim][0],
        )
        w, u = (ws[dim], us[dim]) if window > 1 else (ZERO, ZERO)
        for place in (w, u):
            if place is not ZERO:
                places[name_of(place)] = window
        window_at.append((vs[dim] + low - w).exactly(stride))
        element_at.append(window_at[-1] * stride + u - low)
    inner = Read(operand, tuple(element_at), padded=True)
    window_indices = tuple(name for name in places if name.startswith("u"))
    chosen = Apply("chosen", (Read(operand, vs), Reduce("max", window_indices, inner) if window_indices else inner))
    body = Apply("*", (Read(source, tuple(window_at), padded=True), chosen))
    sums = tuple(name for name in places if name.startswith("w"))
    result = Result(vs, Reduce("sum", sums, body) if sums else body)
    return expression(equation, sizes | places, [result], ("source", "x") if source == 0 else ())


def _select_and_gather_add(equation: Equation) -> Expression:
    """The tangent at the place of each window's extreme."""
    xs, read, padded, sizes, windows = _windows(equation, equation.inputs[0], equation.outputs[0])
    body = Reduce("chosen", tuple(windows), Apply("at", (Read(0, read, padded), Read(1, read, padded))))
    return expression(equation, sizes | windows, [Result(xs, body)], ("tangents", "x"))


RULES: dict[str, Semantics] = {
    "reduce_window_sum": _reduce_window_by("sum"),
    "reduce_window_max": _reduce_window_by("max"),
    "reduce_window_min": _reduce_window_by("min"),
    "reduce_window": _reduce_window,
    "select_and_scatter": _select_and_scatter,
    "select_and_scatter_add": _select_and_scatter_add,
    "select_and_gather_add": _select_and_gather_add,
}
