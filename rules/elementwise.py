"""Elementwise operations: one rule for all of them, found by batching and differentiation in JAX.

An operation is elementwise if applying it to arrays is the same as mapping it over their elements. The test batches the
operation on scalars: the result must be the operation itself. ``sin`` batched twice is ``sin`` of a matrix, with equal
parameters. A ``cumsum`` does not exist on scalars. An operation is linear in some operands if its derivative there is
the operation itself: the derivative of ``a / b`` along ``da`` is ``da / b``.

>>> import jax
>>> from shardplan.rules import rule_of
>>> rule = rule_of(jax.lax.div, jax.numpy.ones((4, 6)), jax.numpy.ones((4, 6)))
>>> print(rule.expression, rule.elementwise, rule.linear)
out[i0, i1] = div(x[i0, i1], y[i0, i1]) True (frozenset({0}),)
"""

from dataclasses import replace
from itertools import combinations
from typing import Any

import jax
from jax import numpy as jnp

from shardplan.rules.equation import Equation, Tensor, expression, letters, sizes_of
from shardplan.rules.expression import ZERO, Apply, Expression, Read, Result, Shape
from shardplan.rules.freeze import frozen

_MAX_OPERANDS = 6


def maps_elements(equation: Equation) -> bool:
    """Whether the operation maps a function over the elements of its operands.

    Operands may be scalars, or have dimensions of size 1 where the result is larger, as in arithmetic on arrays.
    """
    if not equation.inputs or not equation.outputs:
        return False
    shape = equation.outputs[0].shape
    return (
        all(tensor.shape == shape for tensor in equation.outputs)
        and all(_fits(tensor.shape, shape) for tensor in equation.inputs)
        and _facts(equation)[0]
    )


def _fits(shape: Shape, result: Shape) -> bool:
    return not shape or (
        len(shape) == len(result) and all(size in (1, full) for size, full in zip(shape, result, strict=True))
    )


def express(equation: Equation) -> Expression:
    """The expression of an operation that maps over elements."""
    shape = equation.outputs[0].shape
    at = letters("i", len(shape))
    arguments = tuple(
        Read(n, tuple(p if size == full else ZERO for p, size, full in zip(at, t.shape, shape, strict=False)))
        for n, t in enumerate(equation.inputs)
    )
    name, linear = equation.primitive.name, _facts(equation)[1]
    count = len(equation.outputs)
    names = (name,) if count == 1 else tuple(f"{name}_{n}" for n in range(count))
    results = [Result(at, Apply(each, arguments, linear)) for each in names]
    return expression(equation, sizes_of((at, shape)), results)


_known: dict[Any, tuple[bool, tuple[frozenset[int], ...]]] = {}


def _facts(equation: Equation) -> tuple[bool, tuple[frozenset[int], ...]]:
    """Whether the operation is elementwise, and in which operands it is linear; once per primitive, parameters and
    dtypes."""
    # Shardings have the rank of the operands at hand, and no say in what is computed.
    params = {k: None if isinstance(v, jax.sharding.Sharding) else v for k, v in equation.params.items()}
    equation = replace(equation, params=params)
    key = (equation.primitive, frozen(params), tuple(t.dtype for t in equation.inputs))
    found = _known.get(key)
    if found is None:
        elementwise = _maps_itself(equation)
        found = _known[key] = (elementwise, _linear(equation) if elementwise else ())
    return found


def _maps_itself(equation: Equation) -> bool:
    """Whether batching the operation on scalars, twice, gives the operation itself."""

    def scalars(*operands: Any) -> Any:
        return equation.primitive.bind(*operands, **equation.params)

    try:
        jaxpr = jax.make_jaxpr(jax.vmap(jax.vmap(scalars)))(*_specs(equation.inputs, (2, 3))).jaxpr
    except Exception:  # a primitive may refuse scalars, or batching, in any way it likes
        return False
    if not jaxpr.eqns:  # some operations vanish when nothing is left to do, such as a conversion to the same dtype
        return jaxpr.outvars == jaxpr.invars
    return len(jaxpr.eqns) == 1 and _is_same(jaxpr.eqns[0], equation, jaxpr.invars, jaxpr.outvars)


def _linear(equation: Equation) -> tuple[frozenset[int], ...]:
    """Sets of operands along which the derivative is the operation itself."""
    differentiable = [n for n, t in enumerate(equation.inputs) if jnp.issubdtype(t.dtype, jnp.inexact)]
    if len(differentiable) > _MAX_OPERANDS:
        return ()
    subsets = (c for count in range(1, len(differentiable) + 1) for c in combinations(differentiable, count))
    return tuple(frozenset(subset) for subset in subsets if _is_own_derivative(equation, subset))


def _is_own_derivative(equation: Equation, along: tuple[int, ...]) -> bool:
    def derivative(operands: Any, tangents: Any) -> Any:
        def vary(*varying: Any) -> Any:
            mixed = list(operands)
            for n, value in zip(along, varying, strict=True):
                mixed[n] = value
            return equation.primitive.bind(*mixed, **equation.params)

        return jax.jvp(vary, [operands[n] for n in along], tangents)[1]

    specs = _specs(equation.inputs, ())
    try:
        jaxpr = jax.make_jaxpr(derivative)(specs, [specs[n] for n in along]).jaxpr
    except Exception:  # no derivative, or only an incomplete one
        return False
    if not jaxpr.eqns:
        return len(specs) == 1 and jaxpr.outvars == jaxpr.invars[1:]
    expected = list(jaxpr.invars[: len(specs)])
    for n, tangent in zip(along, jaxpr.invars[len(specs) :], strict=True):
        expected[n] = tangent
    return _is_same(jaxpr.eqns[-1], equation, expected, jaxpr.outvars)


def _is_same(found: Any, equation: Equation, operands: list[Any], results: list[Any]) -> bool:
    if found.primitive is not equation.primitive or len(found.invars) != len(operands):
        return False
    same_places = all(a is b for a, b in zip((*found.invars, *found.outvars), (*operands, *results), strict=True))
    return same_places and frozen(found.params) == frozen(equation.params)


def _specs(tensors: tuple[Tensor, ...], shape: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, tensor.dtype) for tensor in tensors]
