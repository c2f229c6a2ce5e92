"""Calls: the expression of a whole jaxpr, by substitution of the expressions of its equations.

>>> import jax
>>> from shardplan.rules import describe, rule_of
>>> layer = describe(lambda x, w: jax.numpy.tanh(x @ w))
>>> print(rule_of(layer, jax.numpy.ones((4, 6)), jax.numpy.ones((6, 8))).expression)
out[i0, i1] = tanh(Sum(k0) x[i0, k0] * y[k0, i1])

The planner inlines the bodies of most calls and needs no rule for them. These rules are for calls that stay whole:
kernels, solvers, and functions described as a whole without an expression.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from shardplan.rules._jax import ClosedJaxpr, Literal
from shardplan.rules.equation import Equation, Semantics, Tensor, Unknown, expression, name_of
from shardplan.rules.expression import (
    Affine,
    Apply,
    Constant,
    Expression,
    Position,
    Read,
    Reduce,
    Result,
    Term,
    children,
    index,
    rebuilt,
    replaced,
)
from shardplan.rules.work import floating_point_operations

_MAX_TERMS = 20_000
"""The most terms of an expression. Longer ones are unreadable, and their analysis takes seconds."""


@dataclass(frozen=True, slots=True)
class _Value:
    """A value inside of the body: its element at the plain indices ``at``, in terms of the call's operands."""

    at: tuple[Affine, ...]
    shape: tuple[int, ...]
    body: Term


@dataclass
class Composer:
    """Substitution of expressions into each other. ``sizes``: of all indices so far, each with a unique name."""

    sizes: dict[str, int] = field(default_factory=dict)
    fresh: Any = field(default_factory=count)
    terms: int = 0
    flops: int = 0

    def new_index(self, size: int) -> Affine:
        name = f"_{next(self.fresh)}"
        self.sizes[name] = size
        return index(name)

    def operand(self, number: int, tensor: Tensor) -> _Value:
        at = tuple(self.new_index(size) for size in tensor.shape)
        return _Value(at, tensor.shape, Read(number, at))

    def run(self, body: Any, operands: Sequence[_Value]) -> list[_Value]:
        """The results of a jaxpr on these operands."""
        from shardplan.rules.table import express  # which names this module

        jaxpr, consts = (body.jaxpr, body.consts) if isinstance(body, ClosedJaxpr) else (body, ())
        values: dict[Any, _Value] = dict(zip(jaxpr.invars, operands, strict=True))
        for variable, _ in zip(jaxpr.constvars, consts, strict=True):
            values[variable] = self._constant(variable.aval.shape)
        for equation in jaxpr.eqns:
            inputs, outputs = (
                tuple(Tensor(tuple(v.aval.shape), v.aval.dtype) for v in side)
                for side in (equation.invars, equation.outvars)
            )
            made = express(Equation(equation.primitive, equation.params, inputs, outputs))
            self.flops += floating_point_operations(made)
            given = [self._literal(v) if isinstance(v, Literal) else values[v] for v in equation.invars]
            values.update(zip(equation.outvars, self._applied(made, given), strict=True))
        return [self._literal(v) if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]

    def _literal(self, literal: Any) -> _Value:
        if literal.aval.shape:
            return self._constant(literal.aval.shape)
        return _Value((), (), Constant(float(literal.val)) if _is_number(literal.val) else Apply("constant", ()))

    def _constant(self, shape: tuple[int, ...]) -> _Value:
        """An array known when tracing: a function of its positions."""
        at = tuple(self.new_index(size) for size in shape)
        return _Value(at, shape, Apply("constant", tuple(Position(p) for p in at)))

    def _applied(self, made: Expression, given: Sequence[_Value]) -> list[_Value]:
        """The results of one equation, whose operands are these values."""
        found = []
        for result, shape in zip(made.results, made.result_shapes, strict=True):
            names = {name: self.new_index(made.sizes[name]) for at in result.at for name in at.indices()}
            at = tuple(replaced(position, names) for position in result.at)
            if not all(len(p.terms) == 1 and isinstance(p.terms[0][1], str) and not p.offset for p in at):
                raise Unknown("a value inside of it has a dimension that two indices make up.")
            found.append(_Value(at, shape, self.copied(result.body, names, given, made.sizes)))
        return found

    def element(self, value: _Value, at: Sequence[Affine | None], padded: bool = False) -> Term:
        """The element of a value at given positions, or a slice of it where positions are ``None``."""
        whole, names = [], {}
        for place, position, size in zip(value.at, at, value.shape, strict=True):
            if position is None:
                position = self.new_index(size)
                whole.append(name_of(position))
            names[name_of(place)] = position
        body = self.copied(value.body, names, None, self.sizes, padded)
        return Reduce("all", tuple(whole), body) if whole else body

    def copied(
        self,
        term: Term,
        names: Mapping[str, Affine],
        given: Sequence[_Value] | None,
        sizes: Mapping[str, int],
        padded: bool = False,
    ) -> Term:
        """The term with its indices replaced, bound ones renamed, and its operands (if ``given``) put in."""
        self.terms += 1
        if self.terms > _MAX_TERMS:
            raise Unknown("its body is too long for one expression.")

        if isinstance(term, Read) and given is not None:
            places = tuple(None if p is None else replaced(p, names) for p in term.at)
            return self.element(given[term.operand], places, term.padded)
        if isinstance(term, Read) and padded:
            term = replace(term, padded=True)
        if isinstance(term, Reduce):
            bound = {name: self.new_index(sizes[name]) for name in term.indices}
            names = {**names, **bound}
            term = replace(term, indices=tuple(name_of(p) for p in bound.values()))
        return rebuilt(
            term,
            lambda position: replaced(position, names),
            lambda inner: self.copied(inner, names, given, sizes, padded),
        )


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def compose(equation: Equation, values: Sequence[_Value], composer: Composer) -> Expression:
    """The expression of a call with these results. Its indices are named for readers: ``i`` of results, ``k`` of
    reductions."""
    named: dict[tuple[int, int], Affine] = {}
    sizes: dict[str, int] = {}
    results = []
    for value in values:
        renaming: dict[str, Affine] = {}
        for place, size in zip(value.at, value.shape, strict=True):
            keys = _plain_reads(value.body, place)
            shared = next((named[k] for k in keys if k in named and named[k] not in renaming.values()), None)
            position = shared if shared is not None else index(f"i{len(sizes)}")
            sizes[name_of(position)] = size
            renaming[name_of(place)] = position
            named.update(dict.fromkeys(keys - set(named), position))
        results.append((value, renaming))
    made = []
    reductions: dict[str, int] = {}
    for value, renaming in results:
        body = composer.copied(value.body, renaming, None, composer.sizes)
        short = {n: index(f"k{len(reductions) + m}") for m, n in enumerate(dict.fromkeys(_bound(body)))}
        reductions |= {name_of(p): composer.sizes[n] for n, p in short.items()}
        at = tuple(renaming[name_of(place)] for place in value.at)
        made.append(Result(at, _relabelled(body, short)))
    return replace(expression(equation, sizes | reductions, made), flops=composer.flops)


def _plain_reads(body: Term, place: Affine) -> set[tuple[int, int]]:
    """Operands and their dimensions that an index alone runs over."""
    if isinstance(body, Read):
        return {(body.operand, dim) for dim, position in enumerate(body.at) if position == place}
    return set().union(*(_plain_reads(child, place) for child in children(body)))


def _bound(body: Term) -> list[str]:
    """Indices of reductions, outermost first."""
    own = list(body.indices) if isinstance(body, Reduce) else []
    return own + [name for child in children(body) for name in _bound(child)]


def _relabelled(body: Term, names: Mapping[str, Affine]) -> Term:
    """The term with its bound indices renamed, all at once."""
    if isinstance(body, Reduce):
        body = replace(body, indices=tuple(name_of(names[name]) for name in body.indices))
    return rebuilt(body, lambda position: replaced(position, names), lambda inner: _relabelled(inner, names))


# Where calls keep their bodies.


def _call(*parameters: str) -> Semantics:
    """A call with a body. ``parameters``: the first existing one of these has the body. JAX 0.11 and later use other
    names."""

    def rule(equation: Equation) -> Expression:
        composer = Composer()
        operands = [composer.operand(n, tensor) for n, tensor in enumerate(equation.inputs)]
        body = next(equation.params[name] for name in parameters if name in equation.params)
        return compose(equation, composer.run(body, operands), composer)

    return rule


def _cond(equation: Equation) -> Expression:
    """Every result is picked from the branches' by the first operand."""
    composer = Composer()
    operands = [composer.operand(n, tensor) for n, tensor in enumerate(equation.inputs)]
    branches = [composer.run(branch, operands[1:]) for branch in equation.params["branches"]]
    values = []
    for number, tensor in enumerate(equation.outputs):
        at = tuple(composer.new_index(size) for size in tensor.shape)
        picked = tuple(composer.element(branch[number], at) for branch in branches)
        values.append(_Value(at, tensor.shape, Apply("branch", (Read(0), *picked))))
    return compose(equation, values, composer)


def _custom_linear_solve(equation: Equation) -> Expression:
    """The solver's own body; its constants come after those of the product and of the transposed product."""
    params = equation.params
    lengths = params["const_lengths"]
    start = lengths.matvec + lengths.vecmat
    stop = start + lengths.solve
    total = stop + lengths.transpose_solve
    composer = Composer()
    operands = [composer.operand(n, tensor) for n, tensor in enumerate(equation.inputs)]
    values = composer.run(params["jaxprs"].solve, operands[start:stop] + operands[total:])
    return compose(equation, values[: len(equation.outputs)], composer)


RULES: dict[str, Semantics] = {
    "call": _call("call_jaxpr"),
    "closed_call": _call("call_jaxpr"),
    "composite": _call("jaxpr", "call_jaxpr"),
    "cond": _cond,
    "cudnn_fusion": _call("jaxpr"),
    "custom_jvp_call": _call("call_jaxpr"),
    "custom_linear_solve": _custom_linear_solve,
    "custom_vjp_call": _call("call_jaxpr"),
    "custom_vmap_call": _call("call"),
    "eval_jaxpr": _call("call_jaxpr"),
    "jit": _call("jaxpr"),
    "linear_call": _call("callee"),
    "remat2": _call("jaxpr"),
    "xla_metadata_call": _call("jaxpr"),
}
