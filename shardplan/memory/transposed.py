"""Values that lie in memory as transposed arguments do, as Fourier transforms ask, or as they are reduced.

XLA moves nothing to transpose an argument: its dimensions lie as they did. So does what meets it element by element,
what that is reduced from and to, and what is gathered with it, unless a product says otherwise: the labels of a
recurrent network, given batch by batch and transposed to meet its outputs step by step, have the loss of each word, the
softmax and its gradient lie batch by batch. The product that made the logits wrote them step by step, and those of the
backward pass read them so: they copy what lies otherwise.

A Fourier transform's library goes along the innermost dimension, of what it reads and what it makes. What is between
these and products lies so too, whatever the program says; kernels move what the products wrote, in tiles, and what they
compute of it element by element. Others read each element by itself, if they are fused with these, which takes much
longer: so the parts of a short filter along the sequence are stored, before a long one (`shardplan.memory.priorities`).
Sums of products these still add up themselves; a kernel stores such a sum as what is computed of it lies, too. What a
product reads as it is written is moved back by the kernel that computes it, into which nothing is fused that moves
something (`shardplan.memory.moving`): the hyperbolic tangents of activations are stored.

A number is spread once for all that read it in one shape and compute element by element: all of this lies alike.

Arguments and results lie as they are written, and what meets them element by element. What is reduced to that lies with
the reduced dimensions innermost, for threads that run together to reduce side by side, if these are 32 at least: a
maximum over the neighbours of points, of which the gradients are computed where neighbours lie innermost, too.

>>> import jax, jax.numpy as jnp
>>> from shardplan.tracing import trace_program
>>> shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 64), (6, 4, 8), (4, 6))]
>>> program = trace_program(lambda w, x, y: jnp.max(jnp.sum(jnp.exp(x @ w), axis=2) - y.T), shapes, {})
>>> pointwise = [o.index for o in program.operations if o.primitive.name in ("exp", "sub")]
>>> orders, *_ = lying_as_met(program, pointwise, ())
>>> [(program.makers[value].primitive.name, orders[value]) for value in sorted(orders)]
[('exp', (1, 0, 2)), ('reduce_sum', (1, 0)), ('transpose', (1, 0)), ('sub', (1, 0))]
>>> points = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((6, 32, 8), (8, 8), (6, 8))]
>>> program = trace_program(lambda x, w, y: jnp.max(jnp.sin(x @ w), axis=1) * y, points, {})
>>> lying_as_met(program, [o.index for o in program.operations if o.primitive.name in ("sin", "mul")], ())[0]
{4: (0, 2, 1)}
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Sequence

from jax.lax import GatherScatterMode

from shardplan.program import Operation, Program
from shardplan.strategy import operand_type

_Order = tuple[int, ...]

_CUTTING = frozenset({"slice", "rev", "pad", "copy", "copy_p", "split", "concatenate"})
"""What leaves the order of the dimensions as it is, besides what computes element by element."""

_WARP = 32
"""How many threads of a GPU reduce together."""

_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"})
_VIEWS = frozenset({"reshape", "squeeze", "expand_dims", "stop_gradient", "broadcast_in_dim", "gather"})


def lying_as_met(
    program: Program, pointwise: Collection[int], known: Collection[int]
) -> tuple[dict[int, _Order], dict[int, _Order], set[int]]:
    """How values lie that meet transposed arguments, Fourier transforms or what is reduced to what lies as arguments
    do, their dimensions from the outermost inwards; those of them that a kernel moves from where a product wrote them;
    and the sums that products add up. What is ``known`` lies otherwise. ``pointwise`` are the operations, by index,
    that compute element by element."""
    meeting, found = _Meeting(program, pointwise), dict[int, _Order]()
    plain = meeting.as_they_are()
    asked = {v: _written(program, v) for o in program.operations if o.primitive.name == "fft" for v in _values_of(o)}
    for begun in (asked, _transposed(program, plain), _reduced(program, plain)):
        left = [value for value in begun if value not in known and value not in found]
        found |= {value: begun[value] for value in left}
        while left:
            value = left.pop()
            for other, order in meeting.beside(value, found[value]):
                if other not in found and other not in known and other not in plain:
                    found[other] = order
                    left.append(other)
    orders = {value: order for value, order in found.items() if [*order] != sorted(order)}
    added = meeting.added(orders)
    return orders, {v: order for v, order in orders.items() if meeting.is_moved(v, order, added)}, added


def _transposed(program: Program, plain: Collection[int]) -> dict[int, _Order]:
    """How transpositions lie of what lies as arguments do."""
    orders = {}
    for operation in program.operations:
        if operation.primitive.name == "transpose" and operation.operands[0] in plain:
            permutation = operation.params["permutation"]
            orders[operation.results[0]] = tuple(permutation.index(dim) for dim in range(len(permutation)))
    return orders


def _reduced(program: Program, plain: Collection[int]) -> dict[int, _Order]:
    """How values lie that are reduced to what lies as arguments do: what a warp reduces is innermost."""
    orders = {}
    for operation in program.operations:
        if operation.primitive.name not in _REDUCTIONS:
            continue
        read, result = operation.operands[0], operation.results[0]
        if result in plain and isinstance(read, int):
            axes, shape = operation.params["axes"], program.values[read].shape
            kept = [dim for dim in range(len(shape)) if dim not in axes]
            length = math.prod(shape[dim] for dim in axes if dim)  # devices split the first dimension, of examples
            if read not in plain and len(kept) > 1 and length >= _WARP:
                orders[read] = (*kept, *axes)
    return orders


def _values_of(operation: Operation) -> list[int]:
    return [*operation.results, *(o for o in operation.operands if isinstance(o, int))]


def _written(program: Program, value: int) -> _Order:
    return tuple(range(len(program.values[value].shape)))


class _Meeting:
    """Which values lie alike, though their dimensions may not be the same."""

    def __init__(self, program: Program, pointwise: Collection[int]) -> None:
        self._program, self._pointwise, self._makers = program, pointwise, program.makers
        self._readers: dict[int, list[Operation]] = {}
        for operation in program.operations:
            for operand in operation.operands:
                if isinstance(operand, int) and not operation.bodies:
                    self._readers.setdefault(operand, []).append(operation)
        self._numbers: dict[int, list[Hashable]] = {}  # per operation, by index, those that it reads at each element
        self._alike: dict[Hashable, list[int]] = {}  # per number, what is computed of it
        for index in sorted(pointwise):
            operation = program.operations[index]
            shape = program.values[operation.results[0]].shape
            constants = [o for o in operation.operands if not isinstance(o, int)]
            self._numbers[index] = [(operation.region, shape, str(o.aval), str(o.value)) for o in constants]
            for number in self._numbers[index]:
                self._alike.setdefault(number, []).append(operation.results[0])

    def as_they_are(self) -> set[int]:
        """Arguments, results of the program, and what meets them element by element or is part of them."""
        found = {*self._program.inputs, *(o for o in self._program.outputs if isinstance(o, int))}
        left, seen = sorted(found), set[Hashable]()
        while left:
            value = left.pop()
            for operation in self._around(value):
                shape = self._program.values[value].shape
                like = operation.index, shape if operation.index in self._pointwise else len(shape)
                if like not in seen and self._says_an_order(operation, shape):
                    seen.add(like)
                    alike = {other for other in _values_of(operation) if self._is_alike(operation, shape, other)}
                    left.extend(sorted(alike - found))
                    found |= alike
        return found

    def _says_an_order(self, operation: Operation, shape: Sequence[int]) -> bool:
        """Whether an operation on a value of this shape lets others lie as that does; a vector says nothing of an
        order."""
        return len(shape) > 1 and (
            operation.index in self._pointwise or operation.primitive.name in _CUTTING | {"gather"}
        )

    def _is_alike(self, operation: Operation, shape: Sequence[int], other: int) -> bool:
        """Whether a value lies as written if one of this shape does, which an operation reads or makes."""
        own = self._program.values[other].shape
        if operation.index in self._pointwise:
            return own == shape
        return operation.primitive.name == "gather" or len(own) == len(shape)

    def beside(self, value: int, order: _Order) -> Iterator[tuple[int, _Order]]:
        """The values that lie as one does, and how; a number, or a vector, says nothing of an order."""
        if not self._has_order(value):
            return
        for operation in self._around(value):
            for other in (*operation.operands, *operation.results):
                if isinstance(other, int) and other != value and self._has_order(other) and self._is_free(other):
                    found = self._through(operation, (value, other), order)
                    if found is not None:
                        yield other, found
            for number in self._numbers.get(operation.index, ()):  # the first that is met says how all lie
                yield from ((other, order) for other in self._alike.pop(number, ()) if self._is_free(other))

    def _around(self, value: int) -> list[Operation]:
        """The operations that read or make a value."""
        return [*self._readers.get(value, ()), *([self._makers[value]] if value in self._makers else ())]

    def _has_order(self, value: int) -> bool:
        """Whether several dimensions of a value are larger than 1."""
        return sum(size > 1 for size in self._program.values[value].shape) > 1

    def is_moved(self, value: int, order: _Order, added: Collection[int]) -> bool:
        """Whether a kernel computes a value from what a product wrote with another dimension innermost. What is
        ``added`` products have written too."""
        maker, shape = self._makers[value], self._program.values[value].shape
        if maker.index not in self._pointwise or maker.primitive.name == "transpose" or value in added:
            return False
        innermost = [dim for dim in order if shape[dim] > 1][-1:]
        turns = innermost != [dim for dim, size in enumerate(shape) if size > 1][-1:]
        return turns and any(self._is_of_product(operand, added) for operand in self._whole(maker))

    def added(self, orders: Collection[int]) -> set[int]:
        """The sums of products and biases, or what lies as written, which products add up themselves, of those that lie
        as ``orders`` say."""
        found = set[int]()
        for value in sorted(orders, key=lambda value: self._makers[value].index):
            maker = self._makers[value]
            whole = self._whole(maker) if maker.primitive.name in ("add", "add_any") else []
            written = all(operand not in orders or operand in found for operand in whole)
            if written and any(self._is_of_product(operand, found, ()) for operand in whole):
                found.add(value)
        return found

    def _is_of_product(
        self, value: int, added: Collection[int], through: Collection[str] = _CUTTING - {"concatenate"}
    ) -> bool:
        """Whether a product wrote what a value is part of."""
        while (made := self._makers.get(value)) is not None and value not in added and made.primitive.name in through:
            [value, *_] = (o for o in made.operands if isinstance(o, int))
        return value in added or (made is not None and made.primitive.name == "dot_general")

    def _whole(self, operation: Operation) -> list[int]:
        values, shape = self._program.values, self._program.values[operation.results[0]].shape
        return [o for o in operation.operands if isinstance(o, int) and values[o].shape == shape]

    def _is_free(self, value: int) -> bool:
        """Whether a value lies as what it meets does: not what libraries, loops, scatters and the like write."""
        maker = self._makers.get(value)
        if maker is None or maker.bodies:
            return False
        name = maker.primitive.name
        if name == "gather":
            return self._takes_elements(maker)
        return maker.index in self._pointwise or name in _REDUCTIONS | _VIEWS | _CUTTING or name == "transpose"

    def _through(self, operation: Operation, pair: tuple[int, int], order: _Order) -> _Order | None:
        """How the other one of two values lies, which an operation reads or makes; None if as nothing says."""
        own, other = (self._program.values[value].shape for value in pair)
        name, params = operation.primitive.name, operation.params
        if name == "transpose":
            permutation = params["permutation"]
            made = pair[1] in operation.results
            return tuple(permutation.index(dim) if made else permutation[dim] for dim in order)
        if operation.index in self._pointwise:
            return order if own == other else None
        if name in _CUTTING:
            return order if len(own) == len(other) else None
        if name in _REDUCTIONS:
            axes, reduced = tuple(params["axes"]), pair[0] in operation.results
            kept = [dim for dim in range(len(other if reduced else own)) if dim not in axes]
            return (
                (*(kept[dim] for dim in order), *axes) if reduced else tuple(kept.index(d) for d in order if d in kept)
            )
        if name in _VIEWS and (name != "gather" or self._is_masked(operation, pair)):
            return _without_ones(own, other, order)
        return None

    def _takes_elements(self, gather: Operation) -> bool:
        """Whether a gather takes single elements."""
        taken, indices = self._program.values[gather.results[0]], operand_type(self._program, gather.operands[1])
        return taken.elements * indices.shape[-1] == indices.elements or self._takes_all(gather)

    def _takes_all(self, gather: Operation) -> bool:
        """Whether a gather takes the only elements there are."""
        taken, read = self._program.values[gather.results[0]], operand_type(self._program, gather.operands[0])
        return taken.elements == read.elements

    def _is_masked(self, gather: Operation, pair: tuple[int, int]) -> bool:
        """Whether a gather takes the only elements there are, or is masked where indices lie outside, which its result
        then meets."""
        if gather.operands[0] in pair:
            return self._takes_all(gather)
        return gather.params["mode"] == GatherScatterMode.FILL_OR_DROP


def _without_ones(own: Sequence[int], other: Sequence[int], order: _Order) -> _Order | None:
    """How a value lies that is another one with other dimensions of one element."""
    sides = [[dim for dim, size in enumerate(shape) if size > 1] for shape in (own, other)]
    if [own[dim] for dim in sides[0]] != [other[dim] for dim in sides[1]]:
        return None
    ones = (dim for dim, size in enumerate(other) if size == 1)
    return (*(sides[1][sides[0].index(dim)] for dim in order if own[dim] > 1), *ones)
