"""Host memory: the bytes of a device's parts of tensors outside of device memory.

These tensors have no bytes in the peak of a device (`shardplan.program.program.Value`). Their peak is counted here, in
the order of the program.

>>> import jax, shardplan
>>> def step(moments, w):
...     moments = jax.device_put(moments, jax.memory.Space.Device) * 0.9 + w
...     return jax.device_put(moments, jax.memory.Space.Host), w - moments
>>> mesh = jax.sharding.AbstractMesh((8,), ("x",))
>>> on_host = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(), memory_kind="pinned_host")
>>> moments = jax.ShapeDtypeStruct((1024, 1024), "float32", sharding=on_host)
>>> plan = shardplan.plan(step, mesh, moments, jax.ShapeDtypeStruct((1024, 1024), "float32"), donate_argnums=(0, 1))
>>> plan.host_bytes * 8 / 2**20
4.0
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from shardplan import _jax
from shardplan.problem.schedule import Schedule


def host_bytes(schedule: Schedule, donated: Collection[int]) -> float:
    """Bytes of host memory for one device at the peak. ``donated`` are positions of inputs whose memory results may
    take.

    A loop's carry and result are one tensor, and so is what passes a barrier. A stack is live from the loop's start.
    """
    program, layouts = schedule.program, schedule.assignment.values
    on_host = {value.index for value in program.values if value.memory_kind is not None}
    if not on_host:
        return 0.0
    end, inputs, links = len(program.operations), {*program.inputs}, schedule.problem.links.values()
    same = {value: carry for one in links for value, carry in one.same.items()}
    within = {link.source for one in links for link in one.inside}  # in the memory of carries, stacks and results
    first, last = dict[int, int](), dict[int, int]()
    for operation in program.operations:
        barrier = operation.primitive is _jax.optimization_barrier
        if barrier:
            passed = zip(operation.results, operation.operands, strict=True)
            same |= {result: same.get(o, o) for result, o in passed if isinstance(o, int)}
        inside = [index for body in operation.bodies for index in program.regions[body].operations]
        for result in {*operation.results} - within if not barrier else ():
            first.setdefault(same.get(result, result), min([operation.index, *inside]))
        for value in (*operation.results, *operation.operands):
            if isinstance(value, int):
                last[same.get(value, value)] = operation.index
    outputs = [(same.get(o, o), program.ties.get(n)) for n, o in enumerate(program.outputs) if isinstance(o, int)]
    made = first.keys() - {output for output, _ in outputs}
    held = [(value, first[value], last[value]) for value in made]
    held += [(value, 0, end) for value in (*inputs, *(o for o, position in outputs if position not in donated))]
    ends = np.zeros(end + 2)
    for value, start, stop in held:
        if value in on_host:
            size = program.values[value].stored_bytes / schedule.problem.domain(value).parts[layouts[value]]
            ends[start] += size
            ends[stop + 1] -= size
    return float(np.cumsum(ends).max())
