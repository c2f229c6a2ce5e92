"""The memory model: a small liveness analysis of a schedule as XLA:GPU compiles it.

| pass | module |
|---|---|
| priority fusion: the materialised values | `kernels` |
| combiners and multi-output fusion: the merged collectives and kernels | `merging` |
| latency-hiding scheduler: the schedule positions | `order` |
| live ranges of all items | `timeline` |
| bytes of each item, as a function of choices | `buffers` |

The model steers the search. The compiled program decides (`shardplan.plans.feedback`).

>>> import jax, jax.numpy as jnp, shardplan
>>> square = jax.ShapeDtypeStruct((512, 512), "float32")
>>> schedule = shardplan.plan(lambda x, w: jnp.tanh(x @ w) @ w, 1, square, square).schedule
>>> lifetimes = lifetimes_of(schedule, frozenset())
>>> (lifetimes.profile(schedule.problem.encode(schedule.assignment)) / 2**20).tolist()
[4.0, 5.0, 4.0, 3.0]
"""

from __future__ import annotations

from shardplan.memoize import memoize
from shardplan.memory.buffers import buffers_of
from shardplan.memory.lifetimes import Lifetimes
from shardplan.memory.timeline import Timeline
from shardplan.problem.schedule import Schedule


@memoize
def lifetimes_of(schedule: Schedule, donated: frozenset[int]) -> Lifetimes:
    """The live ranges of a device's buffers, in the order in which XLA:GPU runs a schedule by this model.

    ``donated``: the positions of inputs whose memory goes to the results that replace them.
    """
    timeline = Timeline(schedule)
    place = {index: last for index, (_, last) in timeline.computed().items()}
    operations = schedule.program.operations
    order = sorted(operations, key=lambda operation: (place[operation.index], operation.index))
    return Lifetimes(schedule.problem, order, place, buffers_of(timeline, donated), timeline.end)
