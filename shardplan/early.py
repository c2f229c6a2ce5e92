"""Sums that are reduced before they are added up.

Two partial results that are added cost less if they are added first and reduced once, and a plan that says so leaves
them open (`shardplan.deferred`). Within a memory limit a plan may reduce each at once, since a reduced one is smaller.
XLA would not keep to that: of two reductions that an addition reads it makes one behind the addition, and holds all
partial results until then. So what such a plan reduces early stands behind a barrier, through which XLA adds nothing.
"""

from __future__ import annotations

from shardplan.layout import Layout
from shardplan.program import Constant
from shardplan.schedule import Schedule

ADDITIONS = frozenset({"add", "add_any"})
MOVING = frozenset({"transpose", "reshape", "squeeze", "expand_dims", "convert_element_type"})
"""Operations that stand between a gradient's product and its addition; XLA moves them into one of the two."""


def reduced_before_added(schedule: Schedule) -> frozenset[int]:
    """The values that are reduced, and then added to others that have been reduced as well."""
    makers = schedule.program.makers

    def reduced(value: int | Constant, layout: Layout | None) -> int | None:
        """The value whose reduction gives an operand; None where that is no reduction's result."""
        while isinstance(value, int) and layout is not None and value not in schedule.assignment.generated:
            maker = makers.get(value)
            strategy = schedule.assignment.strategies.get(maker.index) if maker is not None else None
            if maker is None or strategy is None:
                break
            steps = (*schedule.route(value, layout).steps, *schedule.result_steps(maker, maker.results.index(value)))
            if any(step.kind.reduces for step in steps):
                return value
            if maker.primitive.name not in MOVING:
                break
            value, layout = maker.operands[0], strategy.operands[0]
        return None

    found: set[int] = set()
    for operation in schedule.program.operations:
        strategy = schedule.assignment.strategies.get(operation.index)
        if strategy is not None and operation.primitive.name in ADDITIONS:
            read = map(reduced, operation.operands, strategy.operands)
            values = {value for value in read if value is not None}
            if len(values) > 1:
                found |= values
    return frozenset(found)
