"""Products that are added up in place: XLA:GPU makes an addition part of a product that it adds.

cuBLAS can add a product to what lies in memory, and write the sum there. XLA goes through the additions, operands
first. Of one that adds products, the first that is written down takes the other operand (behind a bias, or where it is
seen through a reshape or a transposition as well); so that operand is computed before, whatever the program says. A
product takes in one addition alone: where the first operand has done so already, the addition stays a kernel of its
own, even if the second could. So of the gradients of a weight that many operations read, added up one after another,
every other one is held until a kernel adds it, and those between are added up in place.

A bias with one number for each column of a matrix is added by the product as well, whose result alone is then in
memory: a library's, which no kernel overwrites.

A product in 16-bit numbers that is converted to float32, and then added, writes float32 (a gradient that microbatches
add up), unless its result is reshaped, in the program or because several of its dimensions are one to cuBLAS.

The first sum below is the first product, added to the second one. That sum and the third are added by a kernel, to
whose result the last one is added.

>>> import jax, jax.numpy as jnp, shardplan
>>> square = jax.ShapeDtypeStruct((512, 512), "float32")
>>> plan = shardplan.plan(lambda a, b, c, d: (((a @ b + b @ c) + c @ d) + d @ a) @ c, 1, *[square] * 4)
>>> [(found.product, found.addition) for found in accumulations(plan.schedule).values()]
[(0, 2), (5, 6)]
>>> [operation.index for operation in plan.program.operations if operation.primitive.name == "dot_general"]
[0, 1, 3, 5, 7]
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from shardplan import _jax
from shardplan.memory.activations import activated
from shardplan.memory.convolutions import forward_convolutions
from shardplan.memory.fusion import pointwise_operations
from shardplan.memory.lying import lying_of
from shardplan.memory.products import is_multiplied, merged_products, multiplied
from shardplan.memory.repeated import apart_in, read_as_one, repeated_in
from shardplan.memory.sizes import bytes_in
from shardplan.memory.unshared import unshared_operands
from shardplan.once import once
from shardplan.program import Operation, Program
from shardplan.running import running_sums, sums_of_products
from shardplan.schedule import Schedule

_ADDITIONS = frozenset({"add", "add_any"})
_VIEWS = frozenset({"transpose", "reshape", "squeeze", "expand_dims"})
_CONVERSION = "convert_element_type"


@dataclass(frozen=True, slots=True)
class Accumulation:
    """A product that adds itself to a value, by the indices of operations.

    between: what turns the product's result into the operand of the addition: views, and a bias.
    addition: or what ends a rectifier, or such a unit, that the product applies (`shardplan.memory.activations`).
    onto: the value in memory that it is added to, of which the addition reads a view, or the bias; ``in_place``, where
        it is overwritten with the sum. -1 where it is added to nothing.
    """

    product: int
    between: tuple[int, ...]
    addition: int
    onto: int
    in_place: bool


@dataclass(frozen=True, slots=True)
class _Open:
    """A product whose result can still take in an addition, or has done so; ``viewed`` where through a view,
    ``biased`` behind a bias, ``widened`` behind a conversion; whether it is a convolution (``convolved``)."""

    product: int
    between: tuple[int, ...] = ()
    viewed: bool = False
    added: bool = False
    biased: bool = False
    convolved: bool = False
    widened: bool = False


@once
def accumulations(schedule: Schedule) -> dict[int, Accumulation]:
    """The products that XLA:GPU adds to something, by the index of the addition that becomes part of each."""
    return _accumulations(schedule, merged_anywhere(schedule))


def _accumulations(schedule: Schedule, merging: Iterable[Sequence[int]]) -> dict[int, Accumulation]:
    """The same where these products are merged."""
    program = schedule.program
    graph = _Graph(schedule)
    merged, running = {index for group in merging for index in group}, running_sums(schedule)
    convolutions, moved = forward_convolutions(program), lying_of(program, pointwise_operations(schedule.problem)).moved
    found, biases = dict[int, Accumulation](), dict[int, Accumulation]()
    units = list[Accumulation]()
    for operation in _of_products(program):
        result, name = next(iter(operation.results), -1), operation.primitive.name
        convolved = operation.index in convolutions
        if convolved or is_multiplied(program, operation):
            if operation.index not in merged and graph.stays(operation):
                graph.open[result] = _Open(operation.index, convolved=convolved)
            continue
        unit = graph.unit(operation)
        if unit is not None:
            product, between = unit
            added = biases.pop(product.product, None)
            units.append(Accumulation(product.product, between, operation.index, added.onto if added else -1, False))
        position = graph.existing(operation) if name in _VIEWS | _ADDITIONS | {_CONVERSION} else None
        if position is None:
            continue
        product = graph.open[graph.operand(operation, position)]
        between = (*product.between, operation.index)
        if name == _CONVERSION:
            if graph.stays(operation) and graph.widens(operation, product):
                graph.open[result] = replace(product, between=between, widened=True)
        elif name in _VIEWS:
            if graph.stays(operation) and not product.convolved and not product.widened:
                graph.open[result] = replace(product, between=between, viewed=True)
        elif graph.is_broadcast(operation, 1 - position):
            convolution = program.operations[product.product] if product.convolved else None
            bias = graph.bias(operation, 1 - position, convolution)
            if bias is not None and not product.added and not product.biased and not product.widened:
                biases[product.product] = Accumulation(product.product, product.between, operation.index, bias, False)
                graph.open[result] = replace(product, between=between, biased=True)
        elif not product.added and result not in moved:
            onto, alone = graph.seen(graph.operand(operation, 1 - position))
            alone = alone and graph.reads_as_stored(operation, 1 - position) and not product.convolved
            found[operation.index] = Accumulation(product.product, product.between, operation.index, onto, alone)
            biases.pop(product.product, None)
            if result not in running:
                graph.open[result] = replace(product, between=(), added=True)
    return found | {last.addition: last for last in (*biases.values(), *units)}


@once
def _of_products(program: Program) -> list[Operation]:
    """The products and convolutions of a program, and what may become part of one."""
    names, some = _VIEWS | _ADDITIONS | {_CONVERSION}, {*forward_convolutions(program), *multiplied(program)}
    some |= _units(program).keys()
    return [
        operation for operation in program.operations if operation.index in some or operation.primitive.name in names
    ]


@once
def _units(program: Program) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Per operation that is the end of a rectifier, or of such a unit, by index: see `activated`."""
    ends = ((operation.index, activated(program, operation)) for operation in program.operations)
    return {index: unit for index, unit in ends if unit is not None}


@once
def waiting_for_sums(schedule: Schedule) -> dict[int, int]:
    """Per product that a running sum takes in, but that adds itself to nothing, by its index, the sum that it waits
    for (`shardplan.waiting`): one that the program makes before.

    What a product reads behind a sum no other one reads: it is merged for its other operand alone. So those wait that
    would add themselves to nothing if all waited, or if those did that are found already.
    """
    if not schedule.running:
        return {}
    makers, sums = schedule.program.makers, sums_of_products(schedule.problem).before
    sums = {index: value for index, value in sums.items() if makers[value].index < index}
    waiting, further = frozenset[int](), _adding_to_nothing(schedule, frozenset(sums), sums)
    while not further <= waiting:
        waiting |= further
        further = _adding_to_nothing(schedule, waiting, sums)
    return {index: value for index, value in sums.items() if index in waiting}


def _adding_to_nothing(schedule: Schedule, waiting: Collection[int], among: Iterable[int]) -> frozenset[int]:
    """The products of some that add themselves to nothing where these are ``waiting`` for sums."""
    merged = _merged_in(schedule, schedule.program.operations, None, waiting)
    adding = {found.product for found in _accumulations(schedule, merged).values()}
    return frozenset(index for index in among if index not in adding)


@once
def merged_anywhere(schedule: Schedule) -> list[list[int]]:
    """Products that XLA merges into one, whether their results are held or not."""
    return merged_in(schedule, schedule.program.operations)


def own_position(schedule: Schedule, merged: Iterable[Operation]) -> int:
    """The position of the operand that merged products do not share."""
    same = repeated_in(schedule.program, apart_in(schedule))
    first = {same.get(o, o) if isinstance(o := operation.operands[0], int) else None for operation in merged}
    return int(len(first) == 1)


def read_together(schedule: Schedule) -> dict[int, list[int]]:
    """Per product that XLA merges with others, the values that any of them reads: all are there before one is computed.
    Where products would so wait for themselves, since what one of them reads needs another one, they stay apart."""
    return _read_by(schedule.program, tuple([tuple(group) for group in merged_anywhere(schedule)]))


@once
def _read_by(program: Program, merged: tuple[tuple[int, ...], ...]) -> dict[int, list[int]]:
    """The same of these groups of products."""
    operations, waiting, found = program.operations, [merged], dict[int, list[int]]()
    read: dict[int, list[int]]
    while waiting:
        some = waiting.pop()
        read = {}
        for group in some:
            every = [o for index in group for o in operations[index].operands if isinstance(o, int)]
            read |= {index: every for index in group}
        if is_ordered(program, found | read):
            found |= read
        elif len(some) > 1:
            waiting += [some[len(some) // 2 :], some[: len(some) // 2]]
    return found


def is_ordered(program: Program, read: Mapping[int, Collection[int]]) -> bool:
    """Whether no operation needs its own result where these read these values."""
    makers = program.makers
    opened, done = set[int](), set[int]()
    for first in read:
        stack = [first]
        while stack:
            index = stack[-1]
            operands = read.get(index, program.operations[index].operands)
            missing = {makers[o].index for o in operands if isinstance(o, int) and o in makers} - done
            if index in done or not missing:
                done.add(stack.pop())
            elif index in opened:  # what it needs was looked at, and needs it
                return False
            else:
                opened.add(index)
                stack += missing
    return True


def merged_in(schedule: Schedule, order: Sequence[Operation], held: Iterable[int] | None = None) -> list[list[int]]:
    """Products that XLA merges into one, see `merged_products`; of those with ``held`` results, if these are said, else
    of those that are no repetition of another one."""
    return _merged_in(schedule, order, held, waiting_for_sums(schedule))


def _merged_in(
    schedule: Schedule, order: Sequence[Operation], held: Iterable[int] | None, waiting: Collection[int]
) -> list[list[int]]:
    """The same where some products wait for sums, by their index: what they read behind these is their own."""
    program = schedule.program
    apart = apart_in(schedule)
    same = repeated_in(program, apart) if held is None else {}
    among = None if held is None else {*held}
    sizes, layouts, read = {}, {}, {}
    products = multiplied(program)
    order = [operation for operation in order if operation.index in products]
    for operation in order:
        strategy = schedule.assignment.strategies.get(operation.index)
        if strategy is None:
            continue
        if operation.results[0] not in same if among is None else operation.results[0] in among:
            pairs = zip((*operation.operands, *operation.results), (*strategy.operands, *strategy.results), strict=True)
            inside = schedule.island_dtype(operation) is not None
            own = unshared_operands(schedule, operation, waits=operation.index in waiting)
            layouts[operation.index] = [
                (layout, inside, operation.index if position in own else -1)
                for position, layout in enumerate(strategy.operands)
            ]
            moved = [
                bytes_in(schedule, value, layout) if isinstance(value, int) and layout is not None else 0.0
                for value, layout in pairs
            ]
            sizes[operation.index], read[operation.index] = sum(moved), moved[: len(operation.operands)]
    return merged_products(program, order, sizes, layouts, apart, read)


def with_products_late(order: Iterable[int], adding: Mapping[int, Accumulation]) -> list[int]:
    """An order of operations in which each product that is added to something runs where it is added."""
    late = {index for found in adding.values() for index in (found.product, *found.between)}
    places = []
    for index in order:
        if index in adding:
            places += [adding[index].product, *adding[index].between]
        if index not in late:
            places.append(index)
    return places


class _Graph:
    """A program with its layouts, and the products that can still take in an addition, by their results."""

    def __init__(self, schedule: Schedule) -> None:
        program = schedule.program
        self._schedule, self._program = schedule, program
        self._makers = program.makers
        self._reads = read_as_one(schedule)
        self.open: dict[int, _Open] = {}

    def operand(self, operation: Operation, position: int) -> int:
        """An operand that is a value, -1 if it is a number."""
        operand = operation.operands[position]
        return operand if isinstance(operand, int) else -1

    def existing(self, operation: Operation) -> int | None:
        """The position of the operand that XLA takes for the product that an operation turns into something else."""
        found = []
        for position in range(len(operation.operands)):
            operand = self.operand(operation, position)
            if operand in self.open and self._reads[operand] == 1 and self.reads_as_stored(operation, position):
                found.append((not self.open[operand].viewed, position))
        return min(found)[1] if found else None

    def unit(self, operation: Operation) -> tuple[_Open, tuple[int, ...]] | None:
        """The product that applies the unit of which an operation is the end, and all that is between, if one does."""
        value, between = _units(self._program).get(operation.index, (-1, ()))
        product, operations = self.open.get(value), [*(self._program.operations[index] for index in between), operation]
        if product is None or (product.convolved and between) or product.added or product.widened:
            return None
        inside = {value, *(one.results[0] for one in operations[:-1])}
        read = [(o, at) for o in operations for at in range(len(o.operands)) if self.operand(o, at) in inside]
        alone = sum(self._reads[one] for one in inside) == len(read)  # nothing else reads any of it
        if alone and all(self.stays(one) for one in operations) and all(self.reads_as_stored(*one) for one in read):
            return product, (*product.between, *between)
        return None

    def widens(self, operation: Operation, product: _Open) -> bool:
        """Whether an operation converts to float32 what a product makes in 16-bit numbers, as cuBLAS makes it: each of
        its dimensions, for batches, rows and columns, is one of the program's, and rows and columns may be swapped."""
        values, made = self._program.values, self._program.operations[product.product]
        if product.convolved or product.added or product.biased:
            return False
        wide, narrow = values[operation.results[0]].dtype, values[made.results[0]].dtype
        contracted, batches = made.params["dimension_numbers"]
        free = [
            len(values[self.operand(made, side)].shape) - len(contracted[side]) - len(batches[side]) for side in (0, 1)
        ]
        alone = len(batches[0]) <= 1 and max(free) <= 1
        turned = [self._program.operations[index] for index in product.between]
        swapped = all(o.primitive.name == "transpose" and not batches[0] for o in turned)
        return alone and swapped and wide == np.float32 and narrow.itemsize == 2 and _jax.is_float(narrow)

    def is_broadcast(self, operation: Operation, position: int) -> bool:
        """Whether an operand repeats fewer elements, or is a number."""
        operand, values = self.operand(operation, position), self._program.values
        if operand < 0 or values[operand].shape != values[operation.results[0]].shape:
            return True
        return operand in self._makers and self._makers[operand].primitive.name == "broadcast_in_dim"

    def bias(self, operation: Operation, position: int, convolution: Operation | None = None) -> int | None:
        """The value of which an operand that is broadcast has one number for each column of a matrix, or for each
        feature of what a convolution makes, if it does."""
        operand, values = self.operand(operation, position), self._program.values
        shape = values[operation.results[0]].shape
        if operand < 0 or len(shape) < 2:
            return None
        column = convolution.params["dimension_numbers"].out_spec[1] if convolution is not None else len(shape) - 1
        dims = tuple(range(len(shape)))
        if values[operand].shape == shape:
            spread, operand = self._makers[operand], self.operand(self._makers[operand], 0)
            dims = tuple(spread.params["broadcast_dimensions"])
        own = values[operand].shape if operand >= 0 else ()
        along = [(dim, size) for dim, size in zip(dims, own, strict=False) if size > 1]  # one number: along none
        return self.seen(operand)[0] if along == [(column, shape[column])] else None

    def seen(self, value: int) -> tuple[int, bool]:
        """The value in memory of which another one is a view, and whether nothing else reads it."""
        alone = self._reads[value] == 1
        while value in self._makers and self._is_view(self._makers[value]):
            value = self.operand(self._makers[value], 0)
            alone = alone and self._reads[value] == 1
        return value, alone

    def _is_view(self, operation: Operation) -> bool:
        """Whether an operation changes no more than the shape, or puts dimensions of size 1 in front."""
        name, values, operand = operation.primitive.name, self._program.values, self.operand(operation, 0)
        if name != "broadcast_in_dim" or operand < 0:
            return name in _VIEWS
        return prod(values[operand].shape) == prod(values[operation.results[0]].shape)

    def stays(self, operation: Operation) -> bool:
        """Whether an operation leaves its result in the layout that it is stored in."""
        strategy = self._schedule.assignment.strategies.get(operation.index)
        return strategy is not None and not self._schedule.result_steps(operation, 0)

    def reads_as_stored(self, operation: Operation, position: int) -> bool:
        """Whether an operation reads an operand in the layout that it is stored in."""
        assignment, operand = self._schedule.assignment, self.operand(operation, position)
        strategy = assignment.strategies.get(operation.index)
        return strategy is not None and operand >= 0 and strategy.operands[position] == assignment.values.get(operand)
