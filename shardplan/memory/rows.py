"""Rows that one XLA:GPU kernel reduces and goes through again: what is left of scores when their largest is taken off.

What an element-by-element operation computes of a row and of a reduction of that row, XLA makes a kernel of its own,
written in tiles, before it fuses anything else. Such a kernel takes in, and becomes part of, only what tiles can be cut
of: nothing that pads, gathers or puts together. So where a softmax's results are padded for a matrix product, what
is left of the scores is stored, in the type in which it was computed.

The reduction must have no other reader, so that of a softmax the largest score is one, and the sum, which the backward
pass reads again, is not. What is computed from numbers of the program alone, a softmax of zeros, is none: XLA computes
it while it compiles.

A product of a matrix and a vector that XLA multiplies and adds up is such a reduction too. Where its result alone, or
what is computed from it element by element, weights the rows of the same matrix in another product, which adds these
up (``x.T @ (x @ v)``, a step of conjugate gradients), that kernel stores all weighted rows.

>>> import jax, jax.numpy as jnp
>>> from shardplan.tracing import trace_program
>>> scores = jax.ShapeDtypeStruct((64, 64), "float32")
>>> program = trace_program(lambda s: jax.nn.softmax(s, axis=1), (scores,), {})
>>> elementwise = frozenset(o.index for o in program.operations if o.primitive.name in ("sub", "exp", "div", "max"))
>>> rows = row_results(program, elementwise)
>>> [o.primitive.name for o in program.operations if not rows.keys().isdisjoint(o.results)]
['sub', 'div']
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator
from math import prod

from shardplan.memory.fusion import is_view
from shardplan.memory.lying import lying_of
from shardplan.memory.products import is_sum
from shardplan.memory.repeated import repeated_in
from shardplan.memory.sums import REDUCTIONS, adds_few
from shardplan.once import once
from shardplan.program import Constant, Operation, Program
from shardplan.strategy import operand_type

LONGEST = 2**14
"""Elements of the longest row that a kernel holds."""

_PASSING = frozenset({"reshape", "squeeze", "expand_dims", "convert_element_type", "stop_gradient", "copy", "copy_p"})
_UNTILED = frozenset({"pad", "concatenate", "gather", "dynamic_slice", "dynamic_update_slice", "rev", "random_bits"})


def cuts_tiles(operation: Operation) -> bool:
    """Whether tiles of what an operation makes, and computes on the way, are made of tiles of what it reads."""
    name = operation.primitive.name
    return name not in _UNTILED and not name.startswith(("scatter", "reduce_window", "select_and", "cum", "arg"))


@once
def row_results(program: Program, pointwise: Collection[int]) -> dict[int, float]:
    """The values that kernels compute row by row, with the reduction of the row that they read, and how many elements
    they compute for each: tiles are as long as the next power of two.

    ``pointwise`` are the operations, by index, that compute element by element.
    """
    rows = _Rows(program, pointwise)
    found = [operation.results[0] for operation in program.operations if rows.ends(operation)]
    lengths = {value: program.values[value].shape[-1] for value in found}
    return {value: 2 ** (length - 1).bit_length() / length for value, length in lengths.items()}


def made_by_rows(
    program: Program, pointwise: Collection[int], fused: Collection[int], in_memory: Collection[int]
) -> frozenset[int]:
    """The values that kernels compute on the way from such rows, or make of them, where operations are ``fused`` into
    their readers, but for what is ``in_memory``. Such a kernel makes nothing else, and no copy in another order."""
    rows = row_results(program, pointwise).keys()
    found, on_the_way = set[int](), set[int]()
    for operation in program.operations if rows else ():
        read = [operand for operand in operation.operands if isinstance(operand, int)]
        if on_the_way.isdisjoint(read) and rows.isdisjoint((*read, *operation.results)):
            continue
        found.update(operation.results)
        if operation.index in fused:
            on_the_way.update(result for result in operation.results if result not in in_memory)
    return frozenset(found)


@once
def weighted_rows(program: Program, pointwise: Collection[int]) -> dict[int, tuple[int, int]]:
    """The products, by index, that add up the rows of a matrix, weighted by what another product has reduced these rows
    to: the position of the matrix, and the index of the other product."""
    rows, found = None, {}
    for operation in program.operations:
        if is_sum(program, operation):
            rows = rows or _Rows(program, pointwise)
            weighting = rows.weighting(operation)
            if weighting is not None:
                found[operation.index] = weighting
    return found


class _Rows:
    """What a program computes row by row. What it computes twice counts once."""

    def __init__(self, program: Program, pointwise: Collection[int]) -> None:
        self._program, self._pointwise = program, pointwise
        self._same = repeated_in(program, ())
        self._makers = program.makers
        self._folded = _folded(program)
        self._users = Counter(o for region in program.regions for o in region.outputs if isinstance(o, int))
        for operation in program.operations:
            if self._same.keys().isdisjoint(operation.results):
                self._users.update({self._known(o) for o in operation.operands if isinstance(o, int)})

    def _known(self, value: int) -> int:
        return self._same.get(value, value)

    def ends(self, operation: Operation) -> bool:
        """Whether an operation goes through rows (its first operand) with what they are reduced to (its second)."""
        if len(operation.operands) != 2 or operation.index not in self._pointwise:
            return False
        rows, reduced = operation.operands
        if not isinstance(rows, int) or not isinstance(reduced, int):
            return False
        values, shape = self._program.values, self._program.values[operation.results[0]].shape
        rows, read = self._known(rows), self._reduced(self._known(reduced), len(shape) - 1)
        if rows in self._folded or read is None or values[read].shape != shape or not 1 < shape[-1] <= LONGEST:
            return False
        lying = lying_of(self._program, self._pointwise).orders.get(operation.results[0])
        if lying is not None and next(d for d in reversed(lying) if shape[d] > 1) != len(shape) - 1:
            return False
        source = self._first(read)
        return source == rows or (self._users[rows] == 1 and source in self._back(rows))

    def weighting(self, operation: Operation) -> tuple[int, int] | None:
        """The position of the matrix whose rows a product adds up, and the index of the product that has reduced each
        of the rows to what weights it, if one has."""
        position = _matrix(self._program, operation)
        matrix, dims = self._as_stored(operation, position)
        weights = operation.operands[1 - position]
        if not isinstance(weights, int) or matrix is None:
            return None
        last = len(self._program.values[matrix].shape) - 1
        for value in self._back(self._known(weights)) if last not in dims else ():
            maker = self._makers.get(value)
            if maker is not None and self._users[value] == 1 and is_sum(self._program, maker):
                reduces = not adds_few(self._program, maker) and self._program.values[matrix].shape[last] <= LONGEST
                same = self._as_stored(maker, _matrix(self._program, maker)) == (matrix, (last,))
                return (position, maker.index) if reduces and same else None
        return None

    def _as_stored(self, product: Operation, position: int) -> tuple[int | None, tuple[int, ...]]:
        """The value that a product reads, maybe transposed, and its dimensions over which that adds up."""
        value, dims = product.operands[position], tuple(product.params["dimension_numbers"][0][position])
        while isinstance(value, int) and (maker := self._makers.get(value)) is not None:
            if maker.primitive.name != "transpose":
                break
            value, dims = maker.operands[0], tuple(maker.params["permutation"][dim] for dim in dims)
        return (self._known(value) if isinstance(value, int) else None), dims

    def _reduced(self, value: int, dimension: int) -> int | None:
        """What is reduced along a dimension to what a value is computed from, and nothing else is."""
        for result in self._back(value, spreading=True):
            maker = self._makers.get(result)
            if maker is None or is_view(self._program, maker):
                continue
            if maker.primitive.name in REDUCTIONS and self._users[result] == 1:
                read = maker.operands[0]
                return self._known(read) if maker.params["axes"] == (dimension,) and isinstance(read, int) else None
        return None

    def _first(self, value: int) -> int:
        """The value from which one is computed that nothing else reads on the way, element by element."""
        return deque(self._back(value), maxlen=1).pop()

    def _back(self, value: int, spreading: bool = False) -> Iterator[int]:
        """A value, and one after the other what it is computed from, each from the next one and constants alone."""
        yield value
        while self._users[value] == 1 and value in self._makers:
            maker = self._makers[value]
            alone = {self._known(o) for o in maker.operands if isinstance(o, int) and not self._is_constant(o)}
            passes = is_view(self._program, maker) or maker.primitive.name in _PASSING or maker.index in self._pointwise
            if len(alone) != 1 or not (passes or (spreading and self._spreads(maker))):
                return
            [value] = alone
            yield value

    def _is_constant(self, value: int) -> bool:
        maker = self._makers.get(value)
        spread = maker is not None and maker.primitive.name == "broadcast_in_dim"
        return maker is not None and spread and isinstance(maker.operands[0], Constant)

    def _spreads(self, operation: Operation) -> bool:
        """Whether an operation gives the same along the last dimension."""
        if operation.primitive.name != "broadcast_in_dim":
            return False
        dimensions, last = operation.params["broadcast_dimensions"], len(operation.params["shape"]) - 1
        return last not in dimensions or operand_type(self._program, operation.operands[0]).shape[-1] == 1


def _folded(program: Program) -> frozenset[int]:
    """The values that are computed from numbers of the program alone (a softmax of zeros), which XLA computes while it
    compiles."""
    found = set[int]()
    for operation in program.operations:
        if not operation.bodies and all(o in found for o in operation.operands if isinstance(o, int)):
            found.update(operation.results)
    return frozenset(found)


def _matrix(program: Program, product: Operation) -> int:
    """The position of the larger operand."""
    sizes = [prod(operand_type(program, operand).shape) for operand in product.operands]
    return int(sizes[1] > sizes[0])
