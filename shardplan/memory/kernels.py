"""The kernels of a schedule: the materialised values, and the operations fused into their readers.

>>> import jax, jax.numpy as jnp, shardplan
>>> square = jax.ShapeDtypeStruct((64, 64), "float32")
>>> schedule = shardplan.plan(lambda x, w: jnp.tanh(x @ w) @ w, 1, square, square).schedule
>>> sorted(kernels_of(schedule).stored - {*schedule.program.inputs})
[2, 3, 4]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardplan.memoize import memoize
from shardplan.memory.convolutions import filters_before_reversal
from shardplan.memory.fusion import Fusion, materialised_values
from shardplan.memory.operations import computes_operand, fusible_operations
from shardplan.memory.products import product_operands
from shardplan.problem.cost_network import Problem
from shardplan.problem.schedule import Schedule
from shardplan.program.cse import repeated_results
from shardplan.program.operation_kinds import CONVOLUTION


@dataclass(frozen=True, slots=True)
class Kernels:
    """``stored`` are the materialised values, ``fused`` the operations, by index, that are fused into other kernels."""

    stored: frozenset[int]
    fused: frozenset[int]
    same: Mapping[int, int]
    """Values that common subexpression elimination removes, with the equal value that it keeps."""


def kernels_of(schedule: Schedule) -> Kernels:
    """The kernels that XLA:GPU makes of a schedule."""
    problem, values = schedule.problem, schedule.assignment.values
    parts = tuple([problem.domain(v).parts[layout] for v, layout in values.items()])
    return _kernels(
        problem, frozenset(_resharded_values(schedule)), (tuple(values), parts), tuple(common_subexpressions(schedule))
    )


def common_subexpressions(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Values with an equal earlier one, of the same operation, operands and layout."""
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


@memoize
def _kernels(
    problem: Problem,
    sent: frozenset[int],
    split: tuple[tuple[int, ...], tuple[float, ...]],
    repeated: tuple[tuple[int, int], ...],
) -> Kernels:
    program, fusible, same = problem.program, fusible_operations(problem), dict(repeated)
    needed = frozenset(same.get(value, value) for value in materialised_operands(problem) | sent)
    values = program.values
    parts = dict(zip(*split, strict=True))
    read = [v for v in range(len(values)) if v not in problem.generated]
    sizes = {v: values[v].total_bytes / parts.get(v, 1.0) for v in read}
    elements = {v: values[v].elements / parts.get(v, 1.0) for v in read}
    made = [o for o in program.operations if not o.bodies and problem.generated.isdisjoint(o.results)]
    made = [o for o in made if not o.results or not same.keys() >= {*o.results}]
    open_values = [r for o in made if o.index in fusible for r in o.results if r not in needed]
    stored = materialised_values(Fusion(problem, sizes, elements, same), made, open_values)
    kept = {r for o in made if o.index not in fusible for r in o.results}
    kept |= {r for o in program.operations if o.bodies for r in o.results}
    outside = {*program.inputs, *program.captured, *(v for region in program.regions for v in region.inputs)}
    in_memory = frozenset(stored | (needed - problem.generated) | kept | outside)
    fused = frozenset(o.index for o in made if o.index in fusible and in_memory.isdisjoint(o.results))
    return Kernels(in_memory, fused, same)


@memoize
def materialised_operands(problem: Problem) -> frozenset[int]:
    """The outputs of regions, and the operands of operations that cannot compute them."""
    program = problem.program
    needed = {o for region in program.regions for o in region.outputs if isinstance(o, int)}
    products, filters = product_operands(program), filters_before_reversal(program)
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


def _resharded_values(schedule: Schedule) -> Iterator[int]:
    """The values with a resharded copy, and those that are reduced."""
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
