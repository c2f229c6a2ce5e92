"""Products that wait for the running sum that takes them in.

A product that adds itself to a sum needs this anyhow. One that XLA merges with others does not: to fill waits for
collectives XLA computed nineteen of them before the first was added (`shardplan.running`). So it reads its smaller
operand behind a barrier that takes in the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from shardplan.layout import Layout
from shardplan.memory.accumulation import waiting_for_sums
from shardplan.memory.unshared import read_behind_sum
from shardplan.program import Operation
from shardplan.schedule import Schedule


def behind_sum(
    schedule: Schedule,
    operation: Operation,
    operands: Sequence[Any],
    held: Mapping[tuple[int, Layout], Any],
    constrain: Callable[[Any, Layout], Any],
) -> Sequence[Any]:
    """The operands of an operation; of a product that waits for a sum, the smaller one behind that. ``held``: values in
    their layouts."""
    value = waiting_for_sums(schedule).get(operation.index)
    if value is None:
        return operands
    position, found = read_behind_sum(schedule.program, operation), list(operands)
    layout = schedule.assignment.strategies[operation.index].operands[position]
    if layout is not None:
        behind, _ = jax.lax.optimization_barrier((found[position], held[value, schedule.assignment.values[value]]))
        found[position] = constrain(behind, layout)
    return found
