"""What operations do in kernels of XLA:GPU, whatever the sizes: what each reads there, and how long it computes."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from shardplan import _jax
from shardplan.memory.coalescing import is_read_apart
from shardplan.memory.convolutions import spread_again
from shardplan.memory.cycles import cycles_of
from shardplan.memory.flattened import flattened
from shardplan.memory.fusion import REDUCTIONS, is_view, merged_scatters, pointwise_operations, readers_in
from shardplan.memory.lying import lying_of
from shardplan.memory.products import copied_again, is_multiplied, product_operands
from shardplan.memory.rows import cuts_tiles, row_results
from shardplan.memory.sums import adds_few, adds_many, columns_of
from shardplan.once import once
from shardplan.problem import Problem
from shardplan.program import Constant, Operation, Program
from shardplan.strategy import operand_type

PARTS = frozenset({"slice", "dynamic_slice", "split", "gather", "squeeze"})
"""Primitives that take parts of their operand."""

_RENAMING = frozenset({"reshape", "squeeze", "expand_dims", "copy", "copy_p", "stop_gradient"})
_MOVING = frozenset({"broadcast_in_dim", "transpose", "rev", "pad", "iota"} | PARTS | _RENAMING)
_BRANCHING = frozenset({"concatenate", "dynamic_update_slice", "reduce_window"} | REDUCTIONS)

_VIEWED = {"erfc": 20}
"""How often a kernel goes through a view of a 16-bit operand, about, of which an operation is computed in float32 by
many others: each of those that read the operand reads a view of its own, and computes anew what that is computed from.
So often it is said by XLA's count of what fusing the operand takes."""


class Computing(NamedTuple):
    """What an operation does, whatever its size: the values that it reads, but for what it makes of nothing or of what
    else it reads; cycles for an element, branches, whether it gives back what it reads (``renames``), adds up many
    numbers to one (``sums``), or is left to a library; ``rows`` and ``tiles`` as a kernel has them; ``columns``: how
    many numbers threads that sum up together leave innermost, 0 where they sum up rows, and how many of these become
    one then; ``views``: how often it reads a view of its operand, or 0; ``numbers``: how many operands are one number;
    ``generated``: the bytes of each element, and of all, of what else it reads that depends on nothing (a mask, say),
    and cycles for an element of that;
    ``copied``: what a kernel copies for a library, ``apart``: reading each element of it by itself, ``through``: what
    it goes through element by element in a view of its own (`shardplan.memory.flattened`)."""

    read: tuple[int, ...]
    cycles: int
    branches: int
    renames: bool
    sums: bool
    library: bool
    rows: float
    tiles: bool
    columns: tuple[int, int] | None
    views: int
    numbers: int
    generated: tuple[tuple[int, int, int], ...]
    copied: tuple[int, ...]
    apart: tuple[int, ...]
    through: tuple[int, ...]

    @property
    def values(self) -> tuple[tuple[int, ...], ...]:
        """The values that it reads, of some kinds."""
        return self.read, self.copied, self.apart, self.through

    @property
    def others(self) -> tuple[object, ...]:
        """What else there is to say."""
        return self[1:-3]


@once
def computing_of(problem: Problem, reshaped: frozenset[int] = frozenset()) -> dict[int, Computing]:
    """What operations without bodies do, by index; ``reshaped`` as in `shardplan.memory.products`."""
    program, found, pointwise = problem.program, {}, pointwise_operations(problem)
    rows, operands = row_results(program, pointwise), product_operands(program, pointwise, reshaped)
    padded = {index for (index, _), read in operands.items() if read.padding > 1}
    again = copied_again(operands) | spread_again(program)
    lying = lying_of(program, pointwise).orders
    copies = {
        place: is_read_apart(program, read.value, read.order, lying.get(read.value))
        for place, read in operands.items()
        if read.copied
    }
    merged = {program.operations[index].results[0] for index in merged_scatters(problem)}
    viewed, flat, scaled = _viewed(program, pointwise), flattened(problem), _scaled_elsewhere(problem)
    passed = merged | problem.generated  # a scatter writes into the sum of what else is added, in a kernel of its own
    for operation in program.operations:
        name = operation.primitive.name
        if operation.bodies or not operation.results:
            continue
        library = is_multiplied(program, operation)  # what reads its operand is a kernel that copies it
        renames = name in _RENAMING or is_view(program, operation) or operation.index in scaled
        cycles = 0 if library or renames or name in _MOVING else cycles_of(program, operation)
        branches = int(name in _BRANCHING and not adds_few(program, operation))
        row = rows.get(operation.results[0], 0.0)
        places = [place for place in range(len(operation.operands)) if (operation.index, place) not in again]
        operands_read = [operation.operands[place] for place in (places[:1] if row else places)]
        read = tuple([o for o in operands_read if isinstance(o, int) and o not in passed])
        tiles = cuts_tiles(operation) and operation.index not in padded
        sums = adds_many(program, operation)
        lies = lying.get(read[0]) if read and name in REDUCTIONS else None
        columns = columns_of(program, operation, lies) if sums and not adds_few(program, operation) else None
        copied = tuple([o for o in read if (operation.index, operation.operands.index(o)) in copies])
        apart = tuple([o for o in copied if copies[operation.index, operation.operands.index(o)]])
        views = _VIEWED.get(name, 0) if read and read[0] in viewed else 0
        by_element = operation.index in pointwise and name != "broadcast_in_dim" and operation.results[0] not in flat
        through = tuple([o for o in read if by_element and o in flat])
        numbers, generated = (0, ()) if operation.index in scaled else _of_nothing(problem, operation)
        found[operation.index] = Computing(
            *(read, cycles, branches, renames, sums, library, row, tiles, columns, views),
            *(numbers, generated, copied, apart, through),
        )
    return found


@once
def _scaled_elsewhere(problem: Problem) -> frozenset[int]:
    """Multiplications by one number, by index, whose results are all multiplied by something that is spread: XLA
    multiplies that by the number, before it spreads it."""
    program, found = problem.program, set[int]()
    readers = readers_in(program)
    for operation in program.operations:
        if operation.primitive.name != "mul":
            continue
        [result] = operation.results
        numbers = [isinstance(_generated(problem, operand), Constant) for operand in operation.operands]
        reading = readers.get(result, ())
        if sum(numbers) == 1 and reading and all(_multiplies_spread(problem, r, result) for r in reading):
            found.add(operation.index)
    return frozenset(found)


def _multiplies_spread(problem: Problem, operation: Operation, value: int) -> bool:
    """Whether an operation multiplies a value by something smaller, which is spread for that."""
    program = problem.program
    other = next((o for o in operation.operands if isinstance(o, int) and o != value), None)
    if operation.primitive.name != "mul" or other is None:
        return False
    maker = program.makers.get(other)
    if maker is not None and maker.primitive.name == "broadcast_in_dim" and isinstance(maker.operands[0], int):
        other = maker.operands[0]
    return 1 < program.values[other].elements < program.values[value].elements


def _of_nothing(problem: Problem, operation: Operation) -> tuple[int, tuple[tuple[int, int, int], ...]]:
    """The operands that depend on nothing: how many are one number, and of others what `Computing` has."""
    program, spread = problem.program, [_generated(problem, operand) for operand in operation.operands]
    masks = [o for o in spread if isinstance(o, int) and program.values[o].elements > 1]
    numbers = sum([o is not None for o in spread]) - len(masks)
    return numbers, tuple([_reading_generated(program, mask) for mask in masks])


def _generated(problem: Problem, operand: int | Constant) -> int | Constant | None:
    """What an operand that depends on nothing is spread from, a value or a number; None for other operands."""
    makers = problem.program.makers
    while isinstance(operand, int) and operand in problem.generated:
        maker = makers[operand]
        if maker.primitive.name != "broadcast_in_dim":
            return operand
        operand = maker.operands[0]
    return None if isinstance(operand, int) else operand


@once
def _reading_generated(program: Program, value: int) -> tuple[int, int, int]:
    """Bytes of each element of a value that depends on nothing, and of all, and cycles for an element."""
    tensor, makers = program.values[value], program.makers
    made, stack, cycles = {value}, [value], 0
    while stack:
        maker = makers[stack.pop()]
        cycles += 0 if maker.primitive.name in _MOVING else cycles_of(program, maker)
        found = {o for o in maker.operands if isinstance(o, int) and program.values[o].elements > 1} - made
        made |= found
        stack += found
    return _jax.item_bytes(tensor.dtype), tensor.total_bytes, cycles


@once
def _viewed(program: Program, pointwise: Collection[int]) -> frozenset[int]:
    """The values in 16-bit numbers that XLA computes as matrices, and views as what they are where these are converted:
    products' results with rows, columns or batches of several dimensions, and what is computed from one of them alone,
    element by element (times a number, say, or with a bias)."""
    found, values, makers = set[int](), program.values, program.makers
    for operation in program.operations:
        if len(operation.results) != 1 or _jax.item_bytes(values[operation.results[0]].dtype) != 2:
            continue
        if is_multiplied(program, operation):
            found.update(operation.results if _joins_dimensions(program, operation) else ())
        elif operation.index in pointwise and operation.primitive.name not in _VIEWED:
            made = values[operation.results[0]]
            whole = {o for o in operation.operands if isinstance(o, int) and values[o].shape == made.shape}
            whole = {o for o in whole if o not in makers or makers[o].primitive.name != "broadcast_in_dim"}
            alike = [values[o].dtype == made.dtype for o in whole & found]
            found.update(operation.results if len(whole) == 1 and any(alike) else ())
    return frozenset(found)


def _joins_dimensions(program: Program, product: Operation) -> bool:
    """Whether rows, columns or batches of a product have several dimensions."""
    contracted, batch = product.params["dimension_numbers"]
    ranks = [len(operand_type(program, operand).shape) for operand in product.operands]
    free = [rank - len(c) - len(b) for rank, c, b in zip(ranks, contracted, batch, strict=True)]
    return max(*free, len(batch[0])) > 1
