"""How the best schedule of each objective is searched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from shardplan.optimize.repeated_work import search_sharing
from shardplan.optimize.solve_once import Found
from shardplan.optimize.step_time_objective import search_balanced

SEARCHES: Mapping[str, Callable[..., Found]] = MappingProxyType({"bytes": search_sharing, "time": search_balanced})
"""By the name of the objective: of a problem, what a search may take, and a function that prices the problem anew."""
