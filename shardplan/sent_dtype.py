"""The type in which replayed collectives send a value: the one that it had before it was converted to a wider one."""

from __future__ import annotations

from typing import Any

from shardplan.schedule import Schedule
from shardplan.widened import widened_from


def sent_dtype(schedule: Schedule, value: int) -> Any:
    """The type that a value had before it was converted to a wider one, and still fits: not that of sums. Else None."""
    return None if value in schedule.problem.deferred.values else widened_from(schedule.program).get(value)


def sent_in(schedule: Schedule, value: int, array: Any) -> Any:
    """A value before a collective, back in the type that it had before it was converted to a wider one: XLA moves that
    conversion behind the collective where nothing else reads its result, and no collective has brought it here."""
    dtype = sent_dtype(schedule, value)
    return array if dtype is None else array.astype(dtype).astype(array.dtype)
