"""Products that XLA:GPU merges into one: how long their results are in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardplan.memory.accumulation import merged_in
from shardplan.memory.products import leaving_products
from shardplan.schedule import Schedule

if TYPE_CHECKING:
    from shardplan.memory.liveness import Lifetime, Lifetimes


def merged_lifetimes(lifetimes: Lifetimes, schedule: Schedule) -> dict[int, Lifetime]:
    """The results of products that XLA merges: one buffer, which lives until nothing reads any of them."""
    found: dict[int, Lifetime] = {}
    leaving = leaving_products(schedule.program)
    for group in merged_in(schedule, lifetimes.order, lifetimes.held):
        results = [schedule.program.operations[index].results[0] for index in group]
        spans = [lifetimes.held[result] for result in results]
        last = lifetimes.end if leaving.intersection(results) else max(span.end for span in spans)
        whole = replace(spans[0], start=min(span.start for span in spans), end=last)
        found |= dict.fromkeys(results, whole)
    return found
