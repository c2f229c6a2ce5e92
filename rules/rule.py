"""The rule of an equation: its expression, every split, and further facts for the planner.

>>> import jax
>>> from shardplan.rules import rule_of
>>> rule = rule_of(jax.lax.dot, jax.numpy.ones((4, 6)), jax.numpy.ones((6, 8)))
>>> print(rule.expression)
out[i, j] = Sum(k) lhs[i, k] * rhs[k, j]
>>> for split in rule.splits(2):
...     print(split.index, [slot.dim for slot in split.operands], [(slot.dim, slot.reducer) for slot in split.results])
i [0, None] [(0, None)]
j [None, 1] [(1, None)]
k [1, 0] [(None, 'sum')]
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from shardplan.rules.analysis import WHOLE, Facts, Refusal, Split, collect, padded_split, split
from shardplan.rules.equation import Equation, Tensor, Unknown
from shardplan.rules.errors import RuleError
from shardplan.rules.expression import Apply, Constant, Expression, Guard, Opaque, Read, Reduce, Result, Term
from shardplan.rules.freeze import frozen
from shardplan.rules.linear import linear_sets
from shardplan.rules.table import express
from shardplan.rules.uneven import uneven_split
from shardplan.rules.work import floating_point_operations

_MAX_CACHED = 100_000


@dataclass(frozen=True)
class Rule:
    """The rule of one operation, for one set of parameters and shapes.

    ``expression`` is ``None`` exactly if ``known`` is false: the primitive has no description, and ``missing`` tells
    so.
    """

    primitive: str
    expression: Expression | None
    missing: str | None = None
    _splits: dict[int, tuple[Split, ...]] = field(default_factory=dict, repr=False)
    along: dict[tuple[str, int, int], Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What `shardplan.rules.along` has found of its operands and results, by number and dimension."""

    @property
    def known(self) -> bool:
        """Whether the operation has a description."""
        return self.expression is not None

    @cached_property
    def facts(self) -> Facts:
        assert self.expression is not None
        return collect(self.expression)

    def splits(self, n: int) -> tuple[Split, ...]:
        """Every index that can be split over ``n`` equal blocks, in the order of the expression's indices."""
        found = self._splits.get(n)
        if found is None:
            found = tuple(s for name in self._indices for s in [self._try(name, n)] if isinstance(s, Split))
            self._splits[n] = found
        return found

    @cached_property
    def padded_splits(self) -> tuple[Split, ...]:
        """Every index that can be split over any number of equal blocks once its dimensions are padded."""
        return self._possible(lambda name: padded_split(self.expression, self.facts, name))  # type: ignore[arg-type]

    def uneven_splits(self, n: int) -> tuple[Split, ...]:
        """Every index that can be split over ``n`` blocks of which the last is shorter, or that read such blocks."""
        return self._possible(lambda name: uneven_split(self.expression, self.facts, name, n))  # type: ignore[arg-type]

    def _possible(self, split_of: Callable[[str], Split]) -> tuple[Split, ...]:
        found = []
        for name in self._indices:
            try:
                found.append(split_of(name))
            except Refusal:
                continue
        return tuple(s for s in found if any(slot is not WHOLE for slot in s.operands + s.results))

    def size(self, name: str) -> int:
        """The number of values of an index."""
        assert self.expression is not None
        return self.expression.sizes[name]

    def refusals(self, n: int) -> dict[str, str]:
        """For every index that cannot be split over ``n`` equal blocks, the reason."""
        tried = {name: self._try(name, n) for name in self._indices}
        return {name: outcome for name, outcome in tried.items() if isinstance(outcome, str)}

    @property
    def _indices(self) -> tuple[str, ...]:
        return tuple(self.expression.sizes) if self.expression else ()

    def _try(self, name: str, n: int) -> Split | str:
        assert self.expression is not None
        try:
            found = split(self.expression, self.facts, name, n)
        except Refusal as refusal:
            return str(refusal)
        if all(slot is WHOLE for slot in found.operands + found.results):
            return "nothing depends on it"
        return found

    @cached_property
    def reason(self) -> str | None:
        """Why nothing splits, or ``None`` if an index splits for some number of blocks."""
        if self.expression is None:
            return self.missing
        if not self.expression.sizes:
            return "it works on scalars: there is no index to split."
        reasons = []
        for name, size in self.expression.sizes.items():
            blocks = next((p for p in range(2, size + 1) if size % p == 0), 2)
            outcome = self._try(name, blocks)
            if isinstance(outcome, Split):
                return None
            reasons.append(f"`{name}`: {outcome}")
        return "; ".join(reasons) + "."

    @cached_property
    def elementwise(self) -> bool:
        """Every element of every result reads only the element at the same place of each operand, or a scalar."""
        return (
            self.expression is not None
            and bool(self.expression.operands)
            and all(_same_place(result.body, result, self.expression) for result in self.expression.results)
        )

    @cached_property
    def single(self) -> bool:
        """Every element of every result is computed of single elements: nothing is reduced, looked up or sorted."""
        return self.expression is not None and all(_is_single(result.body) for result in self.expression.results)

    @cached_property
    def linear(self) -> tuple[frozenset[int], ...]:
        """Sets of operands through which a deferred sum may pass jointly."""
        return linear_sets(self.expression) if self.expression else ()

    @cached_property
    def flops(self) -> int:
        """Floating point operations of the whole operation: 2 per multiply-add of a contraction, else 1 per element."""
        return floating_point_operations(self.expression) if self.expression else 0


def _same_place(term: Term, result: Result, expression: Expression) -> bool:
    match term:
        case Read(operand, at):
            return not at or (at == result.at and expression.operand_shapes[operand] in expression.result_shapes)
        case Apply(_, arguments):
            return all(_same_place(argument, result, expression) for argument in arguments)
        case Constant():
            return True
    return False


def _is_single(term: Term) -> bool:
    if isinstance(term, Apply):
        return all(map(_is_single, term.arguments))
    return _is_single(term.body) if isinstance(term, Guard) else not isinstance(term, Reduce | Opaque)


_cache: dict[Any, Rule] = {}


def derive(primitive: Any, params: Mapping[str, Any], in_avals: Sequence[Any], out_avals: Sequence[Any]) -> Rule:
    """The rule of one equation.

    ``primitive``: a ``jax.extend.core.Primitive``; ``in_avals`` and ``out_avals``: anything with ``shape`` and
    ``dtype``, one per operand and result. Equal equations are analysed once. A primitive without a description has a
    rule with ``known == False``. A user's description that does not fit the equation raises :class:`RuleError`.
    """
    key = (
        primitive,
        tuple(params.items()),
        tuple([(a.shape, a.dtype) if hasattr(a, "shape") else a for a in in_avals]),
    )
    try:
        found = _cache.get(key)
    except TypeError:
        key = (primitive, frozen(params), key[2])
        found = _cache.get(key)
    if found is None:
        if len(_cache) >= _MAX_CACHED:
            _cache.clear()
        found = _cache[key] = _derive(primitive, params, in_avals, out_avals)
    return found


def _derive(primitive: Any, params: Mapping[str, Any], in_avals: Sequence[Any], out_avals: Sequence[Any]) -> Rule:
    name = str(primitive)
    if not all(hasattr(a, "shape") and hasattr(a, "dtype") for a in (*in_avals, *out_avals)):
        return Rule(name, None, f"`{name}` takes or gives something that is not a tensor.")
    inputs, outputs = (tuple(Tensor(tuple(a.shape), a.dtype) for a in avals) for avals in (in_avals, out_avals))
    try:
        return Rule(name, express(Equation(primitive, params, inputs, outputs)))
    except RuleError:  # the user's own description does not fit
        raise
    except Unknown as unknown:
        return Rule(name, None, str(unknown))
    except Exception as error:  # a primitive of somebody else's with the name of one of JAX's, for instance
        return Rule(name, None, f"the parameters of `{name}` are not understood: {error!r}.")


def forget() -> None:
    """Drops all cached rules, after a change of descriptions."""
    _cache.clear()
