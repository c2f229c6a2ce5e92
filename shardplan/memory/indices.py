"""What XLA:GPU stores for operations that data tell where to read or write: places in full, and what it sorts.

A gather or a scatter over batch dimensions reads one number per place and says nothing of these dimensions. XLA makes
it one without them: its places have one number more for each, int32, and are stored where several operations read them
(`jnp.take_along_axis` and its gradient), from the first to the last of these.

A sort works in a copy of its keys, unless nothing reads what is sorted later: then it works in that. For the largest of
a row (`jax.lax.top_k`) XLA sorts all of it, with the places, unless they are few of many (16 at most, of 1024 at
least), which a kernel of its own finds. A sort that finds places too (`jnp.argsort` as well) is one kernel with what
makes these: it copies its keys in any case, unless it computes them on the way.
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


def places_and_keys(lifetimes: Lifetimes, program: Program) -> Iterator[tuple[Operation, int, float, tuple[int, int]]]:
    """Operations that data tell where to read or write, each with the position of an operand, how many times as large
    as this what is stored for them is, and from which to which place of the order."""
    for operations, times in _places_in_full(program):
        places = sorted(lifetimes.place[operation.index] for operation in operations)
        yield lifetimes.order[places[0]], PLACES, times, (places[0], places[-1])
    for operation, operand in _sorting(program):
        place, lifetime = lifetimes.place[operation.index], lifetimes.held.get(operand)
        width = _jax.item_bytes(program.values[operand].dtype)
        maker = program.makers.get(operand)
        kept = lifetime is None or lifetime.end > place or operand in program.leaving or maker is None
        kept |= maker is not None and maker.index not in lifetimes.fused and _finds_places(program, operation)
        found = kept * width + _INDEX_BYTES * (operation.primitive.name == "top_k")
        if found:
            yield operation, 0, found / width, (place, place)


@once
def _sorting(program: Program) -> list[tuple[Operation, int]]:
    """The operations for which XLA sorts their first operand, with this."""
    operands = ((o, o.operands[0]) for o in program.operations if o.operands)
    return [(o, operand) for o, operand in operands if isinstance(operand, int) and _sorts(program, o, operand)]


def _sorts(program: Program, operation: Operation, operand: int) -> bool:
    """Whether XLA sorts the first operand by itself, also to find the largest of a row."""
    if operation.primitive.name == "sort":
        return operation.params["num_keys"] == 1
    few = operation.params.get("k", 0) <= _MOST_SELECTED and program.values[operand].shape[-1:] >= (_FEWEST_SEARCHED,)
    return operation.primitive.name == "top_k" and not few


def _finds_places(program: Program, operation: Operation) -> bool:
    """Whether a sort moves the numbers of the places with its keys."""
    makers = [program.makers.get(operand) for operand in operation.operands[1:] if isinstance(operand, int)]
    return operation.primitive.name == "top_k" or any(maker and maker.primitive.name == "iota" for maker in makers)


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
        if len(operations) > 1:
            tensor = program.values[places]
            numbers = tensor.shape[-1] or 1
            times = _INDEX_BYTES * (numbers + batch) / (numbers * _jax.item_bytes(tensor.dtype))
            stored.append((operations, times))
    return stored
