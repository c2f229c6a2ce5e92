"""Products that XLA:GPU merges into one, and those that it adds up in place: how long their results are in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardplan.memory.accumulation import added_in_place
from shardplan.memory.products import PRODUCT, leaving_products, merged_products
from shardplan.memory.sizes import bytes_in
from shardplan.program import Operation
from shardplan.schedule import Schedule

if TYPE_CHECKING:
    from shardplan.memory.liveness import Lifetime, Lifetimes


def merged_lifetimes(lifetimes: Lifetimes, schedule: Schedule) -> dict[int, Lifetime]:
    """The results of products that XLA merges: one buffer, which lives until nothing reads any of them. Those of
    products that it adds up in place live no longer than their operation, in another one's memory."""
    sizes = {}
    for operation in lifetimes.order:
        strategy = schedule.assignment.strategies.get(operation.index)
        place = lifetimes.place[operation.index]
        if place in lifetimes.in_libraries and strategy is not None and operation.results[0] in lifetimes.held:
            pairs = zip((*operation.operands, *operation.results), (*strategy.operands, *strategy.results), strict=True)
            sizes[operation.index] = sum(
                bytes_in(schedule, value, layout)
                for value, layout in pairs
                if isinstance(value, int) and layout is not None
            )
    found: dict[int, Lifetime] = {}
    leaving = leaving_products(schedule.program)
    for group in merged_products(schedule.program, lifetimes.order, sizes):
        results = [schedule.program.operations[index].results[0] for index in group]
        spans = [lifetimes.held[result] for result in results]
        last = lifetimes.end if leaving.intersection(results) else max(span.end for span in spans)
        whole = replace(spans[0], start=min(span.start for span in spans), end=last)
        found |= dict.fromkeys(results, whole)
    own = lifetimes.held.keys() - found.keys() - {*schedule.program.inputs, *schedule.program.captured}
    for result in added_in_place(schedule.program, lifetimes.order, own, lambda o: _stays(schedule, o)):
        own_span = lifetimes.held[result]
        found[result] = replace(own_span, end=own_span.start - 1)
    return found


def _stays(schedule: Schedule, operation: Operation) -> bool:
    """Whether an operation leaves its result in the layout that it is stored in, and, where it is no product, reads
    its operands so."""
    strategy, values = schedule.assignment.strategies.get(operation.index), schedule.assignment.values
    if strategy is None:
        return False
    operands = zip(operation.operands, strategy.operands, strict=True)
    as_stored = all(layout == values[o] for o, layout in operands if isinstance(o, int) and o in values)
    return (as_stored or operation.primitive.name == PRODUCT) and not schedule.result_steps(operation, 0)
