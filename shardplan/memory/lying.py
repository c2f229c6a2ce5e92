"""In which order the dimensions of values lie in memory, and which values are moved because others lie otherwise.

A transposition of a product's result moves nothing where the product goes over batch dimensions, and what is computed
from it element by element lies as it does. Where what comes from two such products meets and lies in two orders, that
of the earlier product goes for all that is computed element by element, also before they meet, and what comes from the
other one is moved: into memory of its own, where several kernels read it, unless each of these can turn it in tiles
(`shardplan.memory.coalescing`). So the gradients of the scores of heads that share their keys are. The result of a
product without batch dimensions (a bias for attention's scores, made from features of their pairs) is asked for in no
order, and lies as what it meets does: its transposition moves it. Where no product says how values lie, transposed
arguments, Fourier transforms and reductions may (`shardplan.memory.transposed`).

>>> import jax, jax.numpy as jnp, shardplan
>>> def step(x, w):
...     first, second = jnp.swapaxes(x @ w, 1, 2), w @ x
...     return jnp.sum(first * second), jnp.max(second)
>>> squares = jax.ShapeDtypeStruct((4, 8, 8), "float32")
>>> program = shardplan.plan(step, 1, squares, squares).program
>>> pointwise = frozenset(o.index for o in program.operations if o.primitive.name == "mul")
>>> lying = lying_of(program, pointwise)
>>> [(program.operations[lying.makers[value]].primitive.name, order) for value, order in lying.orders.items()]
[('transpose', (0, 2, 1)), ('mul', (0, 2, 1))]
>>> [program.operations[lying.makers[value]].primitive.name for value in lying.turned]
['dot_general']
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shardplan.memory.transposed import lying_as_met
from shardplan.once import once
from shardplan.program import Operation, Program

PRODUCT = "dot_general"


@dataclass(frozen=True, slots=True)
class Lying:
    """Per value whose dimensions lie otherwise than they are written, these from the outermost inwards (``orders``);
    what products made and kernels move (``turned``), with the order that it is moved to; what kernels compute from what
    products wrote in another order, for what no product is (``moved``, `shardplan.memory.transposed`), and the sums of
    products that do not lie as these wrote them (``added``); the index of the operation that makes each value
    (``makers``)."""

    orders: dict[int, tuple[int, ...]]
    turned: dict[int, tuple[int, ...]]
    moved: frozenset[int]
    added: frozenset[int]
    makers: dict[int, int]


@once
def lying_of(program: Program, pointwise: Collection[int]) -> Lying:
    """How values lie. ``pointwise`` are the operations, by index, that compute element by element."""
    parts = _Parts(program)
    for operation in program.operations:
        read = operation.operands[0] if operation.operands else None
        if operation.primitive.name == PRODUCT and _is_batched(operation):
            parts.leave(operation.results[0], range(len(program.values[operation.results[0]].shape)))
        elif operation.primitive.name == "transpose" and isinstance(read, int) and parts.order(read) is not None:
            parts.turn(read, operation)
        elif operation.index in pointwise and len(operation.results) == 1:
            parts.compute(operation)
    makers = {result: operation.index for operation in program.operations for result in operation.results}
    met, moved, added = lying_as_met(program, pointwise, parts.known())
    return Lying(met | parts.orders(), parts.turned(), frozenset(moved), frozenset(added), makers)


def lies_in(program: Program, orders: Mapping[int, Sequence[int]], value: int) -> int:
    """The value in whose memory another one lies: what it is a transposition of that moves nothing, or itself."""
    while (maker := program.makers.get(value)) is not None and maker.primitive.name == "transpose":
        read, permutation, shape = maker.operands[0], maker.params["permutation"], program.values[value].shape
        if not isinstance(read, int):
            break
        lies = [permutation.index(dim) for dim in orders.get(read, range(len(shape)))]
        written = orders.get(value, range(len(shape)))
        if [dim for dim in lies if shape[dim] > 1] != [dim for dim in written if shape[dim] > 1]:
            break
        value = read
    return value


def _is_batched(product: Operation) -> bool:
    """Whether a product goes over batch dimensions: XLA asks for an order of the dimensions of such results alone."""
    _, (batch, _) = product.params["dimension_numbers"]
    return bool(batch)


class _Parts:
    """Values that lie alike, since they are computed element by element from one another: each part of a program has
    the order of the earliest product that it is computed from."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._made: dict[int, tuple[int, tuple[int, ...]]] = {}  # when, and how it lies
        self._parents: dict[int, int] = {}
        self._known: dict[int, tuple[int, tuple[int, ...]]] = {}  # the same, of a part
        self._read: list[tuple[int, int]] = []  # what products made, with a value of the part that reads it

    def leave(self, result: int, order: range) -> None:
        """Takes in what a product leaves in memory."""
        self._made[result] = len(self._made), tuple(order)

    def turn(self, read: int, operation: Operation) -> None:
        """Takes in a transposition."""
        when, order = self._lies(read)
        permutation = operation.params["permutation"]
        self._made[operation.results[0]] = when, tuple(permutation.index(d) for d in order)

    def compute(self, operation: Operation) -> None:
        """Takes in an operation element by element."""
        result, values = operation.results[0], self._program.values
        shape = values[result].shape
        whole = [o for o in operation.operands if isinstance(o, int) and values[o].shape == shape]
        for operand in (o for o in whole if self.order(o) is not None):
            mine, found = self._root(result), self._lies(operand)
            self._known[mine] = min(self._known.get(mine, found), found)
            if operand in self._made:
                self._read.append((operand, result))
            elif self._root(operand) != mine:
                self._parents[self._root(operand)] = mine

    def order(self, value: int) -> tuple[int, ...] | None:
        """How a value lies; None where no product says so."""
        known = self._made.get(value) or self._known.get(self._root(value))
        return known and known[1]

    def known(self) -> set[int]:
        """The values of which products say how they lie."""
        return self._made.keys() | self._known.keys() | self._parents.keys()

    def orders(self) -> dict[int, tuple[int, ...]]:
        """How values lie that do not lie as they are written."""
        found = {value: self.order(value) for value in sorted(self.known())}
        return {v: order for v, order in found.items() if order is not None and [*order] != sorted(order)}

    def turned(self) -> dict[int, tuple[int, ...]]:
        """What products made and parts read that have another dimension innermost, with how it lies there. In another
        order of the dimensions around it kernels read what is in memory as quickly."""
        moved = {}
        for value, reader in self._read:
            order, shape = self.order(reader), self._program.values[value].shape
            innermost = [next((d for d in reversed(o or ()) if shape[d] > 1), 0) for o in (order, self._lies(value)[1])]
            if order is not None and innermost[0] != innermost[1]:
                moved[value] = order
        return moved

    def _lies(self, value: int) -> tuple[int, tuple[int, ...]]:
        return self._made.get(value) or self._known[self._root(value)]

    def _root(self, value: int) -> int:
        path = []
        while value in self._parents:
            path.append(value)
            value = self._parents[value]
        self._parents.update(dict.fromkeys(path, value))
        return value
