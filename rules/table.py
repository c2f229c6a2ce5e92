"""The table of all primitives, merged from those of the family modules: each name may appear once."""

from collections.abc import Mapping
from types import ModuleType

from shardplan.rules import (
    attention,
    calls,
    contraction,
    convolution,
    cumulative,
    elementwise,
    foreign,
    indexing,
    kernels,
    linear_algebra,
    randomness,
    reduction,
    reshaping,
    sorting,
    windows,
)
from shardplan.rules.equation import Equation, Semantics, Unknown
from shardplan.rules.expression import Expression
from shardplan.rules.registry import described
from shardplan.rules.without_rule import WITHOUT_RULE

FAMILIES: tuple[ModuleType, ...] = (
    attention,
    calls,
    contraction,
    convolution,
    cumulative,
    foreign,
    indexing,
    kernels,
    linear_algebra,
    randomness,
    reduction,
    reshaping,
    sorting,
    windows,
)


def _merged() -> dict[str, Semantics]:
    table: dict[str, Semantics] = {}
    for family in FAMILIES:
        rules: Mapping[str, Semantics] = family.RULES
        for name, rule in rules.items():
            if name in table:
                raise ValueError(f"two families describe `{name}`, the second one is {family.__name__}")
            table[name] = rule
    return table


_WITHOUT_RULE = {name: reason for reason, names in WITHOUT_RULE.items() for name in names}

TABLE: Mapping[str, Semantics] = _merged()


def express(equation: Equation) -> Expression:
    """The expression of an equation. Raises :class:`Unknown` for a primitive without a description."""
    description = described(equation.primitive)
    if description is not None:
        return description.expression(equation)
    name = equation.primitive.name
    rule = TABLE.get(name)
    if rule is not None:
        return rule(equation)
    if elementwise.maps_elements(equation):
        return elementwise.express(equation)
    if name in _WITHOUT_RULE:
        raise Unknown(f"`{name}` has no rule: {_WITHOUT_RULE[name]}.")
    raise Unknown(
        f"nobody described the primitive `{name}`: say what it computes with "
        f'`shardplan.describe(primitive, "b i, i j -> b j")`.'
    )
