"""Descriptions of operations that JAX does not know: custom primitives, foreign functions, whole functions.

>>> import jax
>>> from shardplan.rules import describe, rule_of
>>> centred = describe(lambda x: x - x.mean(-1, keepdims=True), "b : -> b :")
>>> rule = rule_of(centred, jax.numpy.ones((8, 16)))
>>> print(rule.expression)
out[b, h0] = Opaque.f(x[b, :])[h0]
>>> [split.index for split in rule.splits(2)]
['b']
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import jax
import numpy as np

from shardplan.rules._jax import Primitive, whole_call_p
from shardplan.rules.errors import RuleError
from shardplan.rules.notation import check_syntax, made_up_shapes
from shardplan.rules.registry import Description, described, forget, register
from shardplan.rules.rule import forget as forget_rules
from shardplan.rules.table import TABLE
from shardplan.rules.verify import verify_or_raise

Target = TypeVar("Target", bound=Callable[..., Any] | Primitive | str)


_MARK = "_described_as_a_whole"


def describe(
    target: Target,
    expression: str | Callable[..., Any] | None = None,
    *,
    check: bool = False,
    operands: Sequence[Any] | None = None,
    replace: bool = False,
    sizes: Mapping[str, int] | None = None,
) -> Target:
    """Describes what an operation computes, so that it can be split.

    ``target``: a ``jax.extend.core.Primitive``; the name of a foreign function's target (for ``ffi_call``); or any
    function of arrays, ``custom_vjp`` functions and functions with Pallas kernels included. Primitives and names are
    registered and returned. For a function, a new one is returned that stays a single operation when it is traced.
    Differentiating it differentiates the function inside: describe the forward and backward functions of a
    ``custom_vjp`` on their own to keep them whole in training.

    ``expression``: text in either notation (see :mod:`shardplan.rules.notation`), or a lambda (see
    :mod:`shardplan.rules.lambdas`), which gets the primitive's parameters that it names. Without one, a function's
    expression is composed from its operations. ``sizes``: sizes of indices that shapes do not determine.

    ``check``: run the operation, whole and in every split that follows, on ``operands`` (or on operands made up to fit
    the text), and refuse a description that this refutes. ``replace``: allow a second description of the same thing.

    Raises :class:`RuleError` for unreadable text, a second description, or a refuted one.
    """
    if isinstance(expression, str):
        check_syntax(expression)
    if expression is None and isinstance(target, Primitive | str):
        raise RuleError(f"`{target}` needs an expression: there is no body to derive one from")
    description = Description(expression, tuple((sizes or {}).items())) if expression is not None else None
    if description is not None and isinstance(target, Primitive | str):
        if isinstance(target, Primitive) and not replace and target.name in TABLE:
            raise RuleError(f"`{target}` has a rule of this library: pass `replace=True` to describe it again")
        before = described(target)
        register(target, description, replace)
        forget_rules()
        if check:
            try:
                _check(target, description, operands)
            except RuleError:
                forget(target)
                if before is not None:
                    register(target, before, True)
                forget_rules()
                raise
        return target
    if getattr(target, _MARK, False):
        if not replace:
            raise RuleError(f"`{target.__name__}` is described already: pass `replace=True` to describe it again")  # type: ignore[union-attr]
        target = target.__wrapped__  # type: ignore[union-attr]
    whole = _whole(cast("Callable[..., Any]", target), description)
    if check:
        _check(whole, description, operands)
    return whole  # type: ignore[return-value]


def _whole(function: Callable[..., Any], description: Description | None) -> Callable[..., Any]:
    """The function as one operation."""
    name = getattr(function, "__name__", "function")

    @wraps(function)
    def call(*operands: Any, **options: Any) -> Any:
        leaves, tree = jax.tree.flatten(operands)

        def flat(*given: Any) -> Any:
            return function(*jax.tree.unflatten(tree, given), **options)

        jaxpr, shape = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        results = whole_call_p.bind(*leaves, jaxpr=jaxpr, statement=description, name=name)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    setattr(call, _MARK, True)
    return call


def _check(target: Any, description: Description | None, operands: Sequence[Any] | None) -> None:
    if isinstance(target, str):
        raise RuleError(f"`{target}` is a name: to check its description, describe the function that calls it")
    if operands is None:
        if description is None or not isinstance(description.said, str) or "->" not in description.said:
            raise RuleError("to check this description, pass `operands`")
        shapes = made_up_shapes(description.said, dict(description.sizes))
        noise = np.random.default_rng(0)
        operands = [noise.integers(-4, 5, shape).astype(np.float32) for shape in shapes]
    run = target.bind if isinstance(target, Primitive) else target
    try:
        jax.eval_shape(run, *operands)
    except Exception as error:
        shapes = [np.shape(operand) for operand in operands]
        raise RuleError(
            f"it can not be run on operands of shapes {shapes}; pass `operands` that fit: {error}"
        ) from error
    verify_or_raise(run, *operands)
