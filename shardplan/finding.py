"""interim"""

from __future__ import annotations
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
import numpy as np
from shardplan.schedule import Schedule
from shardplan.search import Solution, solve
from shardplan.straightening import straightened
from shardplan.errors import InfeasibleError


@dataclass(frozen=True)
class Found:
    schedule: Schedule
    solution: Solution
    peak_bytes: float


@dataclass(frozen=True)
class Search:
    method: str
    seconds: float
    limit_bytes: float
    donated: frozenset[int]
    precision: float = 0.0
    excess: Mapping[int, float] = field(default_factory=dict)
