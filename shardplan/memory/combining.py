"""The order that XLA's combined reductions lead to: weights' gradients are computed late, one after another.

XLA merges reductions of one kind over the same devices, up to 30 MiB of results, into one collective. Nothing waits
for a single one of them, and XLA's last scheduler, which looks for work to run beside collectives, computes what they
reduce late: before the merged collective, one product behind each of the last kernels of the backward pass. What
these products read stays in memory until then. Below, two kernels of a layer run between one weight's gradient and
the next.

>>> import jax, jax.numpy as jnp, shardplan
>>> from shardplan.memory.recomputing import kernels_of
>>> def loss(weights, x, mixing):
...     for w in weights:
...         x = mixing @ (x @ w)
...     return jnp.sum(x)
>>> square, weights = jax.ShapeDtypeStruct((64, 64), "float32"), [jax.ShapeDtypeStruct((64, 64), "float32")] * 3
>>> x, mesh = jax.ShapeDtypeStruct((4096, 64, 64), "float32"), jax.sharding.AbstractMesh((2,), ("x",))
>>> pins = {"0/*": jax.P(), "1": jax.P("x", None, None), "2": jax.P()}
>>> plan = shardplan.plan(jax.grad(loss), mesh, weights, x, square, pins=pins)
>>> reduced = [operation.index for operation in products_of_combined_reductions(plan.schedule)[0]]
>>> order = combined_order(plan.schedule, kernels_of(plan.schedule.problem).fused)
>>> [order.index(number) > number for number in reduced]
[True, False, False]
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from typing import Any

from shardplan.memory.sizes import bytes_in
from shardplan.program import Operation
from shardplan.schedule import REDUCTIONS, Schedule

_COMBINED_BYTES = 30 * 2**20
"""XLA:GPU merges all-reduces, or reduce-scatters, up to this size of their results on one device."""

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})


def combined_order(schedule: Schedule, fused: Collection[int]) -> list[int]:
    """The indices of all operations in the program's order, but products of combined reductions late.

    ``fused`` are the operations that become part of the kernels which read them.
    """
    operations = schedule.program.operations
    groups = [group for group in products_of_combined_reductions(schedule) if len(group) > 1]
    late = {operation.index for group in groups for operation in group}
    kernels = [o.index for o in operations if o.region == 0 and o.index not in fused and o.index not in late]
    behind: dict[int, int] = {}
    for group in groups:
        last = bisect_right(kernels, group[-1].index) - 1
        for back, operation in enumerate(reversed(group)):
            kernel = kernels[last - back] if back <= last else 0
            behind[operation.index] = max(operation.index, kernel)
    makers = {result: operation.index for operation in operations for result in operation.results}
    for operation in operations:  # what is computed from a late result comes after it
        made = (behind[makers[o]] for o in operation.operands if isinstance(o, int) and o in makers)
        behind[operation.index] = max(behind.get(operation.index, operation.index), *made, 0)
    return sorted(range(len(operations)), key=lambda index: (behind[index], index))


def products_of_combined_reductions(schedule: Schedule) -> list[list[Operation]]:
    """The products whose partial results are reduced together, in the order of the program.

    These are products that no other product needs: what one reduction gives to another one is not merged with it.
    """
    groups: list[list[Operation]] = []
    filling: dict[Any, tuple[list[Operation], float]] = {}
    needed = _leading_to_products(schedule)
    for operation in schedule.program.operations:
        if operation.primitive.name not in _PRODUCTS or operation.region or needed & {*operation.results}:
            continue
        result = operation.results[0]
        if operation.index not in schedule.assignment.strategies:
            continue
        steps = [step for step in schedule.result_steps(operation, 0) if step.kind in REDUCTIONS]
        if not steps:
            continue
        size = bytes_in(schedule, result, steps[-1].layout)
        key = tuple((step.kind, step.axes) for step in steps), str(schedule.program.values[result].dtype)
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
