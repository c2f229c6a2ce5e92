"""The registry of users' descriptions, and whole functions with their description."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from shardplan.rules.equation import Equation
from shardplan.rules.errors import RuleError
from shardplan.rules.expression import Expression
from shardplan.rules.lambdas import trace
from shardplan.rules.notation import parse


@dataclass(frozen=True, slots=True)
class Description:
    """A user's description of an operation.

    ``said``: text in one of the notations, or a lambda. ``sizes``: sizes of indices that shapes do not determine.
    """

    said: str | Callable[..., Any]
    sizes: tuple[tuple[str, int], ...] = ()

    def expression(self, equation: Equation) -> Expression:
        """The expression for one equation; raises :class:`RuleError` where the two do not fit."""
        inputs, outputs = ([tensor.shape for tensor in side] for side in (equation.inputs, equation.outputs))
        if isinstance(self.said, str):
            return parse(self.said, inputs, outputs, sizes=dict(self.sizes))
        return trace(self.said, inputs, outputs, equation.params)


_described: dict[Hashable, Description] = {}


def described(key: Hashable) -> Description | None:
    """The description of a primitive, or of a foreign function by the name of its target."""
    return _described.get(key)


def everything_described() -> dict[Hashable, Description]:
    """All descriptions."""
    return dict(_described)


def register(key: Hashable, description: Description, replace: bool) -> None:
    """Keep a description; raises :class:`RuleError` if there is another one and ``replace`` is false."""
    if not replace and key in _described and _described[key] != description:
        raise RuleError(
            f"`{key}` is described already, as {_described[key].said!r}: pass `replace=True` to replace that by "
            f"{description.said!r}"
        )
    _described[key] = description


def forget(key: Hashable) -> None:
    """Drop a description, if there is one."""
    _described.pop(key, None)
