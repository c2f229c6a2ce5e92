"""Values that lie in memory as transposed arguments do.

XLA moves nothing to transpose an argument: its dimensions lie as they did. So does what meets it element by element,
what that is reduced from and to, and what is gathered with it, unless a product says otherwise: the labels of a
recurrent network, given batch by batch and transposed to meet its outputs step by step, have the loss of each word, the
softmax and its gradient lie batch by batch. The product that made the logits wrote them step by step, and those of the
backward pass read them so: they copy what lies otherwise.

>>> import jax, jax.numpy as jnp
>>> from shardplan.tracing import trace_program
>>> shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 64), (6, 4, 8), (4, 6))]
>>> program = trace_program(lambda w, x, wanted: jnp.sum(jnp.exp(x @ w), axis=2) - wanted.T, shapes, {})
>>> pointwise = [o.index for o in program.operations if o.primitive.name in ("exp", "sub")]
>>> orders = lying_as_arguments(program, pointwise, ())
>>> [(program.makers[value].primitive.name, orders[value]) for value in sorted(orders)]
[('exp', (1, 0, 2)), ('reduce_sum', (1, 0)), ('transpose', (1, 0)), ('sub', (1, 0))]
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from jax.lax import GatherScatterMode

from shardplan.program import Operation, Program
from shardplan.strategy import operand_type

_Order = tuple[int, ...]

_CUTTING = frozenset({"slice", "rev", "pad", "copy", "copy_p"})
"""What leaves the order of an argument's dimensions as it is, besides what computes element by element."""

_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"})
_VIEWS = frozenset({"reshape", "squeeze", "expand_dims", "stop_gradient", "broadcast_in_dim", "gather"})


def lying_as_arguments(program: Program, pointwise: Collection[int], known: Collection[int]) -> dict[int, _Order]:
    """How values lie that meet transposed arguments, their dimensions from the outermost inwards; those that are
    ``known`` lie otherwise. ``pointwise`` are the operations, by index, that compute element by element."""
    found, plain = dict[int, _Order](), set(program.inputs)
    for operation in program.operations:
        read = operation.operands[0] if operation.operands else None
        if isinstance(read, int) and read in plain and len(operation.results) == 1:
            if operation.primitive.name == "transpose" and operation.results[0] not in known:
                permutation = operation.params["permutation"]
                found[operation.results[0]] = tuple(permutation.index(dim) for dim in range(len(permutation)))
            elif operation.primitive.name in _CUTTING or operation.index in pointwise:
                plain.update(operation.results)
    if not found:
        return found
    meeting, left = _Meeting(program, pointwise), [*found]
    while left:
        value = left.pop()
        for other, order in meeting.beside(value, found[value]):
            if other not in found and other not in known and other not in plain:
                found[other] = order
                left.append(other)
    return {value: order for value, order in found.items() if [*order] != sorted(order)}


class _Meeting:
    """Which values lie alike, though their dimensions may not be the same."""

    def __init__(self, program: Program, pointwise: Collection[int]) -> None:
        self._program, self._pointwise, self._makers = program, pointwise, program.makers
        self._readers: dict[int, list[Operation]] = {}
        for operation in program.operations:
            for operand in operation.operands:
                if isinstance(operand, int) and len(operation.results) == 1:
                    self._readers.setdefault(operand, []).append(operation)

    def beside(self, value: int, order: _Order) -> Iterator[tuple[int, _Order]]:
        """The values that lie as one does, and how."""
        through = [*self._readers.get(value, ()), *([self._makers[value]] if value in self._makers else ())]
        for operation in through:
            for other in (*operation.operands, *operation.results):
                if isinstance(other, int) and other != value and self._is_free(other):
                    found = self._through(operation, (value, other), order)
                    if found is not None:
                        yield other, found

    def _is_free(self, value: int) -> bool:
        """Whether a value lies as what it meets does: not what libraries, loops, scatters and the like write."""
        maker = self._makers.get(value)
        if maker is None or len(maker.results) != 1:
            return False
        name = maker.primitive.name
        return maker.index in self._pointwise or name in _REDUCTIONS or name in _VIEWS or name == "transpose"

    def _through(self, operation: Operation, pair: tuple[int, int], order: _Order) -> _Order | None:
        """How the other one of two values lies, which an operation reads or makes; None if as nothing says."""
        own, other = (self._program.values[value].shape for value in pair)
        name, params = operation.primitive.name, operation.params
        if operation.index in self._pointwise:
            return order if own == other else None
        if name == "transpose":
            permutation = params["permutation"]
            made = pair[1] in operation.results
            return tuple(permutation.index(dim) if made else permutation[dim] for dim in order)
        if name in _REDUCTIONS:
            axes = tuple(params["axes"])
            kept = [
                dim for dim in range(len(axes) + len(own if pair[0] in operation.results else other)) if dim not in axes
            ]
            if pair[0] in operation.results:
                return (*(kept[dim] for dim in order), *axes)
            return tuple(kept.index(dim) for dim in order if dim in kept)
        if name in _VIEWS and (name != "gather" or self._is_masked(operation, pair)):
            return _without_ones(own, other, order)
        return None

    def _is_masked(self, gather: Operation, pair: tuple[int, int]) -> bool:
        """Whether a gather takes the only elements there are, or is masked where indices lie outside, which its result
        then meets."""
        if gather.operands[0] in pair:
            return (
                operand_type(self._program, gather.operands[0]).elements
                == self._program.values[gather.results[0]].elements
            )
        return gather.params["mode"] == GatherScatterMode.FILL_OR_DROP


def _without_ones(own: Sequence[int], other: Sequence[int], order: _Order) -> _Order | None:
    """How a value lies that is another one with other dimensions of one element."""
    sides = [[dim for dim, size in enumerate(shape) if size > 1] for shape in (own, other)]
    if [own[dim] for dim in sides[0]] != [other[dim] for dim in sides[1]]:
        return None
    ones = (dim for dim, size in enumerate(other) if size == 1)
    return (*(sides[1][sides[0].index(dim)] for dim in order if own[dim] > 1), *ones)
