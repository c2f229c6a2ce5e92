"""What XLA:GPU stores for operations that data tell where to read or write: places in full, and what it sorts.

A gather or a scatter over batch dimensions reads one number per place and says nothing of these dimensions. XLA makes
it one without them: its places have one number more for each, int32, and are stored for scatters, and where several
operations read them (`jnp.take_along_axis` and its gradient), from the first to the last of these.

A sort works in a copy of its keys. For the largest of a row (`jax.lax.top_k`) XLA sorts all of it, with the places,
unless they are few of many (16 at most, of 1024 at least), which a kernel of its own finds. The keys then lie in the
memory of what is sorted, if nothing reads that later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardplan import _jax
from shardplan.memory.repeated import repeated_in
from shardplan.once import once
from shardplan.program import Operation, Program

if TYPE_CHECKING:
    from shardplan.memory.liveness import Lifetimes

PLACES = 1
"""The position of the places among the operands of gathers and scatters."""

_MOST_SELECTED, _FEWEST_SEARCHED = 16, 1024
"""So many at most of so many at least XLA:GPU selects without sorting."""

_INDEX_BYTES = 4


def stored_beside(lifetimes: Lifetimes, program: Program) -> Iterator[tuple[Operation, int, float, tuple[int, int]]]:
    """Operations that data tell where to read or write, each with the position of an operand, how many times as large
    as this what is stored for them is, and from which to which place of the order."""
    for operations, times in _places_in_full(program):
        places = sorted(lifetimes.place[operation.index] for operation in operations)
        yield lifetimes.order[places[0]], PLACES, times, (places[0], places[-1])
    for operation in program.operations:
        name, place = operation.primitive.name, lifetimes.place[operation.index]
        operand = operation.operands[0] if operation.operands else None
        if name == "sort" and operation.params["num_keys"] == 1:
            yield operation, 0, 1.0, (place, place)
        elif name == "top_k" and isinstance(operand, int) and _is_sorted(program, operation, operand):
            lifetime = lifetimes.held.get(operand)
            kept = lifetime is None or lifetime.end > place or operand not in program.makers
            width = _jax.item_bytes(program.values[operand].dtype)
            yield operation, 0, (_INDEX_BYTES + kept * width) / width, (place, place)


def _is_sorted(program: Program, operation: Operation, operand: int) -> bool:
    """Whether XLA sorts to find the largest of a row."""
    return operation.params["k"] > _MOST_SELECTED or program.values[operand].shape[-1] < _FEWEST_SEARCHED


@once
def _places_in_full(program: Program) -> list[tuple[list[Operation], float]]:
    """The gathers and scatters over batch dimensions for which places are stored in full, together those that read the
    same, and how many times as large these are as they are in the program."""
    same, found = repeated_in(program), dict[tuple[int, int], list[Operation]]()
    for operation in program.operations:
        numbers = operation.params.get("dimension_numbers")
        batch = len(getattr(numbers, "operand_batching_dims", ()))
        places = operation.operands[PLACES] if batch else None
        if isinstance(places, int):
            found.setdefault((same.get(places, places), batch), []).append(operation)
    stored = []
    for (places, batch), operations in found.items():
        if len(operations) > 1 or operations[0].primitive.name != "gather":
            tensor = program.values[places]
            numbers = tensor.shape[-1] or 1
            times = _INDEX_BYTES * (numbers + batch) / (numbers * _jax.item_bytes(tensor.dtype))
            stored.append((operations, times))
    return stored
