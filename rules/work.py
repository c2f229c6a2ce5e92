"""Floating point operations of an operation, counted in its expression.

A contraction counts 2 per multiply-add, everything else 1 per element. An index that is only looked up (compared with a
value or with another index, as in a gather, a scatter or a cumulative sum) costs nothing of its own: no implementation
runs over all its values.
"""

from math import prod

from shardplan.rules.expression import Apply, Compare, Expression, Guard, Opaque, Position, Reduce, Term


def floating_point_operations(expression: Expression) -> int:
    """Operations of the whole, and at least one per element of the results."""
    return expression.flops or sum(
        max(_work(result.body, prod(shape), expression), prod(shape))
        for result, shape in zip(expression.results, expression.result_shapes, strict=True)
    )


def _work(term: Term, elements: int, expression: Expression) -> int:
    match term:
        case Reduce(_, indices, body):
            looked_up = max(1, prod(expression.sizes[name] for name in _looked_up(body)))
            added = elements * prod(expression.sizes[name] for name in indices) // looked_up
            inner = max(1, added or elements)  # a sum over nothing writes its elements all the same
            return inner + _work(body, inner, expression)
        case Guard(_, body):
            return _work(body, elements, expression)
        case Apply("*", (Compare(), body)):
            return _work(body, elements, expression)
        case Apply(
            "chosen" | "fill" | "missing", _
        ):  # the comparisons are counted with the reduction that they belong to
            return elements
        case Apply(_, arguments):
            return elements + sum(_work(argument, elements, expression) for argument in arguments)
        case Opaque(_, arguments, _, _, flops):
            return flops or elements + sum(_work(argument, elements, expression) for argument in arguments)
    return 0


def _looked_up(term: Term) -> list[str]:
    """For every comparison in a product or a guard, the index that it looks up."""
    match term:
        case Guard(condition, body):
            return _compared(condition) + _looked_up(body)
        case Apply("*", arguments):
            return [name for a in arguments for name in (_compared(a) if isinstance(a, Compare) else _looked_up(a))]
    return []


def _compared(term: Term) -> list[str]:
    match term:
        case Compare(_, left, right):
            for side in (right, left):
                if isinstance(side, Position) and side.value.terms:
                    return list(side.value.indices())[:1]
    return []
