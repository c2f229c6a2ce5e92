"""Stacks in host memory: what a forward scan stacks and a backward scan reads is copied slice by slice.

A slice goes to the host at the end of its iteration, where the stack is, and comes back at the beginning of the
iteration that reads it.

>>> import jax, jax.numpy as jnp
>>> from shardplan.program.recompute_scans import remakeable
>>> from shardplan.program.tracing import trace_program
>>> def loss(w, x):
...     return jnp.sum(jax.lax.scan(lambda y, w: (jnp.sin(jnp.tanh(y @ w)), None), x, w)[0])
>>> program = trace_program(jax.grad(loss), (jnp.ones((4, 8, 8)), jnp.ones((64, 8))))
>>> moved, _ = offloading_stacks(program, remakeable(program)[:1])
>>> [value.shape for value in moved.values if value.memory_kind]
[(4, 64, 8), (64, 8), (64, 8)]
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from shardplan import _jax
from shardplan.program.program import Operation, Program
from shardplan.program.prune import prune
from shardplan.program.recompute_scans import stacks


def offloading_stacks(program: Program, chosen: Collection[int]) -> tuple[Program, Mapping[int, int]]:
    """The program with some stacks in host memory, and the values that copies of slices stand for."""
    values, regions, known = list(program.values), list(program.regions), stacks(program)
    origins, sent = dict[int, int](), dict[int, Operation]()  # by what makes a slice
    back, instead = dict[int, list[Operation]](), dict[tuple[int, int], int]()  # by the region that reads it

    def copied(value: int, like: Operation, kind: str | None) -> Operation:
        new = len(values)
        values.append(replace(program.values[value], index=new, name=None, memory_kind=kind))
        origins[new] = value
        primitive, params = _jax.move_between_memories, _jax.params_of_move(kind)
        return replace(like, primitive=primitive, params=params, operands=(value,), results=(new,), again=kind is None)

    for value in sorted(chosen):
        stack = known[value]
        maker, reader = (program.operations[scan] for scan in (stack.maker, stack.reader))
        made, read = regions[maker.bodies[0]], reader.bodies[0]
        sent[stack.made] = sent.get(stack.made) or copied(stack.made, program.makers[stack.made], _jax.HOST_MEMORY)
        place = maker.params["num_carry"] + maker.results[maker.params["num_carry"] :].index(value)
        outputs = (*made.outputs[:place], sent[stack.made].results[0], *made.outputs[place + 1 :])
        regions[made.index] = replace(made, outputs=outputs)
        for one in (value, stack.read):
            values[one] = replace(values[one], memory_kind=_jax.HOST_MEMORY)
        returning = replace(copied(stack.read, program.makers[stack.made], None), region=read)
        back.setdefault(read, []).append(returning)
        instead[read, stack.read] = returning.results[0]
    operations = list[Operation]()
    for operation in program.operations:
        operations += back.pop(operation.region, ())
        now = (instead.get((operation.region, o), o) if isinstance(o, int) else o for o in operation.operands)
        operations.append(replace(operation, operands=tuple(now)))
        operations += [sent[result] for result in operation.results if result in sent]
    for region in {region for region, _ in instead}:
        own = regions[region]
        now = (instead.get((region, o), o) if isinstance(o, int) else o for o in own.outputs)
        regions[region] = replace(own, outputs=tuple(now))
    made_of = replace(program, values=tuple(values), operations=tuple(operations), regions=tuple(regions))
    return prune(made_of), origins
