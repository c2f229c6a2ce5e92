"""Narrower copies: what is brought to other layouts in fewer bytes than it has.

XLA moves conversions behind what brings their results elsewhere (`shardplan.widened`). Where the kernels that read such
a value compute what they read on the way, the wide elements are never in memory: what is sent is narrow, and so is what
arrives. Weights that a matrix iteration in bfloat16 has made orthogonal, and that a state in float32 adds up, take half
of the bytes of the latter's type.

>>> import jax, jax.numpy as jnp, shardplan
>>> weights = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((64, 64), "bfloat16")
>>> plan = shardplan.plan(lambda w, x: w - (x @ x).astype("float32"), 1, *weights)
>>> [share for _, share in sorted(narrower_copies(plan.schedule.problem).items())]
[0.5]
"""

from __future__ import annotations

from shardplan.layout import Layout
from shardplan.memory.fusion import fuses_operands, readers_in
from shardplan.memory.sizes import bytes_in
from shardplan.once import once
from shardplan.problem import Problem
from shardplan.program import Operation
from shardplan.schedule import Schedule


@once
def narrower_copies(problem: Problem) -> dict[int, float]:
    """Per value whose copies in other layouts have fewer bytes than the value itself, the share of these."""
    program, readers = problem.program, readers_in(problem.program)
    stay = {o for region in program.regions for o in region.outputs if isinstance(o, int)} | problem.deferred.values
    found = dict[int, float]()
    for value in program.values:
        share = problem.sent_bytes[value.index] / max(value.total_bytes, 1)
        read = readers.get(value.index, ()) if share < 1 and value.index not in stay else ()
        if read and all(_computes(problem, reader, value.index) for reader in read):
            found[value.index] = share
    return found


def _computes(problem: Problem, reader: Operation, value: int) -> bool:
    """Whether a kernel with an operation computes a value on the way wherever the operation reads it."""
    positions = [position for position, operand in enumerate(reader.operands) if operand == value]
    return all(fuses_operands(problem, reader, position) for position in positions)


@once
def sent_narrow(schedule: Schedule) -> frozenset[int]:
    """Of these values, those that nothing reads as they are stored: there is no more of them than what is sent."""
    strategies, readers = schedule.assignment.strategies, readers_in(schedule.program)

    def as_stored(value: int) -> bool:
        stored = schedule.assignment.values.get(value)
        found = [(reader, strategies.get(reader.index)) for reader in readers[value]]
        return any(s is None or (value, stored) in zip(o.operands, s.operands, strict=True) for o, s in found)

    return frozenset(value for value in narrower_copies(schedule.problem) if not as_stored(value))


def bytes_brought(schedule: Schedule, value: int, layout: Layout) -> float:
    """Bytes of a value on one device that was brought to a layout."""
    return bytes_in(schedule, value, layout) * narrower_copies(schedule.problem).get(value, 1.0)
