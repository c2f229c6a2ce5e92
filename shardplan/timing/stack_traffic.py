"""The memory traffic of a scan's stacks, next to what kernels make and read of them.

XLA fills a stack with zeros before the loop, and updates one slice in each iteration. The kernel that makes a slice
writes it into the stack where nothing else reads it; else the slice is written by itself, and copied. A later loop
copies a slice out of its stack for products, whose kernels read whole tensors. (Read from programs compiled for H100 by
jaxlib 0.10: a GPT of twelve scanned layers moves 189 GB, 115 GB with `dots_saveable`.)
"""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.program.operation_kinds import is_product, is_view
from shardplan.program.program import Operation, Program


def stack_traffic(program: Program, scan: Operation) -> Iterator[tuple[int, int]]:
    """The further bytes of one iteration of a scan: of the operations, by index, that make what it stacks, or read
    slices."""
    body = program.regions[scan.bodies[0]]
    carries, constants = scan.params["num_carry"], scan.params["num_consts"]
    for made in body.outputs[carries:]:
        if isinstance(made, int) and made in program.makers and program.makers[made].region == body.index:
            yield program.makers[made].index, stacking_bytes(program, made)
    slices = set(body.inputs[constants + carries :])
    for index in body.operations:
        operation = program.operations[index]
        if is_view(program, operation) and not slices.isdisjoint(operation.read):
            slices.update(operation.results)
        elif is_product(program, operation):
            for read in slices.intersection(operation.read):
                yield index, 2 * program.values[read].total_bytes


def stacking_bytes(program: Program, made: int) -> int:
    """The bytes that a slice moves on its way into a stack, after the kernel that makes it has written it once."""
    body = program.regions[program.makers[made].region]
    read = any(made in program.operations[index].read for index in body.operations)
    size = program.values[made].total_bytes
    return size * (3 if read or body.outputs.count(made) > 1 else 1)
