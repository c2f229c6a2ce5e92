"""When residuals are copied to the host and back, and how much longer a step takes for it.

Either direction of the link between a device and its host is a lane: one copy after another, in the time that kernels
take in between. A residual is gone before the next one goes, and begins to come back when the one before is needed: two
at most are in both memories. A step waits for what does not fit in between.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.problem.schedule import Schedule
from shardplan.program.operation_kinds import is_product
from shardplan.program.recompute import Offloaded, ties
from shardplan.program.residuals import early
from shardplan.timing.step_time import time_prices, work_seconds


@dataclass(frozen=True, slots=True)
class Staying:
    """A residual that may wait on the host: its bytes, where it is made, and where it is needed again."""

    value: int
    size: float
    made: int
    needed: int


@dataclass(frozen=True, slots=True)
class Copied:
    """The two copies of a residual: where a device has let go of it, where it begins to come back, and the seconds that
    a step waits for both."""

    offloaded: Offloaded
    away: int
    back: int
    seconds: float


class HostLane:
    """The link of a device and its host during a schedule; ``place`` is where each operation runs, by index."""

    def __init__(self, schedule: Schedule, place: Mapping[int, int]) -> None:
        program, problem = schedule.program, schedule.problem
        prices, strategies, forward = time_prices(problem), schedule.assignment.strategies, early(program)
        self._rate = prices.hardware.host_bytes_per_second or np.inf
        spent, self._loops = np.zeros(max(place.values(), default=0) + 2), dict[int, float]()
        for operation in program.operations:
            if operation.index in strategies:
                degree = strategies[operation.index].degree
                seconds = work_seconds(problem, prices, operation, degree)
                spent[place[operation.index] + 1] += seconds
                self._loops[operation.region] = self._loops.get(operation.region, 0.0) + seconds
        self._bodies = {o.index: o.bodies for o in program.operations if o.bodies}
        self._clock: list[float] = np.cumsum(spent).tolist()  # seconds until a place
        late = {*ties(program).values()}
        stages = {
            place[o.index]: o.results[0]
            for o in program.operations
            if not o.region and o.results and o.index in forward and (o.bodies or is_product(program, o))
        }
        first = min((place[program.makers[value].index] for value in late), default=0)
        stages = {at: value for at, value in stages.items() if at < first}
        stages |= {place[program.makers[value].index]: value for value in late}
        self._places = sorted(stages)
        self._values = [stages[at] for at in self._places]
        self._times = [self._clock[at] for at in self._places]
        self._late = bisect_left(self._places, first)  # the first stage of the backward part

    def copies(self, staying: Sequence[Staying]) -> list[Copied]:
        """The copies of some residuals."""
        leaving, returning = self._leaving(staying), self._returning(staying)
        found = list[Copied]()
        for one in staying:
            (away, late), (back, later) = leaving[one.value], returning[one.value]
            stages = self._values[away], self._values[back]
            places = self._places[away], self._places[back]
            found.append(Copied(Offloaded(one.value, *stages), *places, late + later))
        return found

    def copies_of_stacks(self, stacked: Mapping[int, tuple[int, float]]) -> list[Copied]:
        """The copies of stacks: of each, the scan that makes it, by index, and its bytes. Slices go to the host while
        the body of that scan runs. The scan that reads them waits for each: no copy begins in the iteration before."""
        bytes_of = dict[int, float]()
        for scan, size in stacked.values():
            bytes_of[scan] = bytes_of.get(scan, 0.0) + size
        hidden = {scan: sum(self._loops.get(body, 0.0) for body in self._bodies[scan]) for scan in bytes_of}
        late = {scan: max(0.0, 1 / self._rate - hidden[scan] / size) for scan, size in bytes_of.items()}
        return [
            Copied(Offloaded(value, value, value), 0, np.iinfo(np.int64).max, size * (late[scan] + 1 / self._rate))
            for value, (scan, size) in stacked.items()
        ]

    def _seconds(self, one: Staying) -> float:
        return one.size / self._rate

    def _leaving(self, staying: Sequence[Staying]) -> dict[int, tuple[int, float]]:
        """The stage that waits for each copy to the host, by number, and the seconds that it waits."""
        found, free, waited = dict[int, tuple[int, float]](), 0.0, 0.0
        order = sorted(staying, key=lambda one: (one.made, one.value))
        for number, one in enumerate(order):
            after = order[number + 1].made if number + 1 < len(order) else np.inf
            first = min(bisect_right(self._places, one.made), len(self._places) - 1)
            last = max(first, min(bisect_right(self._places, after) - 1, self._late))
            free = max(self._clock[one.made + 1] + waited, free) + self._seconds(one)
            stage = bisect_left(self._times, free - waited, first, last)
            late = max(0.0, free - self._times[stage] - waited)
            found[one.value] = stage, late
            waited += late
        return found

    def _returning(self, staying: Sequence[Staying]) -> dict[int, tuple[int, float]]:
        """The stage at which each copy from the host begins, by number, and the seconds that its reader waits."""
        found, begun = dict[int, tuple[int, float]](), np.inf
        order = sorted(staying, key=lambda one: (one.needed, -one.made, one.value))
        for number in reversed(range(len(order))):
            one = order[number]
            before = order[number - 1].needed if number else 0
            last = max(self._late, bisect_left(self._places, one.needed) - 1)
            first = min(last, max(self._late, bisect_left(self._places, before)))
            start = min(self._times[last], begun) - self._seconds(one)
            stage = max(first, bisect_right(self._times, start, first, last + 1) - 1)
            ends = self._times[last] if stage < last else self._clock[one.needed]  # the barrier before the reader
            start = min(ends, begun) - self._seconds(one)
            begun = max(start, self._times[stage])
            found[one.value] = stage, begun - start
        return found
