"""What products read that no others share with them, though these read the same values.

XLA:GPU merges products that read the same operand (`shardplan.memory.products`). Two of them do not where a plan within
a memory limit has it brought to another layout once for each (`shardplan.anew`), nor where one reads it behind the sum
that it waits for (`shardplan.waiting`): behind a barrier, a value is no other one's.

>>> import jax, jax.numpy as jnp, shardplan
>>> narrow, wide = jax.ShapeDtypeStruct((8, 16), "float32"), jax.ShapeDtypeStruct((16, 32), "float32")
>>> schedule = shardplan.plan(jnp.matmul, 1, narrow, wide).schedule
>>> [product] = schedule.program.operations
>>> unshared_operands(schedule, product, waits=False), unshared_operands(schedule, product, waits=True)
([], [0])
"""

from __future__ import annotations

from shardplan.program import Operation, Program
from shardplan.schedule import Schedule


def read_behind_sum(program: Program, product: Operation) -> int:
    """The position of the operand that a product which waits for a sum reads behind it: the smaller one."""
    values = program.values
    return min((values[o].total_bytes, n) for n, o in enumerate(product.operands) if isinstance(o, int))[1]


def unshared_operands(schedule: Schedule, product: Operation, waits: bool) -> list[int]:
    """The positions of the operands that no other product shares with one, which may wait for a sum."""
    layouts, stored = schedule.assignment.strategies[product.index].operands, schedule.assignment.values
    brought = [
        position
        for position, (value, layout) in enumerate(zip(product.operands, layouts, strict=True))
        if isinstance(value, int) and layout is not None and stored.get(value, layout) != layout
        if schedule.gathered_anew(value, layout)
    ]
    return sorted({*brought, read_behind_sum(schedule.program, product)}) if waits else brought
