"""The kernels of a schedule: which values are in memory, and what each kernel reads.

>>> import jax, jax.numpy as jnp, shardplan
>>> square = jax.ShapeDtypeStruct((64, 64), "float32")
>>> schedule = shardplan.plan(lambda x, w: jnp.tanh(x @ w) @ w, 1, square, square).schedule
>>> sorted(kernels_of(schedule).stored - {*schedule.program.inputs})
[2, 3, 4]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardplan.memory.convolutions import unreversed
from shardplan.memory.fusion import Fusion, stored_values
from shardplan.memory.operations import computes_operand, fusible_operations
from shardplan.memory.products import product_operands
from shardplan.once import once
from shardplan.operation_kinds import CONVOLUTION
from shardplan.problem import Problem
from shardplan.repeated import repeated_results
from shardplan.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Kernels:
    """``stored`` are the values that are in memory; ``fused`` the operations, by index, that other kernels compute."""

    stored: frozenset[int]
    fused: frozenset[int]
    same: Mapping[int, int]
    """Values that XLA computes once with an equal one before, with that."""


def kernels_of(schedule: Schedule) -> Kernels:
    """The kernels that XLA:GPU makes of a schedule."""
    problem, values = schedule.problem, schedule.assignment.values
    parts = tuple([problem.domain(v).parts[layout] for v, layout in values.items()])
    return _kernels(problem, frozenset(_sent(schedule)), (tuple(values), parts), tuple(computed_once(schedule)))


def computed_once(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """The values that equal one before, in the same layout and computed in the same way, with that."""
    assignment, makers = schedule.assignment, schedule.program.makers
    found = dict[int, int]()
    for value, first in repeated_results(schedule.program).items():
        if value not in makers or first not in makers or assignment.values.get(value) != assignment.values.get(first):
            continue
        mine, theirs = (assignment.strategies.get(makers[one].index) for one in (value, first))
        if mine is not None and theirs is not None and mine == theirs:
            found[value] = found.get(first, first)
    yield from found.items()


def whole_kernels(problem: Problem) -> Kernels:
    """The kernels that XLA:GPU would make of the program on one device."""
    values = tuple(problem.variables.values)
    return _kernels(problem, frozenset(), (values, (1.0,) * len(values)), ())


@once
def _kernels(
    problem: Problem,
    sent: frozenset[int],
    split: tuple[tuple[int, ...], tuple[float, ...]],
    repeated: tuple[tuple[int, int], ...],
) -> Kernels:
    program, fusible, same = problem.program, fusible_operations(problem), dict(repeated)
    needed = frozenset(same.get(value, value) for value in read_from_memory(problem) | sent)
    values = program.values
    parts = dict(zip(*split, strict=True))
    read = [v for v in range(len(values)) if v not in problem.generated]
    sizes = {v: values[v].total_bytes / parts.get(v, 1.0) for v in read}
    elements = {v: values[v].elements / parts.get(v, 1.0) for v in read}
    made = [o for o in program.operations if not o.bodies and problem.generated.isdisjoint(o.results)]
    made = [o for o in made if not o.results or not same.keys() >= {*o.results}]
    open_values = [r for o in made if o.index in fusible for r in o.results if r not in needed]
    stored = stored_values(Fusion(problem, sizes, elements, same), made, open_values)
    kept = {r for o in made if o.index not in fusible for r in o.results}
    kept |= {r for o in program.operations if o.bodies for r in o.results}
    outside = {*program.inputs, *program.captured, *(v for region in program.regions for v in region.inputs)}
    in_memory = frozenset(stored | (needed - problem.generated) | kept | outside)
    fused = frozenset(o.index for o in made if o.index in fusible and in_memory.isdisjoint(o.results))
    return Kernels(in_memory, fused, same)


@once
def read_from_memory(problem: Problem) -> frozenset[int]:
    """The values that leave a region, or that an operation reads which does not compute its operands."""
    program = problem.program
    needed = {o for region in program.regions for o in region.outputs if isinstance(o, int)}
    products, filters = product_operands(program), unreversed(program)
    for operation in program.operations:
        for position, operand in enumerate(operation.operands):
            if not isinstance(operand, int) or computes_operand(problem, operation, position):
                continue
            read = products.get((operation.index, position))
            if read is None:
                needed.add(filters.get(operand, operand) if operation.primitive.name == CONVOLUTION else operand)
            elif not read.copied:
                needed.add(read.value)
    return frozenset(needed)


def _sent(schedule: Schedule) -> Iterator[int]:
    """The values that collectives bring to another layout, or that are reduced as they are made."""
    for index, strategy in schedule.assignment.strategies.items():
        operation = schedule.program.operations[index]
        for position, result in enumerate(operation.results):
            if any(step.fraction > 0 for step in schedule.result_steps(operation, position)):
                yield result
        for operand, layout in zip(operation.operands, strategy.operands, strict=True):
            if not isinstance(operand, int) or layout is None or operand not in schedule.assignment.values:
                continue
            if any(step.fraction > 0 for step in schedule.route(operand, layout).steps):
                yield operand
