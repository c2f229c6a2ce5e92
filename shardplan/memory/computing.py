"""What operations do in kernels of XLA:GPU, whatever the sizes: what each reads there, and how long it computes."""

from __future__ import annotations

from typing import NamedTuple

from shardplan.memory.convolutions import spread_again
from shardplan.memory.cycles import cycles_of
from shardplan.memory.fusion import REDUCTIONS, is_view, merged_scatters, pointwise_operations
from shardplan.memory.products import copied_again, is_multiplied, product_operands
from shardplan.memory.rows import cuts_tiles, row_results
from shardplan.memory.sums import adds_few, adds_many, columns_of
from shardplan.once import once
from shardplan.problem import Problem

PARTS = frozenset({"slice", "dynamic_slice", "split", "gather", "squeeze"})
"""Primitives that take parts of their operand."""

_RENAMING = frozenset({"reshape", "squeeze", "expand_dims", "copy", "copy_p", "stop_gradient"})
_MOVING = frozenset({"broadcast_in_dim", "transpose", "rev", "pad", "iota"} | PARTS | _RENAMING)
_BRANCHING = frozenset({"concatenate", "dynamic_update_slice", "reduce_window"} | REDUCTIONS)


class Computing(NamedTuple):
    """What an operation does, whatever its size: the values that it reads, but for what it makes of nothing or of what
    else it reads; cycles for an element, branches, whether it gives back what it reads (``renames``), adds up many
    numbers to one (``sums``), or is left to a library; ``rows`` and ``tiles`` as a kernel has them; ``columns``: how
    many numbers it leaves innermost of those that it sums up, or 0, and how many of these become one then;
    ``copied``: what a kernel copies for a library."""

    read: tuple[int, ...]
    cycles: int
    branches: int
    renames: bool
    sums: bool
    library: bool
    rows: float
    tiles: bool
    columns: tuple[int, int]
    copied: tuple[int, ...]


@once
def computing_of(problem: Problem) -> dict[int, Computing]:
    """What operations without bodies do, by index."""
    program, found, pointwise = problem.program, {}, pointwise_operations(problem)
    rows, operands = row_results(program, pointwise), product_operands(program, pointwise)
    padded = {index for (index, _), read in operands.items() if read.padding > 1}
    again = copied_again(operands) | spread_again(program)
    copies = {place for place, read in operands.items() if read.copied}
    merged = {program.operations[index].results[0] for index in merged_scatters(problem)}
    passed = merged | problem.generated  # a scatter writes into the sum of what else is added, in a kernel of its own
    for operation in program.operations:
        name = operation.primitive.name
        if operation.bodies or not operation.results:
            continue
        library = is_multiplied(program, operation)  # what reads its operand is a kernel that copies it
        renames = name in _RENAMING or is_view(program, operation)
        cycles = 0 if library or renames or name in _MOVING else cycles_of(program, operation)
        branches = int(name in _BRANCHING and not adds_few(program, operation))
        row = rows.get(operation.results[0], 0.0)
        places = [place for place in range(len(operation.operands)) if (operation.index, place) not in again]
        operands_read = [operation.operands[place] for place in (places[:1] if row else places)]
        read = tuple([o for o in operands_read if isinstance(o, int) and o not in passed])
        tiles = cuts_tiles(operation) and operation.index not in padded
        sums = adds_many(program, operation)
        columns = columns_of(program, operation) if sums else (0, 1)
        copied = tuple([o for o in read if (operation.index, operation.operands.index(o)) in copies])
        found[operation.index] = Computing(read, cycles, branches, renames, sums, library, row, tiles, columns, copied)
    return found
