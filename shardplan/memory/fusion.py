"""Fusion: which operations XLA:GPU makes part of the kernels that read them, and which values it stores all the same.

>>> import jax, jax.numpy as jnp, shardplan
>>> square = jax.ShapeDtypeStruct((64, 64), "float32")
>>> plan = shardplan.plan(lambda x, w: jnp.sum(jnp.tanh(x @ w)), 1, square, square)
>>> fused = fused_operations(plan.schedule.problem)
>>> [operation.primitive.name for operation in plan.program.operations if operation.index in fused]
['tanh']
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import prod

from shardplan import _jax
from shardplan.memory.products import is_outer, is_sum
from shardplan.memory.sums import REDUCTIONS as TO_ONE
from shardplan.memory.sums import SEARCHES, adds_few
from shardplan.once import once
from shardplan.problem import Problem
from shardplan.program import Constant, Operation, Program
from shardplan.strategy import operand_type

# Data movement that XLA:GPU makes part of the kernels that read it, like elementwise operations, and random bits, which
# it computes from keys and counters; reductions, whose operands it computes on the way.
_MOVES = frozenset(
    {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "slice", "rev", "pad", "select_n", "iota"}
    | {"gather", "dynamic_slice", "split", "concatenate", "copy", "copy_p", "stop_gradient", "random_bits"}
)
REDUCTIONS = TO_ONE | SEARCHES
CUMULATIVE = frozenset({"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"})
BLOCK = 16
"""What adds up along a dimension: XLA:GPU reduces blocks of so many elements first, and computes each element on the
way, from the blocks before it and the elements of its own."""

_VIEWS = frozenset({"reshape", "squeeze", "expand_dims", "stop_gradient"})
_READS_ON_THE_WAY = frozenset(
    REDUCTIONS
    | {"reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum", "select_and_scatter_add"}
)
_SUMMING_SCATTERS = frozenset({"scatter-add", "scatter_add"})
_SCATTERS = _SUMMING_SCATTERS | {"scatter", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"}
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})

_ADDITIONS = frozenset({"add", "add_any"})


def is_scatter(program: Program, operation: Operation) -> bool:
    """Whether an operation writes to many places that data say. What writes to one place (``x.at[:, 3].set(row)``) is
    to XLA an update of a slice, which kernels compute on the way."""
    if operation.primitive.name not in _SCATTERS:
        return False
    return _places(program, operation) != 1


def is_view(program: Program, operation: Operation) -> bool:
    """Whether an operation gives back what it reads, maybe in another shape: so does taking the only element there is
    along a dimension (``picked[..., 0]``), or adding up along it."""
    name = operation.primitive.name
    if name in _VIEWS:
        return True
    if name != "gather" and name not in TO_ONE:
        return False
    own, made = operand_type(program, operation.operands[0]), program.values[operation.results[0]]
    return prod(own.shape) == prod(made.shape) and (name != "gather" or _places(program, operation) == 1)


def _places(program: Program, operation: Operation) -> int:
    """The number of places that the indices of a gather or a scatter say."""
    return prod(operand_type(program, operation.operands[1]).shape[:-1])


def readers_of(operations: Iterable[Operation]) -> dict[int, list[Operation]]:
    """Per value, the operations that read it."""
    readers: dict[int, list[Operation]] = {}
    for operation in operations:
        for operand in operation.operands:
            if isinstance(operand, int):
                readers.setdefault(operand, []).append(operation)
    return readers


@once
def readers_in(program: Program) -> dict[int, list[Operation]]:
    """Those of a program, in its own order."""
    return readers_of(program.operations)


@once
def fused_operations(problem: Problem) -> frozenset[int]:
    """The operations that XLA:GPU makes part of the kernels that read them, by index.

    A sum of a scatter into zeros and other values is a scatter into the sum of these: the sum is the kernel.
    """
    merged = merged_scatters(problem)
    sums = frozenset(merged.values())
    found = set(merged)
    for operation in problem.program.operations:
        if operation.primitive is _jax.optimization_barrier:
            found.add(operation.index)  # it passes on the memory of its operands, which it needs
        elif not operation.bodies and operation.index not in sums and _computes_on_the_way(problem, operation):
            found.add(operation.index)
    return frozenset(found)


@once
def merged_scatters(problem: Problem) -> dict[int, int]:
    """Scatters into zeros that nothing but an addition reads, with the last of the additions to which that leads. Two
    scatters that are added are one where they add fewer elements together than there are to add to, else none."""
    operations, values = problem.program.operations, problem.program.values
    readers = readers_in(problem.program)
    leaving = {o for region in problem.program.regions for o in region.outputs if isinstance(o, int)}
    zeros = {o.results[0] for o in operations if o.primitive.name == "broadcast_in_dim" and _is_zero(o.operands[0])}
    merged, sums = dict[int, int](), dict[int, tuple[list[int], int]]()  # per sum, its scatters, and what these add
    for operation in operations:
        read = [o for o in operation.operands if isinstance(o, int)]
        if operation.primitive.name in _SUMMING_SCATTERS and is_scatter(problem.program, operation):
            if operation.operands[0] in zeros:
                size = operand_type(problem.program, operation.operands[2]).elements
                sums[operation.results[0]] = [operation.index], size
            continue
        added = [o for o in read if o in sums and o not in leaving]
        added = [o for o in added if _only_addition(readers.get(o, []), operation.region) is operation]
        size = sum(sums[o][1] for o in added)
        if added and (len(added) == 1 or size < values[operation.results[0]].elements):
            scatters = [index for o in added for index in sums[o][0]]
            sums[operation.results[0]] = scatters, size
            merged |= dict.fromkeys(scatters, operation.index)
    return merged


@once
def scatters_as_one(problem: Problem) -> dict[int, list[int]]:
    """The additions, by index, of merged scatters alone, with these: XLA makes one scatter of them, into zeros, of all
    that they write."""
    merged, makers, found = merged_scatters(problem), problem.program.makers, dict[int, list[int]]()
    for last in {*merged.values()}:
        scatters, stack = list[int](), [*problem.program.operations[last].operands]
        while stack:
            maker = makers.get(operand) if isinstance(operand := stack.pop(), int) else None
            if maker is not None and merged.get(maker.index) == last:
                scatters.append(maker.index)
            elif maker is not None and maker.primitive.name in _ADDITIONS and _is_one_sum(problem, maker, last):
                stack += maker.operands
            else:
                break
        else:
            found[last] = sorted(scatters)
    return found


def _is_one_sum(problem: Problem, addition: Operation, last: int) -> bool:
    """Whether an addition is read by additions alone that lead to a last one."""
    readers = readers_in(problem.program)
    while addition.index != last:
        above = _only_addition(readers.get(addition.results[0], []), addition.region)
        if above is None:
            return False
        addition = above
    return True


def _only_addition(readers: list[Operation], region: int) -> Operation | None:
    alone = len(readers) == 1 and readers[0].primitive.name in _ADDITIONS and readers[0].region == region
    return readers[0] if alone else None


def _is_zero(operand: int | Constant) -> bool:
    return isinstance(operand, Constant) and operand.value == 0


def moves_between_memories(program: Program, operation: Operation) -> bool:
    """Whether an operation copies a tensor from the memory of the host to that of the devices, or back."""
    if operation.primitive.name != "device_put" or not isinstance(operation.operands[0], int):
        return False
    kinds = {program.values[value].memory_kind for value in (operation.operands[0], operation.results[0])}
    return len(kinds) > 1


def _computes_on_the_way(problem: Problem, operation: Operation) -> bool:
    name = operation.primitive.name
    if moves_between_memories(problem.program, operation):
        return False
    if name in _PRODUCTS and not adds_few(problem.program, operation):
        return is_outer(problem.program, operation)
    if name in _SCATTERS:
        return not is_scatter(problem.program, operation)
    if adds_few(problem.program, operation):
        return True
    return problem.choices[operation.index].pointwise or name in _MOVES or name in CUMULATIVE


def fuses_operands(problem: Problem, operation: Operation, position: int = 0) -> bool:
    """Whether an operation computes an operand on the way instead of reading it from memory.

    A scatter does so with its indices and its updates, which it writes into its first operand.
    """
    if operation.primitive is _jax.optimization_barrier or operation.bodies:
        return False
    name = operation.primitive.name
    if is_scatter(problem.program, operation):
        return position > 0
    added_up = name in _READS_ON_THE_WAY or is_sum(problem.program, operation)
    return added_up or _computes_on_the_way(problem, operation)


@once
def pointwise_operations(problem: Problem) -> frozenset[int]:
    """The operations, by index, that compute each element from the elements at its place."""
    return frozenset(index for index, choices in problem.choices.items() if choices.pointwise)


def updates_of(program: Program, fused: Collection[int]) -> frozenset[int]:
    """Operations, by index, that nothing but results of the step is computed from, on the way to these."""
    needed: set[int] = set()
    found = set()
    for operation in reversed(program.operations):
        if operation.region or operation.index not in fused or not needed.isdisjoint(operation.results):
            needed.update(o for o in operation.operands if isinstance(o, int))
        else:
            found.add(operation.index)
    return frozenset(found)
