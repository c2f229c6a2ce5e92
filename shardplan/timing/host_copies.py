"""The seconds that a step waits for copies between the memory of a device and that of its host.

Either direction of the link is a lane: one copy after another, in the order of the program. A copy begins when it is
made known, and runs while kernels run. The first operation that reads its result waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardplan._jax import optimization_barrier
from shardplan.problem.schedule import Schedule
from shardplan.program.operation_kinds import moves_between_memories


def seconds_of_copies(schedule: Schedule, seconds: Mapping[int, float]) -> float:
    """The waiting of a step; ``seconds`` are those of each operation by index, in all iterations of its loops. None
    where the hardware profile has no link to the host."""
    rate = schedule.problem.prices.hardware.host_bytes_per_second
    if rate is None or all(value.memory_kind is None for value in schedule.program.values):
        return 0.0
    return _region(schedule, 0, seconds, rate)[1]


def _region(schedule: Schedule, region: int, seconds: Mapping[int, float], rate: float) -> tuple[float, float]:
    """The seconds of a region, and those of them that it waits for copies, in all of its iterations."""
    program, own = schedule.program, schedule.program.regions[region]
    clock, waited, times = 0.0, 0.0, max(own.times, 1)
    begun, done = dict[bool, float](), dict[int, float]()
    for index in own.operations:
        operation = program.operations[index]
        ready = max((done.get(o, 0.0) for o in operation.read), default=0.0)
        if moves_between_memories(program, operation):
            [result] = operation.results
            leaves = program.values[result].memory_kind is not None
            start = max(clock, ready, begun.get(leaves, 0.0))
            done[result] = begun[leaves] = start + _moved_bytes(schedule, result) / rate
            continue
        if operation.primitive is optimization_barrier:  # its readers wait
            done |= dict.fromkeys(operation.results, ready)
            continue
        bodies = [_region(schedule, body, seconds, rate) for body in operation.bodies]
        late = max(0.0, ready - clock)
        clock += late + (seconds.get(index, 0.0) + sum(spent for spent, _ in bodies)) / times
        waited += late + sum(waiting for _, waiting in bodies) / times
    late = max(0.0, max((done.get(o, 0.0) for o in own.outputs if isinstance(o, int)), default=0.0) - clock)
    return times * (clock + late), times * (waited + late)


def _moved_bytes(schedule: Schedule, value: int) -> float:
    parts = schedule.problem.domain(value).parts[schedule.assignment.values[value]]
    return schedule.program.values[value].stored_bytes / parts
