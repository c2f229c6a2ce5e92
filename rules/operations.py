"""The operations of a function with their operands, and the rule of each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax import numpy as jnp

from shardplan.rules._jax import Literal
from shardplan.rules.errors import RuleError
from shardplan.rules.rule import Rule, derive


@dataclass(frozen=True)
class Operation:
    """One equation with concrete operands. ``run`` applies its primitive to operands of the same shapes."""

    name: str
    rule: Rule
    operands: tuple[Any, ...]
    run: Callable[..., list[Any]]


def operations(function: Callable[..., Any], *operands: Any) -> Iterator[Operation]:
    """Every operation that ``function`` runs on these operands, in order, jitted functions looked into."""
    closed = jax.make_jaxpr(function)(*operands)
    flat = [jnp.asarray(leaf) for leaf in jax.tree.leaves(operands)]
    yield from _walk(closed.jaxpr, closed.consts, flat, [])


def _walk(jaxpr: Any, consts: list[Any], operands: list[Any], results: list[Any]) -> Iterator[Operation]:
    """Runs the jaxpr and leaves its results in ``results``."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True))

    def read(atom: Any) -> Any:
        return jnp.asarray(atom.val, getattr(atom.aval, "dtype", None)) if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        given = [read(atom) for atom in equation.invars]
        found: list[Any] = []
        inner = equation.params.get("jaxpr") if equation.primitive.name == "jit" else None
        if inner is not None:
            yield from _walk(inner.jaxpr, inner.consts, given, found)
        else:
            operation = _operation(equation, given)
            yield operation
            found = operation.run(*given)
        values.update(zip(equation.outvars, found, strict=True))
    results.extend(read(atom) for atom in jaxpr.outvars)


def _operation(equation: Any, operands: list[Any]) -> Operation:
    primitive = equation.primitive
    params = primitive.get_bind_params(equation.params)

    def run(*given: Any) -> list[Any]:
        found = primitive.bind(*given, **params)
        return list(found) if primitive.multiple_results else [found]

    avals = [[v.aval for v in side] for side in (equation.invars, equation.outvars)]
    return Operation(str(primitive), derive(primitive, equation.params, *avals), tuple(operands), run)


def rule_of(function: Callable[..., Any], *operands: Any) -> Rule:
    """The rule of the one operation that ``function`` traces to; raises :class:`RuleError` if there are several.

    ``operands``: arrays or ``jax.ShapeDtypeStruct``.
    """
    equations = flat_equations(jax.make_jaxpr(function)(*operands).jaxpr)
    if len(equations) != 1:
        names = ", ".join(f"`{equation.primitive}`" for equation in equations)
        raise RuleError(f"expected a function of one operation, got {len(equations)}: {names}")
    (equation,) = equations
    avals = [[v.aval for v in side] for side in (equation.invars, equation.outvars)]
    return derive(equation.primitive, equation.params, *avals)


def all_equations(jaxpr: Any) -> list[Any]:
    """The equations of a jaxpr, those of jitted functions in it after the call itself."""
    found = []
    for equation in jaxpr.eqns:
        found.append(equation)
        if equation.primitive.name == "jit":
            found.extend(all_equations(equation.params["jaxpr"].jaxpr))
    return found


def flat_equations(jaxpr: Any) -> list[Any]:
    """The equations of a jaxpr, with the bodies of jitted functions in place of their calls."""
    found = []
    for equation in jaxpr.eqns:
        inner = equation.params.get("jaxpr") if equation.primitive.name == "jit" else None
        found.extend(flat_equations(inner.jaxpr) if inner is not None else [equation])
    return found
