"""Other layouts and their prices in the page: of the operations that send most, and of the largest arguments.

Each price is that of a search of a neighbourhood, as in ``explain`` without time. It is exact where the neighbourhood
has all that the operation has to do with, and the upper end of an interval elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardplan.plans.explain import Explainer
from shardplan.plans.plan_data import PlanData

_OPERATIONS = 16
_ARGUMENTS = 8
"""The most operations and arguments with prices. The prices of one take a tenth of a second."""

_SHOWN = 4
"""The other layouts of each, the cheapest ones."""


def reasons(plan: PlanData, collectives: Sequence[Sequence[Any]], kinds: Sequence[int]) -> dict[str, list[list[str]]]:
    """Per operation (``op12``) or argument (``arg3``), its other layouts, each with the price as text.

    ``collectives`` are the page's rows, most bytes first. ``kinds`` is the kind of each operation: equal ones are
    priced once.
    """
    explainer, found, seen = Explainer(plan, _SHOWN), dict[str, list[list[str]]](), set[int]()
    for row in collectives:
        for index in row[-1][:1]:
            if index >= 0 and kinds[index] not in seen and len(seen) < _OPERATIONS:
                seen.add(kinds[index])
                found[f"op{index}"] = explainer.other_splits(plan.program.operations[index])[:_SHOWN]
    for position in _largest(plan):
        found[f"arg{position}"] = explainer.other_layouts(plan.program.inputs[position])[:_SHOWN]
    return {name: priced for name, priced in found.items() if priced}


def _largest(plan: PlanData) -> list[int]:
    """The largest arguments, one of each group of equal layers."""
    explainer, groups = Explainer(plan), dict[Any, int]()
    order: Mapping[int, int] = {n: -one.total_bytes for n, one in enumerate(plan.arguments)}
    for position in sorted(order, key=lambda n: (order[n], n)):
        groups.setdefault(explainer.signature(plan.program.inputs[position]), position)
        if len(groups) == _ARGUMENTS:
            break
    return list(groups.values())
