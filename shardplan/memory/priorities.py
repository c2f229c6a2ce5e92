"""Which values XLA:GPU stores though each kernel that reads them could compute them anew: its fusion, by priorities.

A value is *fused* where all kernels that read it compute it, or *stored* by a kernel of its own. XLA starts with a
kernel for each operation, and knows how long each takes, from what it computes and what it reads and writes. What it
fuses next is the value that saves most: the time of its own kernel, and what its readers then take less. They become
larger, so that others save less by being fused into them, until nothing is saved any more.

What is fused first so decides what is stored: of an associative scan, say, the slices, not what they are taken from.
What is put together from parts that no warp divides is dear to compute, and stored where two kernels read it.

>>> import jax, jax.numpy as jnp, shardplan
>>> from shardplan.memory.recomputing import kernels_of
>>> def stored(parts):
...     def read_twice(*parts):
...         whole = jnp.concatenate([2 * part for part in parts], axis=1)
...         return jnp.sum(whole), jnp.sum(whole, axis=0)
...     plan = shardplan.plan(read_twice, 1, *(jax.ShapeDtypeStruct((8192, n), "float32") for n in parts))
...     makers = {value: o.primitive.name for o in plan.program.operations for value in o.results}
...     return [makers[value] for value in kernels_of(plan.schedule.problem).stored]
>>> stored((512, 512)), stored((1, 1023))
([], ['concatenate'])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardplan.memory.absorbing import own_of_rows
from shardplan.memory.alike import first_alike
from shardplan.memory.computing import Computing, computing_of
from shardplan.memory.fusing import Fusion
from shardplan.memory.fusion import merged_scatters, pointwise_operations
from shardplan.memory.lying import lying_of
from shardplan.memory.parts import Part, parts_of
from shardplan.memory.repeated import Apart, repeated_in
from shardplan.once import once
from shardplan.problem import Problem


def stored_values(
    problem: Problem,
    fused: frozenset[int],
    needed: frozenset[int],
    degrees: Sequence[float],
    buffers: Mapping[int, float],
    reshaped: frozenset[int] = frozenset(),
    absorbed: frozenset[int] = frozenset(),
    apart: Apart = (),
) -> frozenset[int]:
    """The values that XLA:GPU stores, of those that operations ``fused`` make, by index, and that are not ``needed`` in
    memory anyway, where each value is split into so many parts (``degrees``), and some are parts of ``buffers`` of so
    many bytes; ``reshaped`` as in `shardplan.memory.products`, ``absorbed`` as in `shardplan.memory.absorbing`,
    ``apart`` as in `shardplan.memory.repeated`: of what is computed twice, XLA fuses one for all that read either."""
    found = set[int]()
    for part, alike in _parts(problem, fused, needed, reshaped, absorbed, apart):
        around = tuple([buffers.get(value, 0.0) for value in part.values])
        split = tuple([degrees[value] for value in part.values])
        stored = _stored_in(problem, alike, split, around, reshaped, absorbed, apart)
        found.update([part.values[place] for place in stored])
    return frozenset(found).union(v for v, first in repeated_in(problem.program, apart).items() if first in found)


@once
def _parts(
    problem: Problem,
    fused: frozenset[int],
    needed: frozenset[int],
    reshaped: frozenset[int],
    absorbed: frozenset[int],
    apart: Apart,
) -> list[tuple[Part, Part]]:
    """The parts, each with the first one that is alike."""
    computing, merged = _computing_once(problem, reshaped, apart), merged_scatters(problem)
    same = repeated_in(problem.program, apart)
    without_bodies = [operation for operation in problem.program.operations if not operation.bodies]
    alone, own = fused - merged.keys(), own_of_rows(problem, absorbed)
    elsewhere = own.union(same, needed, (same[value] for value in needed & same.keys()))
    parts = parts_of(
        {r: computing[o.index].read for o in without_bodies for r in o.results if r not in own and r not in same},
        {r for operation in without_bodies if operation.index in alone for r in operation.results} - elsewhere,
    )
    moving = lying_of(problem.program, pointwise_operations(problem)).moved
    moved = {one.index: moving.isdisjoint(one.results) for one in without_bodies if moving}
    others = {index: (*done.others, moved.get(index, True), index in absorbed) for index, done in computing.items()}
    reading = {index: (done.values, others[index]) for index, done in computing.items()}
    return list(zip(parts, first_alike(problem, parts, reading), strict=True))


@once
def _computing_once(problem: Problem, reshaped: frozenset[int], apart: Apart) -> dict[int, Computing]:
    """What operations do, and read: of what is computed twice, the first one."""
    same = repeated_in(problem.program, apart)
    found = dict(computing_of(problem, reshaped))
    for index, done in found.items():
        if not same.keys().isdisjoint(done.read):
            read, copied, apart_read, through = (
                tuple(dict.fromkeys(same.get(value, value) for value in some)) for some in done.values
            )
            found[index] = done._replace(read=read, copied=copied, apart=apart_read, through=through)
    return found


@once
def _stored_in(
    problem: Problem,
    part: Part,
    degrees: tuple[float, ...],
    buffers: tuple[float, ...],
    reshaped: frozenset[int],
    absorbed: frozenset[int],
    apart: Apart,
) -> list[int]:
    """Those of one part, by place, whose values are split into so many parts, and lie in buffers of so many bytes."""
    split = dict(zip(part.values, zip(degrees, buffers, strict=True), strict=True))
    fusion = Fusion(problem, split, part.makes, _computing_once(problem, reshaped, apart), absorbed)
    fusion.fuse(part.fusible)
    return [place for place, value in enumerate(part.values) if value in fusion.apart]
