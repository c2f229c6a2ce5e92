"""What leaves a step, and is computed by the kernel that reads it: XLA:GPU has that wait for what the kernel reads.

A kernel that computes element by element becomes part of one that reads its result and is as large
(`shardplan.memory.joining`), before reductions over devices are merged. The number of tokens of a batch, which a step
reports, so comes out of the kernel that divides the loss by it. Each gradient is divided by it as well, and waits for
the loss, which is then summed up over devices by itself, not together with what follows from gradients.

>>> import jax, jax.numpy as jnp, shardplan
>>> def read_there(*reported):
...     def step(x, mask):
...         tokens = jnp.maximum(jnp.sum(mask), 1.0)
...         loss = jnp.sum(x * mask) / tokens
...         return x / tokens, loss, tokens if reported else ()
...     row = jax.ShapeDtypeStruct((64,), "float32")
...     problem = shardplan.plan(step, 1, row, row).schedule.problem
...     return [problem.program.operations[index].primitive.name for index in read_with_consumer(problem)]
>>> read_there(), read_there("tokens")
([], ['max'])
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from shardplan.memory.accumulation import is_ordered
from shardplan.memory.fusion import is_view, pointwise_operations, readers_in
from shardplan.once import once
from shardplan.problem import Problem
from shardplan.program import Operation, Program

_MOST_INSIDE = 64
"""Operations of a kernel that are looked at."""


@once
def read_with_consumer(problem: Problem) -> dict[int, list[int]]:
    """Per operation that is part of the kernel which reads its result, by index, the values that both read. Where some
    would so wait for themselves, they stay apart."""
    found, waiting = dict[int, list[int]](), [dict(_taken_in(problem))]
    while waiting:
        some = waiting.pop()
        if is_ordered(problem.program, found | some):
            found |= some
        elif len(some) > 1:
            indices = sorted(some)
            halves = indices[len(some) // 2 :], indices[: len(some) // 2]
            waiting += [{index: some[index] for index in half} for half in halves]
    return found


def _taken_in(problem: Problem) -> Iterator[tuple[int, list[int]]]:
    """What leaves, and others than the kernel that takes it in read as well, with all that is read there."""
    program, pointwise, readers = problem.program, pointwise_operations(problem), readers_in(problem.program)
    leaving = {o for region in program.regions for o in region.outputs if isinstance(o, int)}
    for value in sorted(leaving & program.makers.keys()):
        maker = program.makers[value]
        if maker.index not in pointwise or value not in readers:
            continue
        behind = _behind(program, maker, pointwise)
        kernels = [_behind(program, reader, pointwise) for reader in readers[value] if reader.index in behind]
        ends = [len(leaving & {result for one in kernel.values() for result in one.results}) for kernel in kernels]
        kernel = _with_operands(program, kernels[ends.index(max(ends))], behind) if any(ends) else {}
        if kernel and any(reader.index not in kernel for reader in readers[value]):
            inside = {result for one in (maker, *kernel.values()) for result in one.results}
            read = (o for one in (maker, *kernel.values()) for o in one.operands if isinstance(o, int))
            yield maker.index, [o for o in dict.fromkeys(read) if o not in inside]


def _behind(program: Program, first: Operation, pointwise: Collection[int]) -> dict[int, Operation]:
    """By index, an operation, and what is computed of it element by element and is as large."""
    found, stack, readers = {first.index: first}, [first], readers_in(program)
    size = program.values[first.results[0]].elements
    while stack and len(found) < _MOST_INSIDE:
        for reader in readers.get(stack.pop().results[0], ()):
            taken = reader.index in pointwise or is_view(program, reader)
            alike = len(reader.results) == 1 and program.values[reader.results[0]].elements == size
            if taken and alike and reader.index not in found:
                found[reader.index] = reader
                stack.append(reader)
    return found


def _with_operands(
    program: Program, kernel: Mapping[int, Operation], among: Mapping[int, Operation]
) -> dict[int, Operation]:
    """The operations of a kernel, and those that these are computed from ``among`` some, in the program's order."""
    found, stack = {**kernel}, [*kernel.values()]
    while stack:
        for operand in stack.pop().operands:
            maker = program.makers.get(operand) if isinstance(operand, int) else None
            if maker is not None and maker.index in among and maker.index not in found:
                found[maker.index] = maker
                stack.append(maker)
    return {index: found[index] for index in sorted(found)}
