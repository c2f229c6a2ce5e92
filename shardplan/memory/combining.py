"""Reductions of one kind over the same devices, which XLA merges into one collective, up to 30 MiB of results.

>>> import jax, jax.numpy as jnp, shardplan
>>> def loss(weights, x):
...     for w in weights:
...         x = jnp.tanh(x @ w)
...     return jnp.sum(x)
>>> weights, x = [jax.ShapeDtypeStruct((64, 64), "float32")] * 3, jax.ShapeDtypeStruct((4096, 64), "float32")
>>> pins, mesh = {"0/*": jax.P(), "1": jax.P("x", None)}, jax.sharding.AbstractMesh((2,), ("x",))
>>> plan = shardplan.plan(jax.grad(loss), mesh, weights, x, pins=pins)
>>> [[operation.primitive.name for operation in group] for group in combined_reductions(plan.schedule)]
[['dot_general', 'dot_general', 'dot_general']]
"""

from __future__ import annotations

from typing import Any

from shardplan.memory.sizes import bytes_in
from shardplan.program import Operation
from shardplan.schedule import REDUCTIONS, Schedule

_COMBINED_BYTES = 30 * 2**20
"""XLA:GPU merges all-reduces, or reduce-scatters, up to this size of their results on one device."""

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})


def combined_reductions(schedule: Schedule) -> list[list[Operation]]:
    """The operations whose partial results are reduced together, in the order of the program.

    These are what no product needs, such as weights' gradients and sums for biases. What one reduction gives to another
    one is not merged with it (the norm of a gradient, say): only those are that come through as many reductions.
    """
    groups: list[list[Operation]] = []
    filling: dict[Any, tuple[list[Operation], float]] = {}
    needed = _leading_to_products(schedule)
    passed: dict[int, int] = {}  # per value, through how many of these reductions it comes
    for operation in schedule.program.operations:
        before = max((passed.get(operand, 0) for operand in operation.operands if isinstance(operand, int)), default=0)
        passed |= dict.fromkeys(operation.results, before)
        if not operation.results or operation.region or operation.bodies or needed & {*operation.results}:
            continue
        result = operation.results[0]
        if operation.index not in schedule.assignment.strategies:
            continue
        steps = [step for step in schedule.result_steps(operation, 0) if step.kind in REDUCTIONS]
        if not steps:
            continue
        size = bytes_in(schedule, result, steps[-1].layout)
        passed[result] = before + 1
        key = before, tuple((step.kind, step.axes) for step in steps), str(schedule.program.values[result].dtype)
        group, filled = filling.get(key, ([], 0.0))
        if not group or filled + size > _COMBINED_BYTES:
            group, filled = [], 0.0
            groups.append(group)
        group.append(operation)
        filling[key] = group, filled + size
    return groups


def _leading_to_products(schedule: Schedule) -> frozenset[int]:
    """The values that a product, a loop or a branch is computed from."""
    found: set[int] = set()
    for operation in reversed(schedule.program.operations):
        if operation.primitive.name in _PRODUCTS or operation.bodies or not found.isdisjoint(operation.results):
            found.update(operand for operand in operation.operands if isinstance(operand, int))
    return frozenset(found)
