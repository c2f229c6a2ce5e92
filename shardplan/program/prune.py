"""Pruning: the program without operations whose results nobody reads.

>>> import jax.numpy as jnp
>>> from shardplan.program.tracing import trace_program
>>> def step(x):
...     jnp.cos(x)
...     return jnp.sin(x)
>>> [operation.primitive.name for operation in trace_program(step, (jnp.ones(8),)).operations]
['sin']
"""

from __future__ import annotations

from dataclasses import replace

from shardplan.program.program import Program


def prune(program: Program) -> Program:
    """Drops operations whose results nobody reads and that have no effect."""
    needed = {output for output in program.outputs if isinstance(output, int)} | {*program.written.values()}
    kept = []
    for operation in reversed(program.operations):
        if operation.equation.effects or needed.intersection(operation.results):
            kept.append(operation)
            needed.update(o for o in operation.operands if isinstance(o, int))
            for body in operation.bodies:
                needed.update(o for o in program.regions[body].outputs if isinstance(o, int))
    numbered = enumerate(reversed(kept))
    operations = tuple(one if one.index == number else replace(one, index=number) for number, one in numbered)
    members: dict[int, list[int]] = {}
    for operation in operations:
        members.setdefault(operation.region, []).append(operation.index)
    return replace(
        program,
        operations=operations,
        captured={value: array for value, array in program.captured.items() if value in needed},
        regions=tuple(replace(r, operations=tuple(members.get(r.index, ()))) for r in program.regions),
    )
