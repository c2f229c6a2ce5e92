"""The search of the best schedule, by objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from shardplan.optimize.repeated_work import search_with_repeated_work
from shardplan.optimize.solve_once import FoundSchedule
from shardplan.optimize.step_time_objective import search_shortest_step

SEARCHES: Mapping[str, Callable[..., FoundSchedule]] = MappingProxyType(
    {"bytes": search_with_repeated_work, "time": search_shortest_step}
)
"""The search by the name of the objective. Its arguments are a problem, the limits of the search, and a function that
prices the problem again."""
