"""The memory model: what a device holds while it runs a schedule, as XLA:GPU compiles it.

A small liveness analysis. XLA's fusion rules say which values are in memory (`kernels`), its mergers which kernels and
collectives are one (`merging`), its latency-hiding scheduler when they run (`order`). What they read and make is live
from the first to the last of them (`timeline`), and its bytes are a function of choices (`buffers`). The model steers
the search; the compiler is the judge (`shardplan.plans.feedback`).

>>> import jax, jax.numpy as jnp, shardplan
>>> square = jax.ShapeDtypeStruct((512, 512), "float32")
>>> schedule = shardplan.plan(lambda x, w: jnp.tanh(x @ w) @ w, 1, square, square).schedule
>>> lifetimes = lifetimes_of(schedule, frozenset())
>>> (lifetimes.profile(schedule.problem.encode(schedule.assignment)) / 2**20).tolist()
[4.0, 5.0, 4.0, 3.0]
"""

from __future__ import annotations

from shardplan.memory.buffers import buffers_of
from shardplan.memory.lifetimes import Lifetimes
from shardplan.memory.timeline import Timeline
from shardplan.problem.schedule import Schedule


def lifetimes_of(schedule: Schedule, donated: frozenset[int]) -> Lifetimes:
    """What a device holds, in the order in which XLA:GPU is taken to run a schedule.

    ``donated``: the positions of inputs whose memory the results take that replace them.
    """
    timeline = Timeline(schedule)
    place = {index: last for index, (_, last) in timeline.computed().items()}
    operations = schedule.program.operations
    order = sorted(operations, key=lambda operation: (place[operation.index], operation.index))
    return Lifetimes(schedule.problem, order, place, buffers_of(timeline, donated), timeline.end)
