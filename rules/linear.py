"""Linearity: the operands through which a deferred sum may pass, derived from an expression.

A deferred sum over devices may pass an operation ``f`` if ``f(sum of parts) = sum of f(part)``. ``f`` must be linear,
jointly, in the partial operands. ``a + b`` is linear in both together but in neither alone. ``a * b`` is linear in each
alone. A fill value (zeros or NaN for lookups outside) is the same however often it is added.
"""

from itertools import product

from shardplan.rules.expression import Apply, Compare, Expression, Guard, Opaque, Read, Reduce, Term

_JOINTLY = frozenset({"+", "-", "where", "overwrite", "pad", "concat", "stack"})
"""Functions that select or add up their arguments. The first argument of those in ``_SELECTED`` selects."""

_SELECTED = frozenset({"where", "stack"})

_Sets = list[frozenset[int]]
_MAX_COMBINATIONS = 64


def linear_sets(expression: Expression) -> tuple[frozenset[int], ...]:
    """Sets of operands in which all results are jointly linear."""
    per_result = [_candidates(result.body) for result in expression.results]
    found = {
        operands
        for operands in _unions(per_result)
        if all(_status(result.body, operands) == "linear" for result in expression.results)
    }
    return tuple(sorted(found, key=lambda operands: (len(operands), sorted(operands))))


def _unions(parts: list[_Sets]) -> _Sets:
    """One set from each part, united. Empty if a part has none, or if there are too many combinations."""
    count = 1
    for part in parts:
        count *= len(part)
    if not 0 < count <= _MAX_COMBINATIONS:
        return []
    return [frozenset().union(*choice) for choice in product(*parts)]


def _candidates(term: Term) -> _Sets:
    match term:
        case Read(operand):
            return [frozenset({operand})]
        case Reduce(_, _, body) | Guard(_, body):
            return _candidates(body)
        case Apply("*", arguments):
            return list({s for argument in arguments for s in _candidates(argument)})
        case Apply(function, arguments) if function in _JOINTLY:
            return _unions([_candidates(a) for a in arguments[function in _SELECTED :] if not _is_missing(a)])
        case Apply(_, arguments, linear) | Opaque(_, arguments, _, linear):
            return [
                united
                for positions in linear
                for united in _unions([_candidates(arguments[position]) for position in sorted(positions)])
            ]
    return []


def _is_missing(term: Term) -> bool:
    return isinstance(term, Apply) and term.function == "missing"


def _status(term: Term, operands: frozenset[int]) -> str:
    """``linear`` in the operands, ``free`` of them, or ``no``."""
    match term:
        case Read(operand):
            return "linear" if operand in operands else "free"
        case Reduce(reducer, _, body):
            inner = _status(body, operands)
            return inner if inner == "free" or reducer in ("sum", "last") else "no"
        case Guard(condition, body):
            return _status(body, operands) if _status(condition, operands) == "free" else "no"
        case Compare(_, left, right):
            return "free" if _status(left, operands) == _status(right, operands) == "free" else "no"
        case Apply(function, arguments, linear) | Opaque(function, arguments, _, linear):
            found = [_status(argument, operands) for argument in arguments]
            if all(status == "free" for status in found):
                return "free"
            if "no" in found:
                return "no"
            positions = frozenset(
                n for n, status in enumerate(found) if status == "linear" or _is_missing(arguments[n])
            )
            if function == "*":
                return "linear" if len(positions) == 1 else "no"
            if function in _JOINTLY:
                linear = (frozenset(range(function in _SELECTED, len(arguments))),)
            return "linear" if positions in linear else "no"
    return "free"
